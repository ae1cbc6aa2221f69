"""Statistics of a client's columns: its inputs and targets, told as moments or as counts."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor

from piebald.contracts import (
    ClientContext,
    Query,
    ResultForm,
    Rows,
    Split,
    TrainInput,
    TrainOutput,
    Trains,
    Update,
)
from piebald.contracts.model_spec import ModelSpec
from piebald.core import pytree
from piebald.core.moments import Floats, Moments, counts_at_most, number_of

PARTS = ("present", "missing", "infinite", "mean", "scatter")
MOST_KEYS = 256  # thresholds of a column in one question
_FLOAT64 = "torch.float64"


class StatisticsQuery(Query):
    """Tell the moments of each column, or how many of its numbers are at most some thresholds (`kind` is "statistics").

    Columns are the numbers of an input, flattened, and then those of a target; a class counts as its number.  A site
    answers only where its policy names this query, and keeps to itself what is about fewer rows than it demands.

    Attributes:
        split: which of the client's rows.
        targets: how many numbers a target has, 1 for a class.
        keys: thresholds of each column, as places in the order of float64 numbers (`number_order.number_of`), the same
            number for each; empty asks for moments.
    """

    by_name = True
    reads_model = False

    split: Split = "train"
    targets: int = Field(default=1, ge=0)
    keys: tuple[tuple[int, ...], ...] = Field(default=(), max_length=1 << 14)

    @field_validator("keys")
    @classmethod
    def _check_keys(cls, keys: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        if len({len(one) for one in keys}) > 1 or any(not 1 <= len(one) <= MOST_KEYS for one in keys):
            raise ValueError(f"keys must be 1 to {MOST_KEYS} thresholds, as many for each column")
        return keys

    def rows_read(self, personal: bool) -> set[Split]:
        return {self.split}

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        tables = [columns(rows) for rows in context.rows(self.split)]
        told = np.stack([self._counts(one) if self.keys else self._moments(one) for one in tables])
        counted = torch.tensor([len(one) for one in tables])
        vectors = {"counts" if self.keys else "moments": torch.from_numpy(told)}
        return TrainOutput(inputs.model, torch.zeros(len(tables)), vectors=vectors, metrics={"examples": counted})

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        width = self._width(spec)
        name, shape = ("counts", (width, len(self.keys[0]))) if self.keys else ("moments", (len(PARTS), width))
        return ResultForm({name: shape}, (), rows[self.split], 0, types={name: _FLOAT64})

    def fewest_rows(self, answer: Update) -> int | None:
        """See `Query`: the smallest number of rows that a count is, or that moments are of; none count as no row."""
        if (moments := answer.vectors.get("moments")) is not None:
            counts = moments[:3]
        else:
            below = answer.vectors["counts"]
            ordered = below.sort(1).values
            ends = torch.cat([torch.zeros(len(below), 1), ordered, torch.full((len(below), 1), answer.examples)], 1)
            counts = ends.diff(dim=1)
        held = counts[counts > 0]
        return int(held.min()) if len(held) else None

    def reject_reason(self, answer: Update, spec: ModelSpec) -> str | None:
        if self.keys:
            told = answer.vectors.get("counts")
            if told is None or tuple(told.shape) != (self._width(spec), len(self.keys[0])):
                return "must send a count for each threshold"
            return _count_reason(told, answer.examples) or self._order_reason(told)
        told = answer.vectors.get("moments")
        if told is None or tuple(told.shape) != (len(PARTS), self._width(spec)):
            return f"must send {len(PARTS)} numbers for each column"
        counts = told[:3]
        if reason := _count_reason(counts, answer.examples):
            return reason
        if bool((counts.sum(0) != answer.examples).any()):
            return "sent counts that do not add up to its rows"
        if bool((told[4] < 0).any()) or bool((told[3:, counts[0] == 0] != 0).any()):
            return "sent moments that no rows have"
        return "sent a deviation of a single number" if bool((told[4, counts[0] == 1] != 0).any()) else None

    def topic(self) -> str:
        return f"{self.kind}: {'counts' if self.keys else 'moments'}"

    def most_asked(self, hides: bool) -> int:
        return 1 if hides else 100  # an exact quantile takes about 70

    def _width(self, spec: ModelSpec) -> int:
        """How many columns there are."""
        return sum(math.prod(shape) for shape in pytree.shapes(spec.shape)) + self.targets

    def _order_reason(self, told: Tensor) -> str | None:
        order = torch.from_numpy(np.argsort(np.array(self.keys), axis=1))
        falls = bool((told.gather(1, order).diff(dim=1) < 0).any())
        return "sent counts that fall where thresholds rise" if falls else None

    def _moments(self, table: Floats) -> Floats:
        found = Moments.of(table)
        return np.stack([np.asarray(getattr(found, name), dtype=np.float64) for name in PARTS])

    def _counts(self, table: Floats) -> Floats:
        if len(self.keys) != table.shape[1]:
            raise ValueError(f"thresholds of {len(self.keys)} columns came, and there are {table.shape[1]}")
        held = [np.sort(column[np.isfinite(column)]) for column in table.T]
        return counts_at_most(held, number_of(np.array(self.keys, dtype=np.int64))).astype(np.float64)


def columns(rows: Rows) -> Floats:
    """The numbers of inputs and targets [n, d]; those of a class are its number."""
    parts = [pytree.single(one, "statistics").detach().cpu().double() for one in (rows.x, rows.y)]
    flat = [part.reshape(len(part), math.prod(part.shape[1:])) for part in parts]
    return np.asarray(torch.cat(flat, 1).numpy())


def _count_reason(counts: Tensor, rows: int) -> str | None:
    if bool((counts < 0).any()) or bool((counts != counts.round()).any()) or bool((counts > rows).any()):
        return f"sent counts that cannot be those of {rows:,} rows"
    return None
