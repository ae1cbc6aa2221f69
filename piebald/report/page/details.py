"""The page's last sections: the preparation of tables, settings and versions of all runs, privacy, heterogeneity."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from pydantic_core import PydanticUndefined, to_jsonable_python

from piebald.contracts.component import Component
from piebald.methods.recipe import Recipe
from piebald.privacy.spending import NOT_COVERED, UNITS
from piebald.report.comparison import Comparison
from piebald.report.page import markup, wording
from piebald.report.page.markup import Cell
from piebald.report.page.wording import NONE
from piebald.report.tables import History

_FACTS = {
    "objective": "Objective",
    "model": "Model",
    "parameters": "Parameters",
    "shared": "Shared parameters",
    "piebald": "Piebald",
    "torch": "PyTorch",
    "python": "Python",
}


def settings(comparison: Comparison) -> str:
    """Facts about all runs, the recipes component by component, every run, and the settings of each label."""
    facts: list[tuple[str, Cell]] = [(name, _distinct(comparison.runs, key)) for key, name in _FACTS.items()]
    return markup.section(
        "settings",
        "Settings and versions",
        "",
        markup.facts("facts", facts),
        _privacy(comparison),
        _recipes(comparison),
        _runs(comparison),
        *(_dump(label, runs[0]) for label, runs in comparison.by_label.items()),
    )


def heterogeneity(history: History) -> str:
    """A table of the heterogeneity of clients; empty where nothing was measured."""
    units = history.meta.get("units") or {}
    federation = {row["name"]: row["value"] for row in history.measures if row["client"] is None}
    of_clients: dict[str, list[float]] = {}
    for row in history.measures:
        if row["client"] is not None and row["value"] is not None:
            of_clients.setdefault(row["name"], []).append(row["value"])
    rows: list[list[Cell]] = [
        [
            name.replace("_", " "),
            _figure(federation.get(name)),
            _figure(min(of_clients[name])) if name in of_clients else NONE,
            _figure(max(of_clients[name])) if name in of_clients else NONE,
            str(units.get(name, "")),
        ]
        for name in dict.fromkeys([*federation, *of_clients])
    ]
    if not rows:
        return ""
    seed = "" if history.seed is None else f" (seed {history.seed})"
    caption = f"Heterogeneity of clients before training{seed}: of the federation, and the range over clients."
    return markup.table(
        caption, ["Measure", "Federation", "Smallest client", "Largest client", "Unit"], rows, kind="text"
    )


def _figure(value: float | None) -> str:
    return NONE if value is None else f"{value:.4g}"


def _distinct(runs: list[History], key: str) -> str:
    values = dict.fromkeys(_plain(history.meta[key]) for history in runs if history.meta.get(key) is not None)
    return " / ".join(values) or NONE


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict | list):
        return _written(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _recipes(comparison: Comparison) -> str:
    tables = {label: runs[0].components for label, runs in comparison.by_label.items()}
    axes = [axis for axis in Recipe.axes if any(axis in table for table in tables.values())]
    if not axes:
        return ""
    rows = [
        [axis.replace("_", " "), *(_written(_without_defaults(axis, table.get(axis))) for table in tables.values())]
        for axis in axes
    ]
    marks = ["same" if len(set(components)) == 1 else "" for _, *components in rows]
    caption = (
        "The recipe of each label, one row for each component, without the settings that have their default. Grey rows "
        "are the same for all labels."
    )
    return markup.table(caption, ["Component", *tables], rows, kind="text", marks=marks)


def _without_defaults(axis: str, value: Any) -> Any:
    """Return a component's table without the settings that have their default."""
    if isinstance(value, list):
        return [_without_defaults(axis, part) for part in value]
    if not isinstance(value, dict):
        return value
    kind = Component.registry.get(axis, {}).get(str(value.get("kind")))
    # a component of a plugin that is not installed here has no known defaults
    if kind is None:
        return value
    defaults = {name: field.get_default(call_default_factory=True) for name, field in kind.model_fields.items()}
    plain_defaults = {
        name: default.table() if isinstance(default, Component) else default
        for name, default in defaults.items()
        if default is not PydanticUndefined
    }
    # as run folders keep settings: tuples are lists there, and would never equal the defaults otherwise
    plain = to_jsonable_python(plain_defaults, fallback=str)
    return {
        name: setting
        for name, setting in value.items()
        if name == "kind" or name not in plain or plain[name] != setting
    }


def _written(value: Any) -> str:
    """The table of a component, several of them, or a plain value, as text."""
    if isinstance(value, list):
        tables = any(isinstance(part, dict) for part in value)
        return ("; then " if tables else ", ").join(map(_plain, value)) or "none"
    if not isinstance(value, dict):
        return "none" if value is None else _plain(value)
    fields = ", ".join(f"{name} {_plain(setting)}" for name, setting in value.items() if name != "kind")
    return ": ".join(piece for piece in (str(value.get("kind", "")), fields) if piece)


def _privacy(comparison: Comparison) -> str:
    """Privacy budgets, for labels whose recipe adds noise."""
    rows: list[list[Cell]] = []
    for label, runs in comparison.by_label.items():
        for budget in runs[0].meta.get("privacy") or []:
            epsilons = [budget["epsilon_pld"], budget["epsilon_rdp"]]
            shown = ["infinite" if epsilon is None else f"{epsilon:.3g}" for epsilon in epsilons]
            second = budget.get("epsilon_prv")
            unit = UNITS.get(budget["unit"], NONE)
            shown.append(NONE if second is None else f"{second:.3g}")
            cells = [unit, *shown, f"{budget['delta']:.1g}", budget["meaning"]]
            rows.append([markup.key(comparison.labels, label), *cells])
    if not rows:
        return ""
    # the sum says nothing new about a single run
    for total in comparison.privacy if len(comparison.runs) > 1 else ():
        shown = ["none" if total["epsilon"] is None else f"{total['epsilon']:.3g}", NONE, NONE]
        delta = NONE if total["delta"] is None else f"{total['delta']:.1g}"
        rows.append([f"all {total['runs']} runs", UNITS[total["unit"]], *shown, delta, total["meaning"]])
    caption = (
        "Differential privacy of a run of each label, and of all runs of this report, which covers the model updates "
        f"that clients send and nothing else.  {NOT_COVERED}"
    )
    head = ["Label", "Protected", "Epsilon (PLD)", "Epsilon (RDP)", "Epsilon (opacus, PRV)", "Delta", "Meaning"]
    return markup.table(caption, head, rows, kind="list")


def _runs(comparison: Comparison) -> str:
    rows: list[list[Cell]] = [
        [
            markup.key(comparison.labels, history.label),
            NONE if history.seed is None else ", ".join(filter(None, [str(history.seed), history.division])),
            history.name,
            history.recipe,
            str(history.meta.get("status", NONE)),
            wording.count(history.final["rounds"]),
            _minute(history.meta.get("created")),
        ]
        for history in comparison.runs
    ]
    head = ["Label", "Seed", "Folder", "Recipe", "Status", "Rounds", "Started"]
    table = markup.table("All runs of this report, in the order of the labels.", head, rows, kind="list")
    summary = "The run" if len(rows) == 1 else f"All {len(rows):,} runs"
    return markup.folded(summary, f"{table}{_lineage(comparison)}")


def _lineage(comparison: Comparison) -> str:
    """Return a table of runs that go on from others, and of what they took over."""
    rows: list[list[Cell]] = []
    for history in comparison.runs:
        lineage = history.meta.get("lineage")
        if lineage is not None:
            parts, newcomers = ", ".join(lineage["taken"]), ", ".join(lineage["newcomers"]) or NONE
            from_run = f"{lineage.get('run') or NONE} ({lineage['folder']})"
            cells = [
                history.name,
                from_run,
                wording.count(lineage["steps_before"]),
                parts,
                newcomers,
                lineage["sha256"],
            ]
            rows.append([str(cell) for cell in cells])
    if not rows:
        return ""
    caption = (
        "Runs that go on from a finished one.  Rounds, bytes and privacy budgets of this report are those of the run "
        "itself: what was spent before comes on top."
    )
    head = ["Folder", "Goes on from", "Rounds before", "Taken over", "New clients", "SHA-256 of what was taken"]
    return markup.table(caption, head, rows, kind="list")


def _minute(time: Any) -> str:
    """An ISO time to the minute; any other value unchanged."""
    try:
        return datetime.fromisoformat(str(time)).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return NONE if time is None else str(time)


def _dump(label: str, history: History) -> str:
    shown = {name: history.meta[name] for name in ("recipe", "settings") if name in history.meta}
    seed = "" if history.seed is None else f" (seed {history.seed})"
    content = json.dumps(shown, indent=2, ensure_ascii=False)
    return markup.folded(f"All settings of {label}{seed}", markup.verbatim(content))


_MOST_CLIENTS = 50  # clients in a table


def preparation(comparison: Comparison) -> str:
    """The section; empty where inputs are no prepared columns."""
    metas = [run.meta for run in comparison.runs if run.meta.get("preparation")]
    if not metas:
        return ""
    agreed, by_client = metas[0]["preparation"], metas[0].get("gaps_by_client") or {}
    rows: list[list[Cell]] = [[column["name"], column["kind"], *_becomes(column)] for column in agreed["columns"]]
    rows += [[name, "left out", reason, ""] for name, reason in agreed["left_out"].items()]
    rows += [] if agreed["target"] is None else [_target_cells(agreed["target"])]
    caption = "Columns of the clients' tables in the order of the inputs, the same at every client."
    tables = [markup.table(caption, ["Column", "Kind", "Becomes", "Agreed"], rows)]
    names = [name for name, shares in by_client.items() if any(shares.values())][:_MOST_CLIENTS]
    all_columns = [column["name"] for column in agreed["columns"]]
    columns = [column for column in all_columns if any(by_client[name].get(column) for name in names)]
    if columns:
        cells = [[name, *(_filled_share(by_client[name].get(column)) for column in columns)] for name in names]
        tables.append(markup.table("Share of training rows without a value, by client.", ["Client", *columns], cells))
    return markup.section("preparation", "What was prepared", "", *tables)


def _target_cells(target: Mapping[str, Any]) -> list[Cell]:
    """Return the line of the target."""
    if "classes" in target:
        return [target["name"], "target", f"{len(target['classes'])} classes", _some(target["classes"])]
    return [
        target["name"], "target", "standard scores", f"mean {target['mean']:.6g}, deviation {target['deviation']:.6g}"
    ]  # fmt: skip


def _becomes(column: Mapping[str, Any]) -> list[Cell]:
    """Return what a column becomes, and the numbers that clients agreed on."""
    indicator = ", and an indicator of gaps" if column["gaps"] else ""
    if column["kind"] == "category":
        more = " and one for all others" * column["rare"] + " and one for gaps" * column["gaps"]
        how = "a column each" if column["coding"] == "one-hot" else "an embedding"
        return [f"{len(column['categories'])} categories{more}, {how}", _some(column["categories"])]
    if column["kind"] == "text":
        return [f"{column['length']} token ids", f"{column['vocabulary']:,} tokens of {column['tokenizer']}, SHA-256 "
                f"{column['sha256'][:12]}"]  # fmt: skip
    if column["kind"] == "boolean":
        return [f"1 and 0{indicator}", f"mostly {str(column['common']).lower()}"]
    parts = {"": column["values"]} if column["kind"] == "number" else column["values"]
    scales = {"standard": "standard scores", "log": "standard scores of the logarithm", "none": "as it is",
              "power": "standard scores of a power", "rank": "rank"}  # fmt: skip
    first = next(iter(parts.values()))
    what = scales[first["scale"]] if "" in parts else f"{', '.join(parts)}, each as standard scores"
    agreed = f"median {first['median']:.6g}"
    if first["scale"] in ("standard", "log", "power"):
        agreed += f", mean {first['mean']:.6g}, deviation {first['deviation']:.6g}"
    return [f"{what}{indicator}", agreed]


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _filled_share(share: float | None) -> Cell:
    return f"{100 * share:.3g} %" if share else NONE
