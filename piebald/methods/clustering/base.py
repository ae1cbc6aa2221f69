"""The base class of clusterings, and what some of them do besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from piebald.contracts import Cohort, ServerContext
from piebald.contracts.component import Component
from piebald.core.errors import SettingError, shown

if TYPE_CHECKING:
    from torch import Tensor

    from piebald.contracts.model_spec import ModelSpec


class Clustering(Component):
    """Which clients are aggregated with which.

    What some clusterings do besides is asked for by type: `ChoosesMainCluster`, `SendsCandidates`, `JoinsClusters`,
    `MixesModels`.

    Attributes:
        requires_individual_updates: False where there is only one cluster, so that updates may be summed before.
        compares_changes: whether `assign` reads the individual changes in `Cohort.matrix`; if not, it may be None.
        from_current_model: True where models of members are averaged: changes count from their cluster's model.
    """

    axis = "clustering"
    requires_individual_updates: ClassVar[bool] = True
    compares_changes: ClassVar[bool] = True
    from_current_model: ClassVar[bool] = False

    def assign(self, cohort: Cohort, known: Mapping[int, int], context: ServerContext) -> list[int]:
        """Assign a cluster to each update; `known` are the clusters of clients seen before, others are in cluster 0.

        A cluster that is new begins with the mean of the models that its first members were sent.
        """
        raise NotImplementedError


def assigned(clustering: Clustering, cohort: Cohort, known: Mapping[int, int], context: ServerContext) -> list[int]:
    """The cluster of each update, see `Clustering.assign`.

    Raises:
        SettingError: the clustering returns something else.
    """
    found = clustering.assign(cohort, known, context)
    fine = isinstance(found, Sequence) and len(found) == len(cohort.clients)
    if not fine or not all(isinstance(one, int | np.integer) and one >= 0 for one in found):
        raise SettingError(
            f"clustering {clustering.kind!r} must return a cluster, a whole number of at least 0, for each of "
            f"{len(cohort.clients)} updates, got {shown(found)}"
        )
    return [int(one) for one in found]


@runtime_checkable
class ChoosesMainCluster(Protocol):
    """A clustering whose main cluster need not be number 0."""

    def main_cluster(self, state: Mapping[str, Any]) -> int:
        """The cluster whose model represents the run and that newcomers join, from the component's state."""


@runtime_checkable
class MixesModels(Protocol):
    """A clustering whose clients are sent other models than those that their clusters came to."""

    def mix(self, trained: Mapping[int, Tensor], context: ServerContext) -> dict[int, Tensor]:
        """The models [s] to send from now on, by cluster, after a step of some clusters.

        Args:
            trained: the models [s] that these clusters came to.
            context: of the clustering; what it keeps in the state is in checkpoints.
        """


@runtime_checkable
class SendsCandidates(Protocol):
    """A clustering whose clients choose among several models."""

    def candidates(self, models: Mapping[int, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
        """What a training task brings besides the client's own cluster model: "candidates" [K, s]."""


@runtime_checkable
class JoinsClusters(Protocol):
    """A clustering that is known beforehand, and whose cluster models become one again and again."""

    @property
    def clusters(self) -> int:
        """How many clusters there are, numbered from 0."""

    def cluster(self, client: int) -> int:
        """The cluster of a client."""

    def joined(self, weights: Mapping[int, float], context: ServerContext) -> Mapping[int, float] | None:
        """How much each cluster's model counts in the mean that all clusters go on from after this step.

        None where they go on apart.  `weights` are the sums of this step's weights, by cluster.
        """
