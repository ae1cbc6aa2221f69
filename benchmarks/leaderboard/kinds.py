"""What pays on which kind of unlikeness: the section of the page for a reader who has one federation in mind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binom
from standings import Standing

P = 0.05
KINDS = {
    "Inputs are unlike, one answer would do": ("mnist-writers", "har-subjects", "shakespeare", "office", "traffic"),
    "Few rows of each client, and answers of its own": ("heart", "exam", "contraception", "lecturers", "tcga-brca"),
    "Labels are unlike": ("cifar10-dirichlet", "cifar10-disjoint"),
}


@dataclass(frozen=True)
class FamilyGain:
    """A family of methods on federations of one kind.

    Attributes:
        median: points over training alone, the median over its methods on each federation, the mean over federations.
        above, below: comparisons of one method with training alone on one federation that are beyond noise.
        all: comparisons.
    """

    median: float
    above: int
    below: int
    all: int

    @classmethod
    def of(cls, methods: Sequence[str], found: Sequence[Standing]) -> FamilyGain:
        """The gains of these methods."""
        gains = [[gain for name in methods if name in one.results and (gain := one.gain(name))] for one in found]
        medians = [float(np.median([gain.mean for gain in one])) for one in gains if one]
        every = [gain for one in gains for gain in one]
        above = sum(gain.mean > 0 and gain.p < P for gain in every)
        below = sum(gain.mean < 0 and gain.p < P for gain in every)
        return cls(100 * float(np.mean(medians)) if medians else float("nan"), above, below, len(every))

    @property
    def pays(self) -> bool:
        """Whether more comparisons are above than luck makes of so many, and than are below."""
        return self.above > self.below and _beyond_luck(self.above, self.all)

    @property
    def costs(self) -> bool:
        """Whether more comparisons are below than luck makes of so many, and than are above."""
        return self.below > self.above and _beyond_luck(self.below, self.all)

    @property
    def words(self) -> str:
        """For a cell of the table."""
        return f"{self.median:+.1f} ({self.above} above, {self.below} below, of {self.all})"


def section(found: Sequence[Standing], families: Mapping[str, Sequence[str]]) -> list[str]:
    """The section, as lines; empty where no federation is of a kind."""
    there = {kind: [one for one in found if one.federation.name in names] for kind, names in KINDS.items()}
    gains = {
        kind: {family: FamilyGain.of(methods, own) for family, methods in families.items()}
        for kind, own in there.items()
        if own
    }
    if not gains:
        return []
    lines = [
        "## What pays on which unlikeness", "",
        "Points of mean test accuracy over training alone, of the method in the middle of each family, so that a "
        "family with many methods has no advantage.  In brackets: how many comparisons of a method with training "
        f"alone, on one federation, are beyond noise (p < {P:g}, paired over clients and seeds); a family is said to "
        "pay, or to cost, where these are more than luck makes of so many.", "",
    ]  # fmt: skip
    lines += [f"| family | {' | '.join(gains)} |", "|---" * (len(gains) + 1) + "|"]
    lines += [f"| {family} | {' | '.join(own[family].words for own in gains.values())} |" for family in families]
    for kind, own in gains.items():
        named = ", ".join(one.federation.words for one in there[kind])
        lines += ["", f"**{kind}** ({named}).  {_verdict(own)}"]
    return [*lines, ""]


def _verdict(gains: Mapping[str, FamilyGain]) -> str:
    """What pays and what costs, in sentences."""
    pays = {family: one for family, one in gains.items() if one.pays}
    costs = {family: one for family, one in gains.items() if one.costs}
    others = [f"*{family}*" for family in gains if family not in pays and family not in costs]
    text = []
    if pays:
        text.append(f"Training together pays, the most first: {_named(pays)}.")
    else:
        text.append("Nothing is shown to be better than training alone, which is the simplest: begin with it.")
    if costs:
        text.append(f"Worse than training alone: {_named(costs)}.")
    if others:
        text.append(f"Not told apart from training alone: {', '.join(others)}.")
    return "  ".join(text)


def _named(gains: Mapping[str, FamilyGain]) -> str:
    """Families, the largest gain first."""
    return ", ".join(f"*{family}*" for family in sorted(gains, key=lambda family: -gains[family].median))


def _beyond_luck(count: int, among: int) -> bool:
    """Whether so many of some comparisons are rarely beyond noise, on one side, where nothing differs."""
    return bool(count and binom.sf(count - 1, among, P / 2) < P)
