"""Privacy budgets of runs that go on from one another: what all of them together tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def told_together(
    own: Sequence[Mapping[str, Any]] | None, lineage: Mapping[str, Any] | None
) -> list[dict[str, Any]] | None:
    """The budgets of a run that goes on from others, which say what is known of all of them together.

    Args:
        own: those of this run, as plain values.
        lineage: what it goes on from (`lineage.Inheritance.about`), None for nothing.
    """
    if own is None or lineage is None:
        return None if own is None else [dict(one) for one in own]
    before = list[Sequence[Mapping[str, Any]]]()
    while lineage is not None:
        before.append(lineage.get("privacy") or ())
        lineage = lineage.get("before")
    found = []
    for budget in own:
        alike = [budget, *(next((one for one in run if one["unit"] == budget["unit"]), None) for run in before)]
        spent = [one["epsilon_pld"] for one in alike if one is not None and one["epsilon_pld"] is not None]
        others = "another run" if len(before) == 1 else f"{len(before)} others, one after another"
        told = f"Said of this run alone, which goes on from {others}: of all that was told in all of them "
        if len(spent) < len(alike):
            told += "no budget is known, and what was told before may be what is hidden now."
        else:
            delta = sum(one["delta"] for one in alike if one is not None)
            told += f"epsilon is at most {sum(spent):.4g} at delta {delta:.2g}, the sums."
        found.append({**budget, "meaning": f"{budget['meaning']} {told}"})
    return found
