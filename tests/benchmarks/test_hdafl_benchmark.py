"""HDAFL's benchmark: tables keep what was not run again, and the full scale is the paper's."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests import processes

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "hdafl"


def run(*command: str | Path) -> str:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, FOLDER, FOLDER.parent))),
        "OMP_NUM_THREADS": "1",
    }
    done = processes.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False, cwd=FOLDER
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tables_and_rows_of_what_was_not_run_again_stay() -> None:
    """Before, runs of one network on traffic took the tables of the other one away."""
    program = """
from blocks import merged, merged_rows
from shared.markdown import table
old = "### one, 8 rounds\\n\\n| x |\\n\\n### two, 8 rounds\\n\\n| y |"
print(merged(old, "### one, 20 rounds\\n\\n| z |").split())
assert merged("", "| a |") == "| a |"
heads = ["C", "recipe", "accuracy"]
old = table(heads, [["10", "a", "1"], ["10", "b", "2"], ["20", "a", "3"]])
new = table(heads, [["10", "a", "4"], ["50", "a", "5"]])
print(merged(f"### one\\n{old}", f"### one\\n{new}").replace(" ", ""))
other = table(["recipe"], [["a"]])
assert merged(f"### one\\n{old}", f"### one\\n{other}") == f"### one\\n{other}"
heads = ["model", "C", "gain"]
old, new = table(heads, [["leaf", "10", "1"], ["small", "10", "2"]]), table(heads, [["small", "10", "3"]])
print(merged_rows(old, new, "gain").replace(" ", ""))
print(merged_rows("", new, "gain").replace(" ", ""))
"""
    sections, *lines = run("-c", program).splitlines()
    assert sections == "['###', 'one,', '20', 'rounds', '|', 'z', '|', '###', 'two,', '8', 'rounds', '|', 'y', '|']"
    assert lines == [
        "###one", "|C|recipe|accuracy|", "|---|---|---|", "|10|a|4|", "|20|a|3|", "|50|a|5|",
        "|model|C|gain|", "|---|---|---|", "|leaf|10|1|", "|small|10|3|",
        "|model|C|gain|", "|---|---|---|", "|small|10|3|",
    ]  # fmt: skip


def test_a_recipe_that_was_run_later_stands_beside_those_before_if_fedavg_is_the_same() -> None:
    """Before, one unsent epoch took HDAFL's row away, which had been compared with the very same runs of FedAvg."""
    program = """
from blocks import merged_rows
from shared.markdown import table
heads = ["C", "recipe", "accuracy"]
old = table(heads, [["10", "FedAvg", "1"], ["10", "HDAFL", "2"], ["20", "FedAvg", "3"], ["20", "HDAFL", "4"]])
new = table(heads, [["10", "FedAvg", "1"], ["10", "equal", "5"], ["20", "FedAvg", "3.1"], ["20", "equal", "6"]])
print(merged_rows(old, new, "recipe", ["FedAvg", "equal", "HDAFL"]).replace(" ", ""))
"""
    same, other = ["|10|FedAvg|1|", "|10|equal|5|", "|10|HDAFL|2|"], ["|20|FedAvg|3.1|", "|20|equal|6|"]
    assert run("-c", program).splitlines()[2:] == same + other


@pytest.mark.full
def test_some_cases_and_methods_can_be_run(tmp_path: Path) -> None:
    some = ["--only", "paper", "--cases", "writer/C10", "iid/alone", "--methods", "FedAvg", "Local"]
    shown = run(FOLDER / "run.py", *some, "--dry-run", "--out", tmp_path / "out")
    assert shown.splitlines()[-1] == "6 runs: paper"  # three seeds of each


@pytest.mark.long
def test_runs_of_the_papers_scale_become_tables_and_a_figure(tmp_path: Path) -> None:
    """Before, the last step failed: runs were read as no list, curves after their run folders were closed, and the
    points of a curve by the wrong names, for Table 5."""
    program = """
import sys
from pathlib import Path
import piebald
import results
import settings
import federations
from piebald.models import build_model
from piebald.data.partition import Iid
out, path = map(Path, sys.argv[1:])
clients = Iid(clients=10, test=0.3, limit=200).split(piebald.data.digits())
federations.compressed = lambda *_: {"rows": 1, "raw": 10**6, "npz": 10**6, "xz": 10**6}

def run(part, setting, cohort, label, rounds):
    for seed in (0, 1, 2):
        folder = out / part / setting / cohort / label / f"seed-{seed}"
        model = build_model("mlp", (1, 8, 8), 10, seed, hidden=(4,))
        runtime = piebald.Simulator(engine="sequential", workers=0)
        recipe = settings.compared(5, lr=0.1, batch=10)["FedAvg" if label == federations.CENTRAL else label]
        piebald.run(recipe, clients, model, rounds=rounds, seed=seed, label=label, out=folder, runtime=runtime)

for cohort, labels in {"C10": ("FedAvg", "HDAFL"), "C20": ("FedAvg", "FedAvg_equal")}.items():
    for label in labels:
        run("paper/small_cnn", "writer", cohort, label, 2)
for label in (*settings.LABELS, federations.CENTRAL):
    run("traffic/cnn_1d_tiny", "own_apps", "C2", label, 4)
print(results.write(out, path))
"""
    path = tmp_path / "made" / "RESULTS.md"
    path.parent.mkdir()
    path.write_text(before := (FOLDER / "RESULTS.md").read_text("utf-8"), "utf-8")
    assert "figure_3.png" in run("-c", program, tmp_path / "runs", path)
    made = path.read_text("utf-8")
    table = made.split("### Table 3")[1].split("### Table 4")[0]
    assert table.count("| non-i.i.d. (by writer) | 10; 10 |") == 2
    assert table.count("| non-i.i.d. (by writer) | 20; 20 |") == 2  # also without HDAFL
    assert "| 78.00 |" in table
    assert (path.parent / "figure_3.png").read_bytes().startswith(b"\x89PNG")
    fifth = made.split("### Table 5")[1].split("<!--")[0]
    assert re.findall(r"\| own apps, cnn_1d_tiny \| 4 \| (FedAvg|HDAFL) \| ([\d.]+) \|", fifth) == [
        ("FedAvg", "2.0"),
        ("HDAFL", "1.2"),
    ]
    assert made.count("`cnn_1d_tiny` (") == before.count("`cnn_1d_tiny` (")  # one table was replaced, others stay
    assert re.search(r"<!-- facts -->.*?end of facts", made, re.DOTALL)[0] in before


@pytest.mark.full
def test_the_full_scale_has_the_papers_conditions(tmp_path: Path) -> None:
    """Before, the longest runs had 150 rounds of five seeds, and traffic 60 rounds without a value at 4, 8 and 20."""
    shown = run(FOLDER / "run.py", "--scale", "full", "--dry-run", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    lines = [line for line in shown.splitlines() if line.startswith("  ") and "*" not in line]
    same = {re.split(r"  +", line.strip())[0] for line in lines[1:]}
    assert {"clients per round", "local epochs", "repetitions", "private", "classes each, disjoint", "rounds"} <= same
    assert len(re.findall(r"^  rounds +4, 8, 20 +4, 8, 20$", shown, re.MULTILINE)) == 1


@pytest.mark.full
def test_rounds_of_table_5_are_evaluated() -> None:
    program = """
import jobs, settings
for scale in settings.SCALES.values():
    for job in jobs.traffic_jobs(scale):
        for rounds in settings.table_5_rounds(scale):
            assert rounds % job.plan.coarse == 0 and rounds <= job.plan.rounds
full = settings.SCALES["full"]
OTHERS = (settings.APPS, settings.MANY_ROWS)  # which stand for the paper's settings
made = [job for job in jobs.paper_jobs(full) if job.setting not in OTHERS]
apps, writers = ([job for job in jobs.paper_jobs(full) if job.setting == setting] for setting in OTHERS)
assert {(job.cohort, job.plan.rounds, job.rows) for job in writers} == {(10, 30, settings.MANY_ROWS_LIMIT)}
assert {(job.cohort, job.plan.rounds, job.rows) for job in apps} == {(10, 120, None)}
assert {job.plan.rounds for job in made} == {400}
assert {job.seed for job in made} == set(range(6))
assert {job.label for job in made} == set(settings.LABELS)
small = [job for job in jobs.paper_jobs(settings.SCALES["small"]) if job.setting not in OTHERS]
assert {job.plan.rounds for job in small if job.label != "Local"} == {400}
assert {(job.rows, job.seed) for job in small} == {(7500, seed) for seed in range(3)}
"""
    run("-c", program)
