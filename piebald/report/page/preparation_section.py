"""The page's section about the preparation of tables: what became of each column, and what clients have of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piebald.report.comparison import Comparison
from piebald.report.page import markup
from piebald.report.page.markup import Cell
from piebald.report.page.wording import NONE

SHOWN = 50  # clients in a table


def section(comparison: Comparison) -> str:
    """The section; empty where inputs are no prepared columns."""
    metas = [run.meta for run in comparison.runs if run.meta.get("preparation")]
    if not metas:
        return ""
    agreed, by_client = metas[0]["preparation"], metas[0].get("gaps_by_client") or {}
    rows: list[list[Cell]] = [[column["name"], column["kind"], *_becomes(column)] for column in agreed["columns"]]
    rows += [[name, "left out", reason, ""] for name, reason in agreed["left_out"].items()]
    rows += [] if agreed["target"] is None else [_target(agreed["target"])]
    caption = "Columns of the clients' tables in the order of the inputs, the same at every client."
    tables = [markup.table(caption, ["Column", "Kind", "Becomes", "Agreed"], rows)]
    names = [name for name, shares in by_client.items() if any(shares.values())][:SHOWN]
    all_columns = [column["name"] for column in agreed["columns"]]
    columns = [column for column in all_columns if any(by_client[name].get(column) for name in names)]
    if columns:
        cells = [[name, *(_share(by_client[name].get(column)) for column in columns)] for name in names]
        tables.append(markup.table("Share of training rows without a value, by client.", ["Client", *columns], cells))
    return markup.section("preparation", "What was prepared", "", *tables)


def _target(target: Mapping[str, Any]) -> list[Cell]:
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


def _share(share: float | None) -> Cell:
    return f"{100 * share:.3g} %" if share else NONE
