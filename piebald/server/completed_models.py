"""Buffers that models lack until clients are asked for them, once the models are trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from piebald.contracts import Query, Result
from piebald.core.cohort_matrix import weighted_mean
from piebald.methods.client_work import ClientWork
from piebald.server.cluster_models import ClusterModels
from piebald.server.cluster_state import ClusterModel

Ask = Callable[[Sequence[tuple[int, Query]]], Sequence[Result]]  # clients about the model of their cluster


class CompletedModels:
    """Has clients complete the models of clusters, and gives each client the one that it uses.

    Args:
        work: the run's.
        most: a client's rows count as at most so many, None for no limit.
    """

    def __init__(self, work: ClientWork, most: int | None = None) -> None:
        self._work, self._most = work, most
        self._used: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by number: the model, its buffers, and both

    @property
    def needed(self) -> bool:
        """Whether models lack anything."""
        return self._work.trainer.completing_query(None) is not None

    def complete(self, models: ClusterModels, clients: Sequence[int], ask: Ask) -> None:
        """Ask for the buffers of each cluster's model, and of those parts of it that clients have.

        Like an evaluation, this is no part of training, and costs neither bytes nor virtual time.  What nobody tells
        stays as it is.

        Args:
            models: of the clusters.
            clients: who is asked, each about the model of its cluster.
            ask: asks them, and returns the answers that can be used.
        """
        owns = () if self._work.own_models is None else range(len(self._work.own_models.models))
        for cluster in models.clusters.values():
            asked = [client for client in clients if models.of(client) is cluster]
            found = {number: self._buffers(number, asked, ask) for number in (None, *owns)}
            known = {number: buffers for number, buffers in found.items() if buffers is not None}
            cluster.own_buffers |= {str(number): buffers for number, buffers in known.items() if number is not None}
            if None in known:
                model = cluster.model.clone()
                model[self._work.layout.shared_trained : self._work.layout.shared] = known[None]
                cluster.settle(model)

    def _buffers(self, number: int | None, clients: Sequence[int], ask: Ask) -> Tensor | None:
        """The mean of the buffers that clients tell of a model, None where nobody does."""
        query = self._work.trainer.completing_query(number)
        layout = self._work.numbered(number).layout
        told = [] if query is None else [one.update for one in ask([(client, query) for client in clients])]
        size = (layout.shared - layout.shared_trained,)
        answers = [one for one in told if one is not None and one.examples and one.vectors["buffers"].shape == size]
        if not answers:
            return None
        weights = [float(min(one.examples, self._most or one.examples)) for one in answers]
        mean = weighted_mean([one.vectors for one in answers], "buffers", weights, sum(weights)).float()
        for span in layout.variances:
            mean[span.start - layout.shared_trained : span.stop - layout.shared_trained].clamp_(min=0.0)
        return mean

    def model(self, cluster: ClusterModel, client: int) -> Tensor:
        """The model [s] of a cluster as a client gets it to use: with the buffers of its own part.

        Clients of one part get the same tensor.
        """
        number = self._work.number(client)
        buffers = None if number is None else cluster.own_buffers.get(str(number))
        if number is None or buffers is None:
            return cluster.model
        model, own, made = self._used.get(number, (None, None, None))
        if made is None or model is not cluster.model or own is not buffers:
            made = self._work.with_buffers(number, cluster.model, buffers)
            self._used[number] = cluster.model, buffers, made
        return made
