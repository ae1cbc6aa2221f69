"""Questions about a client's columns: statistics, and sums for regressions and survival curves.

Moments, counts and sums come in the open, under masks or with noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import ClassVar, Self

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from piebald.contracts import (
    SUM,
    ClientContext,
    Disclosure,
    Hiding,
    Query,
    ResultForm,
    Rows,
    Split,
    TrainInput,
    TrainOutput,
    Trains,
    Update,
)
from piebald.contracts.data import ModelSpec
from piebald.core import pytree
from piebald.core.errors import Declined, shown
from piebald.core.moments import Floats, Ints, Moments, counts_at_most, number_of
from piebald.core.randomness import NoiseSource
from piebald.data.preparation.answers import check_moments
from piebald.inference.columns import STEP, ClientColumns, SumPlan, bounds_reason, target_columns
from piebald.inference.models.noisy_sums import NoisyPlan
from piebald.inference.models.rows import MOST_COLUMNS, MOST_SUMS, Ask, ModelPlan, ModelRows, model_rows
from piebald.inference.models.sums import check_sums, client_sums

PARTS = ("present", "missing", "infinite", "mean", "scatter")
MOST_KEYS = 256  # thresholds of a column in one question
_LARGEST = 1 << 62  # absolute value of a sum
_FLOAT64 = "torch.float64"


class RowsQuery(Query):
    """Base class of questions about the rows of one split, which a site answers only where its policy names them.

    Attributes:
        split: the split of the client's rows.
    """

    axis = "query"  # a base class, not a question
    by_name = True
    reads_model = False

    split: Split = "train"

    def rows_read(self, personal: bool) -> set[Split]:
        return {self.split}


class SumsQuery(Query):
    """Base class of questions whose answer is whole numbers [m] that are added up, under masks or with noise."""

    axis = "query"  # a base class, not a question

    @property
    def summands(self) -> int:
        """How many numbers an answer has."""
        raise NotImplementedError

    def hiding(self) -> Hiding | None:
        return Hiding(noise=0.0, masked=True)

    def sums_answer(self, inputs: TrainInput, vectors: Sequence[Ints]) -> TrainOutput:
        """Return an answer of sums [c, m], under which the number of rows is hidden as well."""
        sums = {SUM: torch.from_numpy(np.stack(vectors))}
        return inputs.answered(vectors=sums, metrics={"examples": torch.zeros(len(vectors))})

    def noisy_answer(
        self, inputs: TrainInput, context: ClientContext, vectors: Sequence[Ints], deviation: float
    ) -> TrainOutput:
        """Return an answer of sums [c, m] with Gaussian noise, rounded, from the operating system's randomness."""
        sources = map(NoiseSource.repeatable, context.noise_keys())
        noisy = [
            source.add_to(torch.from_numpy(vector.astype(np.float64)), deviation).round().numpy().astype(np.int64)
            for vector, source in zip(vectors, sources, strict=True)
        ]
        return self.sums_answer(inputs, noisy)

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        return ResultForm({SUM: (self.summands,)}, (), 0, 0, types={SUM: "torch.int64"})

    def reject_reason(self, answer: Update, spec: ModelSpec) -> str | None:
        sums = answer.vectors.get(SUM)
        if sums is None or sums.dtype != torch.int64 or tuple(sums.shape) != (self.summands,):
            return f"must send {self.summands:,} whole numbers"
        return None


class StatisticsQuery(RowsQuery):
    """Send the moments of each column, or counts of its numbers up to some thresholds (`kind` is "statistics").

    Columns are the numbers of an input, flattened, and then those of a target; a class counts as its number.  A site
    answers only where its policy names this query, and tells no sum that few of its rows decide.

    Attributes:
        split: the split of the client's rows.
        targets: how many numbers a target has, 1 for a class.
        keys: thresholds of each column, as places in the order of float64 numbers (`moments.number_of`), the same
            number for each; empty asks for moments.
    """

    targets: int = Field(default=1, ge=0)
    keys: tuple[tuple[int, ...], ...] = Field(default=(), max_length=1 << 14)

    @field_validator("keys")
    @classmethod
    def _check_keys(cls, keys: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        # answers are one table [columns, thresholds], so no column may have another number of them
        lengths = {len(thresholds) for thresholds in keys}
        if len(lengths) > 1 or any(not 1 <= length <= MOST_KEYS for length in lengths):
            raise ValueError(f"keys must be 1 to {MOST_KEYS} thresholds, as many for each column")
        return keys

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        parts: list[Floats] = []
        if self.keys:
            # sorted once, so that each of up to about 20 questions costs a binary search and no pass over the rows
            tables = context.cached(self.split, "sorted columns", _sorted_columns)
            answers, examples = [self._counts(columns) for columns, _ in tables], [count for _, count in tables]
        else:
            parts = [columns(rows) for rows in context.rows(self.split)]
            answers = [self._moments(part, context.features) for part in parts]
            examples = [len(part) for part in parts]
        if context.disclosure is not None:
            for below, count in zip(answers, examples, strict=True) if self.keys else ():
                # thresholds may come in any order, and neighbours single rows out only when sorted: rows are counted
                # between neighbouring ones, below the first and above the last
                ends = np.sort(below, axis=1)
                for index, between in enumerate(np.diff(ends, axis=1, prepend=0.0, append=count)):
                    with _of_column(index, context.features):
                        context.disclosure.check_counts(between)
            for part in () if self.keys else parts:
                _check_columns(part, context.disclosure, context.features)
        vectors = {"counts" if self.keys else "moments": torch.from_numpy(np.stack(answers))}
        return inputs.answered(vectors=vectors, metrics={"examples": torch.tensor(examples)})

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        width = self._width(spec)
        name, shape = ("counts", (width, len(self.keys[0]))) if self.keys else ("moments", (len(PARTS), width))
        return ResultForm({name: shape}, (), rows[self.split], 0, types={name: _FLOAT64})

    def reject_reason(self, answer: Update, spec: ModelSpec) -> str | None:
        if self.keys:
            below = answer.vectors.get("counts")
            if below is None or tuple(below.shape) != (self._width(spec), len(self.keys[0])):
                return "must send a count for each threshold"
            return _count_reason(below, answer.examples) or self._order_reason(below)
        moments = answer.vectors.get("moments")
        if moments is None or tuple(moments.shape) != (len(PARTS), self._width(spec)):
            return f"must send {len(PARTS)} numbers for each column"
        # what a site cannot have measured is refused here, before it is merged with the moments of all others
        counts, scatter = moments[:3], moments[4]
        if reason := _count_reason(counts, answer.examples):
            return reason
        if bool((counts.sum(0) != answer.examples).any()):
            return "sent counts that do not add up to its rows"
        if bool((scatter < 0).any()) or bool((moments[3:, counts[0] == 0] != 0).any()):
            return "sent moments that no rows have"
        return "sent a deviation of a single number" if bool((scatter[counts[0] == 1] != 0).any()) else None

    def topic(self) -> str:
        return f"{self.kind}: {'counts' if self.keys else 'moments'}"

    def most_asked(self, hides: bool) -> int:
        return 1 if hides else 100  # an exact quantile takes about 20

    def _width(self, spec: ModelSpec) -> int:
        """Return the number of columns."""
        return sum(math.prod(shape) for shape in pytree.shapes(spec.shape)) + self.targets

    def _order_reason(self, counts: Tensor) -> str | None:
        # keys are in the order of the numbers that they stand for, so they sort like thresholds
        order = torch.from_numpy(np.argsort(np.array(self.keys), axis=1))
        falls = bool((counts.gather(1, order).diff(dim=1) < 0).any())
        return "sent counts that fall where thresholds rise" if falls else None

    def _moments(self, table: Floats, names: Sequence[str]) -> Floats:
        moments = Moments.of(table, names if len(names) == table.shape[1] else ())
        return np.stack([np.asarray(getattr(moments, name), dtype=np.float64) for name in PARTS])

    def _counts(self, ordered: Sequence[Floats]) -> Floats:
        if len(self.keys) != len(ordered):
            raise ValueError(f"thresholds of {len(self.keys)} columns came, and there are {len(ordered)}")
        return counts_at_most(ordered, number_of(np.array(self.keys, dtype=np.int64))).astype(np.float64)


def columns(rows: Rows) -> Floats:
    """Return the numbers of inputs and targets [n, d]; a class counts as its number."""
    inputs = pytree.single(rows.x, "statistics").detach().cpu().double()
    flat = inputs.reshape(len(inputs), math.prod(inputs.shape[1:])).numpy()
    targets = [*target_columns(rows.y).values()]
    return np.column_stack([flat, *targets]) if targets else flat


def _sorted_columns(rows: Rows, name: str) -> tuple[list[Floats], int]:
    """Return the finite numbers of each column in order, and the number of rows."""
    return [np.sort(column[np.isfinite(column)]) for column in columns(rows).T], len(rows)


def _check_columns(table: Floats, rules: Disclosure, names: Sequence[str]) -> None:
    """Refuse moments of columns [n, d] that few rows decide."""
    missing, infinite = np.isnan(table).sum(0), np.isinf(table).sum(0)
    counts = np.stack([len(table) - missing - infinite, missing, infinite])
    for index, column in enumerate(table.T):
        with _of_column(index, names):
            rules.check_counts(counts[:, index])
            check_moments(column, rules)


@contextmanager
def _of_column(place: int, names: Sequence[str]) -> Iterator[None]:
    """Note in an error which column it is about; the note is for the site's own log, and no part of its sentence."""
    try:
        yield
    except Declined as error:
        error.add_note(f"column {shown(names[place], 40) if place < len(names) else place + 1}")
        raise


def _count_reason(counts: Tensor, rows: int) -> str | None:
    if bool((counts < 0).any()) or bool((counts != counts.round()).any()) or bool((counts > rows).any()):
        return f"sent counts that cannot be those of {rows:,} rows"
    return None


class MaskedSumsQuery(SumsQuery, RowsQuery):
    """Send bounded sums of each column under the run's masks, without noise (`kind` is "masked_sums").

    Columns are the numbers of an input, flattened, and then those of a target; a class is counted instead.  The sums
    are those of `columns.SumPlan`: rows that are present, missing, infinite, sums of numbers and of their squares
    in units of the bounds, and a histogram between them.  A number outside its bounds counts as the nearer one.  A
    column of codes is counted by category, like a class, and columns that are so counted may be counted together.

    Attributes:
        split: the split of the client's rows.
        bounds: low and high of each column besides a class, None for those whose numbers are not added up.
        bins: bins of each histogram, 0 for none.
        classes: how many classes the target has, 0 where it is numbers.
        codes: columns that are counted by category, by their places, each with its categories, like "1".
        tables: pairs of such columns to count together, by their places; that of a class is the last one.
    """

    bounds: tuple[tuple[float, float] | None, ...] = Field(default=(), max_length=1 << 16)
    bins: int = Field(default=0, ge=0, le=10_000)
    classes: int = Field(default=0, ge=0, le=10_000)
    codes: tuple[tuple[int, tuple[str, ...]], ...] = Field(default=(), max_length=1 << 12)
    tables: tuple[tuple[int, int], ...] = Field(default=(), max_length=1 << 12)

    @field_validator("bounds")
    @classmethod
    def _check_bounds(cls, bounds: tuple[tuple[float, float] | None, ...]) -> tuple[tuple[float, float] | None, ...]:
        if reason := next(filter(None, (bounds_reason(*ends) for ends in bounds if ends is not None)), None):
            raise ValueError(f"bounds {reason}")
        return bounds

    @model_validator(mode="after")
    def _check_codes(self) -> Self:
        places = [place for place, _ in self.codes]
        # the place of a column tells which sums are its own, so an order that varies would mix columns up
        width = len(self.bounds)
        if places != sorted({*places}) or not all(0 <= place < width for place in places):
            raise ValueError(f"codes must be of columns 0 to {width - 1} in order, got those of {places}")
        if not all(categories and len({*categories}) == len(categories) for _, categories in self.codes):
            raise ValueError("codes must have different categories, at least one")
        # the class comes after all other columns
        counted = {*places, width} if self.classes else {*places}
        if not counted.issuperset(chain(*self.tables)) or any(first == second for first, second in self.tables):
            raise ValueError(f"tables must be pairs of different columns that are counted, got {self.tables}")
        return self

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        # refused when the question is read, so that no site starts to make so many sums
        if self.plan.length > MOST_SUMS:
            raise ValueError(f"sums are at most {MOST_SUMS:,} numbers, got {self.plan.length:,}")
        return self

    @property
    def plan(self) -> SumPlan:
        """The sums; columns are named by their places."""
        codes = {str(index): categories for index, categories in self.codes}
        bounds = {str(index): ends for index, ends in enumerate(self.bounds) if ends is not None}
        if self.classes:
            codes[str(len(self.bounds))] = tuple(map(str, range(self.classes)))
        return SumPlan(bounds, self.bins, codes, [(str(first), str(second)) for first, second in self.tables])

    @property
    def summands(self) -> int:
        return self.plan.length

    def most_asked(self, hides: bool) -> int:
        return 10

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        plan, hiding = self.plan, self.hiding()
        tables = [self._columns(columns(rows)) for rows in context.rows(self.split)]
        vectors = [plan.vector(table) for table in tables]
        if context.disclosure is not None:
            for table, vector in zip(tables, vectors, strict=True):
                counts, contributions = plan.influences(table, vector)
                context.disclosure.check_counts(counts)
                context.disclosure.check(contributions)
        if hiding is not None and hiding.noise:
            # a site states how many rows it has, so a row can only take the place of another
            deviation = hiding.noise * plan.exchange_influence / STEP
            return self.noisy_answer(inputs, context, vectors, deviation)
        return self.sums_answer(inputs, vectors)

    def reject_reason(self, answer: Update, spec: ModelSpec) -> str | None:
        if reason := super().reject_reason(answer, spec):
            return reason
        hiding, sums = self.hiding(), answer.vectors[SUM]
        if hiding is not None and hiding.masked:
            return None  # under masks, any numbers may come
        # without masks a sum is seen by itself, so one beyond all rows is refused before it spoils the total
        return None if bool(((sums >= -_LARGEST) & (sums <= _LARGEST)).all()) else "sent sums that no rows have"

    def _columns(self, table: Floats) -> ClientColumns:
        # a plan for other columns would name the wrong ones, since columns are named by their places
        if table.shape[1] != len(self.bounds) + (self.classes > 0):
            raise ValueError(f"bounds of {len(self.bounds)} columns came, and there are {table.shape[1]}")
        return table_columns(table)


class NoisySumsQuery(MaskedSumsQuery):
    """Send bounded sums of each column with Gaussian noise (`kind` is "noisy_sums").

    A site draws the noise from its operating system's randomness, new for each question, and counts each question in
    its ledger.  The noise hides whether another row is in the place of one; it does not hide how many rows a client
    has, which a site states.

    Attributes:
        noise: its standard deviation, in units of the largest Euclidean length by which sums change when one row takes
            the place of another.
        masked: whether the sums also leave under the run's masks.
    """

    noise: float = Field(gt=0, le=10_000, allow_inf_nan=False)
    masked: bool = False

    def hiding(self) -> Hiding | None:
        return Hiding(self.noise, self.masked)


def table_columns(table: Floats, client: str = "this client") -> ClientColumns:
    """Return the columns of a table [n, d], which are named by their places."""
    numbers = {str(index): table[:, index] for index in range(table.shape[1])}
    return ClientColumns(client, len(table), numbers, {})


LIMBS, _BITS, _LIMB_STEP = 6, 32, 128  # a sum is a whole number of 2^-128, in 6 parts of 32 bits
_LARGEST_SUM = 2.0**60


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
    if len(sums) and not float(np.abs(sums).max()) <= _LARGEST_SUM:
        raise ValueError("sums under masks are below 2^60")
    limbs = []
    # exact: a float is a ratio of whole numbers, so that only digits below 2^-128 are lost
    for numerator, denominator in (number.as_integer_ratio() for number in sums.tolist()):
        whole = (numerator << _LIMB_STEP) // denominator
        limbs += [(whole >> _BITS * index) & ((1 << _BITS) - 1) for index in range(LIMBS - 1)]
        # an arithmetic shift: the sign is in the last part alone, and all others are 0 to 2^32 - 1
        limbs.append(whole >> _BITS * (LIMBS - 1))
    return np.array(limbs, dtype=np.int64)


def from_limbs(limbs: Floats) -> Floats:
    """Return the sums [k] from the sums of their parts over clients [6 k]."""
    parts = limbs.reshape(-1, LIMBS).tolist()
    # parts of many clients exceed 32 bits: they carry into the next one here, in whole numbers of any size
    wholes = [sum(int(part) << _BITS * index for index, part in enumerate(each)) for each in parts]
    return np.array([math.ldexp(float(whole), -_LIMB_STEP) for whole in wholes])
