"""Questions about models of a client's rows: sums for regressions and survival curves, in the open or under masks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from piebald.contracts import (
    SUM,
    ClientContext,
    Hiding,
    ResultForm,
    Rows,
    Split,
    TrainInput,
    TrainOutput,
    Trains,
    Update,
)
from piebald.contracts.data import ModelSpec
from piebald.core.moments import Floats, Ints
from piebald.inference.models.noisy_sums import STEP, NoisyPlan
from piebald.inference.models.rows import MOST_COLUMNS, MOST_SUMS, Ask, ModelPlan, ModelRows, model_rows
from piebald.inference.models.sums import check_sums, client_sums
from piebald.inference.queries.columns import RowsQuery, SumsQuery, columns, table_columns
from piebald.inference.request import bounds_reason

LIMBS, _BITS, _LIMB_STEP = 6, 32, 128  # a sum is a whole number of 2^-128, in 6 parts of 32 bits
_LARGEST = 2.0**60


class ModelSumsQuery(RowsQuery):
    """Send the sums of a model at some coefficients (`kind` is "model_sums").

    The coefficients, and what else `models.sums.client_sums` takes, come as the task's vector "numbers".  A site
    answers only where its policy names this query, and under its rules of disclosure: a column tells of enough rows,
    the model has at most a third as many coefficients as rows (as in DataSHIELD), and no row has a large share
    of a sum.

    Attributes:
        plan: the columns of the model, by their places.
        ask: the question.
        numbers: how many numbers come, besides the means and deviations of the columns.
        split: the split of the client's rows.
    """

    later: ClassVar = {
        "ask": "any of the sums of this model",
        "numbers": "coefficients of the server's choice, and ends of intervals of time: up to 65,536 numbers",
    }

    plan: ModelPlan
    ask: Ask
    numbers: int = Field(default=0, ge=0, le=1 << 16)

    def most_asked(self, hides: bool) -> int:
        return 60 if hides else 1000  # a model takes 10 to 30

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        sent = [numbers.detach().cpu().double().numpy() for numbers in inputs.vectors["numbers"]]
        # a fit asks 10 to 30 times about the same rows
        parts = context.cached(self.split, self.plan, self._rows)
        for rows, numbers in zip(parts, sent, strict=True):
            self._check_length(numbers)
            if context.disclosure is not None:
                check_sums(self.plan, self.ask, rows, numbers, context.disclosure)
        sums = [self._sums(rows, numbers) for rows, numbers in zip(parts, sent, strict=True)]
        return self._output(inputs, parts, sums)

    def _output(self, inputs: TrainInput, parts: list[ModelRows], sums: list[Floats]) -> TrainOutput:
        examples = torch.tensor([float(len(rows.y)) for rows in parts])
        return inputs.answered(vectors={SUM: torch.from_numpy(np.stack(sums))}, metrics={"examples": examples})

    def _rows(self, rows: Rows, client: str) -> ModelRows:
        return model_rows(self.plan, table_columns(columns(rows), client))

    def _check_length(self, numbers: Floats) -> None:
        if len(numbers) != 2 * len(self.plan.columns) + self.numbers or self.length > MOST_SUMS:
            raise ValueError(f"{len(numbers)} numbers came for a question about {self.length:,} sums")

    def _sums(self, rows: ModelRows, numbers: Floats) -> Floats:
        sums = client_sums(self.plan, self.ask, rows, numbers)
        if len(sums) != self.length:
            raise ValueError(f"{self.length:,} sums are asked for, and {len(sums):,} were made: other numbers came")
        return sums

    @property
    def length(self) -> int:
        """The number of sums."""
        return self.plan.length(self.ask, self.numbers)

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        return ResultForm({SUM: (self.length,)}, (), rows[self.split], 0, types={SUM: "torch.float64"})

    def reject_reason(self, answer: Update, spec: ModelSpec) -> str | None:
        sums = answer.vectors.get(SUM)
        if sums is None or sums.dtype != torch.float64 or tuple(sums.shape) != (self.length,):
            return f"must send {self.length:,} sums"
        if self.ask == "counts" and bool(((sums < 0) | (sums != sums.round())).any()):
            return "sent counts that are no whole numbers"
        return None


class MaskedModelSumsQuery(SumsQuery, ModelSumsQuery):
    """Send the sums of a model under the run's masks (`kind` is "masked_model_sums").

    A sum is a whole number of 2^-128 in six parts of 32 bits, so that no bounds of the columns are needed.
    """

    @property
    def summands(self) -> int:
        return LIMBS * self.length

    def _output(self, inputs: TrainInput, parts: list[ModelRows], sums: list[Floats]) -> TrainOutput:
        return self.sums_answer(inputs, list(map(to_limbs, sums)))


class NoisyModelSumsQuery(SumsQuery, RowsQuery):
    """Send bounded sums of a model with Gaussian noise (`kind` is "noisy_model_sums").

    What a row adds is bounded by the stated bounds, whatever the parameters are, which come as the task's vector
    "numbers"; see `models.noisy_sums`.  A site draws the noise from its operating system's randomness, and its ledger
    counts the question.

    Attributes:
        plan: the columns of the model, by their places.
        bounds: low and high of each regressor.
        target: low and high of the target; of events, 0 and 1.
        ends: of the intervals of time, increasing, of models of times.
        noise: the standard deviation, in units of the largest change that the exchange of one row makes.
        masked: whether the sums also leave under the run's masks.
        split: the split of the client's rows.
    """

    plan: ModelPlan
    bounds: tuple[tuple[float, float], ...] = Field(max_length=MOST_COLUMNS)
    target: tuple[float, float] = (0.0, 1.0)
    ends: tuple[float, ...] = Field(default=(), max_length=1000)
    noise: float = Field(gt=0, le=10_000, allow_inf_nan=False)
    masked: bool = False

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if reason := next(filter(None, (bounds_reason(*ends) for ends in (*self.bounds, self.target))), None):
            raise ValueError(f"bounds {reason}")
        if len(self.bounds) != len(self.plan.columns):
            raise ValueError(f"bounds must be of each of {len(self.plan.columns)} columns, got {len(self.bounds)}")
        if self.plan.has_times and (
            not self.ends or list(self.ends) != sorted({*self.ends}) or not 0 < self.ends[0] <= self.ends[-1] < math.inf
        ):
            raise ValueError("ends of intervals must be increasing times above 0")
        if (
            self.plan.family not in ("gaussian", "binomial", "poisson", "cox", "survival")
            or self.plan.weights or self.plan.entry
            or self.plan.cluster is not None
        ):  # fmt: skip
            raise ValueError("noise is for models without weights, entry times, clusters, and a second parameter")
        if self.sums.length > MOST_SUMS:
            raise ValueError(f"sums are at most {MOST_SUMS:,} numbers, got {self.sums.length:,}")
        return self

    @property
    def sums(self) -> NoisyPlan:
        """The sums."""
        return NoisyPlan(self.plan, self.bounds, self.target, self.ends)

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise of one client, in units of the sums."""
        return self.noise * self.sums.influence

    @property
    def summands(self) -> int:
        return self.sums.length

    def hiding(self) -> Hiding | None:
        return Hiding(self.noise, self.masked)

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        points = [numbers.detach().cpu().double().numpy() for numbers in inputs.vectors["numbers"]]
        if any(len(point) not in (0, self.sums.parameters) for point in points):
            raise ValueError(f"a model of {self.sums.parameters} parameters came with other numbers")
        parts = context.cached(self.split, (self.kind, self.plan), self._rows)
        vectors = [self.sums.vector(rows, point) for rows, point in zip(parts, points, strict=True)]
        return self.noisy_answer(inputs, context, vectors, self.deviation / STEP)

    def _rows(self, rows: Rows, client: str) -> ModelRows:
        # a row that the model does not take is left out: a refusal would tell that there is one
        return model_rows(self.plan, table_columns(columns(rows), client), refuse=False)


def to_limbs(sums: Floats) -> Ints:
    """Return sums [k] as whole numbers of 2^-128 in parts of 32 bits [6 k], of which the last is signed.

    Raises:
        ValueError: a sum is larger than 2^60.

    Examples:
        >>> from_limbs(to_limbs(np.array([-1.5, 1e-9])).astype(float)).tolist()
        [-1.5, 1e-09]
    """
    # "not <=", so that NaN is refused as well
    if len(sums) and not float(np.abs(sums).max()) <= _LARGEST:
        raise ValueError("sums under masks are below 2^60")
    limbs = []
    # exact: a float is a ratio of whole numbers, so that only digits below 2^-128 are lost
    for numerator, denominator in (number.as_integer_ratio() for number in sums.tolist()):
        whole = (numerator << _LIMB_STEP) // denominator
        limbs += [(whole >> _BITS * place) & ((1 << _BITS) - 1) for place in range(LIMBS - 1)]
        # an arithmetic shift: the sign is in the last part alone, and all others are 0 to 2^32 - 1
        limbs.append(whole >> _BITS * (LIMBS - 1))
    return np.array(limbs, dtype=np.int64)


def from_limbs(limbs: Floats) -> Floats:
    """Return the sums [k] from the sums of their parts over clients [6 k]."""
    parts = limbs.reshape(-1, LIMBS).tolist()
    # parts of many clients exceed 32 bits: they carry into the next one here, in whole numbers of any size
    wholes = [sum(int(part) << _BITS * place for place, part in enumerate(each)) for each in parts]
    return np.array([math.ldexp(float(whole), -_LIMB_STEP) for whole in wholes])
