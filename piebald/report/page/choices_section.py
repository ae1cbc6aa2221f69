"""The page's section about clients that chose their models: each choice, and the scores of its candidates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from piebald.methods.choice.best_for_each import WORDS, loses
from piebald.methods.choice.candidates import CANDIDATES
from piebald.methods.choice.knn_per import NEIGHBOURS
from piebald.report.comparison import Comparison
from piebald.report.page import markup, wording
from piebald.report.page.markup import Cell
from piebald.report.page.wording import NONE, MetricFormat
from piebald.report.tables import History

SHOWN = 200  # clients in a table

_TOLD = (
    "Each site chose its model when the run had ended, and told nobody: best-for-each.json or knn-per.json in the "
    "site's folder says which."
)


def section(comparison: Comparison) -> str:
    """The section; empty where clients take what they are given."""
    firsts = {label: runs[0] for label, runs in comparison.by_label.items()}
    chosen = {label: run for label, run in firsts.items() if run.choices}
    # in a federation sites choose and tell nobody, so a run without choices is not one where none was made
    silent = any(run.meta.get("keep", "last") not in ("last", "best") and not run.choices for run in firsts.values())
    if not chosen and not silent:
        return ""
    tables = [_table(comparison, label, run) for label, run in chosen.items()]
    heading = headline(next(iter(chosen.values())).choices) if len(chosen) == 1 else "The model that each client chose"
    return markup.section("choices", heading, _TOLD if silent else "", *tables)


def headline(choices: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of clients that took each model, in one sentence."""
    counts = Counter(str(choice["chosen"]) for choice in choices if choice["chosen"])
    parts = [f"{count:,} {_choice_words(name)}" for name, count in counts.most_common()]
    return f"Of {wording.plural(len(choices), 'client')}, {', '.join(parts) or 'none has chosen'}"


def against_alone(choices: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of clients that are worse off than alone, in one sentence; empty if not measured."""
    compared = [choice for choice in choices if choice.get("alone")]
    if not compared:
        return ""
    worse = [choice for choice in compared if loses(choice)]
    named = (
        f": {', '.join(str(choice['name']) for choice in worse[:5])}{', ...' if len(worse) > 5 else ''}"
        if worse
        else ""
    )
    return (
        f"{len(worse):,} of {wording.plural(len(compared), 'client')} would be better off alone, by more than two "
        f"standard errors of the loss on the rows that models are judged by{named}."
    )


def _choice_words(name: str) -> str:
    return f"took {WORDS[name]}".replace("its ", "their ")


def _table(comparison: Comparison, label: str, history: History) -> str:
    shown, choices = MetricFormat(history.metric), history.choices
    names = [
        name for name in (*CANDIDATES, NEIGHBOURS) if any(name in choice.get("candidates", ()) for choice in choices)
    ]
    rows: list[list[Cell]] = []
    for choice in choices[:SHOWN]:
        tried, judged = choice.get("candidates", {}), choice.get("judged", {})
        cells: list[Cell] = [str(choice["name"]), _chosen(choice)]
        cells += [_scored(shown, tried.get(name)) for name in names]
        cells += [_scored(shown, judged.get(role)) for role in ("chosen", "local")]
        rows.append([*cells, str(choice["why"])])
    head = ["Client", "Chosen", *(name.replace("_", "-") for name in names), "Chosen, judged", "Alone, judged", "Why"]
    rest = f" The first {SHOWN} of {len(choices):,} clients; the run folder has all." if len(choices) > SHOWN else ""
    seed = "" if history.seed is None else f", seed {history.seed}"
    caption = (
        f"{label}{seed}: {shown.name} and, below it, loss of each candidate on the client's validation rows, and "
        f"of the chosen and the local model on {history.split} rows. {against_alone(choices)}{rest}"
    )
    return markup.table(caption, head, rows, kind="list")


def _chosen(choice: Mapping[str, Any]) -> Cell:
    name = str(choice["chosen"] or NONE).replace("_", "-")
    if mixture := choice.get("mixture"):
        return markup.small(name, f"{mixture['share']:.0%} {mixture['of'].replace('_', '-')}")
    if near := choice.get(NEIGHBOURS):
        return markup.small(name, f"{near['lam']:.0%} of {near['k']}")
    passes = choice.get("epochs")
    return markup.small(name, f"{passes} more pass{'' if passes == 1 else 'es'}") if passes else name


def _scored(shown: MetricFormat, scores: Mapping[str, float | None] | None) -> Cell | Markup:
    if scores is None:
        return NONE
    loss = scores.get("loss")
    return markup.small(shown.value(scores.get(shown.metric)), NONE if loss is None else f"{loss:.3g}")
