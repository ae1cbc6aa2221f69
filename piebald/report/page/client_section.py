"""The page's section about clients by name, and its tables of right and wrong answers by class.

Of clients there is a row for each, and a column for each label.  Tables by class are folded up until they are asked
for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from piebald.report.chart import Chart, ChartAxis, Dots, series, short
from piebald.report.class_rows import ClassRow, Counts, class_rows
from piebald.report.comparison import Comparison
from piebald.report.findings import client_gaps, headline, noise
from piebald.report.page import markup
from piebald.report.page.markup import Cell
from piebald.report.page.wording import NONE, MetricFormat, plural
from piebald.report.paired import wilson
from piebald.report.row_noise import COUNTED
from piebald.report.tables import mean

FEW = 12  # clients whose scores are dots beside their names
LISTED = 400  # clients in the table
NEVER = "\N{DAGGER}"  # marks a client that never trained
BARS = " Bars are each score's own 95% interval over other test rows; two methods are compared on the same rows."


@dataclass(frozen=True, slots=True)
class Row:
    """One client: rows, the final metric with each label (mean over seeds), and the labels it never trained with."""

    name: str
    train: int | None
    test: int | None
    values: dict[str, float]
    never: frozenset[str]


def rows(comparison: Comparison) -> list[Row]:
    """A row for each client that was evaluated."""
    values: dict[str, dict[str, list[float]]] = {}
    trained: dict[str, set[str]] = {}
    sizes: dict[str, tuple[int | None, int | None]] = {}
    for label, runs in comparison.by_label.items():
        for run in runs:
            for client, value in run.per_client.items():
                name = run.names[client]
                values.setdefault(name, {}).setdefault(label, []).append(value)
                if client in run.judged:
                    trained.setdefault(name, set()).add(label)
            for row in run.clients:
                # the first run's, since rows of a client may be divided otherwise under other seeds
                sizes.setdefault(run.names[row["client"]], (row["train"], row["test"]))
    return [
        Row(
            name,
            *sizes.get(name, (None, None)),
            {label: sum(repeats) / len(repeats) for label, repeats in by_label.items()},
            frozenset(by_label.keys() - trained.get(name, set())),
        )
        for name, by_label in values.items()
    ]


def table(comparison: Comparison) -> str:
    """A sortable table of clients: rows, each label, the worst and the best of them, and the best's gain."""
    shown, clients = MetricFormat(comparison.metric), rows(comparison)
    if not clients:
        return ""
    base, sign = comparison.made_by("local"), 1 if comparison.higher_is_better else -1
    labels = ([base] if base else []) + [label for label in comparison.ordered if label != base]
    rivals = [label for label in labels if label != base]

    def gain(row: Row) -> float:
        alone = row.values.get(base or "")
        scores = [sign * row.values[label] for label in rivals if label in row.values]
        return max(scores) - sign * alone if scores and alone is not None else 0.0

    clients.sort(key=gain if base else lambda row: sign * (mean(list(row.values.values())) or 0.0))
    body = [_cells(row, labels, base, sign, shown) for row in clients[:LISTED]]
    alone = [f"Alone ({base})"] if base else []
    head = [
        "Client",
        "Training rows",
        "Test rows",
        *alone,
        *rivals,
        "Worst",
        "Best",
        *(["Gain over alone"] if base else []),
    ]
    rest = f" The first {LISTED} of {len(clients):,}." if len(clients) > LISTED else ""
    never = f" {NEVER} never trained with this method." if any(row.never for row in clients) else ""
    criterion = "the least gain of the best method over training alone" if base else "the lowest mean"
    caption = (
        f"Final {shown.name} of each client, the mean over seeds; clients with {criterion} come first, and a click on "
        f"a heading sorts by it.{never}{rest}"
    )
    return markup.table(caption, head, body, kind="sortable")


def _cells(row: Row, labels: list[str], base: str | None, sign: int, shown: MetricFormat) -> list[Cell]:
    order = sorted(row.values, key=lambda label: sign * row.values[label])
    scores: list[Cell] = []
    for label in labels:
        if label not in row.values:
            scores.append(NONE)
            continue
        mark = NEVER if label in row.never else ""
        scores.append(markup.sorted_by(f"{shown.value(row.values[label])}{mark}", row.values[label]))
    worst, best = order[0], order[-1]
    ends: list[Cell] = [
        markup.sorted_by(markup.small(shown.value(row.values[label]), label), row.values[label])
        for label in (worst, best)
    ]
    numbers: list[Cell] = [
        NONE if number is None else markup.sorted_by(f"{number:,}", number) for number in (row.train, row.test)
    ]
    if base is None:
        return [row.name, *numbers, *scores, *ends]
    return [row.name, *numbers, *scores, *ends, _gain(row, base, sign, shown)]


def _gain(row: Row, base: str, sign: int, shown: MetricFormat) -> Cell:
    """Return the gain of the best other label over training alone; one client's score has no test of its own."""
    rivals = [label for label in row.values if label != base]
    if base not in row.values or not rivals:
        return NONE
    best = max(rivals, key=lambda label: sign * row.values[label])
    gained = row.values[best] - row.values[base]
    return markup.sorted_by(markup.small(shown.difference(gained), best), gained)


def dots(comparison: Comparison) -> Chart | None:
    """The final metric of a few clients as dots beside their names, a colour for each label; None for many clients."""
    shown, clients = MetricFormat(comparison.metric), rows(comparison)
    if not 2 <= len(clients) <= FEW:
        return None
    clients.sort(key=lambda row: mean(list(row.values.values())) or 0.0, reverse=not comparison.higher_is_better)
    ranked = comparison.ranking()
    # the bars are of shares of rows, and need the number of rows of each client
    counted = shown.name == COUNTED and all(row.test for row in clients)
    marks = []
    for index, label in enumerate(ranked):
        scored = [(position, row) for position, row in enumerate(clients) if label in row.values]
        # labels of a client are spread over half of its row
        lift = 0.56 * (0.5 - (index + 0.5) / len(ranked))  # dots of a client that would be behind each other
        ends = [wilson(row.values[label], row.test or 1) for _, row in scored] if counted else []
        marks.append(
            Dots(
                name=short(label), label=label, colour=series(comparison.labels, label)[0],
                x=[row.values[label] for _, row in scored], y=[position + lift for position, _ in scored],
                names=[short(row.name, 60) for _, row in scored], hollow=[label in row.never for _, row in scored],
                low=[low for low, _ in ends], high=[high for _, high in ends],
            )
        )  # fmt: skip
    seeds = max(len(runs) for runs in comparison.by_label.values())
    over = f", the mean over {seeds} seeds" if seeds > 1 else ""
    never = " Open dots are clients that never trained." if any(row.never for row in clients) else ""
    gaps = client_gaps(comparison)
    return Chart(
        id="plot-clients",
        title=headline(comparison, gaps),
        caption=f"Final {shown.name} of each client{over}.{never}{BARS if counted else ''}{noise(gaps)}",
        marks=marks,
        x=ChartAxis(title=f"Final {shown.name}", percent=shown.percent),
        y=ChartAxis(names=[short(row.name) for row in clients]),
        height=90 + (22 + 11 * len(ranked)) * len(clients),
    )


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
