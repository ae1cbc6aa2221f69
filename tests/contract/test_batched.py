"""The batched engine: many clients' rows in one batch, and dense weights that are never formed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from piebald import Simulator, recipes
from piebald.core.errors import RuntimeFault
from piebald.data.partition import Lists, PooledClients
from piebald.engines import batched as batched_engine
from piebald.engines import engine_choice
from piebald.engines.batched_layers import FactoredDense
from piebald.engines.factored.factors import Factor
from piebald.engines.sgd_step import Stepper
from piebald.experiments.run_settings import RunSettings
from piebald.methods.training import Sgd
from piebald.models import build_model
from piebald.runs.prepare import prepare

from .conftest import assert_same, carry_out, plain_network
from .conftest import federation as with_validation

SIZES = (7, 26, 21, 12)  # with batches of 8: different numbers of steps, short batches, a short first one


class Sentence(nn.Module):
    """Tokens to classes: an embedding, layer norm and dense layers that see every position of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.wide = nn.Linear(6, 12)
        self.narrow = nn.Linear(12, 6, bias=False)
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        x = x + self.narrow(self.wide(self.norm(x)).relu())
        return self.out(x.mean(1))


class Windows(nn.Module):
    """Series to classes: a dense layer that sees every window of a row, and the rows once more further on."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 9)
        self.out = nn.Linear(15, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([self.wide(x).relu(), x], dim=2).mean(1))


class Scaled(nn.Module):
    """Writes to the rows it is given before its first layer sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = plain_network()

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x.clamp_(min=-0.5))


def seeded(make: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make()


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "dense": (lambda: plain_network(), (6,)),
    "images": (lambda: build_model("leaf_cnn", (1, 8, 8), 4, 0, channels=[3, 4], hidden=10), (1, 8, 8)),
    "batch norm": (lambda: build_model("cnn_bn", (2, 8, 8), 4, 0, channels=[3, 4]), (2, 8, 8)),
    "signals": (lambda: build_model("cnn_1d", (3, 16), 4, 0, channels=[4, 5], hidden=9), (3, 16)),
    "tokens": (lambda: seeded(Sentence), (5,)),
    "windows": (lambda: seeded(Windows), (3, 6)),
    "written to": (lambda: seeded(Scaled), (6,)),
    "dropout first": (lambda: nn.Sequential(nn.Dropout(0.4), *plain_network()), (6,)),
}


def federation(shape: tuple[int, ...], tokens: bool) -> PooledClients:
    draw = np.random.default_rng(2)
    count = sum(SIZES)
    x = draw.integers(0, 11, (count, *shape)) if tokens else draw.normal(size=(count, *shape)).astype(np.float32)
    ends = np.cumsum([0, *SIZES])
    train, test = Lists(np.arange(count), ends), Lists(np.arange(count), ends)
    y = torch.from_numpy(draw.integers(0, 4, count))
    return PooledClients(torch.from_numpy(x), y, {"train": train, "test": test}, classes=list("abcd"))


@pytest.fixture
def formed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Factor all dense layers that can be, or none; returns which ones were, run by run."""
    begun: list[str] = []
    begin = FactoredDense.begin

    def noted(layer: FactoredDense, starts: Any) -> None:
        begun.append(layer.slot.name)
        begin(layer, starts)

    def choose(factored: bool) -> list[str]:
        monkeypatch.setattr(batched_engine, "_MULTIPLICATIONS", 1e9 if factored else 0)
        monkeypatch.setattr(FactoredDense, "begin", noted)
        return begun

    return choose


def check(model: str, recipe: Any, stack: int = 3, **more: Any) -> None:
    """The batched engine gives the numbers of the plain reference."""
    make, shape = MODELS[model]
    clients, network = federation(shape, model == "tokens"), make()
    runs = [
        carry_out(recipe, clients, network, simulator={"engine": engine, "stack": stack, **more})
        for engine in ("reference", "batched")
    ]
    assert_same(*runs)


@pytest.mark.parametrize("factored", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stack", [pytest.param(1, marks=pytest.mark.full), 3, pytest.param(4, marks=pytest.mark.full)])
def test_models_of_every_kind(model: str, factored: bool, stack: int, formed: Any) -> None:
    begun = formed(factored)
    check(model, recipes.fedavg(lr=0.1, batch=8, epochs=2), stack)
    assert bool(begun) == (factored and (model != "batch norm" or stack < 4))  # rows that mix: clients alone


@pytest.mark.parametrize(
    ("model", "ahead"), [("dense", True), ("windows", True), ("written to", False), ("dropout first", False)]
)
def test_products_are_made_ahead_only_where_a_layer_sees_the_rows_themselves(
    model: str, ahead: bool, formed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    formed(True)
    factor, seen = FactoredDense.factor, set[bool]()

    def noted(layer: FactoredDense, *rows: Any) -> Factor:
        made = factor(layer, *rows)
        seen.add(made.whole is not None)
        return made

    monkeypatch.setattr(FactoredDense, "factor", noted)
    check(model, recipes.fedavg(lr=0.1, batch=8, epochs=2), stack=4)
    assert (True in seen) == ahead


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "momentum": ("fedavg", {"momentum": 0.9}),
    "momentum and decay": ("fedavg", {"momentum": 0.5, "weight_decay": 0.1}),
    "prox": ("fedprox", {"mu": 0.7, "momentum": 0.4}),
    "prox and decay": ("fedprox", {"mu": 0.7, "weight_decay": 0.2}),
    "lr_schedule": ("fedavg", {"lr_schedule": {"kind": "exponential", "rate": 0.5}}),
    "private head": ("hdafl", {}),
    "private head and momentum": ("hdafl", {"momentum": 0.3, "weight_decay": 0.1}),
    "validation cycles": ("adaptive_dvw", {"cycles": 3, "vc_tomb": 2, "momentum": 0.5, "limit_staleness": False}),
    "ditto": ("ditto", {"lam": 0.3}),
    "ditto, momentum and decay": ("ditto", {"lam": 0.3, "momentum": 0.5, "weight_decay": 0.1, "personal_epochs": 3}),
    "a correction and a proximal term": ("feddyn", {"alpha": 0.2, "weight_decay": 0.1}),
    "fine-tuned": ("fine_tuned", {"tune_epochs": 2}),
    "momentum at the server": ("fedavgm", {}),
    "control variates": ("scaffold", {}),
    "starts of their own": ("async_fedavg", {}),
    "starts of clusters": ("ifca", {"k": 2}),
}


@pytest.mark.full
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_linear_in_gradients_need_not_be_formed(setting: str, workers: int, formed: Any) -> None:
    name, fields = SETTINGS[setting]
    begun = formed(True)
    recipe = recipes.make(name, **{"lr": 0.1, "batch": 8, "epochs": 2} | fields)
    clients, model = with_validation(), plain_network()
    runs = [
        carry_out(recipe, clients, model, simulator=where)
        for where in ({"engine": "reference"}, {"engine": "batched", "stack": 3, "workers": workers})
    ]
    assert_same(*runs)
    assert workers or begun


@pytest.mark.full
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_models_that_are_drawn_to_others_than_they_start_from_need_not_be_formed(decay: float, formed: Any) -> None:
    begun = formed(True)
    check("dense", recipes.ditto(lr=0.1, batch=8, lam=0.3, weight_decay=decay))
    both = len(begun)
    check("dense", recipes.fedavg(lr=0.1, batch=8, weight_decay=decay))
    assert both == 2 * (len(begun) - both) > 0  # the personal model and the shared one


@pytest.mark.parametrize("engine", ["sequential", "vmapped", "batched"])
@pytest.mark.parametrize(
    ("name", "fields", "copied"),
    [
        ("fedavg", {"weight_decay": 0.1}, False),
        ("fedprox", {"mu": 0.5}, False),
        ("fedprox", {"mu": 0.5, "weight_decay": 0.1}, True),
        ("fedavg", {"momentum": 0.5}, True),
    ],
    ids=str,
)
def test_a_step_with_one_pull_on_the_weights_does_not_copy_its_gradients(
    name: str, fields: dict[str, Any], copied: bool, engine: str, formed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    formed(False)
    step, seen = Stepper.step, list[Tensor]()

    def noted(stepper: Stepper, w: Tensor, g: Tensor, *more: Any) -> None:
        seen.append(g)
        step(stepper, w, g, *more)

    monkeypatch.setattr(Stepper, "step", noted)
    recipe = recipes.make(name, **{"lr": 0.1, "batch": 8} | fields)
    carry_out(recipe, federation((6,), False), plain_network(), simulator={"engine": engine, "stack": 3})
    assert bool(seen) == copied


class Pulled(Sgd):
    """A user's trainer whose models are drawn away from where they start, and shifted besides."""

    def train(self, inputs: Any, context: Any) -> Any:
        pull = {"prox": 0.5, "prox_center": inputs.model * 0.5 + 0.1, "correction": inputs.model * 0.2}
        return self.output(context.run_sgd(inputs.model, self.sgd_config(inputs), **pull))


def test_lengths_of_updates_are_right_where_all_terms_of_the_weights_change(formed: Any) -> None:
    """They are the updates' weights, which factored layers know beforehand where only one of their terms changes."""
    begun = formed(True)
    training = Pulled(lr=0.1, batch=8, weight_decay=0.1)
    check("dense", recipes.fedavg().with_(training=training, aggregation="gradient_norm_weighted"))
    assert begun


class Uncentered(Sgd):
    """A user's trainer that forgets what its proximal term draws to."""

    def train(self, inputs: Any, context: Any) -> Any:
        return self.output(context.run_sgd(inputs.model, self.sgd_config(inputs), prox=0.5))


@pytest.mark.parametrize("engine", ["reference", "sequential", "batched"])
def test_a_proximal_term_without_a_center_is_refused(engine: str) -> None:
    recipe = recipes.fedavg().with_(training=Uncentered())
    with pytest.raises(RuntimeFault, match=r"prox = 0\.5 without what it draws to: give prox_center"):
        carry_out(recipe, federation((6,), False), plain_network(), simulator={"engine": engine, "stack": 3})


@pytest.mark.parametrize(
    ("name", "fields"),
    [("fedavg", {"clip": 0.2}), ("fedavg", {"momentum": 0.5, "keep_momentum": True})],
)
def test_what_is_not_linear_or_keeps_velocity_is_formed(name: str, fields: dict[str, Any], formed: Any) -> None:
    begun = formed(True)
    check("dense", recipes.make(name, **{"lr": 0.1, "batch": 8} | fields))
    assert not begun


@pytest.mark.parametrize("aggregation", ["example_weighted", "gradient_norm_weighted", "equal_weighted"])
def test_an_update_that_cannot_count_is_left_out_of_the_sum(aggregation: str, formed: Any) -> None:
    formed(True)
    clients = federation((6,), False)
    clients.x[: SIZES[0]] = float("nan")  # so are this client's gradients
    recipe = recipes.fedavg(lr=0.1, batch=8).with_(aggregation=aggregation)
    runs = [
        carry_out(recipe, clients, plain_network(), rounds=2, measure="none", simulator={"engine": engine, "stack": 4})
        for engine in ("reference", "batched")
    ]
    assert {row["status"] for row in runs[1].results if row["client"] == 0} == {"lost"}
    assert_same(*runs)


def test_a_layer_that_is_used_twice_is_formed(formed: Any) -> None:
    class Twice(nn.Module):
        """The factors of its two uses would be mixed up."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(6, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.inner(self.inner(x).relu()))

    begun, model = formed(True), seeded(Twice)
    clients = federation((6,), False)
    recipe = recipes.fedavg(lr=0.1, batch=8)
    runs = [carry_out(recipe, clients, model, simulator={"engine": engine}) for engine in ("reference", "batched")]
    assert_same(*runs)
    assert set(begun) == {"out.weight"}


class Padded(Sentence):
    """The first token stands for nothing: its row of the table has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=0)


class Frozen(nn.Module):
    """Batch norm that keeps the statistics it came with, as when a pretrained network is tuned."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.out = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.inner(x)).relu())


@pytest.mark.parametrize("engine", ["vmapped", "batched"])
@pytest.mark.parametrize(("make", "shape"), [(Padded, (5,)), (Frozen, (6,))])
def test_layers_that_are_used_in_a_way_of_their_own(make: Any, shape: tuple[int, ...], engine: str) -> None:
    clients = federation(shape, make is Padded)
    recipe = recipes.fedavg(lr=0.1, batch=8)
    runs = [
        carry_out(recipe, clients, seeded(make), simulator={"engine": name, "stack": 3})
        for name in ("reference", engine)
    ]
    assert_same(*runs)


class ByBatch(nn.Module):
    """Its outputs depend on the length of the batch, so batches of several clients give other outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (len(x) / 8)


@pytest.mark.parametrize(
    ("make", "chosen"), [(plain_network, ("batched", 5)), (lambda: seeded(ByBatch), ("batched", 1))]
)
def test_an_engine_that_misreads_the_model_is_not_chosen(
    make: Any, chosen: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = engine_choice._measure

    def larger_is_faster(engine: Any, clients: Any, stack: int) -> tuple[Tensor, float]:
        return measure(engine, clients, stack)[0], 1.0 / stack - 0.5 * (engine.name == "batched")

    monkeypatch.setattr(engine_choice, "_measure", larger_is_faster)
    rows = federation((6,), False)
    train = Lists(np.arange(60), np.arange(0, 61, 12))
    clients = PooledClients(rows.x, rows.y, {"train": train}, classes=list("abcd"))
    options = RunSettings(runtime=Simulator(engine="sequential", workers=0))
    work = prepare(recipes.fedavg(lr=0.1, batch=8), clients, make(), options).work
    found = engine_choice.fastest(work, clients, torch.device("cpu"), False, range(5), (1, 5))
    assert found[:2] == chosen
