"""Choices among engines: which stacks are measured, and what is not measured twice in a process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.engines import engine_choice
from piebald.engines.engine_choice import EngineChoice
from piebald.experiments.run_settings import RunSettings
from piebald.runs.prepare import prepare
from piebald.runtimes.simulation import simulator
from tests.fakes import classified, seeded

RECIPE = recipes.fedavg(lr=0.2, batch=5)
MEASURED = EngineChoice("batched", 5, 1e-4)


class Wrapped(nn.Module):
    """A model whose code a person may change while its name and its layers stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x)
        return scores


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How often engines were measured, in a process that has measured none before; the result is made up."""
    asked: list[Any] = []

    def fastest(*args: Any) -> EngineChoice:
        asked.append(args)
        return MEASURED

    monkeypatch.setattr(simulator, "fastest", fastest)
    engine_choice.MEASURED.clear()
    return asked


def chosen(model: nn.Module | None = None, **simulator: Any) -> dict[str, Any]:
    trained = seeded(Wrapped) if model is None else model
    options = RunSettings(runtime=piebald.Simulator(workers=0, **simulator))
    table: dict[str, Any] = prepare(RECIPE, classified(*range(6, 20)), trained, options).meta["runtime"]
    return {name: table[name] for name in ("engine", "stack")}


def test_large_stacks_are_measured_only_of_tiny_models_and_where_each_core_gets_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A few of them would end at different times, and 250 larger models take memory that nobody expects."""
    cpu, many = torch.device("cpu"), 3 * 4 * 250
    monkeypatch.setattr(engine_choice, "count_cores", lambda: 3)
    tiny, larger = (
        prepare(RECIPE, classified(*range(6, 20)), seeded(make), RunSettings(runtime=piebald.Simulator(workers=0))).work
        for make in (Wrapped, lambda: nn.Sequential(nn.Linear(4, 5000), nn.Linear(5000, 2)))
    )
    few = engine_choice.stack_sizes(tiny, cpu, 10)
    assert engine_choice.stack_sizes(tiny, cpu, many - 1) == engine_choice.stack_sizes(larger, cpu, many) == few
    assert engine_choice.stack_sizes(tiny, cpu, many) == (*few, 250)


def test_stacks_and_lanes_that_are_measured_on_a_gpu_share_out_a_cohort_evenly() -> None:
    """The last stack of a cohort of 10 would have two clients if the others had eight."""
    work = prepare(RECIPE, classified(6, 7), seeded(Wrapped), RunSettings(runtime=piebald.Simulator(workers=0))).work
    for expected, stacks, lanes in (
        (10, (1, 5, 10), (2, 4, 5, 10)),
        (100, (1, 8, 25, 100), (2, 4, 8, 15)),
        (1, (1,), (1,)),
    ):
        assert engine_choice.stack_sizes(work, torch.device("cuda"), expected) == stacks
        assert engine_choice.lane_counts(stacks) == lanes


def test_the_second_run_measures_nothing(measured: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    first = chosen()
    assert (first["engine"], first["stack"], len(measured)) == ("batched", 5, 1)

    def not_again(*_: Any) -> Any:
        raise AssertionError("a time was measured")

    monkeypatch.setattr(engine_choice, "clock", not_again)
    assert chosen() == first
    assert len(measured) == 1


def test_another_model_or_training_is_measured(measured: list[Any]) -> None:
    chosen()
    chosen(seeded(lambda: nn.Linear(4, 2)))
    chosen(bfloat16=True)
    chosen()
    assert len(measured) == 3


def test_a_stack_of_more_clients_than_there_are_is_measured_again(measured: list[Any]) -> None:
    chosen()
    for key in engine_choice.MEASURED:
        engine_choice.MEASURED[key] = MEASURED._replace(stack=25)
    assert chosen()["stack"] == MEASURED.stack
    assert len(measured) == 2


def test_an_engine_that_computes_something_else_is_not_taken(
    measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's code has changed: it mixes the rows that it is given, which engines that join clients misread."""
    chosen()
    monkeypatch.setattr(Wrapped, "forward", lambda self, x: self.layers(x) * x.max())
    chosen()
    assert len(measured) == 2


def test_a_model_that_takes_only_whole_batches_is_measured(
    measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remembered engine is compared on fewer rows than a batch has, which is no reason to refuse the model."""
    chosen()
    plain = Wrapped.forward

    def whole(self: Wrapped, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled() and len(x) % RECIPE.training.batch:
            raise RuntimeError("this model wants whole batches")
        return plain(self, x)

    monkeypatch.setattr(Wrapped, "forward", whole)
    assert chosen()["engine"] == MEASURED[0]
    assert len(measured) == 2


def test_choices_by_counting_measure_nothing(measured: list[Any]) -> None:
    assert chosen(deterministic=True)["engine"] == "batched"
    assert chosen(engine="vmapped")["engine"] == "vmapped"
    assert not measured
    assert not engine_choice.MEASURED
