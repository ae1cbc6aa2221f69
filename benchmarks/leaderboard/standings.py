"""What the runs say: for each federation the scores of each method with its chosen setting, and ranks over all."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from competition import FEDERATIONS, SEEDS, chosen, read, refused
from methods import ALONE, CENTRALISED, METHODS, TOGETHER
from numpy.typing import NDArray
from scipy.stats import friedmanchisquare, rankdata, studentized_range

sys.path.append(str(Path(__file__).parents[1] / "advise"))
from federations import Federation
from grid import RUNGS
from truth import SCALE

from piebald.report.paired import Difference, Scores, difference
from piebald.report.tables import worst_tenth
from piebald.report.verdict import not_clearly_behind

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Result:
    """A method on a federation, with its chosen setting.

    Attributes:
        entry: the setting, in words.
        scores: test accuracy in [0, 1] by seed and client.
        validation: mean validation accuracy after each rung, over seeds and clients.
        bytes, seconds, steps: of a run, the means over seeds.
    """

    entry: str
    scores: Scores
    validation: Floats
    bytes: float
    seconds: float
    steps: float

    @property
    def mean(self) -> float:
        """Mean test accuracy over seeds and clients."""
        return float(np.nanmean(self.scores.values))

    @property
    def clients(self) -> Floats:
        """Mean test accuracy of each client over seeds."""
        return np.asarray(np.nanmean(self.scores.values, axis=0))

    @property
    def worst_tenth(self) -> float:
        """Mean of the worst tenth of the clients."""
        return worst_tenth(np.sort(self.clients[~np.isnan(self.clients)]).tolist()) or math.nan

    def rounds_to(self, target: float) -> int | None:
        """Rounds after which the validation accuracy was at least so large, as far as it was measured."""
        return next((rung for rung, value in zip(RUNGS, self.validation, strict=True) if value >= target), None)


@dataclass(frozen=True, eq=False)
class Standing:
    """All methods on a federation.

    Attributes:
        federation: which one.
        results: by recipe; only methods whose runs with all seeds are there.
        refused: recipes that cannot be trained here, and why.
    """

    federation: Federation
    results: Mapping[str, Result]
    refused: Mapping[str, str]

    @property
    def federated(self) -> dict[str, Result]:
        """All but the centralised model, which no federation can have."""
        return {name: one for name, one in self.results.items() if name != CENTRALISED}

    @property
    def level_with_best(self) -> list[str]:
        """The best method and those that cannot be told apart from it, the best mean first."""
        return not_clearly_behind({name: one.scores for name, one in self.federated.items()})

    def gain(self, recipe: str, over: str = ALONE) -> Difference | None:
        """The paired difference to another method."""
        return difference(self.results[recipe].scores, self.results[over].scores)

    def better_than_alone(self, recipe: str) -> float:
        """Share of the clients that have a better model than alone, by their means over seeds."""
        own, alone = self.results[recipe].clients, self.results[ALONE].clients
        both = ~np.isnan(own) & ~np.isnan(alone)
        return float((own[both] > alone[both]).mean())


@dataclass(frozen=True)
class Ranks:
    """Ranks of methods over federations (Demsar 2006).

    Attributes:
        methods: recipes that every federation has, the best mean rank first.
        ranks: mean rank of each; ties share their ranks.
        critical: mean ranks that differ by less cannot be told apart (Nemenyi, 5 %).
        p: of Friedman's test that all are alike.
        federations: how many.
    """

    methods: tuple[str, ...]
    ranks: tuple[float, ...]
    critical: float
    p: float
    federations: int

    @classmethod
    def of(cls, standings: Sequence[Standing]) -> Ranks:
        """The ranks of the methods that all federations have, over the federations that all methods fit."""
        standings = [one for one in standings if not one.refused] or standings
        common = [m.name for m in METHODS if all(m.name in one.federated for one in standings)]
        table = np.array([[one.results[name].mean for name in common] for one in standings])
        ranks = rankdata(-table.round(6), axis=1).mean(axis=0)
        count, methods = table.shape
        reach = studentized_range.ppf(0.95, methods, np.inf) / math.sqrt(2)
        critical = float(reach * math.sqrt(methods * (methods + 1) / (6 * count)))
        order = np.argsort(ranks, kind="stable")
        p = float(friedmanchisquare(*table.T).pvalue)
        return cls(tuple(common[one] for one in order), tuple(float(ranks[one]) for one in order), critical, p, count)


def standings(folder: Path, seeds: tuple[int, ...] = SEEDS) -> list[Standing]:
    """The federations that have at least Local and FedAvg with all seeds."""
    found = []
    for federation in FEDERATIONS:
        lines = read(federation.name, folder)
        results = {}
        for method in METHODS:
            best = chosen(method, lines)
            own = [] if best is None else [lines.get((best.label, seed)) for seed in seeds]
            if best is not None and all(line is not None for line in own):
                results[method.name] = _result(best.label, [line for line in own if line is not None], seeds)
        if ALONE in results and TOGETHER in results:
            found.append(Standing(federation, results, refused(federation.name, folder)))
    return found


def _result(entry: str, lines: Sequence[dict[str, Any]], seeds: tuple[int, ...]) -> Result:
    test = np.array([line["test"] for line in lines], dtype=np.float64) / SCALE
    validation = np.array([line["validation"] for line in lines], dtype=np.float64) / SCALE
    names = [str(client) for client in range(test.shape[1])]
    return Result(
        entry=entry,
        scores=Scores(test, names, list(seeds)),
        validation=np.nanmean(validation, axis=(0, 2)),
        bytes=float(np.mean([line["bytes"] for line in lines])),
        seconds=float(np.mean([line["wall"] for line in lines])),
        steps=float(np.mean([line["steps"] for line in lines])),
    )
