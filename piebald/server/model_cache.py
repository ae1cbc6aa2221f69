"""The model cache of Metis: the weighted mean of all clients' last models, kept up to date in O(model).

    W = sum_k p_k w_k,   P = sum_k p_k,   model = W / P

A server step replaces client k's old contribution by its new one, W += p_k w_k - p_k' w_k', in time independent of the
number of clients.
W is float64 and the models are float32, so a step's rounding is about 1e-16 of the largest contribution: a million
server steps drift by less than 1e-12 (`benchmarks/model_cache`).  Only where P has fallen far below what it once was is
that no longer small beside W, so the sums are then formed anew from the last models.  Where all weights have become 0,
they are exactly 0 again, and there is no model until a weight is above 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from piebald.core.tensor_store import TensorStore

_FALLEN = 1e-6  # of the largest P since the sums were last formed: below it they are formed anew


_PIECE = 1 << 17  # numbers handled at a time, so that what a piece needs stays in the processor's cache


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

    def swap(self, client: int, weight: float, model: Tensor, out: Tensor | None = None) -> None:
        """Put a client's new model [s] in place of its last one and write the global model into `out` [s].

        Args:
            client: whose.
            weight: p_k, 0 or more.
            model: w_k, which is kept: it must not change afterwards.
            out: where the global model goes; not written where no client has a weight yet; None where it is not needed.
        """
        before = self.weights.get(client, 0.0)
        old = self.store.get(client)["model"] if before else None
        self.weights[client] = weight
        self.whole += weight - before
        if self._fallen():
            self.store.set(client, {"model": model})
            self._renew(out)
            return
        self._pass(old, before, model, weight, out)
        self.store.set(client, {"model": model})

    def drop(self, client: int, out: Tensor) -> None:
        """Remove a client, e.g. because it has moved to another cluster."""
        before = self.weights.pop(client, 0.0)
        if before:
            self.whole -= before
            if self._fallen():
                self._renew(out)
            else:
                self._pass(self.store.get(client)["model"], before, None, 0.0, out)

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
