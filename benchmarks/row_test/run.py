"""How often the test of rows is right: python benchmarks/row_test/run.py

Federations are drawn whose clients have rows that two or five methods get right or wrong; both share a client's and a
row's difficulty, and each seed moves a method's share of right rows by some noise.  Of two methods: how often the 95 %
interval has the true gain, how often a gain or loss is claimed where there is none (or the other one), and how often a
gain of five points is found.  Of five equal methods: how often the verdict says that one is better than training alone,
and how often it calls anybody clearly behind.

With one or two seeds the verdict is about these runs, so there the truth is what these models score on all rows that
could be drawn ("of these runs"); with three and more it is what the methods score over seeds as well.  Both are
counted.  What was measured is kept in results.json, so the command can be stopped and repeated; RESULTS.md is written
at the end.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from shared import markdown
from shared.options import reader

from piebald.report.crossed_effects import SEEDS_FOR_INTERVAL
from piebald.report.paired import Scores
from piebald.report.row_noise import row_difference
from piebald.report.verdict import ScoreVerdict

HERE = Path(__file__).parent
SEEDS, CLIENTS, ROWS, NOISES = (1, 2, 3, 4, 5), (3, 10, 30), (20, 100, 500), (0.0, 0.007, 0.012)
GAIN, DISAGREE = 0.05, 0.2  # of the alternative; share of rows that a method draws by itself
DRAWS = {2: 300, 5: 150}  # by the number of methods
Cell = tuple[int, int, int, int, float]  # methods, seeds, clients, rows, noise


def draw(rng: np.random.Generator, cell: Cell, gain: float) -> tuple[list[Scores], np.ndarray]:
    """The scores of methods, of which all but the first gain, and what seeds add to each [methods, seeds].

    Args:
        rng: draws the rows.
        cell: how many methods, seeds, clients and rows, and the standard deviation of a method's seeds.
        gain: of the others over the first.
    """
    methods, seeds, clients, rows, noise = cell
    moved = rng.normal(0, noise, (methods, seeds))
    shares = np.clip(rng.normal(0.7, 0.05, clients), 0.5, 0.85)
    right = np.empty((methods, seeds, clients, rows))
    hard = rng.random((clients, rows))
    for method, seed in np.ndindex(methods, seeds):
        share = shares[:, None] + moved[method, seed] + (gain if method else 0.0)
        own = rng.random((clients, rows)) < DISAGREE
        right[method, seed] = np.where(own, rng.random((clients, rows)), hard) < share
    names = [f"c{client}" for client in range(clients)]
    tables = [
        Scores(
            values.mean(2), names, list(range(seeds)), sizes=[rows] * clients, counted=True,
            rows={(seed, name): values[seed, place] for seed in range(seeds) for place, name in enumerate(names)},
        )
        for values in right
    ]  # fmt: skip
    return tables, moved


def of_two(cell: Cell) -> dict[str, float]:
    """Rates of two methods."""
    rng = np.random.default_rng([1, *map(int, cell[:4]), round(cell[4] * 1e4)])
    count, rates = DRAWS[2], dict.fromkeys(("coverage", "of_these_runs", "false", "false_of_these_runs", "power"), 0.0)
    for _ in range(count):
        (base, other), moved = draw(rng, cell, 0.0)
        gap = row_difference(other, base)
        assert gap is not None
        these = float((moved[1] - moved[0]).mean())
        rates["coverage"] += gap.low <= 0 <= gap.high
        rates["of_these_runs"] += gap.low <= these <= gap.high
        rates["false"] += gap.p < 0.05
        rates["false_of_these_runs"] += gap.p < 0.05 and gap.mean * these <= 0
        (base, other), _ = draw(rng, cell, GAIN)
        found = row_difference(other, base)
        assert found is not None
        rates["power"] += found.p < 0.05 and found.mean > 0
    return {name: round(rate / count, 4) for name, rate in rates.items()}


def of_five(cell: Cell) -> dict[str, float]:
    """Rates of five equal methods, of which the first is training alone."""
    rng = np.random.default_rng([2, *map(int, cell[:4]), round(cell[4] * 1e4)])
    count = DRAWS[5]
    rates = dict.fromkeys(("better_than_alone", "behind", "better_of_these_runs", "behind_of_these_runs"), 0.0)
    for _ in range(count):
        tables, moved = draw(rng, cell, 0.0)
        scores = dict(zip(["local", *"abcd"], tables, strict=True))
        verdict, these = ScoreVerdict.of(scores, "accuracy", True, "local"), moved.mean(1)
        assert verdict is not None
        truth = dict(zip(scores, these.tolist(), strict=True))
        better = verdict.over_alone is not None and verdict.over_alone.p < 0.05
        rates["better_than_alone"] += better
        rates["better_of_these_runs"] += better and truth[verdict.leader] <= truth["local"]
        rates["behind"] += bool(verdict.behind)
        # of these runs a method is wrongly called behind where it is the best of them
        rates["behind_of_these_runs"] += max(truth, key=lambda label: truth[label]) in verdict.behind
    return {name: round(rate / count, 4) for name, rate in rates.items()}


def cells() -> Iterable[Cell]:
    """All conditions; those of five methods at fewer sizes, as they take longer."""
    for noise, clients, rows, seeds in itertools.product(NOISES, CLIENTS, ROWS, SEEDS):
        yield 2, seeds, clients, rows, noise
    for noise, clients, rows, seeds in itertools.product(NOISES, (3, 10), (20, 100), (1, 2, 3, 5)):
        yield 5, seeds, clients, rows, noise


def _spread(values: list[float]) -> str:
    return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def page(measured: list[dict[str, Any]]) -> str:
    """The results as a page: the mean over sizes of federations, with the least and the most."""
    two, five = [], []
    for noise, seeds in itertools.product(NOISES, SEEDS):
        here = [row for row in measured if (row["noise"], row["seeds"]) == (noise, seeds)]
        pairs, many = ([row for row in here if row["methods"] == count] for count in (2, 5))
        about = "of_these_runs" if seeds < SEEDS_FOR_INTERVAL else "coverage"
        wrong = "false_of_these_runs" if seeds < SEEDS_FOR_INTERVAL else "false"
        columns = [about, wrong, "coverage", "false", "power"]
        if pairs:
            two.append([f"{100 * noise:g}", seeds, *(_spread([row[name] for row in pairs]) for name in columns)])
        ends = "of_these_runs" if seeds < SEEDS_FOR_INTERVAL else ""
        names = ["better_of_these_runs", "behind_of_these_runs"] if ends else ["better_than_alone", "behind"]
        if many:
            names += ["better_than_alone", "behind"]
            five.append([f"{100 * noise:g}", seeds, *(_spread([row[name] for row in many]) for name in names)])
    heads = ["seeds' noise, points", "seeds"]
    return (
        "# How often the test of rows is right\n\n`python benchmarks/row_test/run.py`: each cell is the mean over "
        f"federations of {', '.join(map(str, CLIENTS))} clients with {', '.join(map(str, ROWS))} rows, then the least "
        f"and the most.\n{DRAWS[2]} draws each; one rate has a standard error of 0.013 at 0.05.  {len(measured)} of "
        f"{len(list(cells()))} conditions are measured so far; lines without all of theirs are means of fewer.\n\n"
        "## Two methods\n\nWhat is said holds for these runs with one or two seeds, for other seeds from three on. "
        f" Power is that of a gain of {100 * GAIN:g} points.\n\n"
        + markdown.table(
            [*heads, "coverage of what is said", "wrong claims of what is said", "coverage over seeds",
             "wrong claims over seeds", "power"], two)
        + f"\n\n## Five equal methods\n\n{DRAWS[5]} draws each, of 3 and 10 clients with 20 and 100 rows.\n\n"
        + markdown.table(
            [*heads, "wrongly better than alone, of what is said", "wrongly behind, of what is said",
             "better than alone, over seeds", "somebody behind, over seeds"], five)
        + "\n"
    )  # fmt: skip


def main() -> int:
    """Measure what has not been measured, and write the results."""
    reader(__doc__).parse_args()
    file = HERE / "results.json"
    measured = json.loads(file.read_text("utf-8")) if file.exists() else []
    names = ("methods", "seeds", "clients", "rows", "noise")
    known = {tuple(row[name] for name in names) for row in measured}
    for cell in cells():
        if cell not in known:
            rates = of_two(cell) if cell[0] == 2 else of_five(cell)
            measured.append(dict(zip(names, cell, strict=True)) | rates)
            file.write_text("[\n" + ",\n".join(map(json.dumps, measured)) + "\n]\n", "utf-8")
    (HERE / "RESULTS.md").write_text(page(measured), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
