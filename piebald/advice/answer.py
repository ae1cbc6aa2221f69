"""The answer: a recommendation, its gain and cost, the clients that lose by it, and its evidence."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_jsonable_python
from rich.filesize import decimal as size

from piebald.advice.answer_page import Axis, Part, fitting, page, screen, short
from piebald.advice.distillation import Distilled
from piebald.advice.ensemble import Ensemble
from piebald.advice.evidence import Checked, ClientGain, Evidence, Loser, Pays, PlainAlone, table
from piebald.advice.more_data import More, outlook, sentences
from piebald.advice.odd_sites import FOUND, SHARES, in_points, nearness
from piebald.advice.race import title_of
from piebald.advice.tuning.space import Cost
from piebald.core.errors import SettingError
from piebald.core.plain_text import printable, wrap
from piebald.core.private_files import write_private
from piebald.core.result_table import ResultTable, Tabular, plain_cell
from piebald.methods.catalog import recipes
from piebald.methods.recipe import Recipe
from piebald.privacy.secure_aggregation.transform import SecureAggregation
from piebald.report.crossed_effects import ERROR_RATE
from piebald.report.page.wording import MetricFormat, duration, names, plural
from piebald.report.paired import Difference, common_seeds, difference
from piebald.report.verdict import ScoreVerdict
from piebald.settings.toml_document import dumps

RECIPE, ENSEMBLE, DISTILLED = "recommended.toml", "ensemble", "distilled"
_COLUMNS = (
    "method", "score", "behind", "error", "lr", "megabytes", "steps", "seconds", "rounds", "seeds", "what became of it",
)  # fmt: skip
_HEADINGS = {"lr": "learning rate", "behind": "behind the best"}
_DIFFERENCES = ("behind", "error", "gain", "from", "to")  # columns of differences between scores
_LINES = {"Open": 1}  # of those for whom nothing can be said; a screen is full if all parts take what they may
_NAMED = 12  # clients that are named in a sentence
_KEPT = (  # attributes that are in answer.json under their own names
    "recommended", "title", "metric", "pays", "evidence", "imbalance", "losers", "reasons", "curve", "cost", "spent",
    "privacy", "clients", "unusable", "look", "own", "better_alone", "keep", "odd", "best_rounds", "rounds", "seeds",
    "processor_seconds",
)  # fmt: skip
EPSILON, _DELTA = 3.0, 1e-5  # of the privacy whose cost is told


@dataclass(frozen=True, eq=False)
class Advice(Tabular):
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
        losers: clients that lose by joining, beyond noise.
        reasons: one sentence each, from measurements.
        tried: one row for each method that was tried, the best first.
        curve: the recommendation's mean on validation rows after each rung, by server steps.
        cost: of a run of the recommendation.
        spent: by the whole search; rounds that recipes share count once, as they were trained.
        tested: scores on test rows, of the recommendation, Local and FedAvg only; empty where there are none.
        clients: the gain of each client on test rows, see `client_gains`; empty where there are none.
        unusable: why methods could not be tried, by label.
        rounds, seeds: of the runs.
        folder: of the search, None where it was removed again.
        settings: the experiment file as plain values, None where it was started from Python.
        look: the text of the look before training, None where it was not asked for.
        more: the effect of more rows and clients, None where it was not asked for, see `more_data`.
        privacy: the privacy budgets of all runs of the search together, see `privacy.spending.together`.
        own: the method for each client by validation rows, see `own_methods`.
        better_alone: the clients for which training alone is better than the recommendation, beyond chance.
        best_rounds: the server steps after which the recommendation was best on validation rows.
        keep: what a run of the recommendation should keep for clients, see `run`; None for its default.
        odd: sentences on sites whose rows are at odds with those of the others, see `odd_sites`.
        ensemble: the mean of the predictions of several runs, None where they could not be averaged.
        distilled: one model that was trained towards the ensemble, None where that was not asked for, or was not
            possible.
        plain_alone: the plain model that is better than Local where each client fits it alone, None where none is.
        processor_seconds: that the search took, of this process and those that it started; the clock of the wall is in
            `spent`.
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
    tried: ResultTable
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
    more: Sequence[More] | None = None
    privacy: Sequence[Mapping[str, Any]] = ()
    own: Mapping[str, str] = field(default_factory=dict)
    better_alone: Sequence[str] = ()
    best_rounds: int = 0
    keep: str | None = None
    odd: Sequence[str] = ()
    ensemble: Ensemble | None = None
    distilled: Distilled | None = None
    plain_alone: PlainAlone | None = None
    processor_seconds: float = 0.0

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

    # ------------------------------------------------------------------------------------------------ on one screen

    def headline(self) -> str:
        """The answer in one sentence: the same in the terminal, the page, a notebook, `repr` and JSON."""
        start = {
            "yes": "Yes, training together pays",
            "no": "No, training together does not pay",
            "cannot be told": "Whether training together pays cannot be known from these rows",
        }[self.pays]
        method, plain = f"{self.recommended} ({self.title})", self.against_naive
        if plain is None or plain.naive is None or not self._is_useless:
            if self.pays == "no" and self.plain_alone is not None:
                return f"{start}: {method} is no better than {self.plain_alone.name}, fitted by each client alone."
            if self.pays == "no" and self.evidence.rows == "test":
                return f"{start}: {method}, the best by validation rows, was not borne out by test rows."
            return f"{start}; {method} is recommended."
        naive = f"always {plain.naive[0]} ({MetricFormat(self.metric).value(plain.naive[1])})"
        if self._may_be_of_use:
            open_question = f"whether {method} is better than {naive} cannot be known from these rows"
            return f"No method is recommended yet: {open_question}."
        # a method that no constant answer is worse than has learned nothing that is of use
        return f"No method is recommended: {method}, the best choice here, is not better than {naive}."

    def text(self) -> str:
        """The answer on one screen: at most 24 lines of 80 columns."""
        return screen(self.parts())

    def parts(self) -> list[Part]:
        """The answer in parts: a heading, its paragraph, and the lines that it may take of a screen."""
        return [
            ("Answer", self.headline(), 3),
            ("Measured", self._measured(), 4),
            ("Beware", " ".join(filter(None, [*self.odd, self.imbalance])), 2),
            ("Ensemble", self._ensemble_part(), 2),
            *((name, text, _LINES.get(name, 2)) for name, text in self._who().items()),
            ("Costs", self._costs(), 2),
            ("Leaves", self._leaves(), 2),
            ("Privacy", self._privacy(), 2),
            ("Next", self._next(), 2),
        ]

    def _measured(self) -> str:
        """Return the scores of the recommendation and its rivals, and the comparison that decided."""
        shown, plain = MetricFormat(self.metric), self.against_naive
        means = self._tested_means() or {self.recommended: self.verdict.best}
        levels = [f"{self._named(label)} {shown.value(mean)}" for label, mean in means.items()]
        if plain is not None and plain.naive is not None:
            levels.append(f"always {plain.naive[0]} {shown.value(plain.naive[1])}")
        rows = "test" if self.tested else "validation"
        return f"{shown.name} on {rows} rows: {', '.join(levels)}.  {self._evidence_sentence()}"

    def _tested_means(self) -> dict[str, float]:
        """Return the means on test rows of the recommendation and its rivals, on seeds that it shares with the first.

        That is training alone, where it was tried, so that the two differ by the gain that is told.
        """
        tables = {checked.label: checked.scores for checked in self.tested}
        # of the first two tables: the recommendation and what it is held against
        seeds = common_seeds(list(tables.values())[:2])
        shared = {label: table.of_seeds(seeds) for label, table in tables.items()}
        # a method without these seeds is told with its own rather than not at all
        means = {label: table.mean if table.present else tables[label].mean for label, table in shared.items()}
        plain = self.plain_alone
        return means | ({} if plain is None or plain.test is None or not means else {plain.name: plain.test.mean})

    def _named(self, label: str) -> str:
        """Return a method with its title, but for the recommendation, which the headline explains."""
        if self.plain_alone is not None and label == self.plain_alone.name:
            return f"{label} of each client alone"
        title = "" if label == self.recommended else title_of(label)
        return f"{title} ({label})" if title else label

    def _evidence_sentence(self) -> str:
        evidence = self.evidence
        if evidence.gain is None:
            return ""
        is_test, plain = evidence.rows == "test", self.plain_alone
        ours = evidence.label if is_test else "What is best for all others, tried on each client,"
        rows = "" if is_test else " on validation rows"
        is_clear = evidence.p < ERROR_RATE
        amount = self._by_chance(evidence.gain, evidence.low, evidence.high, is_clear, evidence.noise)
        # the interval ends below what counts as little
        little = ", so too little is to be gained" if evidence.pays == "no" and not is_clear else ""
        # of several that are alone, each client has what is best for all others as well
        alone = "alone" if plain is None else f"{plain.name} alone" if is_test else "the best alone, likewise,"
        return f"{ours} against {alone}{rows}: {amount}{little}."

    def _by_chance(self, gain: float, low: float | None, high: float | None, clear: bool, noise: str) -> str:
        """Return a gain, positive where it is one, with its interval and the chance that it is held against."""
        ends = (
            ""
            if low is None or high is None
            else f" (95 %: {self._points(low, True, '')} to {self._points(high, True, '')})"
        )
        kind = "other rows of these clients" if noise == "rows" else "other clients"
        # beside scores that are errors, a sign alone would be read the other way round
        better = f"{self._points(abs(gain))} {'worse' if gain < 0 else 'better'}"
        amount = self._points(gain, True) if self.higher_is_better else better
        return f"{amount}{ends}, {'beyond' if clear else 'within'} the chance of {kind}"

    def _who(self) -> dict[str, str]:
        """Return who gains, who loses, and for whom neither can be said, by name, the largest first."""
        if all(client.gain is None for client in self.clients):
            alone = self.tested and self.recommended not in {checked.label for checked in self.tested[1:]}
            reason = "every client trains alone" if alone else "no client has test rows under both methods"
            return {"Gain": f"not known by name: {reason}."}
        unit = " points" if self.metric in SHARES else ""
        groups: dict[str, list[str]] = {"Gain": [], "Lose": [], "Open": []}
        # shrunken gains, since the largest raw gains are those of clients with few rows
        for client in sorted(self.clients, key=lambda client: -abs(client.shrunk or 0.0)):
            if client.shrunk is not None:
                group = {1: "Gain", -1: "Lose", 0: "Open"}[client.sign]
                groups[group].append(f"{short(client.client)} {self._points(client.shrunk, True, '')}")
        has_intervals = any(client.low is not None for client in self.clients)
        nobody = (
            "nobody beyond chance" if has_intervals else f"chance moves the {self.metric} of one client unknown amounts"
        )
        texts = {
            # of a line of 70 columns, a break between words takes some of the next one
            name: fitting(items, 54 * _LINES.get(name, 2) + 8 + len(unit), unit) if items else nobody
            for name, items in groups.items()
        }
        return {name: f"{text}." for name, text in texts.items() if name != "Open" or groups[name]}

    def _costs(self) -> str:
        cost, spent = self.cost, self.spent
        devices = f", {duration(cost.seconds)} of the devices" if cost.seconds else ""
        return (
            f"{plural(self.rounds, 'round')}, {size(cost.bytes)} in all, {duration(60 * cost.minutes)} here{devices}; "
            f"the search took {plural(spent.rounds, 'round')}, {size(spent.bytes)} and {duration(60 * spent.minutes)}, "
            f"{duration(self.processor_seconds)} of processors."
        )

    @property
    def _sent(self) -> float:
        """Bytes that a site sends in a round of the recommendation."""
        # bytes are counted both ways, and about half of them go up
        return self.cost.bytes / 2 / max(1, self.rounds) / max(1, len(self.clients))

    def _leaves(self) -> str:
        if not self.cost.bytes:
            return "nothing: every site trains alone."
        fits = self._fits_secure_sums()
        sums = "would hide what single sites send" if fits else f"do not fit {self.recommended}"
        sent = f"{size(round(self._sent))} of numbers from training, of each site in each round, and no rows"
        return f"{sent}; secure sums {sums}."

    def _fits_secure_sums(self) -> bool:
        """Return whether the server of the recommendation can do with sums over sites."""
        transforms = self.recipe.transforms
        if any(isinstance(transform, SecureAggregation) for transform in transforms):
            return True
        try:
            # recipes refuse what does not go together when they are built, so building is the test
            self.recipe.with_(transforms=[*transforms, SecureAggregation()])
        except SettingError:
            return False
        return True

    def _privacy(self) -> str:
        """Return what hiding rows has spent, or would cost."""
        if self.privacy:
            return " ".join(str(budget["meaning"]) for budget in self.privacy)
        sizes = [client.train for client in self.clients if client.train]
        if not self.cost.bytes or not sizes:
            return ""
        # a number has 4 bytes; the smallest site's step is drowned first
        ratio = noise_of_privacy(self.rounds, min(sizes), self._sent / 4)
        times = f"{float(f'{ratio:.1g}'):,g} times"
        cost = "would drown what it learns" if ratio > 1 else "would cost accuracy"
        return (
            f"hiding every row (epsilon {EPSILON:g}) takes noise {times} as long as a step of the smallest "
            f"site, {min(sizes):,} rows, which {cost}."
        )

    def _next(self) -> str:
        """Return what would settle an open question, or how to go on."""
        helps = [part for part in self.more or () if part.gain and self._outlook(part).endswith("may help")]
        hints = [self._outlook(part) for part in helps]
        if self.pays == "cannot be told" and (settling := self._settling()):
            hints.insert(0, settling)
        if self._is_useless:
            balanced = self.imbalance and self.metric == "accuracy"
            way = "judge with --set evaluate.metrics='[\"balanced_accuracy\"]'" if balanced else "give other columns"
            return "; ".join([*hints, f"{way}, or more rows, before any run"])
        run = f"piebald run {self.folder / RECIPE}" if self.folder else "piebald.run(advice.recipe, clients, model)"
        return "; ".join([*hints, run])

    @property
    def _is_useless(self) -> bool:
        """True if the recommendation is not clearly better than one answer for every row."""
        plain = self.against_naive
        return plain is not None and plain.naive is not None and not plain.beats_naive

    @property
    def _may_be_of_use(self) -> bool:
        """True if it is open whether the recommendation is better than one answer for every row, by a point or more."""
        lead = None if self.against_naive is None else self.against_naive.over_naive
        if lead is None or lead.error is None:
            return True  # nothing is known of it
        gain = lead.mean if self.higher_is_better else -lead.mean
        return gain + 2 * lead.error > nearness(self.metric, self.verdict.best)

    def _settling(self) -> str:
        """Return how many more rows or clients would find a difference that matters four times in five."""
        evidence = self.evidence
        near = nearness(self.metric, self.verdict.best)
        # three points first: if even they could not be found, one point is out of reach for now
        sizes = [gain for gain in (3 * near, near) if evidence.error and evidence.error * FOUND > gain]
        if evidence.error is None or not sizes:
            return ""
        rows = sum(client.rows or 0 for client in self.clients) if evidence.noise == "rows" else len(self.clients)
        # standard errors fall with the root of the rows
        missing = rows * ((FOUND * evidence.error / sizes[0]) ** 2 - 1)
        unit = f"{evidence.rows} rows" if evidence.noise == "rows" else "clients"
        return f"{round_up(missing):,} more {unit} would settle {self._points(sizes[0])}" if rows else ""

    # --------------------------------------------------------------------------------------------------- the details

    def details(self) -> str:
        """All that was measured, for whoever asks for more than a screen."""
        return "\n".join(row for line in self.paragraphs() for row in wrap(line)) + "\n"

    def paragraphs(self) -> list[str]:
        """All that was measured, in sentences."""
        lines = [f"On validation rows: {self.verdict.sentence()}.", self.verdict.meaning(), self.imbalance]
        if self.recommended != self.best:
            lines.append(
                f"{self.best} has the best mean; traffic is dear, and {self.recommended} is within one standard error "
                f"and one {self._unit} of it, and sends less than half as much."
            )
        if self.probability is not None:
            lines.append(
                f"{self.recommended} is within one {self._unit} of the best tried with a probability of "
                f"{100 * self.probability:.0f} %."
            )
        lines += [*self.reasons, *self.odd, self._ensemble_part(), self._ensemble_price()]
        lines += [self._distilled_price(), *self._more_lines()]
        lines += [*self._loser_lines(), *self._test_lines()]
        return [line for line in lines if line]

    def amount(self, gain: Difference) -> str:
        """A difference with its interval, in words."""
        sign = 1 if self.higher_is_better else -1
        # a loss that falls is a gain, so its interval is turned around
        low, high = sorted((sign * gain.low, sign * gain.high))
        error = f"; standard error for other clients {self._points(gain.error)}" if gain.error else ""
        if gain.noise == "rows":
            ends = f"{self._points(low, True)} to {self._points(high, True)}"
            return f"{self._points(sign * gain.mean, True)} (95 % interval for other rows of these clients {ends})"
        if gain.seeds == 1:
            return f"{self._points(sign * gain.mean, True)} (one seed{error})"
        kind = "95 % interval for clients and seeds" if gain.kind == "interval" else "range over seeds"
        # an interval already says what its standard error would
        error = "" if gain.kind == "interval" else error
        ends = f"{self._points(low, True)} to {self._points(high, True)}"
        return f"{self._points(sign * gain.mean, True)} ({kind} {ends}{error})"

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        values: dict[str, Any] = to_jsonable_python({
            **{name: getattr(self, name) for name in _KEPT},
            "headline": self.headline(),
            "answer": {heading: text for heading, text, _ in self.parts() if text},
            "verdict": self.verdict.plain(),
            "against_naive": None if self.against_naive is None else self.against_naive.plain(),
            "probability_within_one_point": self.probability,
            "gain": {"alone": self.gain_alone, "together": self.gain_together},
            "more_data": self.more,
            "methods": list(self.tried),
            "tested": {
                checked.label: {
                    "mean": checked.scores.mean,
                    "clients": dict(zip(checked.scores.clients, _by_client(checked), strict=True)),
                }
                for checked in self.tested
            },
            "ensemble": None if self.ensemble is None else self.ensemble.plain(),
            "distilled": None if self.distilled is None else self.distilled.plain(),
            "plain_alone": self._plain_alone(),
            "recipe": self.recipe.model_dump(),
        })  # fmt: skip
        return values

    def _plain_alone(self) -> dict[str, Any] | None:
        """The plain model that is better than Local, with its means."""
        plain = self.plain_alone
        if plain is None:
            return None
        test = None if plain.test is None else plain.test.mean
        return {"name": plain.name, "validation": plain.validation[plain.name].mean, "test": test}

    def toml(self) -> str:
        """The recommendation as an experiment file, which `piebald run` and `piebald up` take.

        Where the search was started from Python, data, model and partition are for the user to write.
        """
        head = f"# {printable(self.headline())}\n# Chosen by validation rows; see answer.json.\n"
        # printable, since a client's name with a line break would become a setting of the file
        head += "".join(f"# {printable(client)}: stay alone\n" for client in self.better_alone)
        length = {"rounds": self.best_rounds or self.rounds} | ({"keep": self.keep} if self.keep else {})
        table = self._experiment(length, self.recipe)
        if table is None:
            head += "# Write [data], [partition] and [model] yourself: the search was started from Python.\n"
            table = {**length, "recipe": _section(self.recipe)}
        return head + dumps(table)

    def _experiment(self, length: Mapping[str, Any], recipe: Recipe) -> dict[str, Any] | None:
        """A recipe in an experiment file as plain values, None where the search was started from Python."""
        if self.settings is None:
            return None
        # sections of the search: what is recommended is run once
        left_out = ("recipe", "recipes", "grid", "tune", "advise", "seeds", "out", "label", "rounds", "stop")
        table = {name: value for name, value in self.settings.items() if name not in left_out}
        return {**length, **table, "seed": self.seeds[0], "recipe": _section(recipe)}

    def save(self, folder: Path) -> None:
        """Write answer.json, answer.html, recommended.toml and, where there is one, the ensemble into a folder."""
        # the page comes last, so that whoever sees it finds the files that it names
        write_private(folder / "answer.json", json.dumps(self.plain(), indent=1, ensure_ascii=False), lasting=False)
        write_private(folder / RECIPE, self.toml(), lasting=False)
        settings_of = partial(self._experiment, {"rounds": self.rounds})
        for result, name in ((self.ensemble, ENSEMBLE), (self.distilled, DISTILLED)):
            if result is not None and self.folder is not None:
                result.save(folder / name, settings_of)
        write_private(folder / "answer.html", self.page(), lasting=False)

    def page(self) -> str:
        """The answer as a page of HTML."""
        tables: dict[str, ResultTable] = {}
        if self.tested:
            gains = table(self.clients)
            gains.title = (
                f"Scores on test rows{', and the gain with its 95 % interval' if 'gain' in gains.columns else ''}."
            )
            tables["Each client"] = self._in_points(gains, self.clients[0].scores)
        tried = self.table()
        tables["What was tried"] = ResultTable(
            [[label, title_of(label), *row] for label, *row in (row.values() for row in tried)],
            ["method", "in words", *(_HEADINGS.get(name, name) for name in _COLUMNS[1:])],
            units={_HEADINGS.get(name, name): unit for name, unit in tried.units.items()},
            title=f"The best first, by {MetricFormat(self.metric).name} on validation rows; error is the standard "
            "error of how far a method is behind the best, for other clients.",
        )
        parts = {heading: text for heading, text, _ in self.parts()[1:] if text}
        return page(
            self.headline(), parts, self.clients, 100 if self.metric in SHARES else 1, self.paragraphs(), self.curves(),
            self._axis(), tables, self.look or "",
        )  # fmt: skip

    def _axis(self) -> Axis:
        """The axis of learning curves: it begins at what needs no model, where that is a share, and otherwise at 0."""
        shown = MetricFormat(self.metric)
        if self.metric not in SHARES:
            return 0.0, shown.value, ""
        naive = self.against_naive.naive if self.against_naive else None
        note = f"Always {naive[0]}: {shown.value(naive[1])}." if naive else ""
        return (naive[1] if naive else 0.0), "{:.0%}".format if shown.percent else "{:.2g}".format, note

    def curves(self) -> dict[str, dict[str, float]]:
        """The learning curves of the recommendation on validation rows: over rounds, rows and clients."""
        name = MetricFormat(self.metric).name
        curves = {f"{name} after so many rounds": {f"{rounds:,}": value for rounds, value in self.curve.items()}}
        for part in self.more or ():
            of_all = "the training rows" if part.what == "rows" else "the clients"
            curves[f"{name} with a part of {of_all}"] = {
                "all" if share == 1 else f"{100 * share:g} %": value for share, value in part.points.items()
            }
        return curves

    def table(self) -> ResultTable:
        """Return the methods that were tried, the best first, below the answer and above what else is to be said."""
        tried = self._in_points(self.tried.only(*_COLUMNS), ("score",))
        tried.title = self.headline()
        tried.notes = tuple(f"{heading}: {text}" for heading, text, _ in self.parts()[1:] if text)
        return tried

    def __repr__(self) -> str:
        return f"<Advice: {self.headline()}>"

    def _in_points(self, table: ResultTable, scores: Iterable[str]) -> ResultTable:
        """Return a table with scores in per cent and differences in points, where the metric is a share."""
        units = {**dict.fromkeys(_DIFFERENCES, "points"), **dict.fromkeys(scores, "%")} if self.metric in SHARES else {}
        rows = [
            {
                name: round(100 * value, 1) if name in units and value is not None else value
                for name, value in row.items()
            }
            for row in table
        ]
        return ResultTable(rows, table.columns, title=table.title, units=units)

    def _points(self, value: float, signed: bool = False, unit: str = " points") -> str:
        return in_points(self.metric, value, signed, unit)

    @property
    def _unit(self) -> str:
        """The difference that counts as near: a point, or a hundredth of the best's mean if the metric is no share."""
        return "point" if self.metric in SHARES else "hundredth"

    def _outlook(self, part: More) -> str:
        assert part.gain is not None  # only of what was tried is there an outlook
        # of the last value: a hundredth of a loss at the start would be a large part of it at the end
        near = nearness(self.metric, list(self.curve.values())[-1])
        return outlook(f"more {part.what}", part.gain, self.higher_is_better, near)

    def _ensemble_part(self) -> str:
        """Return what the mean of several runs of one seed reaches, beside the recommendation under that seed."""
        if self.ensemble is None:
            return ""
        score = MetricFormat(self.metric).value(self.ensemble.score)
        models = plural(self.ensemble.most, "model")
        rows = f"{self.ensemble.rows} rows, one seed"
        one = "" if self.distilled is None else f", one model distilled from it {self._distilled_score}"
        return f"the mean of {models} has {score} on {rows}{one}; against {self._lead_of(self.ensemble)}."

    def _lead_of(self, found: Ensemble | Distilled) -> str:
        """Return what the ensemble, or one model that was distilled from it, gains against the recommendation."""
        gain, sign = found.gain, 1 if self.higher_is_better else -1
        low, high = sorted((sign * gain.low, sign * gain.high)) if gain.kind == "interval" else (None, None)
        return f"{self.recommended} {self._by_chance(sign * gain.mean, low, high, gain.p < ERROR_RATE, gain.noise)}"

    @property
    def _distilled_score(self) -> str:
        return "" if self.distilled is None else MetricFormat(self.metric).value(self.distilled.score)

    def _distilled_price(self) -> str:
        """Return what the model is that the ensemble was distilled into, and what it costs."""
        if (found := self.distilled) is None:
            return ""
        use = f"  piebald predict {self.folder / DISTILLED} ROWS --client NAME asks it." if self.folder else ""
        return (
            f"Distilled into one model, {found.runner.name}: {self._distilled_score} on {found.rows} rows, one seed; "
            f"against {self._lead_of(found)}.  Each client keeps and asks one model, and a run sends "
            f"{size(found.cost.bytes)}.{use}"
        )

    def _ensemble_price(self) -> str:
        """Return the members of the ensemble, what they cost, and how their mean is taken."""
        if self.ensemble is None:
            return ""
        members = [f"{x.name} ({100 * x.shares.mean():.0f} %)" for x in self.ensemble.members if x.shares.any()]
        # training alone sends nothing, and nothing has no multiple
        times = self.ensemble.bytes / self.cost.bytes if self.cost.bytes else 0.0
        sent = f", {times:.2g} times as much as {self.recommended}" if times else ""
        use = f"  piebald predict {self.folder / ENSEMBLE} ROWS --client NAME takes the mean." if self.folder else ""
        return (
            f"The ensemble: {names(members)}.  Each client keeps and asks {plural(self.ensemble.most, 'model')} at "
            f"most, and a run of all sends {size(round(self.ensemble.bytes))}{sent}.{use}"
        )

    def _more_lines(self) -> list[str]:
        if self.more is None:
            return ["What more rows or clients would change was not tried: leave out more_data = false."]
        return sentences(self.more, self.recommended, self.amount, self._outlook)

    def _loser_lines(self) -> list[str]:
        """Return the clients that lose by joining on validation rows, and what is best for them; of many, some."""
        lines = [
            f"On validation rows {loser.client} loses {self._points(loser.loss)} by joining (standard error "
            f"{self._points(loser.error)}): give it {loser.instead}, which reaches {plain_cell(loser.score)}."
            for loser in self.losers[:_NAMED]
        ]
        if len(self.losers) > _NAMED:
            lines.append(
                f"{len(self.losers) - _NAMED:,} more clients lose by joining: `losers` of answer.json has them."
            )
        return lines

    def _test_lines(self) -> list[str]:
        if not self.tested:
            return ["No client has test rows, so nothing was checked after the choice."]
        listed = names([checked.label for checked in self.tested])
        lines = [f"Test rows were opened once, after the choice, for {listed} only."]
        for checked in self.tested:
            gain = self.tested_gain(checked.label)
            if gain is not None:
                lines.append(f"{self.recommended} against {checked.label} on test rows: {self.amount(gain)}.")
        return lines


def noise_of_privacy(rounds: int, rows: int, numbers: float) -> float:
    """Return the length of the noise that hides every row of a site, in lengths of its clipped mean gradient.

    By zero-concentrated differential privacy (Bun and Steinke 2016): noise with the multiplier s on the sum of a whole
    part's clipped gradients in each round spends rho = rounds / (2 s^2) in all, and epsilon = rho + 2 sqrt(rho ln(1 /
    delta)) with delta = 1e-5.  Noise of this deviation in each of d numbers has a length of about s sqrt(d), and the
    sum of n gradients one of up to n.

    Args:
        rounds: in each of which the site makes one step at least.
        rows: of the site.
        numbers: that it sends.

    Examples:
        >>> round(noise_of_privacy(rounds=20, rows=100, numbers=3000), 1)
        4.2
    """
    log = math.log(1 / _DELTA)
    # epsilon = rho + 2 sqrt(rho log) solved for rho, a quadratic equation in its root
    rho = (math.sqrt(log + EPSILON) - math.sqrt(log)) ** 2
    return math.sqrt(rounds / (2 * rho) * numbers) / rows


def round_up(number: float) -> int:
    """Return a number rounded up to two digits.

    Examples:
        >>> round_up(381.2), round_up(7.1)
        (390, 8)
    """
    unit: int = 10 ** max(0, math.floor(math.log10(max(number, 1))) - 1)
    return math.ceil(number / unit) * unit


def _section(recipe: Recipe) -> dict[str, Any]:
    """A recipe as the section of an experiment file."""
    return dict(tomllib.loads(recipes.toml(recipe))["recipe"])


def _by_client(checked: Checked) -> list[float | None]:
    return [None if np.isnan(mean) else float(mean) for mean in checked.scores.client_means()]
