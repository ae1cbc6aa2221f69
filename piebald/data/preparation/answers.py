"""What clients are asked about their columns, and what they answer: kinds, moments, names of categories, and counts.

An answer has no row.  A category is named where a client has enough rows of it, and all others are counted together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, field_validator
from scipy.stats import yeojohnson

from piebald.contracts import Disclosure
from piebald.core.errors import SettingError, shown, unknown
from piebald.core.moments import Floats, Moments, merged
from piebald.core.tensor_store import blocks
from piebald.data.preparation.column_models import (
    LONGEST_NAME,
    MOST_CATEGORIES,
    MOST_COLUMNS,
    MOST_TARGETS,
    Finite,
    Forms,
    Name,
    Scale,
    Unit,
)
from piebald.data.preparation.columns import (
    CodedRows,
    Kind,
    dates_of,
    factorized,
    guess_columns,
    is_numeric,
    numbers_of,
    truths_of,
    units_of,
)
from piebald.data.preparation.units import LEVELS
from piebald.data.preparation.written_forms import OR, Units

if TYPE_CHECKING:
    import pandas as pd

_SOME = 1000  # rows that are looked at first
_LARGEST_EXPONENT, _GRID = 5.0, 1e-7  # of Yeo and Johnson's change
_ROWS = 1 << 18  # that are read as numbers at once
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Thresholds = Annotated[list[Finite], Field(max_length=2048)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class KindsQuestion(_Message):
    """Which columns are there, and of which kind?  `target` asks for the names of classes as well."""

    about: Literal["kinds"] = "kinds"
    gaps: list[Name] = []
    target: bool = False


class KindsAnswer(_Message):
    """What columns there are, and classes.

    Attributes:
        rows: how many.
        kinds: of each column, None where it has no value.
        classes: of the target, if there are any.
        units: of numbers, also of the target, and forms of dates, see `units_of`.
        truths: columns of numbers that are all 0 or 1.
    """

    about: Literal["kinds"] = "kinds"
    rows: Count
    kinds: Annotated[dict[Name, Kind | None], Field(max_length=MOST_COLUMNS)]
    classes: Annotated[list[Name], Field(max_length=MOST_CATEGORIES)] | None = None
    units: Annotated[dict[Name, Annotated[list[Unit], Field(max_length=1000)]], Field(max_length=MOST_COLUMNS)] = {}
    truths: Annotated[list[Name], Field(max_length=MOST_COLUMNS)] = []


class ValuesQuestion(_Message):
    """What is to be known of the values of each column, whose kinds are agreed.

    Attributes:
        kinds: of each column.
        forms: of columns of dates, see `DateColumn`.
        scale: of columns of numbers.
        gaps: values that stand for a gap.
        least_rows: rows from which on a category is named.
        targets: how many targets are numbers whose moments are asked for.
    """

    about: Literal["values"] = "values"
    kinds: Annotated[dict[Name, Kind], Field(max_length=MOST_COLUMNS)]
    forms: dict[Name, Forms] = {}
    scale: dict[Name, Scale] = {}
    gaps: list[Name] = []
    least_rows: Annotated[int, Field(ge=1)] = 1
    targets: Annotated[int, Field(ge=0, le=MOST_TARGETS)] = 0


class NumbersAnswer(_Message):
    """Counts of present and missing numbers, and the mean and squared deviations of those that are present.

    Attributes:
        quantiles: those of `units.LEVELS`, which are values of single rows, and which no site tells.
    """

    present: Count
    missing: Count
    mean: Finite
    scatter: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    quantiles: Annotated[list[Finite], Field(max_length=len(LEVELS))] = []

    @property
    def moments(self) -> Moments:
        """The same as moments of one column."""
        counts = {name: np.array([number]) for name, number in
                  (("present", self.present), ("missing", self.missing), ("infinite", 0))}  # fmt: skip
        return Moments(
            self.present + self.missing, **counts, mean=np.array([self.mean]), scatter=np.array([self.scatter])
        )


class CategoriesAnswer(_Message):
    """The categories that enough rows have, sorted; whether there are others; and whether there are gaps."""

    names: Annotated[list[Name], Field(max_length=MOST_CATEGORIES)]
    others: bool
    gaps: bool


class ValuesAnswer(_Message):
    """What a client tells of the values of its columns, by the names of parsed columns."""

    about: Literal["values"] = "values"
    numbers: Annotated[dict[Name, NumbersAnswer], Field(max_length=5 * MOST_COLUMNS)]
    categories: dict[Name, CategoriesAnswer]
    targets: Annotated[list[NumbersAnswer], Field(max_length=MOST_TARGETS)] = []


class CountsQuestion(_Message):
    """How many numbers of each column are at most each of these thresholds?"""

    about: Literal["counts"] = "counts"
    kinds: dict[Name, Kind]
    forms: dict[Name, Forms] = {}
    gaps: list[Name] = []
    thresholds: Annotated[dict[Name, Thresholds], Field(max_length=5 * MOST_COLUMNS)]


class CountsAnswer(_Message):
    """The counts in the order of the thresholds."""

    about: Literal["counts"] = "counts"
    counts: dict[Name, Annotated[list[Count], Field(max_length=2048)]]


class PowersQuestion(_Message):
    """What are the moments of each column after Yeo and Johnson's change with each of these exponents?"""

    about: Literal["powers"] = "powers"
    gaps: list[Name] = []
    exponents: Annotated[dict[Name, Thresholds], Field(max_length=MOST_COLUMNS)]

    @field_validator("exponents")
    @classmethod
    def _check_exponents(cls, exponents: dict[str, list[float]]) -> dict[str, list[float]]:
        # a large power is that of the largest number alone, and near exponents differ by one row's digits
        for exponent in chain(*exponents.values()):
            if not abs(exponent) <= _LARGEST_EXPONENT or abs(exponent / _GRID - round(exponent / _GRID)) > 1e-3:
                raise ValueError(
                    f"exponents must be between -{_LARGEST_EXPONENT:g} and {_LARGEST_EXPONENT:g}, multiples of "
                    f"{_GRID:g}, got {exponent:g}"
                )
        return exponents


class PowersAnswer(_Message):
    """The moments in the order of the exponents, and the sum of the signed logarithms that the likelihood has."""

    about: Literal["powers"] = "powers"
    moments: dict[Name, Annotated[list[NumbersAnswer], Field(max_length=2048)]]
    logarithms: dict[Name, Finite]


Question = Annotated[KindsQuestion | ValuesQuestion | CountsQuestion | PowersQuestion, Field(discriminator="about")]
Answer = Annotated[KindsAnswer | ValuesAnswer | CountsAnswer | PowersAnswer, Field(discriminator="about")]


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The rows of a client before they are prepared.

    Attributes:
        frame: its training rows, without the target.
        y: its targets [n], or several [n, k], where they are numbers.
        classes: the names of the classes that it has, None where targets are numbers.
        class_rows: how many of the rows have each class, None where that is not known.
    """

    frame: pd.DataFrame | CodedRows
    y: NDArray[Any] | None = None
    classes: Sequence[str] | None = None
    class_rows: NDArray[Any] | None = None

    def named_classes(self, least_rows: int) -> list[str] | None:
        """Return the classes that so many rows have."""
        if self.classes is None or self.class_rows is None:
            return None if self.classes is None else list(self.classes)
        return [name for name, rows in zip(self.classes, self.class_rows, strict=True) if rows >= least_rows]


def answer(
    question: Question, frame: pd.DataFrame | CodedRows, y: NDArray[Any] | None = None,
    classes: Sequence[str] | None = None, rules: Disclosure | None = None,
) -> Answer:  # fmt: skip
    """Return the answer of one client.

    Args:
        question: the question.
        frame: its training rows; a column that is not there counts as one without values.
        y: its targets [n], or several [n, k], where they are numbers.
        classes: the names of the classes that it has.
        rules: of disclosure at a site.

    Raises:
        SettingError: a value cannot be read as the agreed kind.
        Withheld: few rows decide a number of the answer.
    """
    if rules is not None:
        rules.check_counts(np.array([len(frame)]))
    if isinstance(question, KindsQuestion):
        names = [*map(str, frame.columns)]
        if len(names) > MOST_COLUMNS:
            raise SettingError(
                f"the table has {len(names):,} columns to read, at most {MOST_COLUMNS:,} are allowed: name those that "
                "matter in features of [data]"
            )
        refuse_long(classes or () if question.target else (), "the class", "shorten it")
        refuse_long(names, "the name of column", "rename it, or name other columns in features of [data]")
        empty = {str(name) for name in frame.columns if _is_empty(frame[name], question.gaps)}
        kinds = guess_columns(frame, question.gaps)
        numeric = [name for name, kind in kinds.items() if kind == "number" and name not in empty]
        return KindsAnswer(
            rows=len(frame), kinds={name: None if name in empty else kind for name, kind in kinds.items()},
            classes=list(classes) if question.target and classes is not None else None, units=units_of(frame),
            truths=[name for name in numeric if _is_truth(frame[name], question.gaps)],
        )  # fmt: skip
    if isinstance(question, PowersQuestion):
        numbers = {name: _column(frame, name, question.gaps) for name in question.exponents}
        if rules is not None:
            rules.check(signed_logarithm(values[~np.isnan(values)])[:, None] for values in numbers.values())
        return PowersAnswer(
            moments={
                name: [_moments(yeo_johnson(values, exponent), rules) for exponent in question.exponents[name]]
                for name, values in numbers.items()
            },
            logarithms={name: signed_logarithms(values) for name, values in numbers.items()},
        )
    # rows in blocks, so that more of them take no more memory
    parsed = (
        parsed_numbers(frame[rows], question.kinds, question.gaps, question.forms) for rows in blocks(len(frame), _ROWS)
    )
    if isinstance(question, CountsQuestion):
        limits = question.thresholds
        blocks_of = [{name: _counts(columns[name], limits[name]) for name in limits} for columns in parsed]
        counts = {name: np.sum([block[name] for block in blocks_of], axis=0) for name in limits}
        if rules is not None:
            for below in counts.values():
                # rows between neighbouring thresholds, below the first, and above the last or without a number
                rules.check_counts(np.diff(np.sort(below), prepend=0, append=len(frame)))
        return CountsAnswer(counts={name: below.tolist() for name, below in counts.items()})
    least_rows = max(question.least_rows, 1 if rules is None else rules.least_rows)
    moments: dict[str, list[Moments]] = {}
    spreads: dict[str, list[NDArray[np.float64]]] = {}
    for columns in parsed:
        for name, values in columns.items():
            if rules is None and (present := values[~np.isnan(values)]).size:
                spreads.setdefault(name, []).append(np.quantile(present, LEVELS))
            logged = _logged(name, values, question.scale)
            moments.setdefault(name, []).append(Moments.of(logged[:, None]))
            if rules is not None:
                check_moments(logged, rules)
    return ValuesAnswer(
        numbers={name: _told(merged(parts), rules, spreads.get(name, ())) for name, parts in moments.items()},
        categories={
            name: _categories(frame, name, question.gaps, least_rows)
            for name, kind in question.kinds.items()
            if kind == "category"
        },
        targets=[_moments(column, rules) for column in _target_numbers(y)] if question.targets else [],
    )


def _target_numbers(y: NDArray[Any] | None) -> Iterable[Floats]:
    """Return each column of targets [n] or [n, k]."""
    return () if y is None else np.atleast_2d(np.asarray(y, dtype=np.float64).T)


def _is_truth(series: pd.Series, gaps: list[str]) -> bool:
    """Return whether all values are 0 or 1; few are looked at first, since to number all of them takes long."""
    return all({*factorized(values, gaps)[1]} <= {"0", "1"} for values in (series.head(_SOME), series))


def refuse_long(names: Iterable[str], what: str, remedy: str) -> None:
    """Refuse a name that is too long to be told."""
    if (name := next((name for name in names if len(name) > LONGEST_NAME), None)) is not None:
        raise SettingError(
            f"{what} {shown(name, 40)} has {len(name)} characters, at most {LONGEST_NAME} are allowed: {remedy}"
        )


def parsed_numbers(
    frame: pd.DataFrame | CodedRows, kinds: Mapping[str, Kind], gaps: list[str], forms: Mapping[str, Sequence[str]]
) -> dict[str, Floats]:
    """Return the numbers of columns, booleans as 1 and 0, and dates in parts, by the names of parsed columns."""
    parsed: dict[str, Floats] = {}
    for name, kind in kinds.items():
        if kind == "number":
            parsed[name] = _column(frame, name, gaps)
        elif kind == "boolean":
            parsed[name] = truths_of(_series(frame, name), gaps)
        elif kind == "date":
            parts = dates_of(_series(frame, name), gaps, forms.get(name, ()))
            parsed |= {f"{name}: {part}": values for part, values in parts.items()}
    return parsed


def _is_empty(series: pd.Series, gaps: list[str]) -> bool:
    """Return whether a column has no value."""
    if is_numeric(series) and not gaps:  # to number all of them takes long
        return bool(series.isna().all())
    return bool((factorized(series, gaps)[0] < 0).all())


def yeo_johnson(values: Floats, exponent: float) -> Floats:
    """Return the values after the change of Yeo and Johnson (2000, eq. 2.1) with an exponent."""
    return np.asarray(yeojohnson(values, exponent)) if len(values) else values


def signed_logarithms(values: Floats) -> float:
    """Return the sum of sign(x) log(1 + |x|), of which the likelihood of an exponent has a multiple."""
    return float(signed_logarithm(values[~np.isnan(values)]).sum())


def signed_logarithm(values: Floats) -> Floats:
    """Return sign(x) log(1 + |x|) of each value."""
    return np.asarray(np.sign(values) * np.log1p(np.abs(values)))


def check_moments(values: Floats, rules: Disclosure) -> None:
    """Refuse the mean and the squared deviations of a column if few of its values [n] decide them.

    Raises:
        Withheld: a rule of disclosure is broken.
    """
    finite = values[np.isfinite(values)]
    rules.check([finite[:, None]])
    # squares weigh large values more than many, so that only a single one decides whether they are told
    rules.check([np.square(finite - finite.mean())[:, None]] if len(finite) else [], dominance_only=True)


def _counts(values: Floats, limits: list[float]) -> NDArray[np.int64]:
    """Return how many values are at most each limit, without sorting the values."""
    order = np.argsort(limits, kind="stable")
    first = np.searchsorted(np.asarray(limits)[order], values[~np.isnan(values)])  # the first limit that is not below
    counts = np.empty(len(limits), dtype=np.int64)
    counts[order] = np.cumsum(np.bincount(first, minlength=len(limits) + 1))[: len(limits)]
    return counts


def _series(frame: pd.DataFrame | CodedRows, name: str) -> pd.Series:
    import pandas as pd

    return frame[name] if name in frame.columns else pd.Series(np.full(len(frame), np.nan), name=name)


def _column(frame: pd.DataFrame | CodedRows, name: str, gaps: list[str]) -> Floats:
    return numbers_of(_series(frame, name), gaps)


def _logged(name: str, values: Floats, scale: dict[str, Scale]) -> Floats:
    if scale.get(name) != "log":
        return values
    if (values <= -1).any():
        raise SettingError(f"column {name!r} has numbers of -1 or less, which have no logarithm of 1 + x: write "
                           "'power' in scale of [prepare], or leave it out there")  # fmt: skip
    return np.log1p(values)


def _moments(values: Floats, rules: Disclosure | None) -> NumbersAnswer:
    if rules is not None:
        check_moments(values, rules)
    return _told(merged(Moments.of(values[rows, None]) for rows in blocks(len(values), _ROWS)), rules)


def _told(moments: Moments, rules: Disclosure | None, spreads: Sequence[Floats] = ()) -> NumbersAnswer:
    """Return what is told of a column, with the middle of the quantiles of blocks of its rows."""
    present, missing = int(moments.present[0]), int(moments.missing[0])
    # a few gaps are told as numbers like all others: their count would be about few rows
    if rules is not None and missing < rules.least_rows <= present:
        present, missing = present + missing, 0
    elif rules is not None:
        rules.check_counts(np.array([present, missing]))
    return NumbersAnswer(
        present=present, missing=missing, mean=float(moments.mean[0]), scatter=float(moments.scatter[0]),
        quantiles=np.median(spreads, axis=0).tolist() if len(spreads) else [],
    )  # fmt: skip


def _categories(frame: pd.DataFrame | CodedRows, name: str, gaps: list[str], least_rows: int) -> CategoriesAnswer:
    codes, words = factorized(_series(frame, name), gaps)
    counts = np.bincount(codes[codes >= 0], minlength=len(words))
    named = sorted(word for word, count in zip(words, counts, strict=True) if count >= least_rows)
    refuse_long(named, f"column {shown(name, 40)}: the category", "shorten it, or leave the column out in [prepare]")
    if len(named) > MOST_CATEGORIES:
        raise SettingError(
            f"column {name!r} has {len(named):,} categories, at most {MOST_CATEGORIES:,} are allowed: raise least_rows "
            "in [prepare], or leave the column out there"
        )
    return CategoriesAnswer(names=named, others=len(named) < int((counts > 0).sum()), gaps=bool((codes < 0).any()))


_ROW_NUMBERS = {"identifier", "number"}


def agreed_kinds(
    answers: Sequence[KindsAnswer], columns: Mapping[str, str], scale: Mapping[str, str], tokenizer: str | None = None
) -> tuple[dict[str, Kind], dict[str, str]]:
    """Return the kind of each column that is read, in the order of the first client that has it, and what is left out.

    Raises:
        SettingError: a setting names a column that is not there, a column has free text without a tokenizer, or other
            columns are read beside text.
    """
    if not answers:
        raise SettingError("no client answers questions about its columns, so there is nothing to agree on")
    guesses = common_kinds(answers)
    names = list(guesses)
    for named in (columns, scale):
        if missing := next((name for name in named if name not in names), None):
            raise unknown("column, which [prepare] names,", missing, names)
    kinds, left_out = dict[str, Kind](), dict[str, str]()
    for name in names:
        chosen = columns.get(name) or guesses[name]
        if tokenizer is not None and len(names) == 1:
            chosen = "text"
        if chosen == "leave out":
            left_out[name] = "as [prepare] says"
        elif chosen is None:
            left_out[name] = "no value"
        elif chosen == "identifier":
            left_out[name] = "nearly each row has another value"
        elif chosen == "text" and tokenizer is None:
            raise SettingError(
                f"column {shown(name, 40)} has free text, which is neither a number nor a category: leave it out with "
                f"columns = {{ {shown(name, 40)} = 'leave out' }} in [prepare], make token ids of it by a "
                "tokenizer there, or embed the text first"
            )
        else:
            kinds[name] = cast(Kind, chosen)
    if tokenizer is not None and [*kinds.values()] != ["text"]:
        raise SettingError(
            f"tokenizer in [prepare] reads one column of text and no other, got {shown(', '.join(kinds))}: name the "
            "column in features of [data]"
        )
    return kinds, left_out


def date_forms(column: str, units: Mapping[str, Units]) -> list[str]:
    """Return the forms in which clients write a column of dates, where these are no others than 2024-05-31.

    Args:
        column: of dates.
        units: what clients have told, by their names.

    Raises:
        SettingError: dates of a client may have several of these forms.
    """
    named = [(form, client) for client, of in units.items() for form in of.get(column, ()) if form]
    forms = sorted({form for form, _ in named if OR not in form})
    for form, client in named:
        # the other clients' forms must leave exactly one reading, or days and months might be swapped unnoticed
        if OR in form and len({*form.split(OR)} & {*forms}) != 1:
            raise SettingError(
                f"column {shown(column, 40)} has dates at {client} that may be {form}: write them like 2024-05-31, or "
                "name the column in columns of [prepare] as 'leave out'"
            )
    return forms


def common_kinds(answers: Sequence[KindsAnswer]) -> dict[str, Kind | None]:
    """Return the kind of each column that fits all clients: what all have, else text, or categories; None of gaps.

    A column that names the rows of large clients does so at the small ones, where it looks like numbers.
    """
    common = dict[str, Kind | None]()
    for name in dict.fromkeys(name for held in answers for name in held.kinds):
        guesses = {kind for held in answers if (kind := held.kinds.get(name)) is not None}
        unclear = [held for held in answers if any(OR in form for form in held.units.get(name, ()))]
        if {held.kinds.get(name) for held in answers if held not in unclear} - {None} == {"date"}:
            guesses = {"date"}
        if "boolean" in guesses:  # of others, 1 is true
            guesses = {
                kind for held in answers if name not in held.truths and (kind := held.kinds.get(name)) is not None
            }
        several: Kind = "text" if "text" in guesses else "identifier" if guesses == _ROW_NUMBERS else "category"
        common[name] = several if len(guesses) > 1 else next(iter(guesses), None)
    return common
