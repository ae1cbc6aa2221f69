"""The output of `piebald compare`: the result, and a table within 80 columns, or all columns with --wide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from piebald.cli.app import print_table
from piebald.core.plain_text import WIDTH, wrap
from piebald.core.result_table import ResultTable
from piebald.report.comparison import Comparison
from piebald.report.crossed_effects import ERROR_RATE
from piebald.report.findings import notes
from piebald.report.page.wording import MINUS, MetricFormat, is_significant, megabytes, names
from piebald.report.row_noise import row_differences


def base_of(comparison: Comparison) -> str:
    """Return the label that others are compared with: training alone, or else FedAvg, or else the first."""
    return comparison.made_by("local") or comparison.made_by("fedavg") or comparison.labels[0]


def print_comparison(comparison: Comparison, wide: bool) -> None:
    """Print a comparison."""
    rows = comparison.summary()
    pairs = comparison.paired(base_of(comparison))
    if wide:
        print_table(rows)
        if pairs:
            print("\ndifferences of the means on the same clients and seeds")
            print_table(pairs)
    else:
        print_table(_narrow(comparison, rows, {row["label"]: row for row in pairs}), width=WIDTH)
    if divisions := comparison.by_division():
        print()
        print_table(divisions)
    if against := comparison.against_pooled():
        print("\nbeside all rows in one place, sent compressed: points lost, times less sent")
        shown, columns = MetricFormat(comparison.metric), ("label", "rounds", "lost", "MB", "gain")
        cells = [(_plain(shown.difference(row["lost"])), megabytes(row["mb"]), f"{row['gain']:.3g}") for row in against]
        lines = [[row["label"], row["rounds"], *rest] for row, rest in zip(against, cells, strict=True)]
        print_table(ResultTable(lines, columns))
    sentences = [comparison.headline() + ".", *notes(comparison), *_notes(comparison, rows)]
    sentences += [budget["meaning"] for budget in comparison.privacy]
    print("\n" + "\n".join(row for line in sentences for row in wrap(line)))


def _narrow(
    comparison: Comparison, rows: Sequence[Mapping[str, Any]], pairs: Mapping[str, Mapping[str, Any]]
) -> ResultTable:
    """Return the main figures of each label, and those of answers that need no model."""
    shown, base = MetricFormat(comparison.metric), base_of(comparison)
    body: list[list[str]] = []
    for row in rows:
        pair = pairs.get(row["label"])
        against = "" if pair is None else _plain(shown.difference(pair["difference"]))
        star = "*" if pair is not None and is_significant(dict(pair)) else ""
        sent = megabytes(row["mb_up"] + row["mb_down"])
        body.append([row["label"], _mean(shown, row), f"{against}{star}", shown.value(row["worst_decile"]), sent])
    for name, table in comparison.naive.items():
        body.append([name.removeprefix("the "), shown.value(table.mean), "", "", ""])
    for name, table in comparison.plain_alone.items():
        body.append([f"{name} alone", shown.value(table.mean), "", "", ""])
    base_name = "alone" if base == comparison.made_by("local") else base
    head = ["label", shown.name, f"against {base_name}", "worst tenth", "MB"]
    return ResultTable([[_plain(cell) for cell in cells] for cells in body], head)


def _mean(shown: MetricFormat, row: Mapping[str, Any]) -> str:
    """Return the mean and half its interval, or the interval where the mean with half of it would leave 0 to 100 %."""
    if row["low"] is None:
        return shown.value(row["mean"])
    half = (row["high"] - row["low"]) / 2
    if shown.percent and not half <= row["mean"] <= 1 - half:
        return f"{shown.value(row['mean'])} ({shown.size(row['low'])} to {shown.size(row['high'])})"
    return f"{shown.value(row['mean'])} \N{PLUS-MINUS SIGN} {shown.size(half)}"


def _notes(comparison: Comparison, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the sentences that explain the table."""
    shown, base = MetricFormat(comparison.metric), base_of(comparison)
    kinds = {row["kind"] for row in rows} - {None}
    divided = bool(comparison.by_division())
    others, repeats = ("clients, seeds and divisions", "divisions") if divided else ("clients and seeds", "seeds")
    meaning = {
        "interval": f"\N{PLUS-MINUS SIGN} half the 95% interval (or the interval) for other {others}",
        "range": f"\N{PLUS-MINUS SIGN} half the range of two {repeats}: an interval needs three",
        "one seed": "one seed has no interval: give seeds = [0, 1, 2]",
    }
    explained = [meaning[kind] for kind in sorted(kinds)]
    if any(is_significant(row) for row in comparison.paired(base)):
        explained.append(f"* differs clearly from {base}")
    lines = [f"{'; '.join(explained)}."] if explained else []
    untrained = [row for row in rows if row["untrained"]]
    if untrained:
        each = ", ".join(f"{row['label']} {shown.value(row['mean_all'])}" for row in untrained[:4])
        many = f" and {len(untrained) - 4} more" if len(untrained) > 4 else ""
        lines.append(f"Clients that never trained are left out; with them: {each}{many}.")
    if unscored := comparison.unscored:
        lines.append(f"In no mean, since they have no score: {names(unscored)}.")
    losers = _losers(comparison, base)
    return [*lines, losers] if losers else lines


def _losers(comparison: Comparison, base: str) -> str:
    """Return the clients that score worse with the best other label than with the base, by name."""
    best = next((label for label in comparison.ranking() if label != base), None)
    if best is None or base not in comparison.scores or not comparison.per_client(best, base):
        return ""
    sign, shown = (1 if comparison.higher_is_better else -1), MetricFormat(comparison.metric)
    gains = comparison.gain_of_each(best, base)
    behind = sorted((name for name, gain in gains.items() if sign * gain < 0), key=lambda name: sign * gains[name])
    if not behind:
        return f"No client scores worse with {best} than with {base}."
    listed = [f"{name} ({_plain(shown.difference(gains[name]))})" for name in behind]
    seeds = ", in the mean over seeds" if comparison.scores[best].values.shape[0] > 1 else ""
    gaps = row_differences(comparison.scores[best], comparison.scores[base])
    # Bonferroni's correction: so many clients are looked at, at once
    tested = [gaps[name].p * len(behind) for name in behind if name in gaps]
    chance = ", none beyond the chance of its rows" if len(tested) == len(behind) and min(tested) >= ERROR_RATE else ""
    return f"Worse with {best} than with {base}{seeds}: {names(listed)}{chance}."


def _plain(text: str) -> str:
    """Return text with a minus that terminals and programs know."""
    return text.replace(MINUS, "-")
