"""Real models beside published figures: what would be run, and a page that says no more than its data."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.scripts import loaded

NAMES = ("results", "studies")
FOLDER = Path(__file__).parents[2] / "benchmarks" / "real_models"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    made = loaded(FOLDER / "run.py")
    yield made
    for name in NAMES:
        sys.modules.pop(name, None)


def line(seed: int, **values: float) -> dict[str, Any]:
    told = {"study": "heart", "network": "logistic", "method": "Local", "seed": seed, "title": "Hearts"}
    rows = {"metric": "label_accuracy", "rounds": 1, "rows": dict.fromkeys(values, 10), "common": None, "seconds": 1.0}
    return told | rows | {"values": values}


def test_all_methods_and_seeds_are_run_and_none_twice(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--dry-run", "--out", str(tmp_path)])
    assert benchmark.main() == 0
    jobs = capsys.readouterr().out.splitlines()
    assert len(jobs) == 6 * 3 * 3  # networks, methods and seeds
    kept = line(0, cleveland=70.0)
    (tmp_path / "small.jsonl").write_text(json.dumps(kept) + "\n")
    assert benchmark.main() == 0
    assert set(jobs) - set(capsys.readouterr().out.splitlines()) == {"heart logistic Local 0"}


def test_a_verdict_is_given_only_where_conditions_are_the_same(benchmark: ModuleType) -> None:
    results = benchmark.results
    others = {"hungarian": 74.5, "switzerland": 75.0, "va": 70.0}
    page = results.text([line(0, cleveland=80.0, **others), line(1, cleveland=78.0, **others)], "small")
    assert "79.0 ± 1.4" in page
    assert "meets the published range at 3 of 4 sites; above it at cleveland." in page
    assert "| logistic | Local | 1 | 2 |" in page
    assert "52 runs, which the same command makes: " in page
    tuned = [line(0, cleveland=80.0, **others) | {"method": "fine-tuned"}]
    assert "No verdict: the conditions differ." in results.text(tuned, "small")


def test_every_published_row_says_where_it_stands(benchmark: ModuleType) -> None:
    for one in benchmark.results.PUBLISHED:
        assert one.source
        assert one.conditions
        assert (one.study, one.network) in {(name, n) for name, all_ in benchmark.NETWORKS.items() for n in all_}


def test_the_committed_page_is_that_of_the_committed_runs(benchmark: ModuleType) -> None:
    results = benchmark.results
    assert (FOLDER / "RESULTS.md").read_text("utf-8") == results.text(
        results.Lines(FOLDER / "small.jsonl").read(), "small"
    )
