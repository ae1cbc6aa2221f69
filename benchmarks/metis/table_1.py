"""Table I: its cells in the paper's order, and each policy's difference to FedAvg beside the paper's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import paper
import settings
from shared.intervals import interval
from shared.markdown import table

Found = Mapping[tuple[str, str, str], Sequence[dict[str, Any]]]  # runs by part, case and recipe

# our labels of the columns of the paper's table, its figures, and the recipe that the others are compared with
PRINTED = {
    "synchronous": (("FedAvg", "DVW"), paper.ROUNDS_200, "FedAvg"),
    "uneven": (paper.HETEROGENEOUS, paper.SECONDS_14K, "SyncFedAvg"),
}
BESIDE = {
    "synchronous": ("Equal", "FedAvg + one unsent epoch", "Local"),
    "uneven": ("AsyncEqual", "SyncFedAvg + one unsent epoch", "Local"),
}  # not in the paper
ORDER = [" ".join(cell) for cell in paper.ROUNDS_200]


@dataclass(frozen=True)
class Difference:
    """A policy's accuracy minus FedAvg's in one cell, in points.

    Attributes:
        case: sizes and classes.
        label: the policy.
        mean: mean over seeds.
        half: half width of the 95 % interval.
        theirs: the paper's difference.
        seeds: number of seeds with both.
    """

    case: str
    label: str
    mean: float
    half: float
    theirs: float
    seeds: int


def cases(found: Found, part: str) -> list[str]:
    """Return the cases of a part that have runs, in the paper's order."""
    known = {case for here, case, _ in found if here == part}
    return [case for case in ORDER if case in known]


def labels(found: Found, part: str, case: str) -> list[str]:
    """Return the labels of the recipes that have runs of a case, in alphabetical order."""
    return sorted(label for here, there, label in found if (here, there) == (part, case))


def last(run: dict[str, Any]) -> float:
    """Return a run's last accuracy."""
    return float(run["curve"][-1][1])


def standard_error(accuracy: float) -> float:
    """Return the standard error of an accuracy on the test set, both in percent."""
    return math.sqrt(max(accuracy * (100 - accuracy), 0.0) / settings.TEST)


def printed(part: str, case: str, label: str) -> float | None:
    """Return the paper's figure for a recipe, in percent, or None."""
    if part not in PRINTED:
        return None
    columns, figures, _ = PRINTED[part]
    cell = figures.get(tuple(case.rsplit(" ", 1)))  # type: ignore[call-overload]
    return cell[columns.index(label)] if cell is not None and label in columns else None


def gain(found: Found, part: str, case: str, label: str, base: str) -> tuple[float, float, int] | None:
    """Return the mean difference of the last accuracies, the half width of its 95 % interval, and the number of seeds.

    Paired over seeds (Student's t) where there are at least two; with one seed the test set's own error, which says
    nothing about other seeds.
    """
    mine, theirs = ({run["seed"]: last(run) for run in found.get((part, case, one), [])} for one in (label, base))
    seeds = sorted(mine.keys() & theirs.keys())
    if not seeds:
        return None
    apart = [mine[seed] - theirs[seed] for seed in seeds]
    if len(seeds) == 1:
        return apart[0], 1.96 * math.hypot(standard_error(mine[seeds[0]]), standard_error(theirs[seeds[0]])), 1
    return *interval(apart), len(seeds)


def differences(found: Found, part: str) -> list[Difference]:
    """Return the differences to FedAvg of the paper's policies, by policy and then by cell."""
    if part not in PRINTED:
        return []
    columns, _, base = PRINTED[part]
    every = []
    for label in columns:
        for case in cases(found, part):
            ours, theirs, based = (
                gain(found, part, case, label, base),
                printed(part, case, label),
                printed(part, case, base),
            )
            if label != base and ours is not None and theirs is not None and based is not None:
                mean, half, seeds = ours
                every.append(Difference(case, label, mean, half, theirs - based, seeds))
    return every


def section(found: Found, part: str) -> list[str]:
    """Return the lines of RESULTS.md: one table of accuracies beside the paper's, and one of differences."""
    here = cases(found, part)
    if part not in PRINTED or not here:
        return []
    columns, _, base = PRINTED[part]
    shown = [label for label in (*columns, *BESIDE[part]) if any((part, case, label) in found for case in here)]
    lines = ["Table I: the mean of the last accuracies, in percent, and in brackets the paper's.", ""]
    cells = [[case, *(_accuracy(found, part, case, label) for label in shown)] for case in here]
    lines.append(table(["sizes, classes", *shown], cells, "---"))
    every = {(one.case, one.label): one for one in differences(found, part)}
    policies = [label for label in columns if any(known == label for _, known in every)]
    if policies:
        lines += ["", f"Minus {base}, in points with 95 % intervals, and the paper's in brackets:", ""]
        cells = [[case, *(_difference(every.get((case, label))) for label in policies)] for case in here]
        lines.append(table(["sizes, classes", *policies], cells, "---"))
    rounds = {case: _rounds(found[part, case, "SyncFedAvg"]) for case in here if (part, case, "SyncFedAvg") in found}
    if rounds:
        each = ", ".join(f"{count:.0f} ({case})" for case, count in rounds.items())
        lines += [
            "",
            f"In this time SyncFedAvg makes so many rounds: {each}.  How many the paper's makes is not printed.",
        ]
    return [*lines, ""]


def _rounds(runs: Sequence[dict[str, Any]]) -> float:
    """Return the mean number of rounds of runs in which every client takes part in each."""
    return statistics.mean(run["updates"] for run in runs) / settings.CLIENTS


def _accuracy(found: Found, part: str, case: str, label: str) -> str:
    runs = found.get((part, case, label))
    if not runs:
        return "not run"
    theirs = printed(part, case, label)
    return f"{statistics.mean(map(last, runs)):.1f}" + ("" if theirs is None else f" ({theirs:.1f})")


def _difference(one: Difference | None) -> str:
    return "-" if one is None else f"{one.mean:+.1f} ± {one.half:.1f} ({one.theirs:+.1f})"
