"""The simulator's benchmark: its workloads fit together, and each row of its tables has a recipe."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts import loaded

FOLDER = Path(__file__).parents[2] / "benchmarks" / "simulator"
WORKLOADS = loaded(FOLDER / "workloads.py")


@pytest.fixture
def overhead(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setitem(sys.modules, "workloads", WORKLOADS)
    return loaded(FOLDER / "overhead.py")


def test_each_row_of_the_costs_has_a_recipe(overhead: ModuleType) -> None:
    """Before, counting operations ended at AdamW, which is no recipe's name."""
    made = {what: overhead.recipe_of(what, 3) for what in overhead.TARGETS}
    assert made["adamw"].training.optimizer.kind == "adamw"
    assert made["asynchronous"].scheduling.kind == "asynchronous"
    assert made["scaffold"].training.kind == "scaffold"


@pytest.mark.parametrize("name", WORKLOADS.WORKLOADS)
def test_the_networks_take_the_rows_of_their_workloads(name: str) -> None:
    work = WORKLOADS.WORKLOADS[name]
    clients = work.data()
    assert len(clients) == work.clients >= work.cohort
    rows = clients.rows(0, "train")
    least, most = work.rows if isinstance(work.rows, tuple) else (work.rows, work.rows)
    assert least <= len(rows) <= most
    assert work.network().eval()(rows.x[:2]).shape == (min(2, len(rows)), work.classes)
