"""The cross-checks with other programs: what needs no other environment is run here."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "crosscheck"


@pytest.fixture
def benchmark() -> Iterator[Any]:
    """Import the modules as the program does, and forget them afterwards."""
    names = ("inputs", "ours", "personal", "equations", "frameworks", "authors", "run")
    before = {name: sys.modules.pop(name, None) for name in names}
    sys.path.insert(0, str(FOLDER))
    yield {name: importlib.import_module(name) for name in names}
    sys.path.remove(str(FOLDER))
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


@pytest.mark.long
def test_plain_pytorch_replays_fedavg_fedasync_and_fedbuff(benchmark: Any, tmp_path: Path) -> None:
    """A script that imports nothing of Piebald ends at the same models, within rounding."""
    inputs, ours, run = (benchmark[name] for name in ("inputs", "ours", "run"))
    given = inputs.make()
    mine = ours.training(given) | ours.asynchronous(given) | ours.server_steps(given)
    stale = mine["events, FedAsync"][:, 2] - 1 - mine["events, FedAsync"][:, 1]
    assert stale.max() > 2  # updates that miss server steps are among them
    np.savez(tmp_path / "in.npz", **given, **{key: value for key, value in mine.items() if key.startswith("events")})
    script = FOLDER / "peers" / "with_torch.py"
    subprocess.run(
        [sys.executable, script, tmp_path / "in.npz", tmp_path / "out.npz"], check=True,
        env={"PYTHONPATH": str(FOLDER), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    with np.load(tmp_path / "out.npz") as found:
        verdicts = {name: run.line("torch", name, mine[name], theirs)[-1] for name, theirs in found.items()}
    assert verdicts == dict.fromkeys(("FedAvg", "FedAsync", "FedBuff", "FedAdam", "FedYogi"), "equal")


@pytest.mark.full
def test_methods_are_their_papers_equations_in_plain_pytorch(benchmark: Any, tmp_path: Path) -> None:
    """Those that no maintained program has as their papers say, with the packing of updates."""
    given = benchmark["inputs"].make()
    mine = benchmark["equations"].results(given)
    np.savez(tmp_path / "in.npz", **given, **{key: value for key, value in mine.items() if key.startswith("events")})
    subprocess.run(
        [sys.executable, FOLDER / "peers" / "with_equations.py", tmp_path / "in.npz", tmp_path / "out.npz"], check=True,
        env={"PYTHONPATH": str(FOLDER), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    with np.load(tmp_path / "out.npz") as found:
        verdicts = {
            name: benchmark["run"].line("equations", name, mine[name], value)[-1] for name, value in found.items()
        }
    assert verdicts == dict.fromkeys((name for name in mine if not name.startswith("events")), "equal")


@pytest.mark.full
def test_what_authors_programs_are_given_is_no_idle_case(benchmark: Any) -> None:
    """A cut of the planted groups, clients that choose several models, narrow networks and unlike ranks; and all
    quantities that the page has of these programs are made here."""
    given, authors = benchmark["inputs"].make(), benchmark["authors"]
    mine = authors.results(given)
    halves = np.arange(len(given["x"])) >= len(given["x"]) // 2
    models = mine["CFL, models"]
    assert [bool(np.array_equal(one, models[0])) for one in models] == (~halves).tolist()
    planted = np.arange(len(given["updates"]) - 3) % 3 != 0
    assert np.array_equal(mine["CFL, cut of pulled apart"], planted)
    assert len(np.unique(mine["IFCA, clusters"])) == benchmark["authors"].IFCA["k"]
    assert not np.allclose(mine["HeteroFL"], mine["HeteroFL, masked"])
    assert [np.linalg.matrix_rank(one, tol=1e-4) for one in mine["FlexLoRA, products"]] == sorted({*authors.RANKS})
    named = {
        row[1] for row in benchmark["run"].known((FOLDER / "RESULTS.md").read_text("utf-8"))[0] if "auth" in row[0]
    }
    assert named == {name for name in mine if not name.startswith("events")}


def test_one_program_is_run_without_the_others(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows take the place of its earlier ones, and those of programs that are not run stay."""
    run, page = benchmark["run"], tmp_path / "RESULTS.md"
    flower, fedlab = ("Flower", "median", "0.0e+00", "1.3", "equal"), ("FedLab", "FedProx", "1.0e-07", "1.1", "equal")
    page.write_text(run.text([fedlab, flower], {"FedLab": "fedlab 1", "Flower": "flwr 1"}, []))
    newer = ("FedLab", "FedProx", "2.0e-07", "1.1", "equal")
    monkeypatch.setattr(run, "compare", lambda root, titles: ({"FedLab": ([newer], "fedlab 2")}, []))
    monkeypatch.setattr(sys, "argv", ["run.py", "--results", str(tmp_path), "--only", "FedLab"])
    assert run.main() == 0
    assert run.known(page.read_text()) == ([flower, newer], {"Flower": "flwr 1", "FedLab": "fedlab 2"})


def test_the_page_in_the_repository_can_be_added_to(benchmark: Any) -> None:
    """What it says is read without loss, and each of its programs is one that the benchmark knows."""
    run = benchmark["run"]
    page = (FOLDER / "RESULTS.md").read_text("utf-8")
    lines, programs = run.known(page)
    assert run.text(run.in_order(lines), programs, []) == page


def test_a_difference_is_told_as_one(benchmark: Any) -> None:
    """More than rounding, more than an explanation covers, other shapes, and random draws of another kind."""
    line = benchmark["run"].line
    one = np.linspace(1, 2, 5)
    assert line("Flower", "median", one, one + 1e-6)[-1] == "equal"
    assert line("Flower", "median", one, one + 1e-4)[-1] == "DIFFERS"
    assert line("Flower", "FedYogi", one, one + 1e-3)[-1].startswith("differs: Flower starts")
    assert line("Flower", "FedYogi", one, one + 1.0)[-1] == "DIFFERS"
    assert line("Flower", "median", one, one[:4])[-1].startswith("DIFFERS: shapes")
    drawn = np.random.default_rng(0).normal(size=(2, 60, 3))
    assert line("flwr-datasets", "Dirichlet 0.1, plain", *drawn)[-1] == "equal"
    assert line("flwr-datasets", "Dirichlet 0.1, plain", drawn[0], drawn[1] + 2)[-1] == "DIFFERS"
