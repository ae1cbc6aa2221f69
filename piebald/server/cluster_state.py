"""The state of clusters: their models, what is counted of them, and the model cache of Metis.

    W = sum_k p_k w_k,   P = sum_k p_k,   model = W / P

A server step replaces client k's old contribution by its new one, W += p_k w_k - p_k' w_k', in time independent of the
number of clients.
W is float64 and the models are float32, so a step's rounding is about 1e-16 of the largest contribution: a million
server steps drift by less than 1e-12 (`benchmarks/model_cache`).  Only where P has fallen far below what it once was is
that no longer small beside W, so the sums are then formed anew from the last models.  Where all weights have become 0,
they are exactly 0 again, and there is no model until a weight is above 0.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import weakref
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from piebald.contracts import Checkpoint, Cohort
from piebald.core.machine import on_host
from piebald.core.tensor_store import TensorStore
from piebald.methods.aggregation.base import Aggregator, averaged
from piebald.methods.client_work import ClientWork

Keep = Callable[[Tensor], Tensor]  # a vector that is kept, and perhaps moved to where there is more room
STEPS = 4096  # steps of a cluster that are remembered: older updates have missed all of these, and at most the rest


def where_it_is(vector: Tensor) -> Tensor:
    """Keep a vector in memory."""
    return vector


@dataclass(slots=True, eq=False)
class ClusterModel:
    """The state of one cluster.

    Attributes:
        model: [s], never written to: whoever it was sent to still holds it.
        optimizer_state: the server optimizer's state.
        server_vectors: what is sent besides the model, see `training.KeepsServerVectors`.
        norm: Euclidean length of the model.
        committed: optimiser steps behind its server steps so far.
        steps: versions from which its own server steps were made, in order.
        cache: where the step keeps the sums over all clients' last models, else None.
        own_buffers: the buffers of clients' own models, by their number as text, where clients were asked for them.
        keep: what becomes of its model and vectors before they are kept.
    """

    model: Tensor
    optimizer_state: dict[str, Tensor]
    server_vectors: dict[str, Tensor]
    norm: float
    committed: int = 0
    steps: list[int] = field(default_factory=list)
    cache: ModelCache | None = None
    own_buffers: dict[str, Tensor] = field(default_factory=dict)
    keep: Keep = where_it_is

    def missed(self, sent: int) -> int:
        """Return how many of its own steps an update missed whose model was sent at this version."""
        forgotten = max(0, self.steps[0] - sent) if len(self.steps) == STEPS else 0  # at most, of long ago
        return forgotten + len(self.steps) - bisect_left(self.steps, sent)

    def settle(self, model: Tensor) -> None:
        """Let it have this model."""
        self.norm = norm_of(model)
        self.model = self.keep(model)

    def kept(self, vectors: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Vectors to keep in place of others; what is the same tensor as before is kept already."""
        return {name: vector if vector is before.get(name) else self.keep(vector) for name, vector in vectors.items()}

    def note_step(self, version: int) -> None:
        """Take note of a step from this version."""
        self.steps.append(version)
        if len(self.steps) > STEPS:
            del self.steps[0]


class Counted(NamedTuple):  # made for every update, and a tuple is made four times as fast as a frozen dataclass
    """An update's part in a step: its cluster, its share of the average, its raw weight, its staleness."""

    cluster: int
    share: float
    weight: float | None
    staleness: int


def norm_of(model: Tensor) -> float:
    """The Euclidean length of a vector."""
    return float(torch.linalg.vector_norm(model).item())  # twice as fast as float alone


@dataclass(frozen=True, slots=True, eq=False)
class ModelSnapshot:
    """Global models [s] by cluster, and the cluster of each client that was assigned to one (others are in `main`).

    `own_buffers` are those of clients' own models, by cluster and by the number of the model as text.
    """

    clusters: Mapping[int, Tensor]
    cluster_of: Mapping[int, int]
    main: int = 0
    own_buffers: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)

    def on_host(self) -> ModelSnapshot:
        """The same, with all tensors on the host."""
        buffers = {number: on_host(tensors) for number, tensors in self.own_buffers.items()}
        clusters = {number: model.cpu() for number, model in self.clusters.items()}
        return ModelSnapshot(clusters, self.cluster_of, self.main, buffers)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ModelSnapshot:
        """The models in a checkpoint of the server."""
        names = [name.split("/") for name in checkpoint.tensors]
        clusters = {
            int(name[1]): checkpoint.tensors["/".join(name)] for name in names if name[0::2] == ["cluster", "model"]
        }
        buffers: dict[int, dict[str, Tensor]] = {}
        for name in names:
            if name[0::2] == ["cluster", "own_buffers"]:
                buffers.setdefault(int(name[1]), {})[name[3]] = checkpoint.tensors["/".join(name)]
        values = checkpoint.values["cluster_models"]
        cluster_of = {int(client): int(cluster) for client, cluster in values["cluster_of"]}
        return cls(clusters, cluster_of, values.get("main", 0), buffers)


def capped(weights: Sequence[float], largest: float) -> list[float]:
    """Weights of which none has more than the share `largest` of their sum.

    The largest ones are lowered to one common value, the others stay.  Where that is not possible, because fewer than
    1 / `largest` weights are above 0, those become equal.

    Examples:
        >>> capped([1.0, 1.0, 8.0], largest=0.5)
        [1.0, 1.0, 2.0]
    """
    down = sorted(weights, reverse=True)
    positive = sum(weight > 0 for weight in down)
    if positive * largest <= 1:
        least = min((weight for weight in down if weight > 0), default=0.0)
        return [min(weight, least) for weight in weights]
    # summed from the smallest up, so that a huge weight does not swallow the others
    rests = [*itertools.accumulate(reversed(down))][::-1]
    for count, (weight, rest) in enumerate(zip(down, rests, strict=True)):  # so many are above the limit
        limit = largest * rest / (1 - count * largest)
        # a weight that equals the limit must not miss it by a rounding error
        if weight <= limit * (1 + 1e-12):
            return [min(weight, limit) for weight in weights]
    raise AssertionError("of several weights, not all are above the limit")


def with_capped_examples(cohort: Cohort, largest: float) -> Cohort:
    """The updates with the numbers of rows of the largest clients lowered, for aggregators that go by them."""
    if largest >= 1 or cohort.updates[0].partial_sum is not None:
        return cohort
    limits = capped([float(update.counts) for update in cohort.updates], largest)
    # rows are rounded down, so that no share ends above the limit
    updates = [update.capped(limit) for update, limit in zip(cohort.updates, limits, strict=True)]
    return dataclasses.replace(cohort, updates=updates)


def with_capped_shares(
    average: Tensor, shares: list[float], cohort: Cohort, aggregator: Aggregator, largest: float
) -> tuple[Tensor, list[float]]:
    """The average [s] and the shares [n] with none above `largest` of their sum, where an average is a weighted mean.

    Other aggregators, such as medians, do not depend on one update's weight.
    """
    total = sum(shares)
    weighted = aggregator.averages_rows and cohort.matrix is not None
    if largest >= 1 or not weighted or total <= 0 or max(shares) <= largest * total * (1 + 1e-9):
        return average, shares
    limited = capped(shares, largest)
    limited = [share * total / sum(limited) for share in limited]
    assert cohort.matrix is not None
    average = torch.tensor(limited) @ cohort.parameters
    return torch.cat([average, averaged(cohort, limited)]) if cohort.buffers.shape[1] else average, limited


def fitting_models(
    checkpoint: Checkpoint, work: ClientWork, same: Collection[str], in_order: bool
) -> tuple[Checkpoint, list[str]]:
    """Return what fits of a checkpoint, as `ClusterModels.restore` takes it, and a list of it in words.

    Clusters and what components keep speak of clients by number, so they are taken only where the numbers are the same.

    Args:
        checkpoint: of the finished run (`ServerLoop.state`).
        work: what clients do in the new run.
        same: axes on which both runs have the same component, and "trainer" where the kind of training is the same.
        in_order: whether all clients of the finished run are there, with the same numbers.
    """
    values = checkpoint.values["cluster_models"]
    whole, main = in_order and "clustering" in same, int(values.get("main", 0))
    # else the main cluster alone, as the new run's cluster 0
    numbers = {int(number): int(number) for number in values["clusters"]} if whole else {main: 0}
    cached = whole and "server_optimizer" in same and any("cache" in row for row in values["clusters"].values())
    clusters = {
        str(new): {"committed": 0} | ({"cache": values["clusters"][str(old)]["cache"]} if cached else {})
        for old, new in numbers.items()
    }
    tensors, words = _cluster_tensors(checkpoint, work, numbers, same, cached)
    if cached:
        tensors |= {name: tensor for name, tensor in checkpoint.tensors.items() if name.startswith("last/")}
        words.append("the last models of clients")
    axes = [axis for axis in same if in_order and (whole or axis != "clustering")]
    states = [(axis, number, plain) for axis, number, plain in values["kept"] if axis in axes]
    for axis, number, _ in states:
        place = f"kept/{axis}/{number}/"
        tensors |= {name: tensor for name, tensor in checkpoint.tensors.items() if name.startswith(place)}
    words += [f"the state of {axis}" for axis in sorted({axis for axis, _, plain in states if plain})]
    cluster_of = values["cluster_of"] if whole else []
    return Checkpoint(tensors, {"cluster_of": cluster_of, "clusters": clusters, "kept": [*map(list, states)]}), words


def _cluster_tensors(
    checkpoint: Checkpoint, work: ClientWork, numbers: Mapping[int, int], same: Collection[str], cached: bool
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors of clusters that fit, and a list of them in words.

    Args:
        checkpoint, work, same: as in `fitting_models`.
        numbers: the clusters that are taken, with their new numbers.
        cached: whether the sums over clients' last models are taken.
    """
    shapes = {name: vector.shape for name, vector in work.server_vectors().items()} if "trainer" in same else {}
    kinds = ["model", *(["optimizer_state"] if "server_optimizer" in same else []), *(["cache"] if cached else [])]
    tensors: dict[str, Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        place = name.split("/")
        if place[0] != "cluster" or int(place[1]) not in numbers:
            continue
        if place[2] in kinds or (place[2] == "server_vectors" and shapes.get("/".join(place[3:])) == tensor.shape):
            tensors["/".join(["cluster", str(numbers[int(place[1])]), *place[2:]])] = tensor
    words = [f"{len(numbers)} cluster models" if len(numbers) > 1 else "the global model"]
    parts = {name.split("/")[2] for name in tensors}
    words += ["the server optimizer's state"] if "optimizer_state" in parts else []
    words += ["what the server sends besides the model"] if "server_vectors" in parts else []
    return tensors, words


_FALLEN = 1e-6  # of the largest P since the sums were last formed: below it they are formed anew


_PIECE = 1 << 17  # numbers handled at a time, so that what a piece needs stays in the processor's cache


class _Swapped(dict[int, tuple[float, Tensor | None]]):
    """The weight and the last model that clients had before they were first swapped or dropped."""


class ModelCache:
    """The sums of one cluster.  The clients' last models are in a store that all clusters share.

    Attributes:
        store: keeps each client's last model under "model".
        weights: p_k of each client in the sums.
    """

    def __init__(self, size: int, store: TensorStore) -> None:
        self.store = store
        self.weights: dict[int, float] = {}
        self.whole = 0.0  # P
        self._largest = 0.0  # P since the sums were last formed
        self.sums = torch.zeros(size, dtype=torch.float64)  # W
        # weak, so that no model before the last is kept in memory once nobody can go back to it
        self._swapped: Callable[[], _Swapped | None] = lambda: None

    def mark(self) -> Callable[[bool], None]:
        """Return a function that undoes, but for rounding, what is swapped and dropped from now on.

        It takes whether those are meant that had no weight before, or the others.  One that has moved to another
        cluster must first leave that one's sums, as the store has one model of each client.
        """
        swapped = _Swapped()
        self._swapped = weakref.ref(swapped)

        def go_back(new: bool) -> None:
            for client, (weight, model) in swapped.items():
                if model is None and new:
                    self.drop(client, None)
                elif model is not None and not new:
                    self.swap(client, weight, model)

        return go_back

    def swap(self, client: int, weight: float, model: Tensor, out: Tensor | None = None) -> None:
        """Put a client's new model [s] in place of its last one and write the global model into `out` [s].

        Args:
            client: whose.
            weight: p_k, 0 or more.
            model: w_k, which is kept: it must not change afterwards.
            out: where the global model goes; not written where no client has a weight yet; None where it is not needed.
        """
        before = self.weights.get(client, 0.0)
        old = self._old(client, before)
        self.weights[client] = weight
        self.whole += weight - before
        if self._fallen():
            self.store.set(client, {"model": model})
            self._renew(out)
            return
        self._pass(old, before, model, weight, out)
        self.store.set(client, {"model": model})

    def drop(self, client: int, out: Tensor | None) -> None:
        """Remove a client, e.g. because it has moved to another cluster; `out` as in `swap`."""
        before = self.weights.pop(client, 0.0)
        old = self._old(client, before)
        if before:
            self.whole -= before
            if self._fallen():
                self._renew(out)
            else:
                self._pass(old, before, None, 0.0, out)

    def _old(self, client: int, weight: float) -> Tensor | None:
        """Return a client's last model, None where it has no weight; it is noted where somebody may go back to it."""
        model = self.store.get(client)["model"] if weight else None
        if (swapped := self._swapped()) is not None:
            swapped.setdefault(client, (weight, model))
        return model

    def _fallen(self) -> bool:
        """Return whether so little weight is left that the rounding of what is gone could matter."""
        self._largest = max(self._largest, self.whole)
        return self.whole <= _FALLEN * self._largest

    def _renew(self, out: Tensor | None) -> None:
        """Form the sums from the last models, in O(clients x model), and write the global model if there is one."""
        self.sums.zero_()
        # summed anew and exactly, so that what was taken away leaves no trace
        self.whole = self._largest = math.fsum(self.weights.values())
        for client, weight in sorted(self.weights.items()):  # a resumed run adds in the same order
            if weight:
                self._pass(None, 0.0, self.store.get(client)["model"], weight, None)
        if self.whole > 0:
            self._pass(None, 0.0, None, 0.0, out)

    def _pass(self, old: Tensor | None, before: float, new: Tensor | None, weight: float, out: Tensor | None) -> None:
        """One pass over memory: every number of W, of the models and of the result is fetched once."""
        vectors = (self.sums, old, new, out)
        for sums, away, into, result in [vectors] if self.sums.numel() <= _PIECE else _pieces(vectors):
            if away is not None:
                sums.sub_(away, alpha=before)
            if into is not None and weight:
                sums.add_(into, alpha=weight)
            if result is not None:
                torch.mul(sums, 1.0 / self.whole, out=result)  # in float64, and rounded once

    def state(self) -> tuple[Tensor, dict[str, Any]]:
        """W, and JSON values."""
        return self.sums, {"whole": self.whole, "largest": self._largest, "weights": sorted(self.weights.items())}

    def restore(self, sums: Tensor, values: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.sums.copy_(sums)
        self.whole = float(values["whole"])
        self._largest = float(values.get("largest", self.whole))
        self.weights = {int(client): float(weight) for client, weight in values["weights"]}


def _pieces(vectors: Iterable[Tensor | None]) -> Iterator[tuple[Any, ...]]:
    """Pieces of vectors, side by side; None stays None."""
    return zip(*(repeat(None) if vector is None else torch.split(vector, _PIECE) for vector in vectors), strict=False)
