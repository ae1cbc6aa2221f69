"""The work behind each method: updates, steps and rows, and whether methods did as much of it as each other."""

from __future__ import annotations

from piebald.report.averages import mean
from piebald.report.comparison import Comparison
from piebald.report.page.wording import count, names
from piebald.report.tables import History

MEASURES = {"updates": "used updates", "steps": "local steps", "rows": "rows in updates"}
UNEQUAL = 1.1  # the largest ratio that passes as equal


def work(history: History) -> dict[str, float]:
    """Updates that were used, their local steps and their rows, up to the version that the run ended with."""
    used = [row for row in history.results if row["kind"] == "train" and row["status"] == "ok"]
    used = [row for row in used if history.best is None or row["version"] <= history.best]
    sums = {name: sum(row[column] or 0 for row in used) for name, column in (("steps", "steps"), ("rows", "examples"))}
    return {"updates": float(len(used)), **{name: float(value) for name, value in sums.items()}}


def behind(comparison: Comparison) -> dict[str, dict[str, float | None]]:
    """The work behind each label: means over its runs; None where the run folders do not say."""
    found: dict[str, dict[str, float | None]] = {}
    for label, runs in comparison.by_label.items():
        done = [work(history) for history in runs]
        found[label] = {name: mean([one[name] for one in done]) or None for name in MEASURES}
    return found


def unequal(comparison: Comparison) -> str:
    """A sentence where work differs by more than a tenth between methods; empty where it does not."""
    done = behind(comparison)
    for name, what in MEASURES.items():
        known = {label: value for label, one in done.items() if (value := one[name]) is not None}
        if len(known) < 2:
            continue
        order = sorted(known, key=lambda label: known[label])
        least, most = known[order[0]], known[order[-1]]
        if most > UNEQUAL * least:
            fewest = [label for label in order if known[label] <= UNEQUAL * least]
            return (
                f"The methods did unequal work: {count(least)} {what} with {names(fewest, 3)}, {count(most)} with "
                f"{order[-1]}; differences may be those of work."
            )
    return ""
