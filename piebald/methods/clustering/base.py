"""The base class of clusterings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from piebald.contracts import Cohort, Component, ModelSpec, ServerContext
from piebald.core.errors import SettingError, shown


class Clustering(Component):
    """The assignment of clients to clusters, whose updates are aggregated together.

    Only `assign` must be defined; the other methods have a default for clusterings that do no more than that.

    Attributes:
        on_device: whether all methods compute on whatever device tensors are, see `Aggregator.on_device`.
        requires_individual_updates: False where there is only one cluster, so that updates may be summed before.
        compares_changes: whether `assign` reads the individual changes in `Cohort.matrix`; if not, it may be None.
        from_current_model: True where models of members are averaged: changes count from their cluster's model.
    """

    axis = "clustering"
    on_device: ClassVar[bool] = False
    requires_individual_updates: ClassVar[bool] = True
    compares_changes: ClassVar[bool] = True
    from_current_model: ClassVar[bool] = False

    def assign(self, cohort: Cohort, known: Mapping[int, int], context: ServerContext) -> list[int]:
        """Assign a cluster to each update; `known` are the clusters of clients seen before, others are in cluster 0.

        The cohort's matrix has trained parameters only; its models have all shared numbers.
        A cluster that is new begins with the mean of the models that its first members were sent.
        """
        raise NotImplementedError

    def is_single(self) -> bool:
        """Return whether all clients are one cluster, whatever they send."""
        return False

    def main_cluster(self, state: Mapping[str, Any]) -> int:
        """Return the cluster whose model represents the run and that newcomers join, from the component's state."""
        return 0

    def candidates(self, models: Mapping[int, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
        """Return what a training task brings besides the client's own cluster model, as "candidates" [K, s]."""
        return {}

    def mix(self, trained: Mapping[int, Tensor], context: ServerContext) -> dict[int, Tensor]:
        """Return the models [s] to send from now on, by cluster, where clients are sent others than they came to.

        Args:
            trained: the models [s] that some clusters came to in this step.
            context: of the clustering; what it keeps in the state is in checkpoints.
        """
        return {}

    # -- clusters that are known beforehand, and whose models become one again and again

    @property
    def clusters_to_join(self) -> int:
        """The number of such clusters there are, numbered from 0."""
        return 0

    def cluster(self, client: int) -> int | None:
        """Return the cluster of a client, None where it is not known before `assign`."""
        return None

    def join(self, weights: Mapping[int, float], context: ServerContext) -> Mapping[int, float] | None:
        """Return how much each cluster's model counts in the mean that all of them go on from after this step.

        None where they go on apart.

        Args:
            weights: the sums of this step's weights, by cluster.
            context: of the clustering.
        """
        return None


def assigned(clustering: Clustering, cohort: Cohort, known: Mapping[int, int], context: ServerContext) -> list[int]:
    """The cluster of each update, see `Clustering.assign`.

    Raises:
        SettingError: the clustering returns something else.
    """
    if cohort.matrix is not None:  # statistics have no common scale with parameters, by which clients are compared
        cohort = dataclasses.replace(cohort, matrix=cohort.parameters)
    labels = clustering.assign(cohort, known, context)
    # checked here since clusterings are plugins as well: a bad label would fail far from its cause
    fine = isinstance(labels, Sequence) and len(labels) == len(cohort.clients)
    if not fine or not all(isinstance(label, int | np.integer) and label >= 0 for label in labels):
        raise SettingError(
            f"clustering {clustering.kind!r} must return a cluster, a whole number of at least 0, for each of "
            f"{len(cohort.clients)} updates, got {shown(labels)}"
        )
    return [int(label) for label in labels]
