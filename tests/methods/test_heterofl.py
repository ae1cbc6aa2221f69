"""HeteroFL beside a plain program of its equations, what it claims, and what is refused beside it."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import piebald
from piebald import models, recipes
from piebald.contracts import Cohort, ServerContext, Update
from piebald.core.client_models import narrowed, nested_positions
from piebald.core.parameters import Layout
from piebald.data.partition import clients_from
from piebald.methods.aggregation import HeldAverage
from piebald.server.evaluation import CompletedModels
from tests.fakes import client_work

LR, STEPS, ROUNDS, WIDTHS = 0.1, 2, 3, (1.0, 0.5, 0.3)
SETTINGS: dict[str, Any] = {"lr": LR, "steps": STEPS, "batch": 100}  # every batch is all of a client's rows
HERE = piebald.Simulator(engine="sequential", workers=0)


def sites() -> list[tuple[Tensor, Tensor]]:
    """Four clients of unequal size with pictures of one channel; each lacks one of three classes."""
    draw, made = torch.Generator().manual_seed(3), []
    for client, size in enumerate((9, 14, 20, 11)):
        y = (torch.arange(size) % 2 + client) % 3
        made.append((torch.randn(size, 1, 4, 4, generator=draw) + y[:, None, None, None], y))
    return made


def network(seed: int = 0) -> nn.Sequential:
    """Two convolutions and two linear layers, the third of which sees flattened pictures."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 5, 3), nn.Sigmoid(), nn.Flatten(),
            nn.Linear(20, 7), nn.ReLU(), nn.Linear(7, 3),
        )  # fmt: skip


def run(recipe: Any, **options: Any) -> piebald.Run:
    clients = clients_from(sites(), test=0.0, classes=list("abc"))
    return piebald.run(recipe, clients, network, **{"rounds": ROUNDS, "evaluate_every": 0, "runtime": HERE} | options)


def vector(made: piebald.Run, client: int | None = None) -> Tensor:
    module = made.model(client)
    return Layout.of(module).flatten(module)


def scaled_outputs(tensors: list[Tensor], x: Tensor, ratio: float) -> Tensor:
    """The forward pass of a client of this width, written out."""
    x = torch.tanh(functional.conv2d(x, tensors[0], tensors[1], padding=1) / ratio)
    x = torch.sigmoid(functional.conv2d(x, tensors[2], tensors[3]) / ratio)
    x = torch.relu(functional.linear(x.flatten(1), tensors[4], tensors[5]) / ratio)
    return functional.linear(x, tensors[6], tensors[7])


def program(masked: bool) -> list[Tensor]:
    """Algorithm 1 with loops over tensors: cut out, train, and average what each client has."""
    whole = [parameter.detach().clone() for parameter in network().parameters()]
    for _ in range(ROUNDS):
        total, count = [torch.zeros_like(one) for one in whole], [torch.zeros_like(one) for one in whole]
        for client, (x, y) in enumerate(sites()):
            ratio = WIDTHS[client % len(WIDTHS)]
            a, b, c = (math.ceil(channels * ratio) for channels in (6, 5, 7))
            corners = [(a, 1), (a,), (b, a), (b,), (c, 4 * b), (c,), (3, c), (3,)]
            places = [tuple(slice(size) for size in corner) for corner in corners]
            own = [one[place].clone().requires_grad_() for one, place in zip(whole, places, strict=True)]
            present = torch.tensor([float(bool((y == label).any())) for label in range(3)])
            for _ in range(STEPS):
                outputs = scaled_outputs(own, x, ratio)
                loss = functional.cross_entropy(outputs * present if masked else outputs, y)
                gradients = torch.autograd.grad(loss, own)
                own = [(w - LR * g).detach().requires_grad_() for w, g in zip(own, gradients, strict=True)]
            for number, (place, mine) in enumerate(zip(places, own, strict=True)):
                held = torch.full_like(mine, float(len(y)))
                if masked and number >= 6:
                    held[present == 0] = 0
                total[number][place] += held * mine.detach()
                count[number][place] += held
        whole = [torch.where(n > 0, t / n.clamp(min=1), w) for t, n, w in zip(total, count, whole, strict=True)]
    return whole


@pytest.mark.parametrize("masked", [False, True])
def test_it_is_the_program_of_its_equations(masked: bool) -> None:
    recipe = recipes.heterofl(widths=WIDTHS, masked_loss=masked, **SETTINGS)
    found = [parameter.detach() for parameter in run(recipe).model().parameters()]
    for one, expected in zip(found, program(masked), strict=True):
        torch.testing.assert_close(one, expected, atol=1e-5, rtol=1e-5)
    assert not torch.equal(found[0], next(network().parameters()))


def test_with_one_width_it_is_fedavg_to_the_bit() -> None:
    options: dict[str, Any] = {"lr": 0.1, "batch": 4, "epochs": 2, "momentum": 0.5}
    fedavg, whole = run(recipes.fedavg(**options)), run(recipes.heterofl(widths=[1.0], **options))
    expected = vector(fedavg)
    assert torch.equal(vector(whole), expected)
    assert [row["weight"] for row in whole.results] == pytest.approx([row["weight"] for row in fedavg.results])
    assert not torch.equal(vector(run(recipes.heterofl(widths=[1.0, 0.5], **options))), expected)


def test_a_narrow_network_is_the_whole_one_with_the_other_numbers_at_zero() -> None:
    shape = (3, 32, 32)
    for name in ("mlp_bn", "cnn_bn", "resnet18"):
        module = models.build_model(name, shape, 10)
        narrow, whole = narrowed(module, 0.3, shape, scaler=False).eval(), copy.deepcopy(module).eval()
        layout, part = Layout.of(module), Layout.of(narrow)
        places = nested_positions(layout, part)
        assert len(places.unique()) == part.size < 0.4 * layout.size
        vector = torch.zeros(layout.size)
        vector[places] = layout.flatten(module)[places]
        layout.load(whole, vector)
        x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(narrow(x), whole(x), atol=1e-5, rtol=1e-5)


def test_each_number_is_averaged_over_those_who_have_it() -> None:
    changes = torch.tensor([[1.0, 1.0, 1.0, 0.0], [4.0, 7.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0]])
    updates = [Update({"model": one}, rows, 1, {}) for one, rows in zip(changes, (1, 2, 3), strict=True)]
    held = [torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.tensor([0])]
    cohort = Cohort([0, 1, 2], [0] * 3, updates, changes, 0, held=held)
    average, shares = HeldAverage().aggregate(cohort, cast(ServerContext, None))
    assert average.tolist() == [6.0, 5.0, 1.0, 0.0]  # (1 + 8 + 27) / 6, (1 + 14) / 3, 1 / 1, nobody
    assert shares == pytest.approx([(1 / 6 + 1 / 3 + 1) / 3, (2 / 6 + 2 / 3) / 3, (3 / 6) / 3])
    equal, _ = HeldAverage(weights="equal").aggregate(cohort, cast(ServerContext, None))
    torch.testing.assert_close(equal, torch.tensor([14 / 3, 4.0, 1.0, 0.0]))


def test_what_no_client_has_stays_and_narrow_clients_send_less() -> None:
    made, first = run(recipes.heterofl(widths=[0.3, 0.5], **SETTINGS)), network()
    layout, start = Layout.of(first), Layout.of(first).flatten(first)
    held = nested_positions(layout, Layout.of(narrowed(first, 0.5, (1, 4, 4), False)))
    untouched = torch.ones(layout.size, dtype=torch.bool)
    untouched[held] = False
    assert torch.equal(vector(made)[untouched], start[untouched])
    assert bool((vector(made)[held] != start[held]).any())
    for row in made.results:
        own = Layout.of(made.model(row["client"]))
        assert row["bytes_down"] == row["bytes_up"] == 4 * own.size < 4 * layout.size


def test_private_layers_and_kept_optimizers_are_as_narrow_as_their_client(tmp_path: Path) -> None:
    recipe = recipes.heterofl(widths=WIDTHS, momentum=0.5, keep_momentum=True, **SETTINGS)
    recipe = recipe.with_(sharing={"kind": "all_except", "private_layers": "classifier"})
    with run(recipe, out=tmp_path / "run", rounds=2, keep="last") as made:
        assert [made.model(client)[7].weight.shape[1] for client in range(4)] == [7, 4, 3, 7]
        assert not torch.equal(made.model(0)[7].weight, made.model(3)[7].weight)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "comparing updates": ({"aggregation": {"kind": "krum"}}, "krum takes every update as a change of the whole one"),
    "a plain mean": ({"aggregation": "example_weighted"}, "choose aggregation = 'held_average'"),
    "sums alone": ({"transforms": ["secure_aggregation"]}, "held_average needs individual updates"),
    "clusters": ({"clustering": {"kind": "ifca", "k": 2}}, "choose another clustering"),
    "noise": ({"transforms": [{"kind": "gaussian", "clip": 1.0, "noise": 1.0}]}, "gaussian"),
    "last models": ({"server_optimizer": "cached_average"}, "cached_average"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_takes_whole_updates_is_refused(case: str) -> None:
    changed, words = REFUSED[case]
    with pytest.raises(piebald.SettingError, match=words):
        recipes.heterofl(widths=[1.0, 0.5]).with_(**changed)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 3)), "has a LayerNorm"),
        (nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 1, groups=2), nn.Flatten(), nn.Linear(64, 3)), "in groups"),
        (nn.Linear(4, 3), "ends in no linear layer after others"),
    ],
)
def test_models_whose_channels_cannot_be_left_out_are_refused(model: nn.Module, words: str) -> None:
    rows = [(x.flatten(1)[:, :4], y) for x, y in sites()] if isinstance(model, nn.Linear) else sites()
    with pytest.raises(piebald.SettingError, match=words):
        piebald.run(recipes.heterofl(), clients_from(rows, test=0.0), model, rounds=1, runtime=HERE)


class Joined(nn.Module):
    """Channels of two layers side by side: the first ones of both together are not the first ones of each."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(16, 4), nn.Linear(16, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(torch.cat([self.one(x.flatten(1)), self.two(x.flatten(1))], dim=1))
        return output


def test_a_part_that_computes_something_else_is_refused() -> None:
    with pytest.raises(piebald.SettingError, match="computes something else"):
        piebald.run(recipes.heterofl(), clients_from(sites(), test=0.0), Joined(), rounds=1, runtime=HERE)


def test_settings_that_cannot_be_are_refused() -> None:
    for widths in ([], [0.0], [1.5]):
        with pytest.raises(piebald.SettingError, match="widths"):
            recipes.heterofl(widths=widths)
    with pytest.raises(piebald.SettingError, match="optimizer_state = 'averaged' has no average"):
        recipes.heterofl(optimizer="adam", optimizer_state="averaged")
    with pytest.raises(piebald.SettingError, match="leave out optimizer_state and keep_momentum"):
        recipes.heterofl(dynamic=True, momentum=0.5, keep_momentum=True)
    with pytest.raises(piebald.SettingError, match="another part of the model for each task but top_k keeps"):
        recipes.heterofl(dynamic=True).with_(transforms=[{"kind": "top_k", "share": 0.1}])
    with pytest.raises(piebald.SettingError, match="static_batch_norm of nested_widths would have no effect"):
        run(recipes.heterofl(static_batch_norm=True))
    hdafl = {"kind": "all_except", "private_layers": "classifier"}
    with pytest.raises(piebald.SettingError, match="dynamic of nested_widths gives clients networks of several"):
        run(recipes.heterofl(dynamic=True).with_(sharing=hdafl))


def with_norms(seed: int = 0) -> nn.Sequential:
    """A convolution and a linear layer, each with a batch norm."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 8), nn.BatchNorm1d(8),
            nn.ReLU(), nn.Linear(8, 3),
        )  # fmt: skip


def statistics_program(model: nn.Module) -> dict[str, Tensor]:
    """What torch tracks over all clients' rows, each client's in one batch, weighted by how many there are."""
    model, rows, found = copy.deepcopy(model).train(), 0, dict[str, Tensor]()
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.momentum = 1.0
    for x, _ in sites():
        model(x)
        rows += len(x)
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                found[name] = found.get(name, torch.zeros(())) + len(x) * buffer.clone()
    return {name: total / rows for name, total in found.items()}


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}


@pytest.mark.parametrize(("most", "weights"), [(None, (10, 1000)), (20, (10, 20)), (5, (5, 5))])
def test_statistics_are_weighted_by_rows_up_to_the_limit(most: int | None, weights: tuple[int, int]) -> None:
    work = client_work(with_norms(), recipes.heterofl(widths=WIDTHS, static_batch_norm=True, **SETTINGS).training)
    trained, settled = work.layout.shared_trained, list[Tensor]()
    cluster = SimpleNamespace(model=work.initial, own_buffers={}, settle=settled.append)
    models: Any = SimpleNamespace(clusters={0: cluster}, of=lambda client: cluster)
    told = [torch.full((work.layout.shared - trained,), value) for value in (1.0, 4.0)]

    def ask(requests: Any) -> Any:
        pairs = zip(told, (10, 1000), strict=True)
        return [SimpleNamespace(update=Update({"buffers": buffer}, rows, 0, {})) for buffer, rows in pairs]

    CompletedModels(work, most).complete(models, [0, 1], ask)
    mean = (weights[0] * told[0] + weights[1] * told[1]) / sum(weights)
    torch.testing.assert_close(settled[0][trained : work.layout.shared], mean)
    assert torch.equal(settled[0][:trained], work.initial[:trained])


@pytest.mark.full
@pytest.mark.parametrize("engine", ["sequential", "batched", "vmapped"])
def test_static_batch_norms_are_those_of_all_clients_rows_once_trained(engine: str, tmp_path: Path) -> None:
    recipe = recipes.heterofl(widths=WIDTHS, static_batch_norm=True, **SETTINGS)
    here = piebald.Simulator(engine=engine, workers=0)
    clients = clients_from(sites(), test=0.0, classes=list("abc"))
    options: dict[str, Any] = {"rounds": 2, "evaluate_split": "train", "runtime": here}
    made = piebald.run(recipe, clients, with_norms, out=tmp_path / "run", **options)
    sent = piebald.run(recipes.heterofl(widths=WIDTHS, **SETTINGS), clients, with_norms, **options)
    for client in (None, 1, 2):
        torch.testing.assert_close(buffers(made.model(client)), statistics_program(made.model(client)))
    for name, parameter in made.model().named_parameters():  # batch norms train with the statistics of the batch
        torch.testing.assert_close(parameter, dict(sent.model().named_parameters())[name])
    assert not torch.allclose(buffers(sent.model())["1.running_mean"], buffers(made.model())["1.running_mean"])
    scored = {row["client"]: row["value"] for row in made.scores if row["metric"] == "loss" and row["version"] == 2}
    for client, (x, y) in enumerate(sites()):
        loss = functional.cross_entropy(made.model(client)(x), y).detach()
        assert scored[client] == pytest.approx(float(loss), abs=1e-5)
    again = piebald.resume(tmp_path / "run", clients, with_norms, rounds=3)
    straight = piebald.run(recipe, clients, with_norms, **options | {"rounds": 3})
    for client in (None, 1):
        assert torch.equal(vector(again, client), vector(straight, client))


def test_dynamic_widths_are_drawn_for_each_task_and_models_are_whole() -> None:
    recipe = recipes.heterofl(widths=WIDTHS, dynamic=True, static_batch_norm=True, **SETTINGS)
    clients = clients_from(sites(), test=0.0, classes=list("abc"))
    made = piebald.run(recipe, clients, with_norms, rounds=12, evaluate_every=0, runtime=HERE)
    sizes = [4 * one.layout.size for one in made.work.different()]
    drawn = {client: [row["bytes_up"] for row in made.results if row["client"] == client] for client in range(4)}
    assert all({*one} <= {*sizes} for one in drawn.values())
    assert {one for all_ in drawn.values() for one in all_} == {*sizes}
    assert len({tuple(one) for one in drawn.values()}) == 4
    assert torch.equal(vector(made, 1), vector(made))
    torch.testing.assert_close(buffers(made.model()), statistics_program(made.model()))
