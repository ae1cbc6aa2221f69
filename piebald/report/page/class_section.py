"""The page's tables of right and wrong answers by class, folded up until they are asked for."""

from __future__ import annotations

import numpy as np

from piebald.report.class_rows import ClassRow, Counts, class_rows
from piebald.report.comparison import Comparison
from piebald.report.page import markup
from piebald.report.page.markup import Cell
from piebald.report.page.wording import NONE, plural

COLUMNS = 20  # classes that have a column of their own; of more, a client's worst ones are named
WORST = 5
CLIENTS = 100
LABELS = 12


def details(comparison: Comparison) -> str:
    """A table of all clients together, and one of single clients for each label; empty where nothing was counted."""
    counts = {label: by_client(comparison, label) for label in comparison.ordered}
    counts = {label: matrices for label, matrices in counts.items() if matrices}
    if not counts:
        return ""
    names = [str(name) for name in comparison.runs[0].meta.get("classes") or ()]
    split = next(run.split for run in comparison.runs if run.class_counts)
    single = [_clients(label, matrices, names, split) for label, matrices in list(counts.items())[:LABELS]]
    return _together(counts, names, split, _seeds(comparison), "".join(single))


def by_client(comparison: Comparison, label: str) -> dict[str, Counts]:
    """The counts [true, predicted] of each client of a label by its name, the sum over seeds."""
    matrices: dict[str, Counts] = {}
    for run in comparison.by_label[label]:
        for client, matrix in run.class_counts.items():
            name = run.names[client]
            matrices[name] = matrices[name] + matrix if name in matrices else matrix
    return matrices


def _seeds(comparison: Comparison) -> str:
    seeds = max(len(runs) for runs in comparison.by_label.values())
    return f", summed over {seeds} seeds" if seeds > 1 else ""


def _together(counts: dict[str, dict[str, Counts]], names: list[str], split: str, seeds: str, below: str) -> str:
    """A row for each class, a column for each label: right answers of all clients' rows; `below` is of single ones."""
    tables = {
        label: {row["class"]: row for row in class_rows(np.sum([*matrices.values()], axis=0), names)}
        for label, matrices in counts.items()
    }
    clients = max(map(len, counts.values()))
    present = [name for name in names if any(name in rows for rows in tables.values())]
    body: list[list[Cell]] = []
    for name in present:
        rows = [tables[label].get(name) for label in counts]
        # labels may be judged on different numbers of clients, so the largest count is told
        most = max(row["rows"] for row in rows if row)
        body.append([name, markup.sorted_by(f"{most:,}", most), *map(_share, rows)])
    caption = (
        f"Recognised rows of each class, of the {split} rows of {plural(clients, 'client')}{seeds}; below it, the "
        "class that they are most often taken for, and how many of them are."
    )
    table = markup.table(caption, ["Class", "Rows", *counts], body, kind="sortable")
    return markup.folded(f"Right and wrong answers by class ({len(present):,} classes)", f"{table}{below}")


def _share(row: ClassRow | None) -> Cell:
    if row is None:
        return NONE
    below = f"{row['mistaken']:,} taken for {row['taken_for']}" if row["mistaken"] else "none mistaken"
    return markup.sorted_by(markup.small(f"{row['share']:.0%}", below), row["share"])


def _clients(label: str, matrices: dict[str, Counts], names: list[str], split: str) -> str:
    """A row for each client of one label: its rows, and those of each class that are recognised."""
    # the trace is the number of right answers
    order = sorted(matrices, key=lambda client: float(matrices[client].trace() / max(matrices[client].sum(), 1)))
    listed = [
        (client, {row["class"]: row for row in class_rows(matrices[client], names)}) for client in order[:CLIENTS]
    ]
    shown = [name for name in names if any(name in rows for _, rows in listed)]
    wide = len(shown) > COLUMNS
    body: list[list[Cell]] = []
    for client, rows in listed:
        count, right = int(matrices[client].sum()), int(matrices[client].trace())
        cells: list[Cell] = [client, markup.sorted_by(f"{count:,}", count), markup.sorted_by(f"{right:,}", right)]
        if wide:
            # by wrong rows and not by share: a class of two rows would come first by chance
            worst = sorted(rows.values(), key=lambda row: row["right"] - row["rows"])[:WORST]
            cells.append("; ".join(f"{row['class']}: {row['right']} of {row['rows']}" for row in worst))
        else:
            cells += [_recognised(rows.get(name)) for name in shown]
        body.append(cells)
    rest = f"  The first {CLIENTS} of {len(matrices):,}." if len(matrices) > CLIENTS else ""
    caption = (
        f"{label}: recognised rows of each class at each client, of its {split} rows, the client with the smallest "
        f"share first.{rest}"
    )
    head = ["Client", "Rows", "Right", *(["Most wrong"] if wide else shown)]
    return markup.folded(
        f"{label}, client by client", markup.table(caption, head, body, kind="list" if wide else "sortable")
    )


def _recognised(row: ClassRow | None) -> Cell:
    """The recognised rows of a class; a dash where the client has none of it."""
    if row is None:
        return NONE
    return markup.sorted_by(f"{row['right']:,} of {row['rows']:,}", row["share"])
