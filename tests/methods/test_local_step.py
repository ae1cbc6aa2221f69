"""The seam between a method and SGD: a step of one's own runs alike on every engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.contracts import PLAIN_STEP, Batches, LocalStep, RowPrivacy, SgdConfig, Slopes, StepPoint
from piebald.contracts.training import Gradients
from piebald.core.errors import RuntimeFault
from piebald.engines import vmapped
from piebald.engines.client_context import EngineContext
from piebald.engines.engine_choice import make_engine
from piebald.engines.row_loader import batches, planned_steps
from piebald.engines.stack import ClientStack
from piebald.methods.training import DpSgd, Sgd
from piebald.methods.training.adaptive_local_aggregation import ShareOfRows
from tests.fakes import classified, client_work, few, seeded


@dataclass(frozen=True)
class AcrossTheRidge(LocalStep):
    """The mean of the gradients on both sides of the models, on two thirds of the rows: asked three times a step."""

    def seen(self, count: int) -> int:
        return max(2, 2 * count // 3)

    def gradients(self, point: StepPoint) -> Gradients:
        losses, here = point.gradients()
        here = [gradient.clone() for gradient in here]  # they are lost at the next call
        ahead = [gradient.clone() for gradient in point.gradients(0.1 * gradient for gradient in here)[1]]
        behind = point.gradients(-0.1 * gradient for gradient in here)[1]
        return losses, [(one + two) / 2 for one, two in zip(ahead, behind, strict=True)]


class RidgeSgd(Sgd):
    """SGD across the ridge."""

    @property
    def local_step(self) -> LocalStep:
        return AcrossTheRidge()


@dataclass(frozen=True)
class NotHidden(LocalStep):
    """A step that asks for hidden gradients without saying so."""

    def gradients(self, point: StepPoint) -> Gradients:
        return point.hidden(1.0, 1.0)


class NotHiddenSgd(Sgd):
    """SGD that asks for hidden gradients without saying so."""

    @property
    def local_step(self) -> LocalStep:
        return NotHidden()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.ReLU(), nn.Linear(6, 2))


def trained(trainer: Sgd, engine: str) -> Tensor:
    simulator = piebald.Simulator(engine=engine, stack=2, workers=0)
    recipe = recipes.fedavg().with_(training=trainer)
    clients = classified(13, 9, 7)
    return piebald.run(recipe, clients, seeded(network), rounds=2, runtime=simulator, evaluate_every=0).start()


@pytest.mark.parametrize("engine", ["sequential", "vmapped", "batched"])
@pytest.mark.parametrize(("accumulate", "kind"), [(1, "equal"), (2, "equal"), (2, "exact")])
def test_a_step_of_ones_own_is_that_of_the_reference(engine: str, accumulate: int, kind: Batches) -> None:
    trainer = RidgeSgd(lr=0.2, batch=3, batches=kind, momentum=0.5, weight_decay=0.01, clip=1.0, accumulate=accumulate)
    expected = trained(trainer, "reference")
    torch.testing.assert_close(trained(trainer, engine), expected, rtol=1e-4, atol=1e-5)
    plain = Sgd(lr=0.2, batch=3, momentum=0.5, weight_decay=0.01, clip=1.0, accumulate=accumulate)
    assert not torch.allclose(trained(plain, engine), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("engine", ["sequential", "vmapped", "reference"])
def test_only_a_step_that_says_so_may_ask_for_hidden_gradients(engine: str) -> None:
    with pytest.raises(RuntimeFault, match="hides_rows"):
        trained(NotHiddenSgd(), engine)


def test_rows_are_hidden_alike_where_a_stack_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vmapped engine then trains as the sequential one does."""
    monkeypatch.setattr(vmapped, "MAX_NUMBERS", 0)
    work, clients = client_work(seeded(lambda: nn.Linear(4, 2)), DpSgd(batch=5)), classified(20, 9)
    stack = ClientStack([0, 1], [0, 0], [0, 0], [0, 0], [work.initial] * 2, {}, {})
    models = []
    for name in ("sequential", "vmapped"):
        engine = make_engine(name, work, clients, torch.device("cpu"), bfloat16=False)
        config = SgdConfig(lr=0.5, batch=5, step=DpSgd(batch=5).local_step)
        models.append(EngineContext(engine, stack).run_sgd(work.initial.expand(2, -1), config).model)
    assert torch.equal(*models)


@few
@given(
    count=st.integers(0, 30),
    batch=st.integers(2, 7),
    epochs=st.integers(1, 3),
    step=st.sampled_from([PLAIN_STEP, ShareOfRows(0.4), ShareOfRows(1.0), RowPrivacy(1.0, 1.0)]),
    mixes=st.booleans(),
    kind=st.sampled_from(["equal", "exact"]),
)
def test_a_single_step_has_the_batch_that_it_has_among_the_others(
    count: int, batch: int, epochs: int, step: LocalStep, mixes: bool, kind: Batches
) -> None:
    if mixes and count == 1:
        return  # refused
    config = SgdConfig(lr=0.1, batch=batch, batches=kind, epochs=epochs, step=step)
    places = np.arange(100, 100 + count)
    every = list(batches(places, config, mixes, "client"))
    assert len(every) == planned_steps(places, config, mixes)
    for number, rows in enumerate(every):
        (alone,) = batches(places, config, mixes, "client", only=number)
        assert alone.tolist() == rows.tolist()
        assert planned_steps(places, config, mixes, number) == 1
    assert not list(batches(places, config, mixes, "client", only=len(every)))
    assert planned_steps(places, config, mixes, len(every)) == 0


@few
@given(count=st.integers(2, 90), batch=st.integers(2, 23), mixes=st.booleans())
def test_batches_of_an_epoch_differ_by_one_row_at_most_and_have_every_row_once(
    count: int, batch: int, mixes: bool
) -> None:
    rows = list(batches(np.arange(count), SgdConfig(lr=0.1, batch=batch), mixes, "client"))
    sizes = [len(one) for one in rows]
    assert sorted(np.concatenate(rows).tolist()) == list(range(count))
    assert max(sizes) - min(sizes) <= 1
    if mixes and batch == 2:
        assert min(sizes) >= 2
        assert len(sizes) == count // 2
    else:
        assert min(sizes) >= 1 + mixes
        assert len(sizes) == math.ceil(count / batch)


@few
@given(count=st.integers(2, 90), batch=st.integers(2, 23), mixes=st.booleans())
def test_exact_batches_are_full_but_for_what_is_left(count: int, batch: int, mixes: bool) -> None:
    config = SgdConfig(lr=0.1, batch=batch, batches="exact")
    sizes = [len(one) for one in batches(np.arange(count), config, mixes, "client")]
    expected = [len(one) for one in torch.arange(count).split(batch)]
    if mixes and expected[-1] == 1:
        expected[-2:] = [expected[-2] + 1]
    assert sizes == expected


@pytest.mark.parametrize("engine", ["sequential", "vmapped", "reference"])
def test_steps_on_vectors_hide_rows_by_other_noise_each_time(engine: str) -> None:
    """Equal noise in two steps would cancel in their difference."""
    trainer, clients = DpSgd(noise=100.0, batch=5, steps=2), classified(20)
    work = client_work(seeded(lambda: nn.Linear(4, 2)), trainer)
    runs = make_engine(engine, work, clients, torch.device("cpu"), bfloat16=False)
    context = EngineContext(runs, ClientStack([0], [0], [0], [0], [work.initial], {}, {}))
    model = work.initial.unsqueeze(0)

    def step(at: Mapping[str, Tensor], slopes: Slopes) -> dict[str, Tensor]:
        name = "first" if int(at["step"]) == 0 else "second"
        return {name: slopes(at["model"]).gradient}

    start = {"model": model, "first": torch.zeros_like(model), "second": torch.zeros_like(model)}
    config = SgdConfig(lr=1.0, batch=5, steps=2, step=trainer.local_step)
    vectors = context.run_steps(start, config, step).vectors
    assert float((vectors["first"] - vectors["second"]).abs().min()) > 0.01
