"""A stack of clients that are served together, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from piebald.contracts import WEIGHT, Disclosure, PartialSum, Query, Update
from piebald.core.cohort_matrix import add_weighted, weighted_sum
from piebald.core.machine import float64_device

PRIVATE = "private"  # the name of a client's private parameters in its state
_SCORES = ("loss", "global/", "personal/", WEIGHT)  # what names of scores begin with


@dataclass(frozen=True, slots=True, eq=False)
class ClientStack:
    """Tasks served together: all train, or all answer one query.

    Attributes:
        clients: the clients' numbers.
        versions: the version of each task.
        rng_versions: `Task.rng_version` of each task.
        committed: `Task.committed` of each task.
        models: shared parameters [s] for each client; the same tensor object where clients start from the same model.
        vectors: further named vectors that were sent, one tensor for each client.
        state: client state by name, one tensor for each client.
        query: the query to answer, or None to train.
        secret: what noise and the batches of hidden rows are drawn from: random text that only the clients' site knows,
            fresh for each task; "" in a simulation, which draws them from `ModelSpec.noise_seed`.
        disclosure: the rules that answers obey at a site; None in a simulation.
    """

    clients: Sequence[int]
    versions: Sequence[int]
    rng_versions: Sequence[int | str]
    committed: Sequence[int]
    models: Sequence[Tensor]
    vectors: Mapping[str, Sequence[Tensor]]
    state: Mapping[str, Sequence[Tensor]]
    query: Query | None = None
    secret: str = ""
    disclosure: Disclosure | None = None

    def row(self, row: int) -> ClientStack:
        """A stack of one of the clients."""
        single = slice(row, row + 1)
        return replace(
            self,
            clients=self.clients[single],
            versions=self.versions[single],
            rng_versions=self.rng_versions[single],
            committed=self.committed[single],
            models=self.models[single],
            vectors={name: rows[single] for name, rows in self.vectors.items()},
            state={name: rows[single] for name, rows in self.state.items()},
        )


@dataclass(slots=True, eq=False)
class StackResult:
    """The results of a stack.

    Attributes:
        steps: optimizer steps of each client.
        examples: rows that each client trained on or answered for.
        norms: length of each client's change, which bounds on steps are for.
        nbytes: bytes of each client's update.
        metrics: by name, a number for each client.
        failures: why a client's update may not count, or None.
        vectors: by name, [c, ...]; empty where they were summed or there is nothing to send.
        state: new client state by name, [c, ...] or a list with a tensor for each client.
        trained_norms: the lengths without buffers, where there are some.
        packed: what each client sends in place of vectors["model"], where updates are packed.  It stays where it
            was made: only a site sends it on.
    """

    steps: list[int]
    examples: list[int]
    norms: list[float]
    nbytes: list[int]
    metrics: dict[str, list[float]]
    failures: list[str | None]
    vectors: dict[str, Tensor] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    trained_norms: list[float] = field(default_factory=list)
    packed: list[Tensor] = field(default_factory=list)

    @classmethod
    def joined(cls, results: Sequence[StackResult | str]) -> StackResult:
        """The results of clients that were served one after another; text is the reason why one has none."""
        served = [result for result in results if isinstance(result, StackResult)]
        if not served:
            count = len(results)
            return cls([0] * count, [0] * count, [nan] * count, [0] * count, {}, [str(reason) for reason in results])
        first = served[0]
        # a client that failed keeps its place, so that row k of every list is still the stack's client k
        blank = cls(
            [0], [0], [nan], [0], {key: [nan] for key in first.metrics}, [None],
            {name: torch.zeros_like(part) for name, part in first.vectors.items()}, first.state,
            [nan] * len(first.trained_norms), [part[:0] for part in first.packed],
        )  # fmt: skip
        each = [blank if isinstance(result, str) else result for result in results]
        metrics = dict.fromkeys(name for result in served for name in result.metrics)
        return cls(
            steps=[result.steps[0] for result in each],
            examples=[result.examples[0] for result in each],
            norms=[result.norms[0] for result in each],
            nbytes=[result.nbytes[0] for result in each],
            metrics={name: [result.metrics.get(name, [nan])[0] for result in each] for name in metrics},
            failures=[result if isinstance(result, str) else result.failures[0] for result in results],
            vectors={name: _together([result.vectors[name] for result in each]) for name in first.vectors},
            state={name: [result.state[name][0] for result in each] for name in first.state},
            trained_norms=[norm for result in each for norm in result.trained_norms],
            packed=[part for result in each for part in result.packed],
        )

    def update(self, row: int, partial_sum: PartialSum | None = None) -> Update:
        """One client's update; without its vectors where it is in a sum.

        A score that has no value, or an infinite one, is left out.
        """
        return Update(
            vectors={} if partial_sum is not None else {name: part[row] for name, part in self.vectors.items()},
            examples=self.examples[row],
            steps=self.steps[row],
            metrics={
                name: values[row]
                for name, values in self.metrics.items()
                if isfinite(values[row]) or not name.startswith(_SCORES)
            },
            # bounds are for what was trained; statistics that are not finite must show in the length all the same
            norm=self.trained_norms[row] if self.trained_norms and isfinite(self.norms[row]) else self.norms[row],
            partial_sum=partial_sum,
            nbytes=self.nbytes[row],
        )


class RunningSum:
    """A sum of updates that grows stack by stack, in float64 (see `cohort_matrix.weighted_sum`)."""

    def __init__(self) -> None:
        self.weight = 0.0
        self.vectors: dict[str, Tensor] = {}

    def add(self, weight: float, vectors: Mapping[str, Tensor]) -> None:
        """Add summed vectors whose weights sum to `weight`."""
        self.weight += weight
        for name, part in vectors.items():
            if name in self.vectors:
                self.vectors[name] += part.to(self.vectors[name].device)
            else:
                # a copy even of float64: later stacks are added in place, and `part` belongs to who gave it
                self.vectors[name] = part.to(float64_device(part.device)).to(torch.float64, copy=True)

    def add_rows(self, name: str, rows: Tensor, weights: Sequence[float]) -> None:
        """Add clients' tensors [n, ...] times their weights to the vector of this name, and nothing to the weight."""
        if name in self.vectors:
            add_weighted(self.vectors[name].view(-1), rows.flatten(1), weights)
        else:
            self.vectors[name] = weighted_sum(rows.flatten(1), weights).view(rows.shape[1:])


def _together(vectors: Sequence[Tensor]) -> Tensor:
    """Return vectors [1, ..., n] of several clients as one; those of fewer rows end in zeros."""
    widest = max(vector.shape[-1] for vector in vectors)
    return torch.cat([functional.pad(vector, (0, widest - vector.shape[-1])) for vector in vectors])
