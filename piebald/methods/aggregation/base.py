"""The base class of aggregators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from piebald.contracts import Cohort, Component, ModelSpec, Query, ServerContext
from piebald.core.cohort_matrix import divided, held_mask, held_mean, weighted_sum
from piebald.core.errors import SettingError, shown


class Aggregator(Component):
    """The rule by which the updates of a step are combined.

    An aggregator sees single updates, unless it is an `aggregation.Linear`, whose weighted sum may be formed where
    clients train or under encryption.

    Attributes:
        on_device: whether `aggregate` computes on whatever device a cohort's tensors are, so that they may stay on a
            GPU.  A class says it for itself: what is written for the host is not handed tensors of a GPU because its
            base class takes them.
        averages_rows: whether the average is the sum of the changes by the shares, so that a share can be limited.
        takes_statistics: whether `aggregate` gets all s shared numbers and averages running statistics itself.  By
            default it gets the trained parameters only, and statistics are averaged by its shares.
    """

    axis = "aggregation"
    on_device: ClassVar[bool] = False
    averages_rows: ClassVar[bool] = False
    takes_parts: ClassVar[bool] = False  # whether clients may have a part of the numbers only, see `Cohort.held`
    takes_statistics: ClassVar[bool] = False

    def prepare(self, cohort: Cohort, context: ServerContext) -> Cohort:
        """Return the cohort with what weights depend on besides, such as clients' scores, as metrics of its updates."""
        return cohort

    def sender_query(self, spec: ModelSpec) -> Query | None:
        """Return the query that each client answers about the model it has just trained, or None.

        The answer comes along with the update.  Where transforms change updates, or an answer is no vector, clients are
        asked about the model that arrived instead.
        """
        return None

    def reads_data(self) -> bool:
        """Return whether what a client holds or sends may decide how much its update counts.

        Noise on a mean hides clients only where nothing does, so a subclass that weighs in another way must say so.
        """
        return True

    def statistics_shares(self, cohort: Cohort, shares: Sequence[float]) -> Sequence[float]:
        """Return how much each client's running statistics count [n], whatever they sum to; by default the shares [n].

        They differ where a share corrects for how far a client's training goes, which says nothing of its inputs.
        """
        return shares

    def aggregate(self, cohort: Cohort, context: ServerContext) -> tuple[Tensor, list[float]]:
        """Combine the changes of a cohort.

        Returns:
            The average change, as long as those of the cohort, and the shares [n], which sum to one, or to less where
            stale updates are damped.
        """
        raise NotImplementedError


def aggregated(aggregator: Aggregator, cohort: Cohort, context: ServerContext) -> tuple[Tensor, list[float]]:
    """The average change and the shares, see `Aggregator.aggregate`.

    Raises:
        SettingError: the aggregator returns something else.
    """
    # statistics of batch norms, which may be most of a vector's length, must not take part in a decision by lengths
    cut = cohort.matrix is not None and cohort.buffers.shape[1] > 0 and not aggregator.takes_statistics
    result = aggregator.aggregate(cohort.of_parameters() if cut else cohort, context)
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], torch.Tensor):
        raise SettingError(
            f"aggregation {aggregator.kind!r} must return the average change, a tensor, and the share of each update, "
            f"got {shown(result)}"
        )
    if not isinstance(result[1], Sequence) or len(result[1]) != len(cohort.clients):
        raise SettingError(
            f"aggregation {aggregator.kind!r} must return a share for each of {len(cohort.clients)} updates, got "
            f"{shown(result[1])}"
        )
    average, shares = result
    # minus the buffers, which an aggregator without `takes_statistics` has not seen
    if cohort.matrix is not None and len(average) != cohort.matrix.shape[1] - cut * cohort.buffers.shape[1]:
        raise SettingError(
            f"aggregation {aggregator.kind!r} must return an average as long as each row of the cohort's matrix, got "
            f"{shown(average)}"
        )
    if cut:
        average = torch.cat([average, averaged(cohort, aggregator.statistics_shares(cohort, shares))])
    return average, shares


def averaged(cohort: Cohort, shares: Sequence[float]) -> Tensor:
    """The mean [b] of clients' changes of running statistics by their shares, whatever these sum to.

    Of each number only over the clients that have it.  No change where nobody counts.
    """
    buffers, whole = cohort.buffers, sum(shares)
    if cohort.matrix is not None and any(positions is not None for positions in cohort.held):
        # buffers are the last columns
        held = held_mask(cohort.matrix, cohort.held)[:, cohort.matrix.shape[1] - buffers.shape[1] :]
        return held_mean(buffers, held, shares)[0]
    return divided(weighted_sum(buffers, shares), whole) if whole > 0 else torch.zeros_like(buffers[0])
