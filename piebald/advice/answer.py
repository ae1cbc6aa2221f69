"""The answer: a recommendation, its gain and cost, the clients that lose by it, and its evidence."""

from __future__ import annotations

import html
import json
import textwrap
import tomllib
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from piebald.advice.answer_page import PlainTable, page
from piebald.advice.client_gains import MOST, ClientGain, table
from piebald.advice.client_gains import sentences as client_sentences
from piebald.advice.differences import SHARES, in_points, nearness
from piebald.advice.evidence import Checked, Evidence, Loser, Pays
from piebald.advice.more_data import More, sentences
from piebald.advice.tuning.budget import Cost
from piebald.core.plain_text import printable
from piebald.methods import recipes
from piebald.methods.recipe import Recipe
from piebald.report.page.markup import html_table, plain_cell
from piebald.report.page.wording import MetricFormat
from piebald.report.paired import Difference, difference
from piebald.report.verdict import ScoreVerdict
from piebald.settings.toml_document import dumps

RECIPE = "recommended.toml"
_COLUMNS = (
    "method", "score", "behind", "error", "lr", "megabytes", "steps", "seconds", "rounds", "seeds", "what became of it",
)  # fmt: skip
_DIFFERENCES = ("behind", "error", "gain", "standard error")  # columns of differences between scores


@dataclass(frozen=True, eq=False)
class Advice:
    """The answer of `advise`.

    Attributes:
        recommended: the label of the recommended method.
        recipe: its recipe, with the settings that were chosen.
        title: the method in plain words.
        metric, higher_is_better: the measure by which methods are judged.
        pays: whether federating pays these clients: the recommendation against Local.
        evidence: the comparison that decided it.
        verdict: on validation rows, of the methods that were trained to the end and, if any were, repeated.
        against_naive: the recommendation beside answers that need no model, on test rows where there are some.
        imbalance: a sentence on balanced accuracy where one class dominates the test rows of a client, else empty.
        probability: that the recommendation is within one point of the best of those that were tried to the end, or
            within one hundredth of the best's mean where the metric is no share; None where it cannot be known.
        gain_alone, gain_together: the difference of the recommendation to Local and to FedAvg on validation rows, None
            where it is that method.
        losers: clients that lose by joining, beyond noise, where the metric is the accuracy.
        worse: of other metrics, for which the noise of one client's score is not known: the clients that are worse off
            than alone under every seed, and by how much in the mean.
        reasons: one sentence each, from measurements.
        table: one row for each method that was tried.
        curve: the recommendation's mean on validation rows after each rung, by server steps.
        cost: of a run of the recommendation.
        spent: by the whole search.
        tested: scores on test rows, of the recommendation, Local and FedAvg only; empty where there are none.
        clients: the gain of each client on test rows, see `client_gains`; empty where there are none.
        unusable: why methods could not be tried, by label.
        rounds, seeds: of the runs.
        folder: of the search, None where it was removed again.
        settings: the experiment file as plain values, None where it was started from Python.
        look: the text of the look before training, None where it was not asked for.
        more: the effect of more rows and clients, None where it was not asked for, see `more_data`.
        privacy: the privacy budgets of all runs of the search together, see `privacy.several_runs.together`.
    """

    recommended: str
    recipe: Recipe
    title: str
    metric: str
    higher_is_better: bool
    pays: Pays
    evidence: Evidence
    verdict: ScoreVerdict
    against_naive: ScoreVerdict | None
    imbalance: str
    probability: float | None
    gain_alone: Difference | None
    gain_together: Difference | None
    losers: Sequence[Loser]
    reasons: Sequence[str]
    table: Sequence[Mapping[str, Any]]
    curve: Mapping[int, float]
    cost: Cost
    spent: Cost
    tested: Sequence[Checked]
    clients: Sequence[ClientGain]
    unusable: Mapping[str, str]
    rounds: int
    seeds: Sequence[int]
    folder: Path | None
    settings: Mapping[str, Any] | None
    look: str | None = None
    worse: Mapping[str, float] | None = None
    more: Sequence[More] | None = None
    privacy: Sequence[Mapping[str, Any]] = ()

    def tested_gain(self, label: str) -> Difference | None:
        """The difference of the recommendation to a method on test rows, None where there is none."""
        scores = {checked.label: checked.scores for checked in self.tested}
        if label == self.recommended or label not in scores or self.recommended not in scores:
            return None
        return difference(scores[self.recommended], scores[label])

    @property
    def best(self) -> str:
        """The label with the best mean on validation rows."""
        return self.verdict.leader

    def headline(self) -> str:
        """The answer in one sentence."""
        start = {
            "yes": "Training together pays",
            "no": "Training together does not pay",
            "cannot be told": "Whether training together pays cannot be told from these rows",
        }[self.pays]
        method, plain = f"{self.recommended} ({self.title})", self.against_naive
        if plain is None or plain.naive is None or plain.beats_naive:
            return f"{start}: {method} is recommended."
        # a method that no constant answer is worse than has learned nothing that is of use
        naive = f"always {plain.naive[0]} ({MetricFormat(self.metric).value(plain.naive[1])})"
        return f"No method is recommended: {method}, the best choice here, is not clearly better than {naive}."

    def text(self) -> str:
        """The answer for a terminal."""
        return wrapped(self.paragraphs())

    def paragraphs(self) -> list[str]:
        """The answer, a sentence or two in each line."""
        lines = [self.headline(), *self._evidence_lines(), ""]
        lines.append(f"On validation rows: {self.verdict.sentence()}.")
        if self.recommended != self.best:
            lines.append(
                f"{self.best} has the best mean; {self.recommended} is within one standard error and one {self._unit} "
                "of it, and sends less than half as much."
            )
        lines += [self.imbalance] if self.imbalance else []
        if self.probability is not None:
            lines.append(
                f"It is within one {self._unit} of the best tried with a probability of {100 * self.probability:.0f} %."
            )
        lines += [*self.reasons, *self._more_lines()]
        lines += [*self._loser_lines(), *self._unharmed_lines()]
        return [*lines, "", *self._cost_lines(), "", *self._test_lines()]

    def amount(self, gain: Difference) -> str:
        """A difference with its interval, in words."""
        sign = 1 if self.higher_is_better else -1
        # a loss that falls is a gain, so its interval is turned around
        low, high = sorted((sign * gain.low, sign * gain.high))
        error = "" if gain.error is None else f"; standard error for other clients {self._points(gain.error)}"
        if gain.seeds == 1:
            return f"{self._points(sign * gain.mean, True)} (one seed{error})"
        kind = "95 % interval for clients and seeds" if gain.kind == "interval" else "range over seeds"
        # an interval already says what its standard error would
        error = "" if gain.kind == "interval" else error
        ends = f"{self._points(low, True)} to {self._points(high, True)}"
        return f"{self._points(sign * gain.mean, True)} ({kind} {ends}{error})"

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        gains = {"alone": self.gain_alone, "together": self.gain_together}
        return {
            "recommended": self.recommended,
            "title": self.title,
            "headline": self.headline(),
            "metric": self.metric,
            "pays": self.pays,
            "evidence": asdict(self.evidence),
            "verdict": self.verdict.plain(),
            "against_naive": None if self.against_naive is None else self.against_naive.plain(),
            "imbalance": self.imbalance,
            "probability_within_one_point": self.probability,
            "gain": {name: None if gain is None else asdict(gain) for name, gain in gains.items()},
            "losers": [asdict(loser) for loser in self.losers],
            "worse_than_alone_in_every_seed": None if self.worse is None else dict(self.worse),
            "reasons": list(self.reasons),
            "more_data": None if self.more is None else [asdict(part) for part in self.more],
            "methods": [dict(row) for row in self.table],
            "curve": {str(rounds): value for rounds, value in self.curve.items()},
            "cost": asdict(self.cost),
            "spent": asdict(self.spent),
            "privacy": [dict(budget) for budget in self.privacy],
            "tested": {
                checked.label: {
                    "mean": checked.scores.mean,
                    "clients": dict(zip(checked.scores.clients, _by_client(checked), strict=True)),
                }
                for checked in self.tested
            },
            "clients": [asdict(client) for client in self.clients],
            "unusable": dict(self.unusable),
            "look": self.look,
            "rounds": self.rounds,
            "seeds": list(self.seeds),
            "recipe": self.recipe.model_dump(),
        }

    def toml(self) -> str:
        """The recommendation as an experiment file, which `piebald run` and `piebald up` take.

        Where the search was started from Python, data, model and partition are for the user to write.
        """
        head = f"# {printable(self.headline())}\n# Chosen by validation rows; see answer.json.\n"
        if self.settings is None:
            return (
                f"{head}# Write [data], [partition] and [model] yourself: the search was started from Python.\n"
                + dumps({"rounds": self.rounds})
                + "\n"
                + recipes.toml(self.recipe)
            )
        # sections of the search: the recommendation is one run
        left_out = ("recipe", "recipes", "grid", "tune", "advise", "seeds", "out", "label", "rounds", "stop")
        table = {name: value for name, value in self.settings.items() if name not in left_out}
        recipe = tomllib.loads(recipes.toml(self.recipe))["recipe"]
        return head + dumps({"rounds": self.rounds, **table, "seed": self.seeds[0], "recipe": recipe})

    def save(self, folder: Path) -> None:
        """Write answer.json, answer.html and recommended.toml into a folder."""
        (folder / "answer.json").write_text(json.dumps(self.plain(), indent=1, ensure_ascii=False), encoding="utf-8")
        (folder / RECIPE).write_text(self.toml(), encoding="utf-8")
        (folder / "answer.html").write_text(self.page(), encoding="utf-8")

    def page(self) -> str:
        """The answer as a page of HTML."""
        lines = [line for line in self.paragraphs()[1:] if line]
        tables: dict[str, PlainTable] = {}
        if self.clients:
            heading, rows = table(self.clients)
            shown = self._in_points(heading, rows, self.clients[0].scores)
            tables["Each client, on test rows"] = ("Scores of each client, and its gain.", heading, shown)
        shown = self._in_points(self.columns, self.rows(), ("score",))
        tables["What was tried"] = ("Methods that were tried, the best first.", self.columns, shown)
        return page(self.headline(), lines, self.curves(), tables, self.look or "")

    def curves(self) -> dict[str, dict[str, float]]:
        """The learning curves of the recommendation on validation rows: over rounds, rows and clients."""
        curves = {f"{self.metric} after so many rounds": {f"{rounds:,}": value for rounds, value in self.curve.items()}}
        for part in self.more or ():
            of_all = "the training rows" if part.what == "rows" else "the clients"
            curves[f"{self.metric} with a part of {of_all}"] = {
                "all" if share == 1 else f"{100 * share:g} %": value for share, value in part.points.items()
            }
        return curves

    def rows(self) -> list[list[Any]]:
        """The methods that were tried, the best first, as rows under `columns`."""
        return [[row.get(name) for name in self.columns] for row in self.table]

    @property
    def columns(self) -> tuple[str, ...]:
        """The heading of `rows`."""
        return _COLUMNS

    def __repr__(self) -> str:
        return f"<Advice: {self.headline()}>"

    def _repr_html_(self) -> str:
        lines = "".join(f"<p>{html.escape(line)}</p>" for line in self.text().splitlines() if line)
        return f"{lines}{self._tried_table()}"

    def _tried_table(self) -> str:
        return html_table(self.columns, self._in_points(self.columns, self.rows(), ("score",)))

    def _in_points(
        self, heading: Sequence[str], rows: Sequence[Sequence[Any]], scores: Container[str]
    ) -> list[list[Any]]:
        """Rows of a table with scores in per cent and differences in points, where the metric is a share."""
        if self.metric not in SHARES:
            return [list(row) for row in rows]

        def shown(name: str, value: Any) -> Any:
            if not isinstance(value, float):
                return value
            if name in scores:
                return f"{100 * value:.1f} %"
            return self._points(value, name == "gain") if name in _DIFFERENCES else value

        return [[shown(name, value) for name, value in zip(heading, row, strict=True)] for row in rows]

    def _points(self, value: float, signed: bool = False) -> str:
        return in_points(self.metric, value, signed)

    @property
    def _unit(self) -> str:
        """The difference that counts as near: a point, or a hundredth of the best's mean if the metric is no share."""
        return "point" if self.metric in SHARES else "hundredth"

    def _more_lines(self) -> list[str]:
        if self.more is None:
            return ["What more rows or clients would change was not tried: leave out more_data = false."]
        gains = {part.what: part.gain for part in self.more} | {
            f"{part.what} before": part.before for part in self.more
        }
        amounts = {name: self.amount(gain) for name, gain in gains.items() if gain is not None}
        # of the last value: a hundredth of a loss at the start would be a large part of it at the end
        near = nearness(self.metric, list(self.curve.values())[-1])
        return sentences(self.more, self.recommended, amounts, self.higher_is_better, near)

    def _evidence_lines(self) -> list[str]:
        """Return the evidence of the headline."""
        evidence = self.evidence
        if evidence.gain is None:
            return []
        ours = self.recommended if evidence.rows == "test" else "the best method for the other clients"
        error = "" if evidence.error is None else f", standard error {self._points(evidence.error)}"
        verdict = "within noise"
        if evidence.pays != "cannot be told":
            verdict = (
                f"beyond noise for {'other rows of these clients' if evidence.noise == 'rows' else 'other clients'}"
            )
        lines = [
            f"On {evidence.rows} rows, {ours} against every client alone: {self._points(evidence.gain, True)}{error}, "
            f"{verdict} (p = {evidence.p:.2g})."
        ]
        if evidence.rows == "test" and evidence.pays == "no":
            lines.append("So the choice by validation rows was not borne out: every client is better off alone.")
        return lines

    def _loser_lines(self) -> list[str]:
        """Return the clients that lose by joining, and what is best for them; of many only those that lose most."""
        lines = [
            f"{loser.client} loses {self._points(loser.loss)} (standard error {self._points(loser.error)}) by joining: "
            f"give it {loser.instead}, which reaches {plain_cell(loser.score)}."
            for loser in self.losers[:MOST]
        ]
        if len(self.losers) > MOST:
            lines.append(f"{len(self.losers) - MOST:,} more clients lose by joining: `losers` of answer.json has them.")
        return lines

    def _unharmed_lines(self) -> list[str]:
        """Return a sentence on whether any client loses, where none was named."""
        if self.worse is None:
            sure = not self.losers and self.pays != "no" and self.gain_alone is not None
            text = "No client is shown to lose by joining, beyond two standard errors of its own validation rows."
            return [text] if sure else []
        caveat = f"How far chance moves the {self.metric} of one client is not known, so nobody is shown to lose."
        if not self.worse:
            return [f"{caveat}  No client is worse off than alone under every seed."]
        named = [f"{client} ({self._points(loss)})" for client, loss in self.worse.items()]
        each = _listed(named if len(named) <= MOST else [*named[: MOST - 1], f"{len(named) - MOST + 1:,} more"])
        return [f"{caveat}  Worse than alone under every seed, in the mean: {each}."]

    def _cost_lines(self) -> list[str]:
        cost, spent = self.cost, self.spent
        time = f", {cost.seconds:,.0f} seconds of the devices" if cost.seconds else ""
        return [
            f"A run of {self.rounds} rounds costs {cost.bytes / 1e6:,.3g} MB, {cost.steps:,} steps and "
            f"{60 * cost.minutes:,.3g} seconds here{time}.",
            f"The search took {spent.rounds:,} rounds, {spent.bytes / 1e6:,.3g} MB and {spent.minutes:,.3g} minutes.",
            *(budget["meaning"] for budget in self.privacy),
        ]

    def _test_lines(self) -> list[str]:
        if not self.tested:
            return ["No client has test rows, so nothing was checked after the choice."]
        names = _listed([checked.label for checked in self.tested])
        lines = [f"Test rows were opened once, after the choice, for {names} only:"]
        for checked in self.tested:
            gain = self.tested_gain(checked.label)
            against = "" if gain is None else f"; {self.recommended} against it: {self.amount(gain)}"
            lines.append(f"  {checked.label}: {self.metric} {checked.scores.mean:.4g}{against}")
        return [*lines, *client_sentences(self.clients, self.recommended, self._points)]


def _listed(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def wrapped(lines: Sequence[str]) -> str:
    """Paragraphs, in lines of at most 80 columns."""
    rows: list[str] = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()))
        text = printable(line.strip())
        rows += textwrap.wrap(text, 80, initial_indent=indent, subsequent_indent=f"{indent}  ") or [""]
    return "\n".join(rows) + "\n"


def _by_client(checked: Checked) -> list[float | None]:
    return [None if np.isnan(mean) else float(mean) for mean in checked.scores.client_means()]
