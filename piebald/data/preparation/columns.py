"""The columns of a table: what kind each is, and their values as numbers or text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray

from piebald.core.errors import SettingError, shown
from piebald.core.targets import IGNORED
from piebald.core.tensor_store import large_array
from piebald.data.preparation.written_forms import MOSTLY, date_readings, units_by_column

if TYPE_CHECKING:
    import pandas as pd

Kind = Literal["number", "category", "boolean", "date", "text", "identifier"]
KINDS: tuple[Kind, ...] = get_args(Kind)
GAPS = ("", "?", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "<NA>")  # text that stands for no value
# in English, German, French, Spanish and Italian
WORDS_OF_TRUE = frozenset(["true", "yes", "y", "t", "ja", "j", "wahr", "oui", "vrai", "si", "sí", "verdadero", "vero"])
WORDS_OF_FALSE = frozenset(["false", "no", "n", "f", "nein", "falsch", "non", "faux", "falso"])
_NUMBER = re.compile(r"[+-]?(0|[1-9]\d*)(\.\d*)?([eE][+-]?\d+)?|[+-]?0?\.\d+([eE][+-]?\d+)?")  # "007" is a name
_DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}([T ]\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?(Z|[+-]\d{2}:?\d{2})?)?")
_CALLED_IDENTIFIER = re.compile(  # "cases" and "customers" are counts
    r"(?i:(^|[\W_])(id|nr|patient|subject|person|participant|user|customer|case|family|household|session|device|animal)"
    r"([\W_]?(id|nr|no|number|code|name))?$)|[a-z]I[dD]$"
)
_COUNTS_ROWS = re.compile(r"row_?(names?|numbers?|id)|index", re.IGNORECASE)
_FREE_TEXT = 40  # characters of an average value of free text (skrub's TableVectorizer looks at the number of values)
_UNIQUE = 0.9  # share of different values from which on a column of words names its rows
_AMOUNTS = 5  # different numbers of a column of amounts
_MOST_NUMBERED = 20  # different whole numbers of a target, up to which they are classes
_FEWEST = 20  # values from which on this can be told
_TOLD = 4  # values that are named in a message
PARTS = ("day", "month", "weekday", "hour")  # of a date, besides the elapsed days
LARGEST = 1e150  # whose squares have no sum
_DAY = 86_400.0  # seconds
_EXACT = 1 << 53  # up to which float64 has all whole numbers
_WORDS = "text"  # what the categories of coded text are called


ROWS = "rows"  # of which files, among the attributes of a table


class RowsOfFile(NamedTuple):
    """The rows of a table that come from one file.

    Attributes:
        name: of the file, where there are several.
        rows: how many.
        first: the number of the first one.
        units: columns whose numbers are all written with a unit, and this; of dates, their form, or those that they may
            have, with `OR` between.
    """

    name: str | None
    rows: int
    first: int
    units: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class CodedTable:
    """How the columns of a table are written as float64 numbers [n, d], so that rows travel like any other inputs.

    Attributes:
        names: the columns, in order.
        values: the different values of columns of text, in order; their places stand for them.
        labels: of the rows [n] in the index of the table that it was, None where they are numbered from 0.
        files: which rows came from which file, see `row_number`.
        categories: columns that pandas has as such, so that numbers among them are codes.
    """

    names: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]]
    labels: NDArray[np.int64] | None = None
    files: tuple[RowsOfFile, ...] = ()
    categories: frozenset[str] = frozenset()

    @classmethod
    def of(cls, frame: pd.DataFrame) -> tuple[Self, NDArray[np.float64]]:
        """Return the description of a table and its numbers [n, d]; NaN where a value is missing."""
        # column by column, since a large table is read so
        values, numbers = dict[str, tuple[str, ...]](), large_array((len(frame.columns), len(frame)), np.float64).T
        for position, name in enumerate(frame.columns):
            series = frame[name]
            # numbers beyond 2 ** 53 travel as text, or different accounts would be one
            if is_numeric(series) and not is_inexact(series):
                numbers[:, position] = series.to_numpy(dtype=np.float64, na_value=np.nan)
                continue
            codes, different = factorized(series)
            values[str(name)] = tuple(different)
            numbers[:, position] = np.where(codes < 0, np.nan, codes)
        index = frame.index
        # the places themselves, as a range that takes no memory
        numbered = (getattr(index, "start", None), getattr(index, "step", None)) == (0, 1)
        labels = None if numbered or index.dtype.kind != "i" else index.to_numpy()
        categories = frozenset(str(name) for name in frame.columns if is_categorical(frame[name]))
        return cls(tuple(map(str, frame.columns)), values, labels, frame.attrs.get(ROWS, ()), categories), numbers

    def frame(self, numbers: NDArray[np.floating], index: NDArray[np.int64] | None = None) -> pd.DataFrame:
        """Return some rows [n, d] as a table: float64 numbers, and text with None for gaps.

        Args:
            numbers: the rows.
            index: their places in the whole table, for messages.
        """
        import pandas as pd

        columns = {name: self.column(name, numbers[:, position]) for position, name in enumerate(self.names)}
        if index is None:
            return pd.DataFrame(columns, index=range(len(numbers)), copy=False)
        frame = pd.DataFrame(columns, index=self.labels_of(index), copy=False)
        frame.attrs[ROWS] = self.files
        return frame

    def labels_of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the labels [n] of rows by their places."""
        return places if self.labels is None else self.labels[places]

    def column(self, name: str, numbers: NDArray[np.floating]) -> Any:
        """Return some rows [n] of a column: float64 numbers, or coded text."""
        numbers = np.asarray(numbers, dtype=np.float64)
        if name not in self.values:
            return numbers
        codes = np.where(np.isnan(numbers), -1, numbers).astype(np.int32)
        return coded_words(codes, self.values[name], None if name in self.categories else _WORDS)


@dataclass(frozen=True, slots=True, eq=False)
class CodedRows:
    """Some rows of a table that is written as numbers, read as a pandas DataFrame is, column by column.

    Attributes:
        table: how the columns are written.
        numbers: the whole table [n, d].
        rows: the numbers of these rows in it.
    """

    table: CodedTable
    numbers: NDArray[np.floating]
    rows: NDArray[np.int64]

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        return self.table.names

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> Any:
        """Return a column by its name, or the rows of a slice."""
        import pandas as pd

        if isinstance(key, slice):
            return replace(self, rows=self.rows[key])
        numbers = self.numbers[:, self.table.names.index(key)][self.rows]
        series = pd.Series(self.table.column(key, numbers), self.table.labels_of(self.rows), name=key, copy=False)
        series.attrs[ROWS] = self.table.files
        return series


def coded_words(codes: NDArray[np.integer], words: Sequence[Any], called: str | None = _WORDS) -> Any:
    """Return text as pandas' categories, which take little memory and here say nothing of what the column means.

    Args:
        codes: the place [n] of each row's text among the different ones, -1 for a gap.
        words: the different texts.
        called: what pandas calls them; None where they are categories whatever their values.
    """
    import pandas as pd

    return pd.Categorical.from_codes(codes, dtype=pd.CategoricalDtype(pd.Index(words, name=called, dtype=object)))


def is_categorical(series: pd.Series) -> bool:
    """Return whether pandas has a column as categories that are more than a way to store text."""
    return str(series.dtype) == "category" and series.cat.categories.name != _WORDS


def is_numeric(series: pd.Series) -> bool:
    """Return whether a column has numbers and no booleans, dates or text."""
    return getattr(series.dtype, "kind", "O") in "iuf"


def is_inexact(series: pd.Series) -> bool:
    """Return whether a column has whole numbers that float64 has not, such as numbers of accounts."""
    is_whole = getattr(series.dtype, "kind", "O") in "iu"
    return is_whole and bool(((series < -_EXACT) | (series > _EXACT)).any())


def _text(value: Any) -> str:
    """Return a value as text without blanks around it: a date as ISO writes it, 3 for 3.0."""
    if isinstance(value, float):
        # 15 digits are those that float64 keeps of any decimal: 0.1 + 0.2 and 0.3 are one value
        return str(int(value)) if value.is_integer() else f"{value:.15g}"
    return value.isoformat() if hasattr(value, "isoformat") else str(value).strip()


def factorized(series: pd.Series, gaps: Sequence[str] = ()) -> tuple[NDArray[np.int64], list[str]]:
    """Return the place [n] of each row's value among the different values as text, -1 for a gap, and these values.

    Args:
        series: the column.
        gaps: values that stand for a gap besides those that are always taken so.
    """
    import pandas as pd

    codes, different = pd.factorize(series)
    # the last one is for gaps, whose code is -1
    texts = np.array([*map(_text, different), ""], dtype=object)
    empty = {*GAPS, *gaps}
    places = {word: index for index, word in enumerate(dict.fromkeys(word for word in texts if word not in empty))}
    return np.array([places.get(word, -1) for word in texts])[codes], list(places)


def words_of(series: pd.Series, gaps: Sequence[str] = ()) -> NDArray[np.object_]:
    """Return a column as text [n] without blanks around it, None for gaps."""
    codes, different = factorized(series, gaps)
    return np.array([*different, None], dtype=object)[codes]


def guess_columns(frame: pd.DataFrame | CodedRows, gaps: Sequence[str] = ()) -> dict[str, Kind]:
    """Guess the kind of each column from its values, as skrub's TableVectorizer does.

    Numbers may be written as text, unless pandas has them as categories; a column of words that are nearly all
    different is an identifier, or free text where they are long.  Codes that are numbers count as numbers, unless
    each row has another and the column is called like PassengerId.

    Args:
        frame: the rows.
        gaps: values that stand for a gap.

    Examples:
        >>> import pandas as pd
        >>> table = pd.DataFrame({"age": [61, 70], "ward": ["a", "b"], "smoker": ["yes", "no"]})
        >>> guess_columns(table)
        {'age': 'number', 'ward': 'category', 'smoker': 'boolean'}
    """
    return {str(name): _kind(frame[name], gaps) for name in frame.columns}


def _kind(series: pd.Series, gaps: Sequence[str]) -> Kind:
    if getattr(series.dtype, "kind", "O") == "M":
        return "date"
    if is_numeric(series):
        return "identifier" if _numbers_rows(series) else "number"
    if is_categorical(series):
        return "category"
    codes, different = factorized(series, gaps)
    counts = np.bincount(codes[codes >= 0], minlength=len(different))
    rows, letters = int(counts.sum()), float(np.dot(counts, np.array([*map(len, different)], dtype=np.int64)))
    if not different:
        return "number"  # a column without a value is what it is elsewhere
    words = {word.lower() for word in different}
    if words <= WORDS_OF_TRUE | WORDS_OF_FALSE and (
        len(words) == 1 or (words & WORDS_OF_TRUE and words & WORDS_OF_FALSE)
    ):  # F and N are no contraries
        return "boolean"
    for kind, form in (("number", _NUMBER), ("date", _DATE)):
        fits = np.array([form.fullmatch(word) is not None for word in different])
        if kind == "date" and not fits.any():
            fits = ~np.isnan(_days(different))
        # a few odd words in a column of amounts are mistakes, which are named when they are read
        if fits.all() or (fits.sum() >= _AMOUNTS and counts[fits].sum() > MOSTLY * rows):
            return kind  # type: ignore[return-value]
    if letters > _FREE_TEXT * rows and any(" " in word for word in different):
        return "text"
    return "identifier" if rows >= _FEWEST and len(different) > _UNIQUE * rows else "category"


def is_called_identifier(name: str) -> bool:
    """Return whether the name of a column says that its values name persons, devices or such.

    Examples:
        >>> [is_called_identifier(name) for name in ("patient_id", "PassengerId", "case nr", "cases", "uric acid")]
        [True, True, True, False, False]
    """
    return _CALLED_IDENTIFIER.search(name) is not None


def _numbers_rows(series: pd.Series) -> bool:
    """Return whether a column of numbers names its rows: it is called so, and no two rows have the same number."""
    name = str(series.name)
    if len(series) < _FEWEST or not (is_called_identifier(name) or _COUNTS_ROWS.fullmatch(name)):
        return False
    return bool(series.is_unique) and bool((series.dropna() % 1 == 0).all())


def are_classes(values: NDArray[Any]) -> bool:
    """Return whether the numbers of a target are classes: at most 20 different ones, all whole.  Others are amounts.

    Examples:
        >>> are_classes(np.array([1.0, 2.0, np.nan])), are_classes(np.array([36.6, 37.0])), are_classes(np.arange(21))
        (True, False, False)
    """
    different = np.unique(values[~np.isnan(values)])
    return len(different) <= _MOST_NUMBERED and bool((different == np.round(different)).all())


def are_labels(values: NDArray[Any]) -> bool:
    """Return whether targets [n, k] are labels: 0 or 1, -100 and NaN where unknown."""
    return bool(np.isin(values[~np.isnan(values)], (0, 1, IGNORED)).all())


def in_order(classes: Iterable[str]) -> list[str]:
    """Return the different names of classes: numbers by their size, others as text."""
    # sorted as text first: "1" and "1.0" are equal by size, and a set has another order in each process
    names = sorted({*classes})
    return sorted(names, key=float) if all(map(_NUMBER.fullmatch, names)) else names


def classes_of(series: pd.Series, gaps: Sequence[str] = ()) -> list[str] | None:
    """Return the names of a target's classes in order, None where it has amounts.

    Text, dates and booleans are classes, and numbers where `are_classes` takes them so.

    Raises:
        SettingError: a value is no number, and nearly all others are.
    """
    if getattr(series.dtype, "kind", "O") == "b":
        series = series.astype(int)
    if _kind(series, gaps) == "number" and not are_classes(numbers_of(series, gaps)):
        return None
    return in_order(factorized(series, gaps)[1])


def numbers_of(series: pd.Series, gaps: Sequence[str] = ()) -> NDArray[np.float64]:
    """Return a column of numbers [n] float64, NaN for gaps.

    Raises:
        SettingError: a value is no number, or an infinite one.
    """
    if is_numeric(series):
        numbers = series.to_numpy(dtype=np.float64, na_value=np.nan)
        for gap in gaps:
            if _NUMBER.fullmatch(gap):
                numbers = np.where(numbers == float(gap), np.nan, numbers)
    else:
        numbers = _parsed(series, gaps, float, "a number")
    if (large := np.abs(numbers) >= LARGEST).any():
        row = int(np.argmax(large))
        raise unusable(series, row, "a finite number" if np.isinf(numbers[row]) else f"a number below {LARGEST:g}")
    return np.asarray(numbers, dtype=np.float64)


def truths_of(series: pd.Series, gaps: Sequence[str] = ()) -> NDArray[np.float64]:
    """Return a column of booleans [n] as 1 and 0, NaN for gaps.

    Raises:
        SettingError: a value is neither true nor false.
    """
    places = {**dict.fromkeys(WORDS_OF_TRUE | {"1"}, 1.0), **dict.fromkeys(WORDS_OF_FALSE | {"0"}, 0.0)}
    return _parsed(series, gaps, lambda word: places[word.lower()], "true or false")


def dates_of(series: pd.Series, gaps: Sequence[str] = (), forms: Sequence[str] = ()) -> dict[str, NDArray[np.float64]]:
    """Return the parts of dates [n] by name: "days" since 1970, and those of `PARTS`; NaN for gaps.

    Dates are written as 2024-05-31 or 2024-05-31 12:30; one with a time zone is turned into UTC.

    Args:
        series, gaps: see `factorized`.
        forms: of `date_readings`, which count where dates have several.

    Raises:
        SettingError: a value is no date.
    """
    import pandas as pd

    days = _parsed(series, gaps, _day, "a date like 2024-05-31", lambda words: _days(words, forms))
    # days times seconds may fall just short of a full hour, which would be the hour before
    moments = pd.Series(pd.to_datetime(np.round(days * _DAY), unit="s"))
    named = {"day": "day", "month": "month", "weekday": "day_of_week", "hour": "hour"}
    parts = {"days": days, **{part: getattr(moments.dt, named[part]).to_numpy(dtype=np.float64) for part in PARTS}}
    return {name: np.where(np.isnan(days), np.nan, part) for name, part in parts.items()}


def _day(word: str) -> float:
    import pandas as pd

    if not _DATE.fullmatch(word):  # pandas would guess which of two numbers is the month
        raise ValueError(word)
    return float(pd.to_datetime(word, utc=True).timestamp()) / _DAY


def _days(words: Sequence[str], forms: Sequence[str] = ()) -> NDArray[np.float64]:
    """Return the days of all dates at once, NaN for those that are to be looked at one by one."""
    import pandas as pd

    texts = pd.Series(words, dtype=object)
    moments = pd.to_datetime(texts, utc=True, errors="coerce", format="ISO8601")
    moments = moments.where(texts.str.fullmatch(_DATE.pattern).astype(bool))
    others = moments.isna()  # of one table, some clients may write theirs in another form
    if (others.all() or (forms and others.any())) and len(readings := date_readings(texts[others], forms)) == 1:
        moments = moments.combine_first(next(iter(readings.values())).dt.tz_localize("UTC"))
    seconds = np.round(moments.dt.as_unit("us").astype("int64").to_numpy() / 1e6, 6)
    return np.where(moments.notna(), seconds / _DAY, np.nan)


def _parsed(
    series: pd.Series, gaps: Sequence[str], read: Callable[[str], float], form: str,
    read_all: Callable[[Sequence[str]], NDArray[np.float64]] | None = None,
) -> NDArray[np.float64]:  # fmt: skip
    """Return the values as `read` reads their text, NaN for gaps; one that cannot be read is refused with its row.

    Args:
        series, gaps: see `factorized`.
        read: reads a value.
        form: what values must be, in words.
        read_all: reads values at once, for which `read` would take long, with NaN for those that it leaves to `read`.
    """
    codes, different = factorized(series, gaps)
    # the last one is for gaps, whose code is -1
    numbers = np.full(len(different) + 1, np.nan)
    if read_all is not None and different:
        numbers[:-1] = read_all(different)
    odd: dict[str, int] = {}
    for index in np.flatnonzero(np.isnan(numbers[:-1])).tolist():
        try:
            numbers[index] = read(different[index])
        except (ValueError, KeyError, OverflowError):
            odd[different[index]] = int(np.argmax(codes == index))
            if len(odd) > _TOLD:
                break
    if odd:
        first = min(odd.values())
        raise unusable(series, first, form, [word for word, row in odd.items() if row != first])
    return np.asarray(numbers[codes])


def row_number(rows: pd.DataFrame | pd.Series, place: int) -> str:
    """Return the number of a row for messages, as a spreadsheet shows it: of a file, also where rows were left out.

    Args:
        rows: of a table.  Their index has their places in the whole table, and `attrs[ROWS]` says in which file they
            are; without it, rows are counted from 1.
        place: of the row among them.
    """
    label = rows.index[place]
    number = int(label) if isinstance(label, int | np.integer) else place
    for file in rows.attrs.get(ROWS, ()):
        if number < file.rows:
            return f"{number + file.first}{'' if file.name is None else f' of {file.name}'}"
        number -= file.rows
    return str(number + 1)


def units_of(rows: pd.DataFrame | CodedRows) -> dict[str, list[str]]:
    """Return the different units of columns in the files that rows come from, "" for files without one."""
    files: Sequence[RowsOfFile] = rows.table.files if isinstance(rows, CodedRows) else rows.attrs.get(ROWS, ())
    if len(files) > 1 and any(file.units for file in files):
        labels = rows.table.labels_of(rows.rows) if isinstance(rows, CodedRows) else rows.index.to_numpy()
        ends = np.cumsum([file.rows for file in files])
        files = [files[index] for index in np.unique(np.searchsorted(ends, labels, side="right"))]
    return units_by_column([dict(file.units) for file in files])


def unusable(series: pd.Series, row: int, form: str, others: Sequence[str] = ()) -> SettingError:
    """Return the error that names a value of a column, and what there must be in its place.

    Args:
        series: the column.
        row: the place of the value.
        form: what values must be, in words.
        others: further values of this kind.
    """
    value = series.iloc[row]
    value = value.item() if isinstance(value, np.generic) else value
    origin = f"{series.attrs['file']}: " if "file" in series.attrs else ""
    more = f" and {shown(', '.join(others), 40)} in others" if others else ""
    return SettingError(
        f"{origin}column {shown(str(series.name), 40)} must have {form} in each row, got {shown(value, 40)} in row "
        f"{row_number(series, row)}{more}: correct it, leave the cell empty, or name the value in gaps of [prepare]"
    )
