"""The rows of clients as columns with names, numbers with gaps or text, and the statistics that are asked for of them.

A request is checked before any client is asked.  Sums that bounded rows make for it are one vector of whole numbers, to
which each row adds no more than its stated bounds allow.  They can be made under masks, and noise can hide a row in
them: each row adds at most 1 to a count, a number between -1 and 1 to a sum and one between 0 and 1 to a sum of
squares, all in steps of 2^-30.  Sums of whole numbers have no rounding errors that depend on their order, so the
influence of a row is exactly what `SumPlan` states (Casacuberta et al. 2022, "Widespread underestimation of sensitivity
in differentially private libraries").
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from piebald.contracts import Clients, Rows, RowsAtSites, Split
from piebald.core import pytree
from piebald.core.arguments import checked
from piebald.core.errors import SettingError, shown, unknown
from piebald.core.moments import Floats, Ints, Moments
from piebald.data.clients.client_tables import by_client, warn_of_lacking
from piebald.data.clients.convert import class_numbers
from piebald.data.clients.owner import read_owners
from piebald.data.clients.prepared import columns_of as coded_columns
from piebald.data.clients.prepared import frame_of
from piebald.data.partition import clients_from
from piebald.data.preparation.answers import KindsAnswer, KindsQuestion, answer, common_kinds, date_forms
from piebald.data.preparation.columns import dates_of, numbers_of, truths_of, words_of
from piebald.data.preparation.preparation import PrepareSettings
from piebald.data.preparation.written_forms import common_units
from piebald.inference.pooled_statistics import NumberColumn
from piebald.privacy.ledger import noise_for

TARGET = "target"  # the name of a column of targets that has no name
MOST_COLUMNS = 4096
MOST_CODES = 100  # categories of a column that become columns
_CODE = re.compile(r"-?[\d.]+(e[+-]?\d+)?")  # a number as `as_text` writes it


@dataclass(frozen=True, slots=True, eq=False)
class ClientColumns:
    """The rows of one client.

    Attributes:
        name: the client's name.
        rows: number of rows.
        numbers: columns of numbers [n] float64 by name, of dates in days since 1970, and of booleans as 1 and 0; NaN
            where a value is missing.
        texts: columns of text [n] by name; None where a value is missing.
        dates: the columns of numbers that are of dates.
    """

    name: str
    rows: int
    numbers: Mapping[str, Floats]
    texts: Mapping[str, NDArray[np.object_]]
    dates: frozenset[str] = frozenset()

    def text(self, name: str) -> NDArray[np.object_]:
        """Return a column as text [n]; "3" for 3.0."""
        if name in self.texts:
            return self.texts[name]
        return as_text(self.numbers[name])


def client_names(client: str | None) -> set[str]:
    """Return the names by which columns may ask for the client of a row, where no column has them.

    Args:
        client: the column that names the clients of rows, None where there is none.
    """
    return {"client", client or "site"}


def as_text(values: Floats) -> NDArray[np.object_]:
    """Return numbers as categories [rows]: "3" for 3.0, others to six digits, None for missing ones."""
    import pandas as pd

    places, different = pd.factorize(values)
    # the last one is for gaps, whose place is -1
    return np.array([*map(_text, different.tolist()), None], dtype=object)[places]


def check_codes(name: str, categories: Sequence[str]) -> None:
    """Refuse categories of a column of numbers that are no numbers, which no row has.

    Raises:
        SettingError: a category is a word.
    """
    # "NaN" and "inf" parse as numbers in Python and are none here: hence the pattern and not `float`
    if word := next((word for word in categories if not _CODE.fullmatch(word)), None):
        raise SettingError(
            f"column {name!r} has numbers, and {shown(word, 30)} is none: write its categories as numbers, "
            "which are 0 and 1 for words that mean false and true"
        )


def _text(value: float) -> str:
    # codes that were read as floats, since a column had gaps, must match categories that are written as "3"
    return str(int(value)) if value.is_integer() else f"{value:g}"


def asked_owners(
    source: Any, client: str | None, prepare: PrepareSettings | Mapping[str, Any] | None, apart: Collection[str | None]
) -> Any:
    """Return the rows that a question is about as the settings of [prepare] read them: cleaned, and gaps empty.

    Args:
        source, client: see `columns_of`.
        prepare: the settings; None takes rows as they are.
        apart: columns that stay as they are after cleaning.
    """
    if prepare is None:
        return source
    settings = prepare if isinstance(prepare, PrepareSettings) else PrepareSettings(**prepare)
    owners = read_owners(source, client, cleaning=settings.cleaning)
    return [replace(owner, content=settings.read(owner.content, apart)) if owner.is_frame else owner
            for owner in owners]  # fmt: skip


def columns_of(
    source: Any, client: str | None, columns: Sequence[str] | None, split: Split,
    features: Sequence[str] | None = None, optional: Collection[str] = (),
) -> list[ClientColumns]:  # fmt: skip
    """Return the columns of each client, from anything that holds rows.

    Args:
        source: a pandas DataFrame or the path of a table, with the column `client`; a mapping from clients' names to
            such tables of their own; `Clients`; or anything else that `clients_from` accepts.
        client: the column that names the client of each row.
        columns: names of columns; None for all.
        split: the split, where clients have splits; tables are taken whole.
        features: names of the inputs, where clients have no tables; "x0", "x1", ... by default.
        optional: those of the columns that need not be there.

    Raises:
        SettingError: there are no clients or columns, or clients hold different ones.
    """
    owners = read_owners(source, client)
    if owners[0].is_table:
        tables = _of_frames(by_client(owners, client), columns, optional)
    else:
        if client is not None:
            raise SettingError(f"client names a column of a table, got a {type(source).__name__}: leave client out")
        # clients that hold rows keep their splits; all else is divided anew by `clients_from`
        held = owners[0].clients
        tables = _of_clients(clients_from(owners) if held is None else held, split, features, columns, optional)
    if not tables:
        raise SettingError("there are no clients: give at least one")
    if not tables[0].numbers and not tables[0].texts:
        raise SettingError("there is no column: give at least one")
    return tables


def _of_frames(
    frames: Mapping[str, Any], columns: Sequence[str] | None, optional: Collection[str] = ()
) -> list[ClientColumns]:
    """Return the columns of tables, which have the kinds that clients would agree on before a training.

    Booleans are 1 and 0 whatever words a client has for them, and dates are days since 1970.

    Raises:
        SettingError: a column occurs twice, is missing in a table, or has a value of another kind or in another unit.
    """
    chosen = {client: _chosen(client, frame, columns) for client, frame in frames.items()}
    for column in columns or ():
        if column not in optional and not any(column in frame.columns for frame in chosen.values()):
            client, frame = next(iter(frames.items()))
            raise SettingError(
                f"client {client!r} has no column {column!r}: it has {', '.join(map(str, frame.columns))}"
            )
    held = warn_of_lacking(chosen)
    chosen = {client: frame.reindex(columns=held) for client, frame in chosen.items()}
    answers = [cast(KindsAnswer, answer(KindsQuestion(), frame)) for frame in chosen.values()]
    # by all clients' answers: a column that has only 0 and 1 at one client may have amounts at another
    kinds, units = common_kinds(answers), {client: held.units for client, held in zip(chosen, answers, strict=True)}
    tables, dates = list[ClientColumns](), frozenset(name for name, kind in kinds.items() if kind == "date")
    for client, frame in chosen.items():
        numbers, texts = dict[str, Floats](), dict[str, NDArray[np.object_]]()
        for name, kind in kinds.items():
            series = frame[name]
            if kind == "date":
                numbers[name] = dates_of(series, (), date_forms(name, units))["days"]
            elif kind == "boolean":
                numbers[name] = truths_of(series)
            elif kind in ("number", None):
                plain = series.dtype.kind in "biuf"  # infinite numbers are counted
                numbers[name] = series.to_numpy(np.float64, na_value=np.nan) if plain else numbers_of(series)
            else:
                texts[name] = words_of(series)
        tables.append(ClientColumns(client, len(frame), numbers, texts, dates))
    signed = {name for held in answers for name in held.units if kinds.get(name) == "number"}
    # numbers about 100 times those of a client that writes per cent show that a unit is missing
    common_units({name: [Moments.of(table.numbers[name][:, None]) for table in tables] for name in signed}, units)
    return tables


def _chosen(client: str, frame: Any, columns: Sequence[str] | None) -> Any:
    """Return the columns of a client's table that are wanted, with text as names."""
    names = [str(column) for column in frame.columns]
    if len(set(names)) < len(names):
        twice = next(column for index, column in enumerate(names) if column in names[:index])
        raise SettingError(f"column {twice!r} of client {client!r} occurs twice: rename one of them")
    named = frame.set_axis(names, axis=1)
    # a name that was given twice is one column
    return named if columns is None else named[[name for name in dict.fromkeys(columns) if name in names]]


def _of_clients(
    clients: Clients, split: Split, features: Sequence[str] | None, columns: Sequence[str] | None,
    optional: Collection[str],
) -> list[ClientColumns]:  # fmt: skip
    if isinstance(clients, RowsAtSites) and clients.elsewhere:
        raise SettingError(
            "rows are at the sites of a federation: ask them with piebald statistics FILE --credentials FOLDER"
        )
    # fetched once: the columns and the targets below are of the same rows
    rows_of = [clients.rows(client, split) for client in range(len(clients))]
    coded = coded_columns(clients)
    if coded is None:
        inputs = [named_inputs(rows.x, features) for rows in rows_of]
        tables = [ClientColumns(str(name), len(rows), numbers, {}) for name, rows, numbers in
                  zip(clients.names, rows_of, inputs, strict=True)]  # fmt: skip
    else:  # columns of a table, as a run would prepare them
        frames = {str(name): frame_of(coded, rows) for name, rows in zip(clients.names, rows_of, strict=True)}
        tables = _of_frames(frames, None)
    return [
        _with_targets(table, rows, clients.classes, columns, optional)
        for table, rows in zip(tables, rows_of, strict=True)
    ]


def _with_targets(
    table: ClientColumns, rows: Rows, classes: Sequence[str] | None, columns: Sequence[str] | None,
    optional: Collection[str],
) -> ClientColumns:  # fmt: skip
    """Return the columns that are wanted of inputs and targets, of which classes are text."""
    numbers, texts, labels = dict(table.numbers), dict(table.texts), class_numbers(rows.y)
    if classes is not None and labels is not None:
        names = list(classes)
        # names of classes and not their numbers, which have no order that a mean could be of
        texts[TARGET] = np.array([names[label] for label in labels.tolist()], dtype=object)
    else:
        numbers |= target_columns(rows.y)
    for column in columns or ():
        if column not in numbers and column not in texts and column not in optional:
            raise unknown("column", column, [*numbers, *texts])
    if columns is not None:
        numbers = {name: numbers[name] for name in columns if name in numbers}
        texts = {name: texts[name] for name in columns if name in texts}
    return replace(table, numbers=numbers, texts=texts)


def named_inputs(x: Any, features: Sequence[str] | None) -> dict[str, Floats]:
    """Return inputs of one tensor [n, ...], flattened, as columns with names.

    Raises:
        SettingError: there are too many columns, or another number of names.
    """
    flat = pytree.single(x, "statistics of inputs").detach().cpu().to(torch.float64)
    flat = flat.reshape(len(flat), math.prod(flat.shape[1:]))  # -1 cannot stand for the width where there are no rows
    return {name: flat[:, index].numpy() for index, name in enumerate(input_names(flat.shape[1], features))}


def input_names(width: int, features: Sequence[str] | None, targets: int = 0) -> Sequence[str]:
    """Return the names of inputs, "x0", "x1", ... by default.

    Args:
        width: how many numbers an input has.
        features: their names, None for the default.
        targets: how many numbers a target has, which counts as columns, too.

    Raises:
        SettingError: there are too many columns, or another number of names.
    """
    # before a name or a column is made: images have so many inputs that statistics would fill the memory
    if width + targets > MOST_COLUMNS:
        raise SettingError(f"statistics are for at most {MOST_COLUMNS:,} columns, got {width + targets:,}")
    if features is not None and len(features) != width:
        raise SettingError(f"features must name each of the {width} numbers of an input, got {len(features)} names")
    return [f"x{index}" for index in range(width)] if features is None else features


def target_columns(targets: Any) -> dict[str, Floats]:
    """Return targets of one or several tensors [n, ...] as columns, "target" or "target0", "target1", ...

    Targets that have names, such as a time and an event, keep them.
    """
    parts = dict(targets) if isinstance(targets, Mapping) else {TARGET: targets}
    if isinstance(targets, tuple):
        parts = {f"{TARGET}{index}": part for index, part in enumerate(targets)}
    columns: dict[str, Floats] = {}
    for name, part in parts.items():
        flat = pytree.single(part, "statistics of targets").detach().cpu().double()
        # without rows -1 cannot stand for the width
        flat = flat.reshape(len(flat), math.prod(flat.shape[1:]))
        wide = flat.shape[1] != 1
        columns |= {f"{name}{index}" if wide else str(name): column.numpy() for index, column in enumerate(flat.T)}
    return columns


STEP = 2.0**-30  # of sums, which are whole numbers of steps
MOST_ROWS = 1 << 31  # of all clients together: their sums, and noise on them, fit 64 bits
_NARROWEST = 1e-300
_COUNTS = 3  # of these numbers
_HEAD = 5  # numbers of a column before its histogram: present, missing, infinite, sum, sum of squares


@dataclass(frozen=True, slots=True)
class SumPlan:
    """The sums that are made, in a fixed order.

    Attributes:
        bounds: columns of numbers with their stated bounds; a number outside counts as the nearer bound.
        bins: bins of each histogram, 0 for none.
        categories: columns of text with the categories that are counted; others count as "other".
        tables: pairs of columns of `categories` that are counted together.

    Examples:
        >>> plan = SumPlan({"age": (0.0, 100.0)}, bins=0, categories={"smokes": ("no", "yes")}, tables=())
        >>> plan.length, plan.influence
        (9, 2.0)
    """

    bounds: Mapping[str, tuple[float, float]]
    bins: int
    categories: Mapping[str, Sequence[str]]
    tables: Sequence[tuple[str, str]]

    @property
    def influence(self) -> float:
        """The largest Euclidean length of what one row adds to the sums."""
        numbers = len(self.bounds) * (3 + (self.bins > 0))  # one kind of presence, a sum, a sum of squares, one bin
        return math.sqrt(numbers + len(self.categories) + len(self.tables))

    @property
    def exchange_influence(self) -> float:
        """The largest Euclidean length of what changes in the sums when one row takes the place of another.

        Two numbers a and b of a column change its sums by a - b and a^2 - b^2, of which the squares add up to at most 4
        in [-1, 1], at its ends; and two counts of a histogram.  A number in place of a missing one changes less.
        """
        numbers = len(self.bounds) * (4 + 2 * (self.bins > 0))
        return math.sqrt(numbers + 2 * (len(self.categories) + len(self.tables)))

    @property
    def length(self) -> int:
        """The number of sums."""
        tables = [len(self.categories[first]) * len(self.categories[second]) for first, second in self.tables]
        # besides the categories "other" and missing, as `_codes` numbers them
        single = [len(categories) + 2 for categories in self.categories.values()]
        return len(self.bounds) * (_HEAD + self.bins) + sum(single) + sum(tables)

    def vector(self, client: ClientColumns) -> Ints:
        """Return the sums of a client [length], in steps of 2^-30.

        Raises:
            SettingError: it has more rows than a sum has room for.
        """
        # more would let a sum overflow 64 bits under noise
        if client.rows >= MOST_ROWS:
            raise SettingError(f"sums are of fewer than {MOST_ROWS:,} rows, client {client.name!r} has {client.rows:,}")
        parts = [self._numbers(client.numbers[name], *ends) for name, ends in self.bounds.items()]
        codes = {name: _codes(client.text(name), categories) for name, categories in self.categories.items()}
        parts += [_counted(codes[name], len(categories) + 2) for name, categories in self.categories.items()]
        for first, second in self.tables:
            height, width = len(self.categories[first]), len(self.categories[second])
            in_table = (codes[first] < height) & (codes[second] < width)  # neither "other" nor missing
            parts.append(_counted((codes[first] * width + codes[second])[in_table], height * width))
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def influences(self, client: ClientColumns, vector: Ints) -> tuple[Ints, list[Floats]]:
        """Return the counts of rows among a client's sums, and what its rows contribute to all other sums [n, 2]."""
        counted = np.ones(len(vector), dtype=bool)
        for index in range(len(self.bounds)):
            counted[index * (_HEAD + self.bins) + _COUNTS : index * (_HEAD + self.bins) + _HEAD] = False
        scaled = [_scaled(client.numbers[name], *ends) for name, ends in self.bounds.items()]
        return vector[counted] >> 30, [np.column_stack([values, np.square(values)]) for values in scaled]

    def _numbers(self, values: Floats, low: float, high: float) -> Ints:
        scaled = _scaled(values, low, high)
        missing = int(np.isnan(values).sum())
        # counts are shifted to the unit of sums, 2^-30, so that one deviation of noise fits all numbers of the vector
        counts = np.array([len(scaled), missing, len(values) - len(scaled) - missing], dtype=np.int64) << 30
        # each row is rounded before the sum, so that the total does not depend on the order of rows or clients
        sums = [int(np.rint(power / STEP).astype(np.int64).sum()) for power in (scaled, np.square(scaled))]
        # the upper end falls into the last bin, which has both of its edges
        places = np.minimum(((scaled + 1) / 2 * self.bins).astype(np.int64), max(self.bins - 1, 0))
        histogram = _counted(places, self.bins) if self.bins else np.zeros(0, dtype=np.int64)
        return np.concatenate([counts, np.array(sums, dtype=np.int64), histogram])

    def numbers(self, total: NDArray[np.float64], quantiles: Sequence[float] = ()) -> dict[str, NumberColumn]:
        """Return the statistics of the columns of numbers from the sum over clients, in steps.

        Args:
            total: the sums [length].
            quantiles: shares of the quantiles, which come from the histogram.
        """
        statistics = {}
        width = _HEAD + self.bins
        for index, (name, (low, high)) in enumerate(self.bounds.items()):
            # noise may drive counts below 0, which no later division or square root takes
            part = total[index * width : (index + 1) * width] * STEP
            present, missing, infinite = (max(float(count), 0.0) for count in part[:3])
            half, mean, variance = (high - low) / 2, math.nan, math.nan
            if present >= 0.5:  # with noise, a count near 0 tells nothing about the mean
                # a mean and a mean square of numbers in [-1, 1], where noise does not keep them
                first = min(max(float(part[3]) / present, -1.0), 1.0)
                second = min(max(float(part[4]) / present, 0.0), 1.0)
                mean = low + half + half * first
                if present > 1:
                    variance = half**2 * max(second - first**2, 0.0) * present / (present - 1)
            column = NumberColumn(present, missing, infinite, mean, variance)
            if self.bins:
                edges, counts = np.linspace(low, high, self.bins + 1), np.maximum(part[_HEAD:], 0.0)
                column = column.with_histogram(edges, counts, quantiles)
            statistics[name] = column
        return statistics

    def counts(self, total: NDArray[np.float64]) -> tuple[dict[str, Floats], dict[tuple[str, str], Floats]]:
        """Return the counts of each column of text [categories, "other", missing], and of each table."""
        index = len(self.bounds) * (_HEAD + self.bins)
        single, tables = {}, {}
        for name, categories in self.categories.items():
            # noise may make a count negative; clamping is post-processing and costs no privacy
            single[name] = np.maximum(total[index : index + len(categories) + 2] * STEP, 0.0)
            index += len(categories) + 2
        for first, second in self.tables:
            shape = (len(self.categories[first]), len(self.categories[second]))
            tables[first, second] = np.maximum(total[index : index + shape[0] * shape[1]] * STEP, 0.0).reshape(shape)
            index += shape[0] * shape[1]
        return single, tables


def _scaled(values: Floats, low: float, high: float) -> Floats:
    """Return the numbers that are finite, with the bounds as -1 and 1."""
    finite = values[np.isfinite(values)]
    # the range is mapped to [-1, 1], since `influence` counts on no row adding more than 1 to a sum
    half = (high - low) / 2
    # the outer clip takes what rounding of (high - low) / 2 leaves beyond 1: such a row would exceed its influence
    return np.asarray(np.clip((np.clip(finite, low, high) - (low + half)) / half, -1.0, 1.0))


def bounds_reason(low: float, high: float) -> str | None:
    """Return why two numbers cannot be the bounds of a column, or None."""
    if not math.isfinite(low) or not math.isfinite(high - low):
        return "must be two numbers, low and high"
    # half of a narrower range is 0, and numbers in units of 0 are none
    return None if high - low >= _NARROWEST else "must be a low and a higher number"


def _codes(values: NDArray[np.object_], categories: Sequence[str]) -> Ints:
    """Return the place of each value among the categories; "other" comes after them, then missing ones."""
    import pandas as pd

    places = {category: index for index, category in enumerate(categories)}
    rows, different = pd.factorize(values)
    # the last one is for gaps, whose code is -1
    return np.array([*(places.get(value, len(places)) for value in different), len(places) + 1], dtype=np.int64)[rows]


def _counted(codes: Ints, width: int) -> Ints:
    return np.bincount(codes, minlength=width).astype(np.int64) << 30


Bins = Annotated[int, Field(ge=1, le=10_000)]
Quantiles = Sequence[Annotated[float, Field(ge=0, le=1)]]
NoiseAt = Literal["server", "client"]
_LARGEST = 1.7e308  # a whole number may be larger than any float


@dataclass(frozen=True, slots=True)
class StatisticsRequest:
    """The statistics that are asked for.

    Attributes:
        quantiles: shares of the numbers below, in [0, 1].
        bins: bins of each column's histogram; None for no histograms.
        bounds: the range of each column of numbers.
        categories: the categories of columns of text, and of numbers that are codes.
        tables: pairs of columns to count together.
        by_client: also each client's own columns.
        split: the rows that the statistics are of.
        secure: whether sums leave clients under masks.
        epsilon, delta: the privacy budget of the question; None for no noise.
        noise_at: who adds noise; under masks clients do.
        client: the column that names clients, None where there is none.
        counted: columns that are counted at each client, in tables with it.
    """

    quantiles: tuple[float, ...]
    bins: int | None
    bounds: Mapping[str, tuple[float, float]]
    categories: Mapping[str, tuple[str, ...]]
    tables: tuple[tuple[str, str], ...]
    by_client: bool = False
    split: Split = "train"
    secure: bool = False
    epsilon: float | None = None
    delta: float | None = None
    noise_at: NoiseAt = "client"
    client: str | None = None
    counted: tuple[str, ...] = ()

    @property
    def noise(self) -> float:
        """The standard deviation of the noise, in units of one row's influence; 0 without noise."""
        return noise_multiplier(self.epsilon, self.delta)

    @property
    def hides_rows(self) -> bool:
        """Whether rows are hidden in sums, by noise or by masks."""
        return self.secure or self.epsilon is not None

    @property
    def central(self) -> bool:
        """Whether noise is added once, to the sum, which under masks nobody sees before it is complete."""
        return self.epsilon is not None and not self.secure and self.noise_at == "server"

    def check_columns(self, numbers: Sequence[str], texts: Sequence[str]) -> None:
        """Refuse what does not fit the columns of clients.

        Args:
            numbers: names of columns of numbers.
            texts: names of columns of categories.

        Raises:
            SettingError: a column is not there, or has numbers where categories are words.
        """
        for name in self.bounds:
            if name not in numbers:
                raise unknown("column of numbers to give bounds of,", name, numbers)
        for name in [*self.categories, *self.counted, *itertools.chain(*self.tables)]:
            if name not in numbers and name not in texts:
                raise unknown("column", name, [*numbers, *texts])
        for name in {*self.categories} & {*numbers}:
            check_codes(name, self.categories[name])

    def check_hidden(self, numbers: Collection[str], counted: Collection[str]) -> None:
        """Refuse what sums that hide rows cannot tell without looking at the rows first.

        Args:
            numbers: names of columns of numbers, which need bounds or categories.
            counted: names of columns that are counted by category, alone or in tables.

        Raises:
            SettingError: bounds, categories or bins are missing, or clients' own columns are asked for.
        """
        option = "secure" if self.epsilon is None else "epsilon"
        if self.by_client:
            raise SettingError("by_client shows what secure and epsilon are to hide: leave it out")
        unknown_range = [name for name in numbers if name not in self.bounds and name not in self.categories]
        missing = [(name, "bounds", "(low, high)") for name in unknown_range]
        missing += [(name, "categories", "[...]") for name in counted if not self.categories.get(name)]
        for name, argument, form in missing:
            raise SettingError(
                f"{option} needs {argument} of column {name!r}, which must not be taken from the rows: write "
                f"{argument}={{{name!r}: {form}}}, or name the columns that you want without it"
            )
        # exact quantiles take about 20 questions, each under noise or masks of its own; a histogram is one
        if self.quantiles and self.bins is None and self.bounds:
            raise SettingError(
                f"{option} takes quantiles from a histogram: write bins=100 for an error of a hundredth of the bounds, "
                "or quantiles=()"
            )


@checked
def statistics_request(
    quantiles: Quantiles = (),
    bins: Bins | None = None,
    bounds: Mapping[str, Sequence[float]] | None = None,
    by_client: bool = False,
    categories: Mapping[str, Sequence[str]] | None = None,
    tables: Sequence[Sequence[str]] = (),
    split: Split = "train",
    secure: bool = False,
    epsilon: float | None = None,
    delta: float | None = None,
    noise_at: NoiseAt = "client",
    client: str | None = None,
) -> StatisticsRequest:
    """Return a checked request; the arguments are those of `statistics`.

    Raises:
        SettingError: an argument is wrong.
    """
    noise_multiplier(epsilon, delta)  # refuses half a budget
    return StatisticsRequest(
        tuple(map(float, quantiles)), bins,
        {name: _checked_bounds(name, ends) for name, ends in (bounds or {}).items()},
        {name: _checked_categories(name, values) for name, values in (categories or {}).items()},
        tuple(map(_checked_pair, tables)), by_client, split, secure, epsilon, delta, noise_at,
        client,
    )  # fmt: skip


def _checked_pair(columns: Sequence[str]) -> tuple[str, str]:
    if isinstance(columns, str) or len(columns) != 2 or columns[0] == columns[1]:
        raise SettingError(f"tables must be pairs of different columns, got {shown(columns)}")
    return str(columns[0]), str(columns[1])


def _checked_categories(name: str, values: Sequence[str]) -> tuple[str, ...]:
    texts = tuple(map(str, values))
    if not texts or len(set(texts)) < len(texts):
        raise SettingError(f"categories of {name!r} must be different names, at least one, got {shown(values)}")
    return texts


def _checked_bounds(name: str, ends: Sequence[float]) -> tuple[float, float]:
    if len(ends) != 2 or not all(isinstance(end, int | float) and abs(end) <= _LARGEST for end in ends):
        raise SettingError(f"bounds of {name!r} must be two numbers, low and high, got {shown(ends)}")
    if reason := bounds_reason(*map(float, ends)):
        raise SettingError(f"bounds of {name!r} {reason}, got {shown(ends)}")
    return float(ends[0]), float(ends[1])


def noise_multiplier(epsilon: float | None, delta: float | None) -> float:
    """Return the standard deviation of the noise that a privacy budget asks for, in units of one row's influence.

    Args:
        epsilon, delta: the budget of one question; both None for no noise, which is 0.

    Raises:
        SettingError: only one of them is given.
    """
    if epsilon is None:
        if delta is not None:
            raise SettingError("delta belongs to noise: give epsilon, too, or leave it out")
        return 0.0
    if delta is None:
        raise SettingError("epsilon needs a delta, below one over the number of rows: write delta=1e-6")
    return noise_for(epsilon, delta)
