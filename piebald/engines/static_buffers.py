"""Memory that stays where it is from step to step and from client to client, as recorded steps need it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from piebald.contracts import PLAIN_STEP, Rows
from piebald.core import pytree
from piebald.core.machine import moved
from piebald.engines.row_loader import Gathered
from piebald.engines.sgd_step import SgdRun

_ROOM = 64  # rows of the smallest table


class StaticBuffers:
    """Buffers on a device by name, type and shape."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._held: dict[tuple[Any, ...], Tensor] = {}

    def like(self, name: str, values: Tensor) -> Tensor:
        """The buffer of this name for values of just this shape, contiguous; its contents are old."""
        key = (name, values.dtype, tuple(values.shape))
        if key not in self._held:
            self._held[key] = torch.zeros(values.shape, dtype=values.dtype, device=self.device)
        return self._held[key]

    def filled(self, name: str, values: Tensor) -> Tensor:
        """The same, with the values."""
        buffer = self.like(name, values)
        buffer.copy_(values)
        return buffer

    def table(self, name: str, values: Tensor) -> Tensor:
        """A buffer that begins with the rows of `values`, which may be on the host; it has room for more."""
        key, rows = (name, values.dtype, tuple(values.shape[1:])), len(values)
        if key not in self._held or len(self._held[key]) < rows:
            # powers of two, so that runs of about the same length find the same memory, and recordings stay valid
            room = max(_ROOM, 1 << (rows - 1).bit_length() if rows else 0)
            self._held[key] = torch.zeros(room, *values.shape[1:], dtype=values.dtype, device=self.device)
        self._held[key][:rows].copy_(moved(values.contiguous(), self.device), non_blocking=True)
        return self._held[key]

    def rows(self, gathered: Gathered, lasting: bool) -> Gathered:
        """Rows that stay where they are: those of a pool do by themselves."""
        if lasting:
            return gathered
        trees = ("x", gathered.x), ("y", gathered.y)
        x, y = (self._tree(name, tree) for name, tree in trees)
        return Gathered(x, y, gathered.positions)

    def _tree(self, name: str, tree: Any) -> Any:
        """The tensors of a tree as tables; those of rows of another shape, which may never come again, are freed."""
        names = itertools.count()

        def kept(leaf: Tensor) -> Tensor:
            slot = f"{name} {next(names)}"
            for key in [key for key in self._held if key[0] == slot and key[1:] != (leaf.dtype, tuple(leaf.shape[1:]))]:
                del self._held[key]
            return self.table(slot, leaf)

        return pytree.mapped(kept, tree)

    def run(self, run: SgdRun, rows: slice, state: Mapping[str, Tensor]) -> SgdRun:
        """A run of some of the clients whose vectors are buffers, also those [c, p] of the optimizer's state; rates lie
        in tables, and its model is nowhere.
        """

        def kept(name: str, values: Tensor | None) -> Tensor | None:
            return None if values is None else self.filled(name, values[rows])

        def each(name: str, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {part: self.filled(f"{name} {part}", values[rows]) for part, values in named.items()}

        lr = torch.ones(()) if isinstance(run.config.lr, Tensor) else 1.0  # which decides how a step is made
        step = run.config.step if run.config.step.changes_gradients else PLAIN_STEP
        # steps that differ only in what tables hold must have one `StepForm`, which is told by the config's text
        config = dataclasses.replace(run.config, lr=lr, schedule=None, epochs=1, steps=None, step_limit=None, step=step)
        return dataclasses.replace(
            run,
            clients=(),
            rng_versions=(),
            model=torch.empty(0),
            config=config,
            prox_center=kept("center", run.prox_center if run.prox else None),
            correction=kept("correction", run.correction),
            state=each("state", state),
            own=each("own", run.own),
            only_step=None,
        )


def vectors_of(run: SgdRun) -> list[Tensor]:
    """Return the vectors that a step of a run reads besides the model, the rows and the optimizer's state."""
    return [*run.own.values(), *(vector for vector in (run.prox_center, run.correction) if vector is not None)]


class StepTables(NamedTuple):
    """The numbers that differ from step to step, with a row for each step.

    Attributes:
        positions: positions of the rows, [s, b] or of a stack [s, c, b].
        mask: which of them count, [s, c, b]; None where all do.
        keys: dropout keys, [s] or [s, c]; None where nothing is drawn.
        rates: learning rate, [s, 1] or [s, c, 1].
        numbers: number of the step since the optimizer's state began, likewise.
    """

    positions: Tensor
    mask: Tensor | None
    keys: Tensor | None
    rates: Tensor
    numbers: Tensor

    @property
    def held(self) -> list[Tensor]:
        """The tables."""
        return [table for table in self if table is not None]

    @staticmethod
    def row(table: Tensor | None, number: Tensor) -> Tensor | None:
        """A table's row of the step that a counter [1] on the device is at."""
        # by a tensor: a recording would keep a number of the host for ever
        return None if table is None else table.index_select(0, number)[0]

    def of_step(self, number: Tensor) -> tuple[Tensor, Tensor]:
        """The learning rate of that step and its number."""
        return self.rates.index_select(0, number)[0], self.numbers.index_select(0, number)[0]


def padded(batches: Sequence[np.ndarray[Any, Any]], width: int) -> Tensor:
    """Positions of batches as rows of one width [s, width], filled up with zeros."""
    # zeros are never read: a step takes its batch's length of them (`SequentialEngine._take_step`)
    rows = np.zeros((len(batches), width), dtype=np.int64)
    for row, batch in zip(rows, batches, strict=True):
        row[: len(batch)] = batch
    return torch.from_numpy(rows)


def rows_at(gathered: Gathered, positions: Tensor) -> Rows:
    """The rows at positions [...], gathered along one axis, which is much quicker."""
    rows = gathered.take(positions.flatten())
    if positions.dim() == 1:
        return rows
    shape = positions.shape
    return Rows(*(pytree.mapped(lambda leaf: leaf.view(*shape, *leaf.shape[1:]), tree) for tree in (rows.x, rows.y)))
