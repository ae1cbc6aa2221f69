"""The state of one cluster, and how an update counted in it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from piebald.server.model_cache import ModelCache

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
        """How many of its own steps an update missed whose model was sent at this version."""
        forgotten = max(0, self.steps[0] - sent) if len(self.steps) == STEPS else 0  # at most, of long ago
        return forgotten + len(self.steps) - bisect_left(self.steps, sent)

    def settle(self, model: Tensor) -> None:
        """Let it have this model."""
        self.norm = norm_of(model)
        self.model = self.keep(model)

    def kept(self, vectors: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Vectors to keep in place of others; what is the same tensor as before is kept already."""
        return {name: one if one is before.get(name) else self.keep(one) for name, one in vectors.items()}

    def note_step(self, version: int) -> None:
        """Take note of a step from this version."""
        self.steps.append(version)
        if len(self.steps) > STEPS:
            del self.steps[0]


class Counted(NamedTuple):  # made for every update, and a tuple is made four times as fast as a frozen dataclass
    """How an update counted: its cluster, its share of the average, its weight before normalization, its staleness."""

    cluster: int
    share: float
    weight: float | None
    staleness: int


def norm_of(model: Tensor) -> float:
    """The Euclidean length of a vector."""
    return float(torch.linalg.vector_norm(model).item())  # twice as fast as float alone
