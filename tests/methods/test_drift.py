"""Methods against drift, beside plain loops over the papers' equations, and what each of them claims."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import piebald
from piebald import recipes
from piebald.contracts import TrainInput
from piebald.core.errors import PiebaldError
from piebald.data.partition import clients_from
from piebald.engines.client_context import EngineContext
from piebald.engines.engine_choice import make_engine
from piebald.engines.stack import ClientStack
from piebald.methods.clustering import Attentive
from piebald.methods.recipe import Recipe
from piebald.runs.finished_run import Run

LR, STEPS, ROUNDS = 0.2, 3, 3
PLAIN: dict[str, Any] = {"lr": LR, "steps": STEPS, "batch": 100}  # every batch is all of a client's rows


def sites() -> list[tuple[Tensor, Tensor]]:
    """Three clients of unequal size; each lacks one of four classes, and has one that it has few rows of."""
    draw, made = torch.Generator().manual_seed(3), []
    for client, size in enumerate((9, 14, 20)):
        y = torch.arange(size) % 2 + 2 * (torch.arange(size) % 7 == 0)
        y = (y + client) % 4
        y[y == (client + 3) % 4] = client
        made.append((torch.randn(size, 5, generator=draw) + y[:, None] + 0.5 * client, y))
    return made


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))


def normed(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))


def run(recipe: Recipe, model: Callable[[int], nn.Module] = network, **options: Any) -> Run:
    clients = clients_from(sites(), test=0.0, classes=list("abcd"))
    where = piebald.Simulator(engine="sequential", workers=0)
    return piebald.run(
        recipe, clients, model, **{"rounds": ROUNDS, "evaluate_every": 0, "seed": 0, "runtime": where} | options
    )


def features(model: nn.Sequential, x: Tensor) -> Tensor:
    return model[:-1](x)


def descend(model: nn.Module, loss: Callable[[nn.Module], Tensor], steps: int = STEPS) -> None:
    """Gradient descent, by torch's own optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()


def averaged(models: list[nn.Module], weights: list[float]) -> nn.Module:
    """The weighted mean of models, with the mean of their float buffers."""
    mean = copy.deepcopy(models[0])
    for name, tensor in mean.state_dict().items():
        parts = [weight * model.state_dict()[name] for weight, model in zip(weights, models, strict=True)]
        tensor.copy_(sum(parts) / sum(weights))  # type: ignore[arg-type]
    return mean


def by_hand(train: Callable[[int, nn.Module, Tensor, Tensor], None], start: nn.Module | None = None) -> nn.Module:
    """Rounds of FedAvg whose clients train a copy of the global model in place."""
    world = start or network()
    for _ in range(ROUNDS):
        locals_ = [copy.deepcopy(world) for _ in sites()]
        for client, ((x, y), model) in enumerate(zip(sites(), locals_, strict=True)):
            train(client, model, x, y)
        world = averaged(locals_, [float(len(y)) for _, y in sites()])
    return world


def apart(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of parameters and float buffers."""
    theirs, mine = other.state_dict(), {n: t for n, t in one.state_dict().items() if t.is_floating_point()}
    return max(float((tensor - theirs[name]).abs().max()) for name, tensor in mine.items())


# ----------------------------------------------------------------------------------------- beside the papers' equations


def plain_moon() -> nn.Module:
    mu, temperature, previous = 2.0, 0.3, [network() for _ in sites()]

    def train(client: int, model: nn.Module, x: Tensor, y: Tensor) -> None:
        world, before = copy.deepcopy(model), previous[client]

        def loss(model: Any) -> Tensor:
            z = features(model, x)
            near = functional.cosine_similarity(z, features(world, x).detach()) / temperature  # type: ignore[arg-type]
            far = functional.cosine_similarity(z, features(before, x).detach()) / temperature
            contrast = -torch.log(near.exp() / (near.exp() + far.exp()))
            return functional.cross_entropy(model(x), y) + mu * contrast.mean()

        descend(model, loss)
        previous[client] = copy.deepcopy(model)  # type: ignore[assignment]

    return by_hand(train)


def plain_fedlc() -> nn.Module:
    def train(client: int, model: nn.Module, x: Tensor, y: Tensor) -> None:
        counts = torch.tensor([max(1e-8, float((y == label).sum())) for label in range(4)])

        def loss(model: nn.Module) -> Tensor:
            calibrated = (model(x) - 0.7 * counts ** (-1 / 4)).exp()
            return -(calibrated[torch.arange(len(y)), y] / calibrated.sum(1)).log().mean()

        descend(model, loss)

    return by_hand(train)


def plain_feddecorr() -> nn.Module:
    def train(client: int, model: nn.Module, x: Tensor, y: Tensor) -> None:
        def loss(model: Any) -> Tensor:
            correlation = torch.corrcoef(features(model, x).T)
            return functional.cross_entropy(model(x), y) + 0.8 * correlation.norm() ** 2 / len(correlation) ** 2

        descend(model, loss)

    return by_hand(train)


def plain_fedsam() -> nn.Module:
    def train(client: int, model: nn.Module, x: Tensor, y: Tensor) -> None:
        for _ in range(STEPS):
            here = copy.deepcopy(model)
            gradients = torch.autograd.grad(functional.cross_entropy(here(x), y), list(here.parameters()))
            length = torch.cat([gradient.flatten() for gradient in gradients]).norm()
            with torch.no_grad():
                for parameter, gradient in zip(here.parameters(), gradients, strict=True):
                    parameter += 0.3 * gradient / length
            above = torch.autograd.grad(functional.cross_entropy(here(x), y), list(here.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), above, strict=True):
                    parameter -= LR * gradient

    return by_hand(train)


def plain_scaffold() -> nn.Module:
    """Algorithm 1, option I, of which every client takes part in each round."""
    world, clients = network(), range(len(sites()))
    common = [torch.zeros_like(parameter) for parameter in world.parameters()]
    own = [[torch.zeros_like(parameter) for parameter in world.parameters()] for _ in clients]
    for _ in range(ROUNDS):
        locals_, fresh = [copy.deepcopy(world) for _ in clients], []
        for client, ((x, y), model) in enumerate(zip(sites(), locals_, strict=True)):
            at = torch.autograd.grad(functional.cross_entropy(world(x), y), list(world.parameters()))
            fresh.append(list(at))
            for _ in range(STEPS):
                g = torch.autograd.grad(functional.cross_entropy(model(x), y), list(model.parameters()))
                with torch.no_grad():
                    for p, one, mine, all_ in zip(model.parameters(), g, own[client], common, strict=True):
                        p -= LR * (one - mine + all_)
        world = averaged(locals_, [1.0] * len(locals_))  # type: ignore[assignment]
        for place, before in enumerate(common):
            common[place] = before + sum(fresh[k][place] - own[k][place] for k in clients) / len(locals_)
        own = fresh
    return world


def plain_fedala() -> nn.Module:
    """Algorithm 1 with all rows and all layers.  In the first round both models are equal; in the second W is learned
    by four passes, in the third by one."""
    last = [network() for _ in sites()]
    weights = [[torch.ones_like(parameter) for parameter in network().parameters()] for _ in sites()]
    passes = [iter((1, 4, 1)) for _ in sites()]

    def train(client: int, model: nn.Module, x: Tensor, y: Tensor) -> None:
        old, sent, w = list(last[client].parameters()), list(copy.deepcopy(model).parameters()), weights[client]
        start = copy.deepcopy(model)

        def place() -> None:
            with torch.no_grad():
                for p, a, b, share in zip(start.parameters(), old, sent, w, strict=True):
                    p.copy_(a + (b - a) * share)

        place()
        for _ in range(next(passes[client])):
            g = torch.autograd.grad(functional.cross_entropy(start(x), y), list(start.parameters()))
            for share, one, a, b in zip(w, g, old, sent, strict=True):
                share.copy_((share - 3.0 * one * (b - a).detach()).clamp(0, 1))
            place()
        model.load_state_dict(start.state_dict())
        descend(model, lambda model: functional.cross_entropy(model(x), y))
        last[client] = copy.deepcopy(model)  # type: ignore[assignment]

    return by_hand(train)


def plain_fedphp(inherited: list[nn.Module] | None = None) -> nn.Module:
    inherited, tasks = inherited if inherited is not None else [network() for _ in sites()], [0, 0, 0]

    def train(client: int, model: nn.Module, x: Tensor, y: Tensor) -> None:
        teacher = copy.deepcopy(inherited[client])

        def loss(model: Any) -> Tensor:
            mine, theirs = features(model, x), features(teacher, x).detach()  # type: ignore[arg-type]
            both = torch.cat([mine, theirs])
            squared = (both[:, None, :] - both[None, :, :]).pow(2).sum(2)
            width = float(squared.detach().sum()) / (len(both) ** 2 - len(both))
            kernel = sum(torch.exp(-squared / (width * 2.0**power)) for power in range(-2, 3))
            n = len(x)
            total = kernel[:n, :n].sum() + kernel[n:, n:].sum() - 2 * kernel[:n, n:].sum()  # type: ignore[index]
            return 0.6 * functional.cross_entropy(model(x), y) + 0.4 * total / len(x) ** 2

        descend(model, loss)
        past = min(0.9 * tasks[client] / 2, 0.9)
        inherited[client] = averaged([teacher, copy.deepcopy(model)], [past, 1 - past])
        tasks[client] += 1

    return by_hand(train)


BESIDE: dict[str, tuple[Recipe, Callable[[], nn.Module]]] = {
    "MOON": (recipes.moon(mu=2.0, temperature=0.3, **PLAIN), plain_moon),
    "FedLC": (recipes.fedlc(tau=0.7, **PLAIN), plain_fedlc),
    "FedDecorr": (recipes.feddecorr(beta=0.8, **PLAIN), plain_feddecorr),
    "FedSAM": (recipes.fedsam(rho=0.3, **PLAIN), plain_fedsam),
    "SCAFFOLD, option I": (recipes.scaffold(option="I", **PLAIN), plain_scaffold),
    "FedPHP": (recipes.fedphp(lam=0.4, horizon=2, **PLAIN), plain_fedphp),
    "FedALA": (
        recipes.fedala(weight_lr=3.0, weight_share=1.0, adaptive_layers="*", first_passes=4, **PLAIN), plain_fedala,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BESIDE)
def test_equals_a_plain_loop_over_the_papers_equations(case: str) -> None:
    recipe, plain = BESIDE[case]
    done, fedavg, expected = run(recipe), run(recipes.fedavg(**PLAIN)), plain()
    assert apart(done.model(), expected) < 1e-5
    assert apart(fedavg.model(), expected) > 1e-3  # or nothing would be shown
    sent = [[(row["client"], row["bytes_down"], row["bytes_up"]) for row in one.results] for one in (done, fedavg)]
    assert (sent[0] == sent[1]) == (recipe.name != "scaffold")  # nothing but the model leaves a client


def test_silobn_keeps_statistics_and_shares_scale_and_shift(tmp_path: Path) -> None:
    kept = [copy.deepcopy(normed()[1]) for _ in sites()]
    world: Any = normed()
    for _ in range(ROUNDS):
        locals_ = [copy.deepcopy(world) for _ in sites()]
        for client, ((x, y), model) in enumerate(zip(sites(), locals_, strict=True)):
            for name in ("running_mean", "running_var"):
                getattr(model[1], name).copy_(getattr(kept[client], name))
            descend(model, lambda model, x=x, y=y: functional.cross_entropy(model(x), y))  # type: ignore[misc]
            kept[client] = copy.deepcopy(model[1])
        world = averaged(locals_, [float(len(y)) for _, y in sites()])
    done = run(recipes.silobn(**PLAIN), normed, out=tmp_path / "run")
    for client, own in enumerate(kept):
        expected = copy.deepcopy(world)
        for name in ("running_mean", "running_var"):
            getattr(expected[1], name).copy_(getattr(own, name))
        assert apart(done.model(client), expected) < 1e-5
    assert apart(done.model(0), done.model(1)) > 0.1  # in the statistics, as their inputs are apart
    assert {row["bytes_up"] for row in done.results} == {4 * sum(p.numel() for p in normed().parameters())}


def test_fedamp_mixes_as_algorithm_1_says(tmp_path: Path) -> None:
    """Its models at the server and at the clients, also where one of them has not trained yet."""
    alpha, sigma, mu = 0.3, 2.0, 0.5
    recipe = recipes.fedamp(cohort=2, alpha=alpha, sigma=sigma, mu=mu, **PLAIN)
    done = run(recipe, rounds=4, out=tmp_path / "run")
    sent: list[Any] = [network() for _ in sites()]
    trained: dict[int, nn.Module] = {}
    for version in range(4):
        for client in sorted(row["client"] for row in done.results if row["sent_version"] == version):
            (x, y), cloud = sites()[client], copy.deepcopy(sent[client])

            def loss(model: nn.Module, x: Tensor = x, y: Tensor = y, cloud: nn.Module = cloud) -> Tensor:
                pairs = zip(model.parameters(), cloud.parameters(), strict=True)
                return functional.cross_entropy(model(x), y) + mu / 2 * sum(  # type: ignore[return-value]
                    (one - other.detach()).square().sum() for one, other in pairs
                )

            trained[client] = copy.deepcopy(sent[client])
            descend(trained[client], loss)
        flat = {c: torch.cat([p.detach().flatten() for p in model.parameters()]) for c, model in trained.items()}
        for client in range(len(sites())):
            weights = {
                other: alpha / sigma * float(torch.exp(-(flat[client] - flat[other]).square().sum() / sigma))
                for other in trained
                if client in trained and other != client
            }
            own = {client: 1 - sum(weights.values())} if client in trained else dict.fromkeys(trained, 1.0)
            shares = weights | own
            sent[client] = averaged([trained[one] for one in shares], list(shares.values()))
    assert sorted(trained) == [0, 1, 2]
    for client, model in trained.items():
        assert apart(done.model(client), model) < 1e-5
        cloud = done.work.layout.flatten(sent[client])
        torch.testing.assert_close(done.cluster_models[client + 1], cloud, atol=1e-5, rtol=1e-4)
    assert apart(trained[0], sent[0]) > 1e-3


def test_fedamp_without_others_is_local_training(tmp_path: Path) -> None:
    alone = run(recipes.fedamp(alpha=0.0, mu=0.0, **PLAIN), out=tmp_path / "fedamp")
    local = run(recipes.local(**PLAIN), out=tmp_path / "local")
    assert all(apart(alone.model(client), local.model(client)) < 1e-6 for client in range(len(sites())))


def test_fedphp_uses_the_mean_of_what_it_has_trained(tmp_path: Path) -> None:
    inherited: list[nn.Module] = [network() for _ in sites()]
    plain_fedphp(inherited)
    done = run(recipes.fedphp(lam=0.4, horizon=2, **PLAIN), out=tmp_path / "run")
    none = run(recipes.fedphp(lam=0.0, mu=0.0, **PLAIN), out=tmp_path / "none")
    fedavg, before = run(recipes.fedavg(**PLAIN)), run(recipes.fedavg(**PLAIN), rounds=ROUNDS - 1).model()
    assert none.start().equal(fedavg.start())  # without effect it is FedAvg to the bit
    for client, (x, y) in enumerate(sites()):
        assert apart(done.model(client), inherited[client]) < 1e-5
        last = copy.deepcopy(before)
        descend(last, lambda model, x=x, y=y: functional.cross_entropy(model(x), y))  # type: ignore[misc]
        assert apart(none.model(client), last) < 1e-5


# ---------------------------------------------------------------------------------------------- what the papers claim


def test_fedphp_learns_the_features_of_the_inherited_model() -> None:
    """The claim: what a client has learned for itself supervises its next model, from the same start."""
    done, x = run(recipes.fedavg(**PLAIN), rounds=1), sites()[0][0]
    layout, sent, inherited = done.work.layout, network(0), network(1)
    clients = clients_from(sites(), test=0.0, classes=list("abcd"))
    engine = make_engine("sequential", done.work, clients, torch.device("cpu"), bfloat16=False)
    context = EngineContext(engine, ClientStack([0], [0], [0], [0], [layout.flatten(sent)], {}, {}))
    state = {"inherited": layout.flatten(inherited)[None], "tasks": torch.zeros(1, 1)}
    count, away = torch.zeros(1, 1), {}
    for lam in (0.0, 0.5):
        trainer = recipes.fedphp(lam=lam, **PLAIN | {"steps": 30, "lr": LR / (1 - lam)}).training
        inputs = TrainInput(layout.flatten(sent)[None], layout.size, state, {}, [0], count.double(), count, [0])
        trained = network()
        layout.load(trained, trainer.train(inputs, context).model[0])
        means = [features(model, x).mean(0) for model in (trained, inherited)]
        away[lam] = float((means[0] - means[1]).detach().norm())
    assert away[0.5] < 0.5 * away[0.0], away


def test_moon_trains_towards_the_features_of_the_global_model(tmp_path: Path) -> None:
    """Local models agree more with the global model that they began with than with their own last ones.  With mu = 0
    they are FedAvg's, and agree more with their own."""
    nearer = {}
    for mu in (0.0, 1.0):
        runs = [run(recipes.moon(mu=mu, **PLAIN), rounds=n, out=tmp_path / f"{mu} {n}") for n in (4, 5)]
        margins = []
        for client, (x, _) in enumerate(sites()):
            found = []
            for vector in (
                runs[1]._store.client_state(client)["previous"], runs[0].start(),
                runs[0]._store.client_state(client)["previous"],
            ):  # fmt: skip
                model = network()
                runs[0].work.layout.load(model, vector)
                found.append(features(model, x).detach())
            z, sent, previous = found
            margins.append(functional.cosine_similarity(z, sent) - functional.cosine_similarity(z, previous))
        nearer[mu] = float(torch.cat(margins).mean())
    assert nearer[0.0] < 0 < nearer[1.0], nearer


def test_fedlc_unlearns_less_of_a_class_that_a_client_lacks() -> None:
    first, x = sites()[0], sites()[0][0]
    missing = 3
    assert missing not in first[1]
    clients, left = clients_from([first], test=0.0, classes=list("abcd")), {}
    for recipe in (recipes.fedavg(**PLAIN), recipes.fedlc(**PLAIN)):
        model = piebald.run(recipe, clients, network, rounds=3, evaluate_every=0).model()
        left[recipe.name] = float(model(x).softmax(1)[:, missing].mean().detach())
    assert left["fedlc"] > 1.5 * left["fedavg"], left


def test_feddecorr_keeps_features_from_correlating() -> None:
    x, found = torch.cat([x for x, _ in sites()]), {}
    for recipe in (recipes.fedavg(**PLAIN), recipes.feddecorr(beta=2.0, **PLAIN)):
        correlation = torch.corrcoef(features(run(recipe, rounds=8).model(), x).detach().T)
        found[recipe.name] = float((correlation - torch.eye(len(correlation))).square().mean())
    assert found["feddecorr"] < 0.7 * found["fedavg"], found


def test_fedsam_ends_where_the_loss_is_flatter() -> None:
    """The loss rises less along the gradient from FedSAM's model than from FedAvg's."""
    x, y = (torch.cat(parts) for parts in zip(*sites(), strict=True))
    rises = {}
    for recipe in (recipes.fedavg(**PLAIN), recipes.fedsam(rho=0.5, **PLAIN)):
        model = run(recipe, rounds=25).model()
        loss = functional.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        length = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter += 0.5 * gradient / length
            rises[recipe.name] = float(functional.cross_entropy(model(x), y) - loss)
    assert rises["fedsam"] < 0.9 * rises["fedavg"], rises


def test_fedsam_moves_running_statistics_once_a_step() -> None:
    one, two = (run(recipe, normed, rounds=1).model() for recipe in (
        recipes.fedavg(lr=LR, steps=1, batch=100), recipes.fedsam(rho=0.5, lr=LR, steps=1, batch=100)
    ))  # fmt: skip
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(one[1], name), getattr(two[1], name))
    assert apart(one, two) > 1e-3


def test_feddecorr_has_no_term_for_a_single_row() -> None:
    alone = {"lr": 0.05, "batch": 1}
    one, two = (run(recipe).model() for recipe in (recipes.fedavg(**alone), recipes.feddecorr(beta=5.0, **alone)))
    assert apart(one, two) < 1e-6


def test_fedala_starts_from_what_serves_the_client(tmp_path: Path) -> None:
    """Clients whose labels mean something else: their own starts have a lower loss than the global model, which FedAvg
    gives them, and the weights that were learned lie between."""
    turned = [(x, (y + client) % 4) for client, (x, y) in enumerate(sites())]
    clients = clients_from(turned, test=0.0, classes=list("abcd"))
    recipe = recipes.fedala(adaptive_layers="*", weight_lr=5.0, **PLAIN)
    done = piebald.run(recipe, clients, network, rounds=6, evaluate_every=0, out=tmp_path / "run")
    for client, (x, y) in enumerate(turned):
        own, world = (functional.cross_entropy(model(x), y).detach() for model in (done.model(client), done.model()))
        assert float(own) < float(world)
        weights = done._store.client_state(client)["weights"]
        assert 0 <= float(weights.min()) < 0.9 < float(weights.max()) <= 1


def test_fedamp_listens_to_those_that_are_alike() -> None:
    """Two pairs of models: a partner counts, and who is far away does not, also where alpha is far too large."""
    parameters = torch.tensor([[0.0, 0.0], [0.1, 0.0], [9.0, 0.0], [9.0, 0.1]])
    weights = Attentive(alpha=0.4, sigma=1.0).weights(parameters)
    torch.testing.assert_close(weights.sum(1), torch.ones(4))
    assert torch.all(weights[:2, :2] > 0.3)
    assert torch.all(weights[:2, 2:] < 1e-6)
    torch.testing.assert_close(weights, weights.T)
    greedy = Attentive(alpha=1000.0, sigma=1.0).weights(parameters)
    assert bool((greedy >= 0).all())
    torch.testing.assert_close(greedy.sum(1), torch.ones(4))


# --------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("recipe", "model", "wrong"),
    [
        (recipes.moon(), lambda seed: nn.Linear(5, 4), "model_contrastive compares features"),
        (recipes.feddecorr(), lambda seed: nn.Linear(5, 4), "decorrelation compares features"),
        (recipes.fedala(adaptive_layers="body"), network, "no layer or role of this model called 'body'"),
        (recipes.silobn(), network, "no layer or role of this model called '\\*running_mean'"),
    ],
)
def test_models_that_a_method_cannot_train_are_refused(recipe: Recipe, model: Any, wrong: str) -> None:
    with pytest.raises(PiebaldError, match=wrong):
        run(recipe, model)


def test_fedlc_refuses_targets_that_are_no_classes() -> None:
    clients = clients_from([(x, y.float()) for x, y in sites()], test=0.0)
    with pytest.raises(PiebaldError, match="logit_calibration counts rows by class"):
        piebald.run(recipes.fedlc(), clients, lambda seed: nn.Linear(5, 1), rounds=1)


def test_fedamp_needs_single_updates() -> None:
    with pytest.raises(PiebaldError, match="attentive needs individual updates"):
        recipes.fedamp().with_(transforms=[{"kind": "secure_aggregation"}])
