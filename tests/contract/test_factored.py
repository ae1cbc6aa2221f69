"""Vectors as sums that are not formed: their arithmetic, the weights of layers, and packed client state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.core.parameters import Slot
from piebald.data.partition import PooledClients
from piebald.engines import batched as batched_engine
from piebald.engines.engine_choice import make_engine
from piebald.engines.factored import client_state
from piebald.engines.factored.client_state import StatePacker
from piebald.engines.factored.factors import ClientRowFactor, Factor, MatrixTerm, Weights
from piebald.engines.factored.vectors import FactoredVectors
from piebald.experiments.run_settings import RunSettings
from piebald.runs.prepare import prepare
from piebald.storage.store import RunStore

from .conftest import assert_same, carry_out, vector
from .test_batched import MODELS, federation

SLOT = Slot("w", (4, 5), 3, False)
SPANS = [(slice(0, 3), slice(0, 3)), (slice(23, 26), slice(3, 6))]


def close(one: Tensor, two: Tensor) -> None:
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


@st.composite
def factors(draw: st.DrawFn, made: torch.Generator, order: Tensor | None) -> tuple[Factor, Tensor, Tensor]:
    """Three clients with three, two and one step of a [4, 5] layer, the factor of each step, and what that comes to."""
    counts = (3, 2, 1)  # clients that took each step
    x = [torch.randn(count, 2, 5, generator=made) for count in counts]
    d = [torch.randn(count, 2, 4, generator=made) for count in counts]
    sort = torch.arange(3) if order is None else order
    scale = torch.randn(3, 3, generator=made)
    formed = torch.zeros(3, 20)
    for step, (one, two) in enumerate(zip(x, d, strict=True)):
        products_of = torch.bmm(two.transpose(1, 2), one).flatten(1)
        formed[sort[: len(one)]] += scale[sort[: len(one)], step].unsqueeze(1) * products_of
    whole = None
    if draw(st.booleans()):
        vectors = [torch.nn.functional.pad(part, (0, 0, 0, 0, 0, 3 - len(part))) for part in x]
        whole = torch.cat(vectors, dim=1)
    return Factor(SLOT, x, d, whole, order), scale, formed


@st.composite
def pairs(draw: st.DrawFn) -> list[tuple[Tensor, Tensor]]:
    """Vectors of three clients that are not formed or only partly, beside what they are."""
    made = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    order = draw(st.sampled_from([None, torch.tensor([2, 0, 1])]))
    start, own = torch.randn(26, generator=made), torch.randn(3, 26, generator=made)
    found: list[tuple[Tensor, Tensor]] = [
        (start.expand(3, 26), start.repeat(3, 1)),
        (FactoredVectors.of(own), own.clone()),
    ]
    numbers = torch.randn(3, 6, generator=made)
    factor, scale, formed = draw(factors(made, order))
    keep = draw(st.sampled_from([1.0, 0.5, torch.tensor([[0.5], [0.75], [1.0]])]))
    models = FactoredVectors(own, 3, 26, [MatrixTerm.of(start, keep)], [(factor, scale)], numbers, SPANS)
    whole = start * keep * torch.ones(3, 1)
    whole[:, 3:23] += formed
    whole[:, :3], whole[:, 23:] = numbers[:, :3], numbers[:, 3:]
    found.append((models, whole))
    return found


STEPS: list[Callable[..., Any]] = [
    lambda a, b: a - b,
    lambda a, b: a + b,
    lambda a, b: torch.add(a, b, alpha=0.5),
    lambda a, b: a * 2.0 - b,
    lambda a, b: a / torch.tensor([[2.0], [4.0], [0.5]]) + b,
    lambda a, b: (a - b) * torch.tensor([[True], [False], [True]]),
    lambda a, b: b - (a - b),
    lambda a, b: -1 * a + 3 * b,
]


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(pairs(), st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9), st.integers(0, 9)), max_size=6))
def test_arithmetic_is_that_of_the_vectors_formed(pairs: list[tuple[Tensor, Tensor]], steps: list[Any]) -> None:
    for step, one, two in steps:
        (a, dense_a), (b, dense_b) = pairs[one % len(pairs)], pairs[two % len(pairs)]
        pairs.append((step(a, b), step(dense_a, dense_b)))
    weights = torch.tensor([0.5, 2.0, 0.0])
    for vectors, dense in pairs:
        assert vectors.shape == dense.shape
        if isinstance(vectors, FactoredVectors):
            close(vectors.total(weights), weights @ dense)
            close(vectors.columns(0, 3), dense[:, :3])
            close(vectors[:, :23].total(weights), weights @ dense[:, :23])
            assert bool(vectors.sums().isfinite().all())
        close(vectors.clone(), dense)
        close(vectors.sum(1), dense.sum(1))


def test_equal_terms_cancel() -> None:
    start, common, own = torch.randn(8), torch.randn(8), FactoredVectors.of(torch.randn(3, 8))
    end = FactoredVectors.of(start.expand(3, 8)) - (common.expand(3, 8) - own) * 0.3
    change = (start.expand(3, 8) - end) / torch.full((3, 1), 0.3) - common.expand(3, 8)
    assert isinstance(change, FactoredVectors)
    assert [term.matrix.shape for term in change.matrices] == [(3, 8)]  # minus their own, and nothing else
    assert isinstance(own + change, FactoredVectors)
    assert not (own + change).matrices


@settings(max_examples=30, deadline=None)
@given(pairs())
def test_any_other_operation_sees_ordinary_vectors(pairs: list[tuple[Tensor, Tensor]]) -> None:
    models, dense = pairs[-1]
    close(models[1], dense[1])
    close(torch.where(dense > 0, models, dense), dense)
    models.mul_(2)
    models[0] = 7.0
    expected = dense * 2
    expected[0] = 7.0
    close(models.clone(), expected)
    close(models - dense, expected - dense)  # also where sums are asked for again


def test_what_would_be_lost_is_refused() -> None:
    own = torch.randn(3, 26)
    models = FactoredVectors.of(own)
    with pytest.raises(RuntimeError, match="take its clone"):
        models[:, :3] += 1
    with pytest.raises(RuntimeError, match="take its clone"):
        models[:, :3].zero_()
    later, same = models + torch.ones(3, 26), FactoredVectors.of(own)
    own += 1
    with pytest.raises(RuntimeError, match="changed in place"):
        (same - own).clone()  # these are not the same numbers any more
    with pytest.raises(RuntimeError, match="changed in place"):
        later.clone()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.booleans())
def test_weights_do_what_the_matrix_does(seed: int, each: bool, ahead: bool) -> None:
    made = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made)

    common, own = random(4, 5), random(3, 4, 5)
    share: float | Tensor = random(3, 1, 1) if each else 0.5
    rows, d = random(3, 6, 5), random(3, 6, 4)
    weights = Weights([(common, share), (own, -2.0)], [(rows, d)])
    formed = common * share - 2 * own + torch.bmm(d.transpose(1, 2), rows)
    x, back = random(2, 3, 5), random(2, 3, 4)  # the third client has no such step
    close(weights.times(x), torch.bmm(x, formed[:2].transpose(1, 2)))
    close(weights.back(back), torch.bmm(back, formed[:2]))
    gram = torch.bmm(rows, rows.transpose(1, 2))
    known = weights.times(rows)
    if ahead:
        close(weights.times(rows, lambda one: gram if one is rows else None), known)
        square = weights.square(3, lambda one: known if one is rows else None, lambda one: gram)
    else:
        square = weights.square(3)
    close(square, formed.square().sum((1, 2)))


# ------------------------------------------------------------------------------------------------------- client state


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Factor and pack whatever can be; returns what was packed."""
    packed: list[Any] = []
    pack = StatePacker.pack

    def noted(packer: StatePacker, vectors: FactoredVectors, clients: Any) -> list[Tensor] | None:
        made = pack(packer, vectors, clients)
        packed.append(made)
        return made

    monkeypatch.setattr(batched_engine, "_MULTIPLICATIONS", 1e9)
    monkeypatch.setattr(client_state, "_WORTH", 1e9)
    monkeypatch.setattr(StatePacker, "pack", noted)
    return packed


VISITS: dict[str, dict[str, Any]] = {
    "epochs": {"epochs": 2},
    "a part of the rows": {"steps": 2},
    "a part and more": {"steps": 5},
    "some clients": {"cohort": 2},
}


@pytest.mark.full
@pytest.mark.parametrize("visit", VISITS)
@pytest.mark.parametrize("model", ["dense", "tokens", "images", "windows", "dropout first"])
def test_control_variates_are_the_same_ones_packed(model: str, visit: str, packing: list[Any]) -> None:
    make, shape = MODELS[model]
    clients, network = federation(shape, model == "tokens"), make()
    recipe = recipes.scaffold(**{"lr": 0.1, "batch": 8, "cohort": 4} | VISITS[visit])
    runs = [
        carry_out(recipe, clients, network, rounds=5, simulator={"engine": engine, "stack": 3})
        for engine in ("reference", "batched")
    ]
    assert_same(*runs)
    assert packing
    assert None not in packing


class UsedInAnotherOrder(nn.Module):
    """Layers that are defined the other way round than they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = nn.Linear(12, 4), nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.second(self.first(x.flatten(1)).relu())
        return logits


def test_layers_may_be_used_in_another_order_than_they_are_defined(packing: list[Any]) -> None:
    torch.manual_seed(0)
    network = UsedInAnotherOrder()
    recipe = recipes.scaffold(lr=0.1, batch=8, cohort=4)
    runs = [
        carry_out(recipe, federation((6,), False), network, rounds=3, simulator={"engine": engine, "stack": 3})
        for engine in ("reference", "batched")
    ]
    assert_same(*runs)
    assert packing
    assert None not in packing


def test_a_client_whose_gradients_are_not_finite_is_left_out(packing: list[Any]) -> None:
    make, shape = MODELS["dense"]
    clients = federation(shape, False)
    clients.x[: clients.size(0, "train")] = float("nan")
    runs = [
        carry_out(recipes.scaffold(lr=0.1, batch=8), clients, make(), measure="none", simulator=where)
        for where in ({"engine": "reference"}, {"engine": "batched", "stack": 4})
    ]
    assert {row["status"] for row in runs[1].results if row["client"] == 0} == {"lost"}
    assert_same(*runs)


def test_a_private_layer_has_no_variate(packing: list[Any]) -> None:
    make, shape = MODELS["dense"]
    recipe = recipes.scaffold(lr=0.1, batch=8).with_(sharing={"kind": "all_except", "private_layers": ["3"]})
    runs = [
        carry_out(recipe, federation(shape, False), make(), rounds=3, simulator={"engine": engine, "stack": 3})
        for engine in ("reference", "batched")
    ]
    assert_same(*runs)


def engines(clients: PooledClients) -> tuple[Any, Any]:
    """A batched and a sequential engine of one federation."""
    work = prepare(recipes.scaffold(lr=0.1, batch=8), clients, MODELS["dense"][0](), RunSettings()).work
    made = [make_engine(name, work, clients, torch.device("cpu"), False) for name in ("batched", "sequential")]
    return made[0], made[1]


@pytest.mark.full
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from(["packed", "never asked", "formed"]))
def test_what_is_packed_comes_back(seed: int, by_row: bool, beside: str) -> None:
    made = torch.Generator().manual_seed(seed)
    clients = federation((6,), False)
    batched, sequential = engines(clients)
    packer, size = batched.packer, batched.work.layout.shared
    slots = [slot for slot in batched.work.layout.slots if slot.name in ("0.weight", "3.weight")]
    order = torch.tensor([1, 0, 2])
    places = torch.stack(
        [torch.randint(0, clients.size(int(client), "train"), (9,), generator=made) for client in order]
    )
    own_rows = [clients.rows(int(client), "train").x[which] for client, which in zip(order, places, strict=True)]
    first = torch.stack(own_rows)
    vectors, count = list[tuple[Factor, Tensor]](), torch.ones(3, 1)
    for slot, x in zip(slots, (first, torch.randn(3, 9, 8, generator=made)), strict=True):
        d = torch.randn(3, 9, slot.shape[0], generator=made)
        which = places if by_row and slot is slots[0] else None
        vectors.append((Factor(slot, [x], [d], x, order, which), count))
    rest = packer._rest(slots)
    own = torch.randn(3, rest[-1][1].stop, generator=made)
    expected = FactoredVectors(own, 3, size, (), vectors, own, rest).clone()
    worth, client_state._WORTH = client_state._WORTH, 1e9
    packed = packer.pack(FactoredVectors(own, 3, size, (), vectors, own, rest), [0, 1, 2])
    client_state._WORTH = worth
    assert packed is not None
    assert all(packer.is_packed(row, "control") and not packer.is_packed(row, "other") for row in packed)
    if beside != "packed":
        packed[1] = torch.zeros(size) if beside == "never asked" else torch.ones(size)
        expected[1] = packed[1]
    from piebald.engines.outgoing import unpack_state

    for engine in (batched, sequential):
        found = unpack_state(engine, [0, 1, 2], "control", packed)
        assert isinstance(found, FactoredVectors) == (engine is batched)
        close(found.clone(), expected)
    found = packer.unpack(packed, [0, 1, 2], torch.device("cpu"))
    assert (found is None) == (beside == "formed")
    assert found is None or isinstance(found.factors[0][0], ClientRowFactor) == by_row


@pytest.mark.parametrize("width", [4, 400])
def test_only_what_is_worth_it_is_packed(width: int, packing: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_state, "_WORTH", 0.5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.ReLU(), torch.nn.Linear(width, 200))
    clients = federation((6,), False)
    carry_out(recipes.scaffold(lr=0.01, batch=8), clients, model, simulator={"engine": "batched", "stack": 4})
    assert all((made is not None) == (width == 400) for made in packing)
    if width == 400:
        sizes = sorted(clients.size(client, "train") for client in range(len(clients)))
        # a head of three, biases, one number for each row and output of the first layer, rows and gradients of the last
        expected = [3 + width + 200 + size * width + size * (width + 200) for size in sizes]
        assert sorted(len(row[0]) for row in packing[0]) == expected


def test_packed_variates_are_on_the_disk_and_come_back(
    packing: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, model = federation((6,), False), MODELS["dense"][0]
    recipe, where = recipes.scaffold(lr=0.1, batch=8, cohort=3), {"engine": "batched", "stack": 2}
    whole = carry_out(recipe, clients, model(), rounds=6, simulator=where, out=tmp_path / "whole")
    commit = RunStore.commit

    def stopped(store: RunStore, *args: Any, **more: Any) -> None:
        commit(store, *args, **more)
        if store.version == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunStore, "commit", stopped)
    with pytest.raises(KeyboardInterrupt):
        carry_out(recipe, clients, model(), rounds=6, simulator=where, out=tmp_path / "run", checkpoint_every=1)
    monkeypatch.setattr(RunStore, "commit", commit)
    files = [file for file in (tmp_path / "run").glob("*.safetensors") if not file.name.startswith("vectors-")]
    assert {len(tensor.shape) for file in files for tensor in load_file(file).values()} == {2}
    again = piebald.resume(tmp_path / "run", clients, model())
    assert len(again.rounds) == 6
    assert torch.equal(vector(again), vector(whole))
