"""FedProto beside a plain program of its equations, with unlike models; and who may have which model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import piebald
from piebald import recipes
from piebald.contracts import StepContext
from piebald.data.partition import clients_from
from piebald.methods.recipe import Recipe
from piebald.methods.training import Prototypes
from tests.fakes import seeded

LR, STEPS, ROUNDS, LAM = 0.2, 3, 3, 0.7
PLAIN: dict[str, Any] = {"lr": LR, "steps": STEPS, "batch": 100}  # every batch is all of a client's rows
NAMES = ("north", "south 1", "south 2")


def sites() -> dict[str, tuple[Tensor, Tensor]]:
    """Three clients of unequal size; each lacks one of four classes, and nobody has the last one."""
    draw, made = torch.Generator().manual_seed(3), {}
    for client, (name, size) in enumerate(zip(NAMES, (9, 14, 20), strict=True)):
        y = (torch.arange(size) % 2 + client) % 3
        made[name] = (torch.randn(size, 5, generator=draw) + y[:, None] + 0.5 * client, y)
    return made


def with_head(*body: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict({"body": nn.Sequential(*body), "head": nn.Linear(6, 4)}))


def wide(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return with_head(nn.Linear(5, 6), nn.Tanh())


def deep(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return with_head(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.Sigmoid())


UNLIKE: Mapping[str, Callable[[int], nn.Module]] = {"south *": deep, "*": wide}


def run(recipe: Recipe, model: Any = UNLIKE, engine: str = "sequential", **options: Any) -> piebald.Run:
    clients = clients_from(sites(), test=0.0, classes=list("abcd"))
    where = piebald.Simulator(engine=engine, workers=0, stack=3)  # type: ignore[arg-type]
    return piebald.run(
        recipe, clients, model, **{"rounds": ROUNDS, "evaluate_every": 0, "seed": 0, "runtime": where} | options
    )


def program() -> list[nn.Module]:
    """Algorithm 1, a client and a class at a time."""
    models, rows = [wide(), deep(), deep()], list(sites().values())
    sent: dict[int, Tensor] = {}
    for _ in range(ROUNDS):
        came: dict[int, list[Tensor]] = {}
        for model, (x, y) in zip(models, rows, strict=True):
            for _ in range(STEPS):
                features = model[:-1](x)
                loss = functional.cross_entropy(model[-1](features), y)
                for row, label in enumerate(y.tolist()):
                    if label in sent:
                        loss = loss + LAM * functional.mse_loss(features[row], sent[label]) / len(y)
                model.zero_grad()
                loss.backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= LR * parameter.grad
            for label in y.unique().tolist():
                came.setdefault(label, []).append(model[:-1](x[y == label]).mean(0).detach())
        sent |= {label: torch.stack(ones).mean(0) for label, ones in came.items()}
    return models


@pytest.mark.parametrize("engine", ["sequential", "batched", "vmapped", "reference"])
def test_it_is_the_program_of_its_equations(engine: str, tmp_path: Path) -> None:
    more = {"max_examples": 1000} if engine == "reference" else {}  # then updates reach the server one by one
    with run(
        recipes.fedproto(lam=LAM, inference="classifier", **PLAIN), engine=engine, out=tmp_path / "run", **more
    ) as made:
        for client, expected in enumerate(program()):
            found = made.model(client)
            for one, other in zip(found.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)
        for row in made.results:  # 4 prototypes of 6 numbers, and which of them there are
            assert row["bytes_down"] == row["bytes_up"] == 4 * (4 * 6 + 4)


def test_without_the_term_clients_train_alone_to_the_bit(tmp_path: Path) -> None:
    more: dict[str, Any] = {"lr": 0.1, "batch": 4, "momentum": 0.5}
    with (
        run(recipes.fedproto(lam=0.0, inference="classifier", **more), out=tmp_path / "one") as one,
        run(recipes.local(**more), out=tmp_path / "two") as two,
        run(recipes.fedproto(lam=2.0, inference="classifier", **more), out=tmp_path / "three") as three,
    ):
        for client in range(3):
            models = [made.model(client) for made in (one, two, three)]
            mine, alone, drawn = (nn.utils.parameters_to_vector(model.parameters()) for model in models)
            assert torch.equal(mine, alone)
            assert not torch.equal(mine, drawn)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["sequential", "vmapped"])
def test_the_nearest_prototype_is_predicted(engine: str, tmp_path: Path) -> None:
    """The prototypes are those of the last task, so those that clients sent in the round before; training is equal."""
    recipes_ = {what: recipes.fedproto(lam=LAM, inference=what, **PLAIN) for what in ("classifier", "prototypes")}
    with (
        run(recipes_["prototypes"], engine=engine, rounds=3, out=tmp_path / "nearest") as made,
        run(recipes_["classifier"], engine=engine, rounds=3, out=tmp_path / "plain") as plain,
        run(recipes_["classifier"], engine=engine, rounds=2, out=tmp_path / "before") as before,
        run(recipes_["prototypes"], engine=engine, rounds=1, out=tmp_path / "first") as first,
    ):
        rows, sent = list(sites().values()), dict[int, list[Tensor]]()
        for client, (x, y) in enumerate(rows):
            for label in y.unique().tolist():
                sent.setdefault(label, []).append(before.model(client)[:-1](x[y == label]).mean(0).detach())
        common = torch.stack([torch.stack(sent[label]).mean(0) for label in range(3)])
        for client, (x, _) in enumerate(rows):
            features = plain.model(client)[:-1](x)
            scores = made.model(client)(x)
            assert torch.equal(scores.argmax(1), torch.cdist(features, common).argmin(1))
            away = (features[:, None] - common).square().sum(-1)
            torch.testing.assert_close(scores[:, :3], features.square().sum(1, keepdim=True) - away, atol=1e-4, rtol=0)
            assert bool((scores[:, 3] < -1000).all())  # a class that nobody has
            unlearnt = nn.utils.parameters_to_vector(first.model(client).parameters())
            assert torch.isfinite(unlearnt).all()
            assert unlearnt.min() > -100  # no prototypes have come: the classifier is used


@pytest.mark.full
def test_features_of_a_class_come_nearer_to_one_another(tmp_path: Path) -> None:
    def apart(lam: float) -> float:
        with run(
            recipes.fedproto(lam=lam, inference="classifier", **PLAIN), rounds=12, out=tmp_path / str(lam)
        ) as made:
            means = {}
            for client, (x, y) in enumerate(sites().values()):
                model = made.model(client)
                means[client] = {label: model[:-1](x[y == label]).mean(0).detach() for label in y.unique().tolist()}
        pairs = [(0, 1, 1), (1, 2, 2), (0, 2, 0)]  # two clients, and the class that both have
        return float(sum((means[a][label] - means[b][label]).norm() for a, b, label in pairs))

    assert apart(5.0) < 0.5 * apart(0.0)


def test_a_class_that_nobody_has_keeps_its_prototype() -> None:
    trainer = Prototypes(classes=3, features=2)
    before, known = torch.tensor([[1.0, 1.0], [5.0, 6.0], [0.0, 0.0]]), torch.tensor([1.0, 1.0, 0.0])
    came, share = torch.tensor([[3.0, 6.0], [0.0, 0.0], [0.0, 0.0]]), torch.tensor([0.75, 0.0, 0.0])
    after = trainer.update_server_vectors(
        {"prototypes": before, "present": known},
        {"prototypes": came, "present": share},
        StepContext(arrived=4, known=4, version=1),
    )
    assert after["prototypes"].tolist() == [[4.0, 8.0], [5.0, 6.0], [0.0, 0.0]]  # the mean of three of four clients
    assert after["present"].tolist() == [1.0, 1.0, 0.0]


def test_a_run_of_unlike_models_is_resumed_to_the_bit(tmp_path: Path) -> None:
    recipe, clients = recipes.fedproto(lr=0.1, batch=4), clients_from(sites(), test=0.0, classes=list("abcd"))
    run(recipe, rounds=1, out=tmp_path / "short").close()
    with pytest.raises(piebald.SettingError, match="the models of single clients are not those of the run"):
        piebald.resume(tmp_path / "short", clients, {"south 1": deep, "*": wide}, rounds=ROUNDS)
    with (
        run(recipe, out=tmp_path / "whole") as whole,
        piebald.resume(tmp_path / "short", clients, UNLIKE, rounds=ROUNDS) as resumed,
    ):
        for client in range(3):
            pairs = zip(whole.model(client).parameters(), resumed.model(client).parameters(), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)


def test_what_is_private_may_be_unlike_where_the_rest_is_averaged() -> None:
    recipe = recipes.lg_fedavg(**PLAIN)  # a common head behind unlike bodies
    made = run(recipe)
    assert made.work.layout.shared == 4 * 6 + 4
    assert {row["bytes_up"] for row in made.results} == {4 * (4 * 6 + 4)}


OTHER = seeded(lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)))
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "averaged": (lambda: run(recipes.fedavg()), "fedavg averages what clients share, but body.0.weight is not alike"),
    "nobody's": (lambda: run(recipes.fedproto(), {"*": wide, "west": deep}), "no client has this name or is left"),
    "missing": (lambda: run(recipes.fedproto(), {"north": wide}), "model has no entry for client 'south 1'"),
    "features": (lambda: run(recipes.fedproto(), {"north": wide, "*": OTHER}), "one has 6 and another 8"),
    "outputs": (lambda: run(recipes.fedproto(), {"north": wide, "*": nn.Linear(5, 3)}), "outputs of one shape"),
    "no features": (lambda: run(recipes.fedproto(), nn.Linear(5, 4)), "no layer before a linear one"),
    "widths": (lambda: run(recipes.heterofl().with_(sharing="nothing")), "give one model, and not one for each"),
    "sums": (lambda: recipes.fedproto().with_(transforms=["secure_aggregation"]), "mean features of their rows"),
    "noise": (
        lambda: recipes.fedproto().with_(transforms=[{"kind": "gaussian", "clip": 1.0, "noise": 1.0}]),
        "gaussian protects",
    ),
    "no bias": (
        lambda: run(recipes.fedproto(inference="prototypes"), nn.Sequential(wide()[0], nn.Linear(6, 4, bias=False))),
        "writes prototypes into the last linear layer, and 1 has no bias",
    ),
    "inference": (
        lambda: recipes.fedproto(inference="nearest"),
        "inference must be 'classifier' or 'prototypes', got 'nearest'",
    ),
    "mixed rows": (lambda: run(recipes.fedproto(augmentation=["mix_up"])), "mix_up may mix them"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case: str) -> None:
    make, words = REFUSED[case]
    with pytest.raises(piebald.SettingError, match=words):
        make()
