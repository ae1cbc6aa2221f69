"""What a run does to the process that it is in: the garbage collector leaves alone what existed before it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from torch import nn

import piebald
from piebald import recipes
from piebald.core import machine
from piebald.core.errors import SettingError
from piebald.core.machine import existing_objects_frozen
from piebald.report.callbacks import Callback
from piebald.runs import execution
from tests.fakes import classified, seeded, simulate


@pytest.fixture(autouse=True, scope="module")
def nothing_frozen() -> Iterator[None]:
    """As where nobody has frozen anything: `conftest.py` does for all other tests."""
    gc.unfreeze()
    machine.objects_are_frozen = False
    yield
    gc.collect()
    gc.freeze()
    machine.objects_are_frozen = True


class Lost:
    """In a cycle, so that only the garbage collector finds it."""

    def __init__(self) -> None:
        self.own = self


class Noted(Callback):
    """Notes how many objects are frozen at each step."""

    def __init__(self) -> None:
        self.frozen: list[int] = []

    def on_server_step(self, step):
        self.frozen.append(gc.get_freeze_count())


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 2])
def test_during_a_run_and_not_after_it(workers: int) -> None:
    noted, model = Noted(), seeded(lambda: nn.Linear(4, 2))
    simulate(recipes.fedavg(batch=2), classified(5, 2), model, simulator={"workers": workers}, callbacks=[noted])
    assert len(noted.frozen) > 0
    assert min(noted.frozen) > 10_000  # of torch alone there are more
    assert gc.get_freeze_count() == 0


def test_also_while_a_run_is_prepared_and_its_clients_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = {}

    def model(seed: int) -> nn.Module:
        frozen["prepared"] = gc.get_freeze_count()
        return nn.Linear(4, 2)

    def measure(*args: object) -> None:
        frozen["described"] = gc.get_freeze_count()

    monkeypatch.setattr(execution, "measure_heterogeneity", measure)
    piebald.run(recipes.fedavg(batch=2), classified(5, 2), model, rounds=1, runtime={"kind": "simulator", "workers": 0})
    assert set(frozen) == {"prepared", "described"}
    assert min(frozen.values()) > 10_000
    with pytest.raises(SettingError):
        piebald.run(recipes.fedavg(batch=2), classified(5, 2), nn.Linear(5, 2), rounds=1)
    assert gc.get_freeze_count() == 0


def test_also_not_after_an_error() -> None:
    with pytest.raises(KeyError), existing_objects_frozen():
        raise KeyError("of the user")
    assert gc.get_freeze_count() == 0


@pytest.mark.full
def test_garbage_of_before_is_found_once_runs_have_taken_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = weakref.ref(Lost())
    monkeypatch.setattr(machine, "_COLLECT_AFTER", 1e9)
    with existing_objects_frozen():
        gc.collect()
        assert lost() is not None
    monkeypatch.setattr(machine, "_COLLECT_AFTER", 0.0)
    with existing_objects_frozen():
        pass
    assert lost() is None


def test_garbage_of_a_run_is_found_within_it() -> None:
    with existing_objects_frozen():
        lost = weakref.ref(Lost())
        gc.collect()
        assert lost() is None


@pytest.mark.full
def test_what_the_user_has_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        with existing_objects_frozen(), existing_objects_frozen():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
