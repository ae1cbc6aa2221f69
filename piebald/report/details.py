"""The page's last section: what was run, with which settings and versions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from piebald.recipe import Recipe
from piebald.report import markup, wording
from piebald.report.comparison import Comparison
from piebald.report.markup import Cell
from piebald.report.tables import History
from piebald.report.wording import NONE

UNITS = {"client": "that a client took part", "updates": "what a client's updates are", "row": "that a row is there"}

_FACTS = {
    "objective": "Objective",
    "model": "Model",
    "parameters": "Parameters",
    "shared": "of them shared",
    "piebald": "Piebald",
    "torch": "PyTorch",
    "python": "Python",
}


def settings(comparison: Comparison) -> str:
    """Facts that all runs share, the recipes axis by axis, every run, and the settings of each label."""
    facts: list[tuple[str, Cell]] = [(name, _distinct(comparison.runs, key)) for key, name in _FACTS.items()]
    return markup.section(
        "settings",
        "Settings and versions",
        "",
        markup.facts("facts", facts),
        _privacy(comparison),
        _recipes(comparison),
        _runs(comparison),
        *(_dump(label, group[0]) for label, group in comparison.groups.items()),
    )


def unlike(history: History) -> str:
    """A table of how unlike the clients are; empty where nothing was measured."""
    units = history.meta.get("units") or {}
    whole = {row["name"]: row["value"] for row in history.measures if row["client"] is None}
    each: dict[str, list[float]] = {}
    for row in history.measures:
        if row["client"] is not None and row["value"] is not None:
            each.setdefault(row["name"], []).append(row["value"])
    rows: list[list[Cell]] = [
        [
            name.replace("_", " "),
            _figure(whole.get(name)),
            _figure(min(each[name])) if name in each else NONE,
            _figure(max(each[name])) if name in each else NONE,
            str(units.get(name, "")),
        ]
        for name in dict.fromkeys([*whole, *each])
    ]
    if not rows:
        return ""
    seed = "" if history.seed is None else f" (seed {history.seed})"
    caption = f"How unlike the clients are before any training{seed}: for the federation, and over clients."
    return markup.table(caption, ["Measure", "Federation", "Least client", "Most client", "Unit"], rows, kind="text")


def _figure(value: float | None) -> str:
    return NONE if value is None else f"{value:.4g}"


def _distinct(runs: list[History], key: str) -> str:
    found = dict.fromkeys(_plain(history.meta[key]) for history in runs if history.meta.get(key) is not None)
    return " / ".join(found) or NONE


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict | list):
        return _answer(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _recipes(comparison: Comparison) -> str:
    tables = {label: _table(group[0]) for label, group in comparison.groups.items()}
    axes = list(dict.fromkeys(axis for table in tables.values() for axis in table))
    if not axes:
        return ""
    rows = [[axis, *(_answer(table.get(axis)) for table in tables.values())] for axis in axes]
    marks = ["same" if len(set(answers)) == 1 else "" for _, *answers in rows]
    caption = "The recipe of each label, one row an axis. Rows in grey are the same for all."
    return markup.table(caption, ["Axis", *tables], rows, kind="text", marks=marks)


def _table(history: History) -> Mapping[str, Any]:
    recipe = history.meta.get("recipe")
    table = recipe.get("table") if isinstance(recipe, dict) else None
    return {axis: table[axis] for axis in Recipe.axes if axis in table} if isinstance(table, dict) else {}


def _answer(part: Any) -> str:
    """A part's table, or several, or a plain value, in words."""
    if isinstance(part, list):
        tables = any(isinstance(one, dict) for one in part)
        return ("; then " if tables else ", ").join(map(_plain, part)) or "nothing"
    if not isinstance(part, dict):
        return "nothing" if part is None else _plain(part)
    fields = ", ".join(f"{name} {_plain(value)}" for name, value in part.items() if name != "kind")
    return ": ".join(piece for piece in (str(part.get("kind", "")), fields) if piece)


def _privacy(comparison: Comparison) -> str:
    """What noise buys, for labels whose recipe adds some."""
    rows: list[list[Cell]] = []
    for label, runs in comparison.groups.items():
        for budget in runs[0].meta.get("privacy") or []:
            epsilons = [budget["epsilon_pld"], budget["epsilon_rdp"]]
            shown = ["infinite: no noise" if one is None else f"{one:.3g}" for one in epsilons]
            second = budget.get("epsilon_prv")
            unit = UNITS.get(budget.get("unit", "client"), NONE)  # folders of earlier versions do not say
            shown.append(NONE if second is None else f"{second:.3g}")
            told = [unit, *shown, f"{budget['delta']:.1g}", budget["meaning"]]
            rows.append([markup.key(comparison.labels, label), *told])
    if not rows:
        return ""
    caption = (
        "Differential privacy that a whole run's noise gives, to what clients send of their models and nothing else."
    )
    head = ["Label", "Hidden", "Epsilon (PLD)", "Epsilon (RDP)", "Epsilon (opacus, PRV)", "Delta", "Meaning"]
    return markup.table(caption, head, rows, kind="list")


def _runs(comparison: Comparison) -> str:
    rows: list[list[Cell]] = [
        [
            markup.key(comparison.labels, history.label),
            NONE if history.seed is None else str(history.seed),
            history.name,
            history.recipe,
            str(history.meta.get("status", NONE)),
            wording.count(history.final["rounds"]),
            _minute(history.meta.get("created")),
        ]
        for history in comparison.runs
    ]
    head = ["Label", "Seed", "Folder", "Recipe", "Status", "Rounds", "Begun"]
    table = markup.table("Every run of this report, in the order of the labels.", head, rows, kind="list")
    return f"<details><summary>All {len(rows):,} runs</summary>{table}</details>"


def _minute(moment: Any) -> str:
    """An ISO time as date, hour and minute; anything else as it is."""
    try:
        return datetime.fromisoformat(str(moment)).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return NONE if moment is None else str(moment)


def _dump(label: str, history: History) -> str:
    shown = {name: history.meta[name] for name in ("recipe", "settings") if name in history.meta}
    seed = "" if history.seed is None else f" (seed {history.seed})"
    content = json.dumps(shown, indent=2, ensure_ascii=False)
    summary = markup.text(f"All settings of {label}{seed}")
    return f"<details><summary>{summary}</summary><pre>{markup.text(content)}</pre></details>"
