"""Privacy budgets of several runs on the same rows: what all of them together tell.

Budgets add up whatever the runs have to do with one another, be it other seeds, settings or methods, or a run that goes
on from another: what is (epsilon_1, delta_1) and (epsilon_2, delta_2) private is (epsilon_1 + epsilon_2, delta_1 +
delta_2) private together (Dwork and Roth 2014, theorem 3.16), also where the second was chosen by the first's result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Budget = Mapping[str, Any]  # the plain values of a `PrivacyBudget`
UNITS = {"client": "whether a client took part", "updates": "a client's updates", "row": "whether a row is present"}
NOT_COVERED = (
    "Not covered is what was chosen by scores on validation rows: settings, methods, versions, and the end of a run."
)


def together(metas: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The budgets of several runs on the same rows together, one for each unit that any of them hides.

    Args:
        metas: what describes each run.

    Returns:
        Tables of unit, runs (how many), epsilon and delta (None where a run hides nothing of this unit, so that no
        budget holds for all of them) and meaning (in words); nothing where no run adds noise.
    """
    runs = list(metas)
    spent = [{budget.get("unit", "client"): budget for budget in meta.get("privacy") or ()} for meta in runs]
    sums = []
    for unit in UNITS:
        budgets = [budgets.get(unit) for budgets in spent]
        if not any(budgets):
            continue
        epsilon, delta = _sum(budgets)
        if epsilon is None:
            none = sum(budget is None or budget["epsilon_pld"] is None for budget in budgets)
            meaning = (
                f"Of {UNITS[unit]}: {none} of {len(runs)} runs hide nothing, so nothing is hidden by all together."
            )
        else:
            scope = "in this run" if len(runs) == 1 else f"in all {len(runs)} runs on the same rows together, the sums"
            meaning = f"Of {UNITS[unit]}: epsilon is at most {epsilon:.4g} at delta {delta:.2g} {scope}."
        if any(meta.get("lineage") for meta in runs):
            meaning += " What the runs spent that these go on from comes on top."
        table = {"unit": unit, "runs": len(runs), "epsilon": epsilon, "delta": delta}
        sums.append({**table, "meaning": f"{meaning} {NOT_COVERED}"})
    return sums


def _sum(budgets: Sequence[Budget | None]) -> tuple[float | None, float | None]:
    """Epsilon and delta of all together; None where one is not known, or promises nothing."""
    stated = [budget for budget in budgets if budget is not None and budget["epsilon_pld"] is not None]
    delta = sum(budget["delta"] for budget in stated)
    if len(stated) < len(budgets) or delta >= 1:
        return None, None
    return sum(budget["epsilon_pld"] for budget in stated), delta


def lineage_budgets(lineage: Mapping[str, Any] | None) -> list[Sequence[Budget]]:
    """The budgets of the runs that a run goes on from, the last one first."""
    before = list[Sequence[Budget]]()
    while lineage is not None:
        before.append(lineage.get("privacy") or ())
        lineage = lineage.get("before")
    return before


def told_together(own: Sequence[Budget] | None, lineage: Mapping[str, Any] | None) -> list[dict[str, Any]] | None:
    """The budgets of a run that goes on from others, which say what is known of all of them together.

    Args:
        own: those of this run, as plain values.
        lineage: what it goes on from (`lineage.Inheritance.about`), None for nothing.
    """
    if own is None or lineage is None:
        return None if own is None else [dict(budget) for budget in own]
    before, budgets = lineage_budgets(lineage), []
    for budget in own:
        alike = [next((earlier for earlier in run if earlier["unit"] == budget["unit"]), None) for run in before]
        epsilon, delta = _sum([budget, *alike])
        what_before = "another run" if len(before) == 1 else f"{len(before)} others, one after another"
        meaning = f"Said of this run alone, which goes on from {what_before}: of all that was told in all of them "
        if epsilon is None:
            meaning += "no budget is known, and what was told before may be what is hidden now."
        else:
            meaning += f"epsilon is at most {epsilon:.4g} at delta {delta:.2g}, the sums."
        budgets.append({**budget, "meaning": f"{budget['meaning']} {meaning}"})
    return budgets
