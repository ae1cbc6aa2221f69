"""Sums of a client's columns in which no number of a row is larger than its bounds: under masks, or with noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from piebald.contracts import (
    SUM,
    ClientContext,
    Hiding,
    Query,
    ResultForm,
    Split,
    TrainInput,
    TrainOutput,
    Trains,
    Update,
)
from piebald.contracts.model_spec import ModelSpec
from piebald.core.moments import Floats, Ints
from piebald.core.noise import NoiseSource
from piebald.statistics.bounded_sums import STEP, SumPlan, as_text, bounds_reason
from piebald.statistics.queries.statistics import columns

MOST_NUMBERS = 1 << 20  # of an answer
_LARGEST = 1 << 62  # absolute value of a number of an answer


class MaskedSumsQuery(Query):
    """Tell bounded sums of each column under the run's masks, without noise (`kind` is "masked_sums").

    Columns are the numbers of an input, flattened, and then those of a target; a class is counted instead.  The sums
    are those of `bounded_sums.SumPlan`: rows that are present, missing, infinite, sums of numbers and of their squares
    in units of the bounds, and a histogram between them.  A number outside its bounds counts as the nearer one.  A
    column of codes is counted by category, like a class, and columns that are so counted may be counted together.

    Attributes:
        split: which of the client's rows.
        bounds: low and high of each column of numbers.
        bins: bins of each column's histogram, 0 for none.
        classes: how many classes the target has, 0 where it is numbers.
        codes: columns that are counted by category instead, by their places, each with its categories, like "1".
        tables: pairs of such columns to count together, by their places; that of a class is the last one.
    """

    by_name = True
    reads_model = False

    split: Split = "train"
    bounds: tuple[tuple[float, float], ...] = Field(default=(), max_length=1 << 16)
    bins: int = Field(default=0, ge=0, le=10_000)
    classes: int = Field(default=0, ge=0, le=10_000)
    codes: tuple[tuple[int, tuple[str, ...]], ...] = Field(default=(), max_length=1 << 12)
    tables: tuple[tuple[int, int], ...] = Field(default=(), max_length=1 << 12)

    @field_validator("bounds")
    @classmethod
    def _check_bounds(cls, bounds: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        if reason := next(filter(None, (bounds_reason(*ends) for ends in bounds)), None):
            raise ValueError(f"bounds {reason}")
        return bounds

    @model_validator(mode="after")
    def _check_codes(self) -> Self:
        places = [place for place, _ in self.codes]
        if places != sorted({*places}) or not all(0 <= place < self._width for place in places):
            raise ValueError(f"codes must be of columns 0 to {self._width - 1} in order, got those of {places}")
        if not all(known and len({*known}) == len(known) for _, known in self.codes):
            raise ValueError("codes must have different categories, at least one")
        counted = {*places, self._width} if self.classes else {*places}
        if not counted.issuperset(chain(*self.tables)) or any(one == other for one, other in self.tables):
            raise ValueError(f"tables must be pairs of different columns that are counted, got {self.tables}")
        return self

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.plan.length > MOST_NUMBERS:
            raise ValueError(f"sums are at most {MOST_NUMBERS:,} numbers, got {self.plan.length:,}")
        return self

    @property
    def plan(self) -> SumPlan:
        """The sums; columns are named by their places."""
        codes = {str(place): known for place, known in self.codes}
        numbers = [str(place) for place in range(self._width) if str(place) not in codes]
        if self.classes:
            codes[str(self._width)] = tuple(map(str, range(self.classes)))
        tables = [(str(one), str(other)) for one, other in self.tables]
        return SumPlan(dict(zip(numbers, self.bounds, strict=True)), self.bins, codes, tables)

    @property
    def _width(self) -> int:
        """How many columns there are besides a class."""
        return len(self.bounds) + len(self.codes)

    def hiding(self) -> Hiding | None:
        return Hiding(noise=0.0, masked=True)

    def most_asked(self, hides: bool) -> int:
        return 10

    def rows_read(self, personal: bool) -> set[Split]:
        return {self.split}

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        plan, hiding = self.plan, self.hiding()
        vectors = [plan.vector(self._columns(columns(rows))) for rows in context.rows(self.split)]
        if hiding is not None and hiding.noise:
            deviation = hiding.noise * plan.exchange_influence / STEP
            sources = map(NoiseSource.repeatable, context.noise_keys())
            vectors = [_noised(one, deviation, source) for one, source in zip(vectors, sources, strict=True)]
        none = torch.zeros(len(vectors))  # no number besides the sums: nothing would hide it
        return TrainOutput(
            inputs.model, none, vectors={SUM: torch.from_numpy(np.stack(vectors))}, metrics={"examples": none}
        )

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        return ResultForm({SUM: (self.plan.length,)}, (), 0, 0, types={SUM: "torch.int64"})

    def reject_reason(self, answer: Update, spec: ModelSpec) -> str | None:
        told = answer.vectors.get(SUM)
        if told is None or told.dtype != torch.int64 or tuple(told.shape) != (self.plan.length,):
            return f"must send {self.plan.length:,} whole numbers"
        masked = (hiding := self.hiding()) is not None and hiding.masked  # then any numbers may come
        return (
            None if masked or bool(((told >= -_LARGEST) & (told <= _LARGEST)).all()) else "sent sums that no rows have"
        )

    def _columns(self, table: Floats) -> _Columns:
        if table.shape[1] != self._width + (self.classes > 0):
            raise ValueError(f"bounds or codes of {self._width} columns came, and there are {table.shape[1]}")
        return _Columns(len(table), {str(place): table[:, place] for place in range(table.shape[1])})


class NoisySumsQuery(MaskedSumsQuery):
    """Tell bounded sums of each column with Gaussian noise (`kind` is "noisy_sums").

    A site draws the noise from its operating system's randomness, new for each question, and counts each question in
    its ledger.  What is hidden is which row of its kind is there: not how many rows a client has, which a site states.

    Attributes:
        noise: its standard deviation, in units of the largest Euclidean length by which sums change when one row takes
            the place of another.
        masked: whether the sums leave under the run's masks besides.
    """

    noise: float = Field(gt=0, le=10_000, allow_inf_nan=False)
    masked: bool = False

    def hiding(self) -> Hiding | None:
        return Hiding(self.noise, self.masked)


@dataclass(frozen=True, slots=True)
class _Columns:
    """A client's columns (`bounded_sums.Columns`)."""

    rows: int
    numbers: Mapping[str, Floats]
    name: str = "this client"

    def text(self, name: str) -> NDArray[np.object_]:
        return as_text(self.numbers[name])


def _noised(vector: Ints, deviation: float, source: NoiseSource) -> Ints:
    """Whole numbers with noise."""
    noisy = source.add_to(torch.from_numpy(vector.astype(np.float64)), deviation)
    return np.asarray(noisy.round().numpy()).astype(np.int64)
