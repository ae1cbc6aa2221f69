"""The load benchmark sees what it must not find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.scripts import loaded

REST = {"threads": 20.0, "files": 15.0, "memory": 300.0}
FINE: dict[str, Any] = {
    "sites": 4, "lost after": [], "twice": 0, "logs": [], "leftover": [],
    "before": REST, "after": REST | {"threads": 24.0},
    "memory": [300.0, 305.0, 301.0, 306.0],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"lost after": ["reset"]}, "gone after: reset"),
        ({"twice": 2}, "2 updates counted twice"),
        ({"logs": ["line 3 is not as it was written"]}, "line 3 is not"),
        ({"leftover": ["a.part"]}, "the file a.part was left"),
        ({"after": REST | {"threads": 25.0}}, "25 threads are left"),
        ({"after": REST | {"files": 18.0}}, "18 files are open"),
        ({"after": REST | {"memory": 330.0}}, "memory grew"),
        ({"memory": [300.0, 305.0, 330.0, 330.0]}, "memory grew"),
    ],
)
def test_what_does_not_come_back_is_said(change: dict[str, Any], said: str) -> None:
    benchmark = loaded(Path(__file__).parents[2] / "benchmarks" / "load" / "run.py")
    found = benchmark.wrong_after(FINE | change)
    assert len(found) == bool(said)
    assert said in "".join(found)


@pytest.mark.long
def test_a_minute_of_disturbance_loses_nothing() -> None:
    benchmark = loaded(Path(__file__).parents[2] / "benchmarks" / "load" / "run.py")
    found = benchmark.chaos(1.0, 4)
    assert sum(found["events"].values()) > 1
    assert benchmark.wrong_after(found) == []
