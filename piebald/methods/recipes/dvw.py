"""Distributed validation weighting, synchronous and asynchronous, with a fixed or an adaptive update frequency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack

from piebald.methods.aggregation.dvw import Dvw
from piebald.methods.catalog.registry import CohortSize, Recipe, Sgd, SgdSettings, recipe
from piebald.methods.recipes.async_fedavg import METIS
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.scheduling.asynchronous import Asynchronous
from piebald.methods.server_optimizer.cached_average import CachedAverage
from piebald.methods.training.adaptive_frequency import AdaptiveFrequency, LearnerGroup

Score = Literal["micro_f1", "accuracy", "macro_f1", "geometric_mean", "matthews"]


@recipe(METIS, Sgd)
def sync_dvw(
    cohort: CohortSize = 1.0,
    score: Score = "micro_f1",
    evaluators: int | None = None,
    above_chance: bool = False,
    power: float = 1.0,
    **training: Unpack[SgdSettings],
) -> Recipe:
    """FedAvg with each model weighted by its score on the validation rows of all clients."""
    aggregation = Dvw(score=score, evaluators=evaluators, above_chance=above_chance, power=power)
    return fedavg(cohort, **training).with_(aggregation=aggregation)


@recipe(METIS, Sgd)
def async_dvw(
    cohort: CohortSize = 1.0,
    score: Score = "micro_f1",
    evaluators: int | None = None,
    above_chance: bool = False,
    power: float = 1.0,
    max_staleness: int | None = None,
    **training: Unpack[SgdSettings],
) -> Recipe:
    """Keep the mean of all clients' last models, weighted by validation scores, and update it at every result."""
    base = sync_dvw(cohort, score, evaluators, above_chance, power, **training)
    return base.with_(
        scheduling=Asynchronous(cohort=cohort, max_staleness=max_staleness), server_optimizer=CachedAverage()
    )


@recipe(METIS, AdaptiveFrequency)
def adaptive_dvw(
    cohort: CohortSize = 1.0,
    cycles: int = 20,
    vc_loss: float = 0.0,
    vc_tomb: int = 0,
    groups: Sequence[LearnerGroup | Mapping[str, Any]] = (),
    limit_staleness: bool = True,
    score: Score = "micro_f1",
    evaluators: int | None = None,
    above_chance: bool = False,
    power: float = 1.0,
    max_staleness: int | None = None,
    **training: Unpack[SgdSettings],
) -> Recipe:
    """`async_dvw` whose clients decide by their validation loss and staleness when to send their models."""
    base = async_dvw(cohort, score, evaluators, above_chance, power, max_staleness)
    trainer = AdaptiveFrequency(
        cycles=cycles, vc_loss=vc_loss, vc_tomb=vc_tomb, groups=groups, limit_staleness=limit_staleness, **training
    )
    return base.with_(training=trainer)
