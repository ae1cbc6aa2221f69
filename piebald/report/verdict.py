"""The verdict on methods: one object, and one sentence, for terminal, page, answer, notebook and JSON.

First comes what is gained against training alone and against an answer that needs no model, then who leads, then who is
not clearly behind.  A method is clearly behind where the leader or another method is clearly better; two methods that
are not clearly behind do not clearly differ from each other.

Two methods are compared on the clients and seeds that both have: row by row for the clients at hand
(`report.row_noise`) where the noise of rows is known, otherwise for other clients (`report.paired`).  The leader is
chosen by the same scores that it is compared by, and of equal methods the best and the worst differ most by chance, so
intervals and p values hold for all pairs of methods together (Bonferroni).  So where no method is better than another,
any is called clearly behind in at most 5 % of cases.  One or two seeds say nothing of others: what is said then holds
for these runs.

Sources: Tukey, *The problem of multiple comparisons*, 1953, for all pairs; Berger, *Multiparameter hypothesis testing
and acceptance sampling*, Technometrics 1982.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from piebald.core.arguments import Count, checked
from piebald.report.crossed_effects import ERROR_RATE, SEEDS_FOR_INTERVAL
from piebald.report.page.wording import MetricFormat, cheapest, megabytes, names, plural, standing
from piebald.report.paired import Difference, Scores, difference, ranking
from piebald.report.row_noise import row_difference

_FEW = 5  # clients, below which nothing can be said of others


@checked
def compared(a: Scores, b: Scores, comparisons: Count = 1) -> Difference | None:
    """The mean of `a` minus that of `b`: for other rows of these clients where that is known, else for other clients.

    Args:
        a, b: scores; clients are matched by name, seeds by number.
        comparisons: the number of comparisons that the interval and p are to hold for together.

    Returns:
        None where they share no client and seed.
    """
    return row_difference(a, b, comparisons=comparisons) or difference(a, b, comparisons=comparisons)


@checked
def leads(scores: Mapping[str, Scores], higher_is_better: bool = True, extra: int = 0) -> dict[str, Difference | None]:
    """The mean of the leader minus that of each other method, with simultaneous intervals and p values.

    Args:
        scores: scores by label.
        higher_is_better: whether a larger value of the metric is better.
        extra: comparisons of the leader with others than these.

    Returns:
        the leader first, with a difference of zero to itself, then the others by their means; None where two methods
        share no client and seed.
    """
    order = ranking(scores, higher_is_better)
    comparisons = max(1, _all_pairs(len(order), extra))  # a leader alone is compared with itself
    return {label: compared(scores[order[0]], scores[label], comparisons) for label in order}


def _all_pairs(methods: int, extra: int = 0) -> int:
    """The number of comparisons of each two methods, and some more."""
    return methods * (methods - 1) // 2 + extra


def _clearly_behind(scores: Mapping[str, Scores], order: Sequence[str], comparisons: int) -> list[str]:
    """The methods that one before them in an order, the best mean first, is clearly better than."""
    pairs = itertools.combinations(order, 2)
    behind = {
        worse for better, worse in pairs
        if (gap := compared(scores[better], scores[worse], comparisons)) is not None and gap.p < ERROR_RATE
    }  # fmt: skip
    return [label for label in order if label in behind]


@checked
def not_clearly_behind(scores: Mapping[str, Scores], higher_is_better: bool = True) -> list[str]:
    """The leader, and all methods that neither it nor another is clearly better than, the best mean first.

    Without scores that pair with those of another a method is not clearly behind it either.

    Examples:
        >>> import numpy as np
        >>> rng, clients = np.random.default_rng(0), [f"site-{number}" for number in range(20)]
        >>> base = rng.uniform(0.4, 0.6, (3, 20))
        >>> values = {"local": base, "fedavg": base + 0.2, "fedprox": base + 0.2 + rng.normal(0, 0.05, (3, 20))}
        >>> sorted(not_clearly_behind({label: Scores(table, clients) for label, table in values.items()}))
        ['fedavg', 'fedprox']
    """
    order = ranking(scores, higher_is_better)
    behind = _clearly_behind(scores, order, _all_pairs(len(order)))
    return [label for label in order if label not in behind]


def _over_all(rivals: Mapping[str, Scores], leader: Scores, comparisons: int) -> Difference | None:
    """The leader's mean minus that of the first rival, with the largest p of those against all of them.

    The best of them by its mean need not be the hardest to beat beyond chance: the leader beats all of them only if it
    beats each (an intersection-union test), which counts as one comparison.
    """
    gaps = [compared(leader, table, comparisons) for table in rivals.values()]
    largest = max((gap.p for gap in gaps if gap is not None), default=1.0)
    return replace(gaps[0], p=largest) if gaps and gaps[0] is not None else None


@dataclass(frozen=True)
class ScoreVerdict:
    """The verdict of scores on methods.

    Attributes:
        metric, higher_is_better: of the scores.
        leads: of the leader, the first one, over each method, see `leads`.
        best: the mean of the leader.
        alone: the label of training alone, None where it was not tried.
        strong: the name and the mean of a plain model that each client fits alone, which the leader is held against;
            None where it is held against training alone only.
        is_beside: whether training alone counts beside that plain model, as nothing has chosen between the two.
        over_alone: the leader's mean minus that of the better of those that are alone; its p is the largest of those
            against them.  None where the leader is the only one of them.
        naive: the name and the mean of the best answer that needs no model, None where there is none.
        over_naive: the leader's mean minus that answer's; its p is the largest of those against all such answers.
        below_naive: the methods whose mean is worse than that answer's, with their means.
        behind: the methods that are clearly behind the leader or another.
        comparisons: of methods with each other, for all of which together intervals and p values hold.
        sent: bytes that each method sends, both ways; None where that is not known.
        unscored: the methods without any score, of which nothing can be said.
    """

    metric: str
    higher_is_better: bool
    leads: Mapping[str, Difference | None]
    best: float
    alone: str | None = None
    strong: tuple[str, float] | None = None
    is_beside: bool = False
    over_alone: Difference | None = None
    naive: tuple[str, float] | None = None
    over_naive: Difference | None = None
    below_naive: Mapping[str, float] = field(default_factory=dict)
    behind: Sequence[str] = ()
    comparisons: int = 1
    sent: Mapping[str, float | None] = field(default_factory=dict)
    unscored: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        scores: Mapping[str, Scores],
        metric: str,
        higher_is_better: bool,
        alone: str | None = None,
        naive: Mapping[str, Scores] | None = None,
        sent: Mapping[str, float | None] | None = None,
        tried: Sequence[str] = (),
        best_alone: Mapping[str, Scores] | None = None,
    ) -> ScoreVerdict | None:
        """The verdict on scores by label; None where there are none.

        Args:
            scores: of the methods.
            metric, higher_is_better, alone, sent: see the attributes.
            naive: scores of answers that need no model, by their names.
            tried: all methods, also those that are not in `scores`.
            best_alone: scores of what is best alone, chosen by other rows than these: `alone`, a plain model that each
                client fits alone, by its name, or both where nothing has chosen between them; by default `alone`.
        """
        plain = {name: table for name, table in (naive or {}).items() if table.present}
        over = leads(scores, higher_is_better, extra=min(1, len(plain)))
        if not over:
            return None
        leader = next(iter(over))
        means = {label: scores[label].mean for label in over}
        plain = {name: plain[name] for name in ranking(plain, higher_is_better)}
        best_naive = next(((name, table.mean) for name, table in plain.items()), None)
        sign = 1 if higher_is_better else -1
        worse = {} if best_naive is None else {x: m for x, m in means.items() if sign * m < sign * best_naive[1]}
        # every answer that needs no model must be beaten, so they count as one comparison, as those that are alone do
        comparisons = _all_pairs(len(over), min(1, len(plain)))
        alone = alone if alone in over else None
        by_itself = {} if alone is None else best_alone or {alone: scores[alone]}
        strong = next(((name, table.mean) for name, table in by_itself.items() if name != alone), None)
        # of two the better is the one to beat
        order = sorted((x for x in by_itself if x != leader), key=lambda x: -sign * by_itself[x].mean)
        rivals = {name: by_itself[name] for name in order}
        unscored = [label for label in dict.fromkeys([*scores, *tried]) if label not in over]
        return cls(
            metric, higher_is_better, over, means[leader], alone, strong, len(rivals) > 1,
            _over_all(rivals, scores[leader], comparisons), best_naive, _over_all(plain, scores[leader], comparisons),
            worse, _clearly_behind(scores, list(over), comparisons), comparisons, sent or {}, unscored,
        )  # fmt: skip

    @property
    def leader(self) -> str:
        """The label with the best mean."""
        return next(iter(self.leads))

    @property
    def near(self) -> list[str]:
        """The leader and all that are not clearly behind, the best mean first."""
        return [label for label in self.leads if label not in self.behind]

    @property
    def incomparable(self) -> list[str]:
        """The methods that share no client and seed with the leader, of which nothing can be said beside it."""
        return [label for label, lead in self.leads.items() if lead is None and label != self.leader]

    @property
    def beats_naive(self) -> bool | None:
        """True where the leader is clearly better than every answer that needs no model; None where there is none."""
        return None if self.naive is None else self._is_gain(self.over_naive)

    @property
    def too_few(self) -> bool:
        """True if so few clients were compared, and only as clients, that nothing can be said."""
        others = [lead for label, lead in self.leads.items() if label != self.leader and lead is not None]
        return bool(others) and not self.behind and all(x.noise == "clients" and x.clients < _FEW for x in others)

    def sentence(self) -> str:
        """The verdict in words, without a full stop at the end.

        Examples:
            >>> scores = {"ditto": Scores([[0.75, 0.75]], "ab"), "local": Scores([[0.5, 0.5]], "ab")}
            >>> ScoreVerdict.of(scores, "accuracy", True, "local").sentence()
            'ditto leads at 75.0% accuracy; 2 clients are too few to say who is behind it'
        """
        shown = MetricFormat(self.metric)
        value = f"{shown.value(self.best)} {shown.name}"
        gains = " and ".join(filter(None, (self._alone_clause(shown), self._naive_gain(shown))))
        if len(self.leads) == 1:
            first = f"{self.leader} ends at {value}" + (f", {gains}{self._runs}" if gains else "")
        else:
            first = (
                f"{self.leader} is {gains}{self._runs}; it leads at {value}"
                if gains
                else f"{self.leader} leads at {value}"
            )
        rest = [self._near_clause()] if len(self.leads) > 1 else []
        if self.unscored:
            rest.append(f"{names(self.unscored)} {'has' if len(self.unscored) == 1 else 'have'} no score")
        return "; ".join(filter(None, [self._doubt(shown), first, *rest]))

    def title(self) -> str:
        """The verdict in at most about twenty words, without intervals, for the top of a page.

        Examples:
            >>> scores = {"ditto": Scores([[0.75, 0.75]], "ab"), "local": Scores([[0.5, 0.5]], "ab")}
            >>> ScoreVerdict.of(scores, "accuracy", True, "local").title()
            'ditto leads at 75.0% accuracy; 2 clients are too few to say who is behind it'
        """
        shown = MetricFormat(self.metric)
        value = f"{shown.value(self.best)} {shown.name}"
        if rivals := self._rivals(shown):
            return f"No method is clearly better than {' or '.join(rivals)}"
        if self.too_few:
            return f"{self.leader} leads at {value}; {self._near_clause()}"
        lead, base = self.over_alone, self._alone_name
        if lead is None or not self._is_gain(lead):
            lead, base = self.over_naive, f"always {self.naive[0]}" if self.naive else ""
        gain = f", {shown.size(abs(lead.mean))}{shown.points} better than {base}{self._runs}" if lead else ""
        verb = "leads" if len(self.leads) > 1 and self.behind else "ends"
        return f"{self.leader} {verb} at {value}{gain}"

    @property
    def _alone_name(self) -> str:
        """Those that are alone which the leader is held against, in words."""
        if self.strong is None:
            return "training alone"
        plain = f"{self.strong[0]} of each client alone ({MetricFormat(self.metric).value(self.strong[1])})"
        return f"the better of training alone and {plain}" if self.is_beside else plain

    def _is_gain(self, lead: Difference | None) -> bool:
        """Return whether the leader is clearly better, by a difference to another."""
        return lead is not None and lead.p < ERROR_RATE and (lead.mean > 0) == self.higher_is_better

    def _alone_clause(self, shown: MetricFormat) -> str:
        lead = self.over_alone
        return f"{_size(lead, shown)} better than {self._alone_name}" if lead and self._is_gain(lead) else ""

    def _naive_gain(self, shown: MetricFormat) -> str:
        if self.naive is None or self.over_naive is None or not self.beats_naive:
            return ""
        return f"{_size(self.over_naive, shown)} better than always {self.naive[0]} ({shown.value(self.naive[1])})"

    def _doubt(self, shown: MetricFormat) -> str:
        """The comparison that no method clearly wins."""
        if not (rivals := self._rivals(shown)):
            return ""
        told = {label: shown.value(mean) for label, mean in self.below_naive.items()}
        answer = "" if self.naive is None else shown.value(self.naive[1])
        # a mean that is written as the answer's is not called worse than it
        worse = [f"{label} ({mean})" for label, mean in told.items() if mean != answer]
        below = f"; worse than that: {names(worse)}" if worse and self.naive is not None else ""
        return f"No method is clearly better than {' or '.join(rivals)}{below}"

    def _rivals(self, shown: MetricFormat) -> list[str]:
        """Training alone and the best answer without a model, where the leader is not clearly better."""
        rivals = []
        beside = self.alone is not None and self.alone not in self.incomparable and len(self.leads) > 1
        if beside and not self._is_gain(self.over_alone) and not self.too_few:
            rivals.append(self._alone_name)
        if self.naive is not None and not self.beats_naive:
            rivals.append(f"always {self.naive[0]} ({shown.value(self.naive[1])})")
        return rivals

    def _near_clause(self) -> str:
        clauses = [self._compared_clause()] if len(self.incomparable) < len(self.leads) - 1 else []
        verb = "shares" if len(self.incomparable) == 1 else "share"
        clauses += [f"{names(self.incomparable)} {verb} no client and seed with it"] if self.incomparable else []
        return "; ".join(clauses)

    def _compared_clause(self) -> str:
        """The clause on the methods that are not clearly behind the leader, or else on those that are."""
        near, behind = [label for label in self.near[1:] if label not in self.incomparable], self.behind
        if self.too_few:
            lead = next(lead for label, lead in self.leads.items() if label != self.leader and lead is not None)
            verb = "is" if lead.clients == 1 else "are"
            return f"{plural(lead.clients, 'client')} {verb} too few to say who is behind it"
        if not near:
            return standing(behind, clearly=True)
        least = cheapest([self.leader, *near], self.sent)
        clause = standing(sorted(near, key=lambda label: label != least), clearly=False)
        if least is None or least == self.leader:
            return clause
        amount = self.sent[least] or 0.0
        return f"{clause}, and {least} sends {f'least, {megabytes(amount / 1e6)} MB' if amount else 'nothing'}"

    def meaning(self) -> str:
        """The scope of intervals and of "clearly"; empty where nothing was compared."""
        others = [self.over_naive, *(lead for label, lead in self.leads.items() if label != self.leader)]
        noises = {lead.noise for lead in others if lead is not None}
        if not noises:
            return ""
        of = {"rows": "other rows of these clients", "clients": "other clients"}
        together = f", all {self.comparisons} comparisons together" if self.comparisons > 1 else ""
        runs = f",{self._runs}" if self._runs else ""
        chance = " and ".join(of[noise] for noise in sorted(noises))
        return f"Clearly: beyond the chance of {chance}{runs}{together} (95 %)."

    @property
    def _runs(self) -> str:
        """What limits the verdict where its seeds are too few to say anything of others; empty where they are not."""
        others = [lead for label, lead in self.leads.items() if label != self.leader] + [self.over_naive]
        seeds = [lead.seeds for lead in others if lead is not None]
        return " for these runs" if seeds and min(seeds) < SEEDS_FOR_INTERVAL else ""

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "sentence": self.sentence(),
            "leader": self.leader,
            "not_clearly_behind": [label for label in self.near[1:] if label not in self.incomparable],
            "clearly_behind": self.behind,
            "naive": None if self.naive is None else {"answer": self.naive[0], self.metric: self.naive[1]},
            "beats_naive": self.beats_naive,
            "strong_alone": None if self.strong is None else {"model": self.strong[0], self.metric: self.strong[1]},
            "unscored": list(self.unscored),
        }


def _size(lead: Difference, shown: MetricFormat) -> str:
    """The size of a gain with its interval."""
    # an interval across 0 keeps its signs, of which one says that the gain may be a loss
    low, high = sorted((abs(lead.low), abs(lead.high))) if lead.low * lead.high > 0 else (lead.low, lead.high)
    ends = f" ({shown.size(low)} to {shown.size(high)})" if lead.kind == "interval" else ""
    return f"{shown.size(abs(lead.mean))}{shown.points}{ends}"
