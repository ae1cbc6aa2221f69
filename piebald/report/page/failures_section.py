"""The page's section about what clients could not do: who, what, in which rounds, and why."""

from __future__ import annotations

from piebald.core.errors import failure_kind
from piebald.report.comparison import Comparison
from piebald.report.page import markup, wording
from piebald.report.page.markup import Cell
from piebald.report.tables import History

SHOWN = 200  # rows of the table


def section(comparison: Comparison) -> str:
    """The section; empty where every client could do what it was asked."""
    rows = [(run, *row) for run in comparison.runs for row in _rows(run)]
    if not rows:
        return ""
    rows.sort(key=lambda row: failure_kind(row[-1]) is None)  # those of clients' own work before lost connections
    names = list(dict.fromkeys(name for _, name, *_ in rows))
    shown: list[list[Cell]] = [
        [name, kind, rounds, markup.name(reason), markup.key(comparison.labels, run.label), wording.count(run.seed)]
        for run, name, kind, rounds, reason in rows[:SHOWN]
    ]
    first = f", the first {SHOWN} of {len(rows):,}" if len(rows) > SHOWN else ""
    caption = f"What clients could not do{first}. It left them out of these rounds, or without a score there."
    head = ["Client", "Work", "Rounds", "Reason", "Label", "Seed"]
    heading = f"{wording.names(names)} could not do all that was asked"
    sentences = {(run.label, run.seed): "; ".join(run.absence_sentences) for run in comparison.runs if run.absences}
    absent = " ".join(f"{label}, seed {seed}: {sentence}." for (label, seed), sentence in sentences.items())
    return markup.section("failures", heading, absent, markup.table(caption, head, shown, kind="text"))


def _rows(run: History) -> list[tuple[str, str, str, str]]:
    """Return name, kind of work, rounds and reason of each failure, and of clients without rows to be judged by."""
    rows = [(row["name"], row["kind"], wording.rounds(row["rounds"]), row["reason"]) for row in run.failures]
    silent = set(run.unscored) - {row["name"] for row in run.failures if row["kind"] == "evaluate"}
    reasons = run.reasons([name for name in run.unscored if name in silent], "evaluate")
    return rows + [(name, "evaluate", "all rounds", reason) for name, reason in reasons.items() if reason]
