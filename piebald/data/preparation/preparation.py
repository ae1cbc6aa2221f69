"""The preparation that clients have agreed on: how each column of a table becomes inputs, and how targets are read.

The section [prepare] of an experiment: what is asked for, before clients agree.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from piebald.contracts.component import WordedModel
from piebald.core.arguments import sentence
from piebald.core.errors import SettingError, shown, unknown
from piebald.data.preparation.cleaning import Cleaning
from piebald.data.preparation.column_models import (
    MOST_COLUMNS,
    MOST_TOKENS,
    BooleanColumn,
    CategoryColumn,
    ClassTarget,
    Column,
    DateColumn,
    Fields,
    Finite,
    LabelColumn,
    Name,
    NumericColumn,
    Scale,
    TokenColumn,
)
from piebald.data.preparation.column_models import NumberTarget as NumberTarget
from piebald.data.preparation.columns import (
    Kind,
    dates_of,
    factorized,
    is_numeric,
    numbers_of,
    row_number,
    truths_of,
    units_of,
    words_of,
)
from piebald.data.preparation.units import FEWEST, Spread, unlike_training
from piebald.data.preparation.written_forms import PERCENT

if TYPE_CHECKING:
    import pandas as pd
    from sklearn.compose import ColumnTransformer


_log = logging.getLogger("piebald.data")
_FARTHEST = 1e18  # of inputs, whose squares float32 can hold
OTHER = "(other)"  # categories that are too rare to be named
Tell = Callable[[str], None]


def warn(sentence: str) -> None:
    """Log what users should know of rows that are used all the same."""
    _log.warning("%s", sentence)


class Preparation(Fields, WordedModel):
    """How the columns of a table become inputs, the same at every client: a fitted `ColumnTransformer` as plain values.

    Attributes:
        columns: the columns that are read, in the order of the inputs.
        target: the column to predict, None where it is not known.
        left_out: columns that are not read, and why.
        gaps: values that stand for a gap, besides empty cells, "?", "NA" and the like.
        least_rows: the rows from which on a client tells a category.
        harmonised: by client and column, slope and offset that take out the client's effect on a column of numbers
            (ComBat), before anything else; a client that is not named there keeps its numbers.
        cleaning: what is done to the columns of tables before all else, None for nothing.
        form: "inputs" of a model, or the "values" of the columns, for statistics: numbers with NaN for gaps, days of
            dates, 1 and 0 of booleans, and the number of a category, one more for all others.

    Raises:
        SettingError: a value is none that training rows can have.

    Examples:
        >>> import pandas as pd
        >>> rows = pd.DataFrame({"age": [50.0, None, 70.0], "ward": ["a", "b", "a"], "ill": ["no", "yes", "no"]})
        >>> from piebald.data.preparation.agreement import fitted
        >>> agreed = fitted(rows, "ill", least_rows=1)
        >>> agreed.feature_names_out
        ['age', 'age is missing', 'ward=a', 'ward=b']
        >>> agreed.transform(rows)[1].tolist(), agreed.classes
        ([0.0, 1.0, 0.0, 1.0], ['no', 'yes'])
    """

    columns: Annotated[list[Column], Field(max_length=MOST_COLUMNS)]
    target: Annotated[ClassTarget | NumberTarget, Field(discriminator="kind")] | None = None
    left_out: dict[Name, Annotated[str, Field(max_length=200)]] = Field(default={})
    gaps: list[Name] = Field(default=[], max_length=100)
    least_rows: Annotated[int, Field(ge=1)] = 5
    harmonised: dict[Name, dict[Name, Annotated[list[Finite], Field(min_length=2, max_length=2)]]] = Field(default={})
    cleaning: Cleaning | None = None
    form: Literal["inputs", "values"] = "inputs"

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        numbers = {column.name for column in self.columns if isinstance(column, NumericColumn)}
        if any({*lines} - numbers for lines in self.harmonised.values()):
            raise ValueError("harmonised must be of columns of numbers")
        if not self.columns:
            raise ValueError("there is no column to predict from: all of them are left out")
        names = [column.name for column in self.columns]
        if self.form != "values" and any(isinstance(column, LabelColumn) for column in self.columns):
            raise ValueError("a column of labels is read for statistics, and is no input of a model")
        if len(names) > 1 and any(isinstance(column, TokenColumn) for column in self.columns):
            raise ValueError("a column of text must be the only one that is read")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"columns must be different, got {shown(twice)} twice")
        return self

    @classmethod
    def from_json(cls, text: str | bytes) -> Preparation:
        """Read a preparation that `to_json` wrote.

        Raises:
            SettingError: it is damaged, or no preparation.
        """
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            raise SettingError(sentence(error, "preparation", cls.model_fields)) from None

    def to_json(self) -> str:
        """Return the preparation as readable JSON."""
        return self.model_dump_json(indent=1)

    @property
    def feature_names_out(self) -> list[str]:
        """The names of the inputs, in order."""
        from piebald.data.preparation.transformer import names_out

        if self.text is not None:
            return [f"{self.text.name}: token {index + 1}" for index in range(self.text.length)]
        return self.names_in if self.form == "values" else names_out(self.columns)

    @property
    def names_in(self) -> list[str]:
        """The columns that a table must have, without the target."""
        return [column.name for column in self.columns]

    @property
    def text(self) -> TokenColumn | None:
        """The column of text whose token ids are the inputs, None where inputs are numbers."""
        return next((column for column in self.columns if isinstance(column, TokenColumn)), None)

    @property
    def dtype(self) -> type[np.floating] | type[np.int64]:
        """The type of the inputs; counts and quantiles of values are those of the numbers themselves."""
        return np.int64 if self.text is not None else np.float32 if self.form == "inputs" else np.float64

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes, None where targets are numbers."""
        return self.target.classes if isinstance(self.target, ClassTarget) else None

    @property
    def target_columns(self) -> str | list[str] | None:
        """The column to predict, a list of several, or None where it is not known."""
        if isinstance(self.target, NumberTarget) and self.target.others:
            return self.target.columns
        return None if self.target is None else self.target.name

    @property
    def embedded(self) -> dict[int, int]:
        """How many categories an input has that is the number of one, by its place among the inputs."""
        if self.form == "values":
            return {}
        coded = [column for column in self.columns if isinstance(column, CategoryColumn)]
        counts = [len(column.categories) for column in coded if column.coding == "embedding"]
        # the transformer has them after all other inputs
        first = len(self.feature_names_out) - len(counts)
        return {first + index: count for index, count in enumerate(counts)}

    @cached_property
    def transformer(self) -> ColumnTransformer:
        """The fitted `ColumnTransformer` of the table that `parsed` returns."""
        from piebald.data.preparation.transformer import column_transformer

        return column_transformer(self.columns)

    def for_client(self, client: str | None) -> Preparation:
        """Return the same preparation for one client's rows, whose effects become part of what is learnt of numbers."""
        columns, lines = list[Column](), self.harmonised.get(client or "", {})
        for column in self.columns:
            slope, offset = lines.get(column.name, (1.0, 0.0))
            if isinstance(column, NumericColumn) and column.name in lines:
                learnt = column.values
                column = column.model_copy(update={"values": learnt.model_copy(update={
                    # the score of slope x + offset is that of x by these constants, so no row changes
                    "median": (learnt.median - offset) / slope, "mean": (learnt.mean - offset) / slope,
                    "deviation": learnt.deviation / slope,
                })})  # fmt: skip
            columns.append(column)
        fields = {name: getattr(self, name) for name in Preparation.model_fields}
        return Preparation(**{**fields, "columns": columns, "harmonised": {}})

    @property
    def as_written(self) -> frozenset[str]:
        """The columns that are read from files as they are written, see `read_table`."""
        return frozenset() if self.cleaning is None else self.cleaning.as_written

    def cleaned(self, frame: pd.DataFrame, client: str | None = None, tell: Tell = warn) -> pd.DataFrame:
        """Return new rows cleaned as those of training were, and say what was changed and how they are unlike these.

        Rows that differ can be predicted, and the user may know why they do, so that nothing is refused here.

        Args:
            frame: the rows, all of which stay.
            client: whose they are, where some clients have rules of their own.
            tell: takes each sentence.
        """
        if self.cleaning is not None:
            frame, changes = self.cleaning.applied(frame, client, every_row=True)
            for change in changes:
                tell(change)
        for difference in self.unlike_training(frame):
            tell(difference)
        return frame

    def in_unit_of_target(self) -> Preparation:
        """Return the same preparation for a loss in the target's own unit, unless [prepare] says how it is scaled."""
        if not isinstance(self.target, NumberTarget) or self.target.scale is not None:
            return self
        return self.model_copy(update={"target": self.target.unscaled()})

    def parsed(self, frame: pd.DataFrame, client: str | None = None) -> pd.DataFrame:
        """Return the columns that are read: float64 numbers with NaN for gaps, dates in parts, and text.

        A column that is not there is a column of gaps, where the training rows have gaps in it.

        Args:
            frame: the rows.
            client: whose they are, where numbers are harmonised.

        Raises:
            SettingError: a column is missing, or a value cannot be read.
        """
        import pandas as pd

        values: dict[str, Any] = {}
        units = units_of(frame)
        for column in self.columns:
            other = max(units.get(column.name, ()), default="")
            if isinstance(column, NumericColumn) and other and column.unit not in ("", other):
                raise SettingError(
                    f"column {shown(column.name, 40)} has the unit {shown(other, 20)}, and {shown(column.unit, 20)} in "
                    "training rows: convert its numbers"
                )
            if column.name not in frame.columns:
                if not column.gaps:
                    raise SettingError(
                        f"{frame.attrs.get('file', 'the table')} has no column {shown(column.name, 40)}, which the "
                        f"preparation reads: add it; it has {shown(', '.join(map(str, frame.columns)))}"
                    )
                frame = frame.assign(**{column.name: np.full(len(frame), np.nan)})
            series = frame[column.name]
            if series.ndim != 1:
                raise SettingError(f"column {shown(column.name, 40)} occurs twice: rename one of them")
            values |= _values(column, series, self.gaps)
        for name, (slope, offset) in self.harmonised.get(client or "", {}).items():
            values[name] = slope * values[name] + offset
        return pd.DataFrame(values, index=frame.index)

    def transform(
        self, frame: pd.DataFrame, client: str | None = None, numbered: dict[str, dict[str, int]] | None = None
    ) -> NDArray[Any]:
        """Return the inputs [n, d] of a table, whose columns may have any order and may be more.

        Numbers are float32, and token ids int64.

        Args:
            frame: the rows.
            client: whose they are, where numbers are harmonised.
            numbered: the numbers of labels so far, by column, where these are further rows of a table; new ones are
                added.

        Raises:
            SettingError: a column is missing, or a value cannot be read.
        """
        if self.form == "values":
            return self._column_values(self.parsed(frame), {} if numbered is None else numbered)
        if not len(frame):
            return np.zeros((0, len(self.feature_names_out)), dtype=self.dtype)
        if self.text is not None:
            from piebald.data.preparation.tokens import token_ids

            return token_ids(self.text, self.parsed(frame)[self.text.name])
        parsed = self.parsed(frame, client)
        for column in self.columns:
            low = (
                parsed[column.name] <= -1
                if isinstance(column, NumericColumn) and column.values.scale == "log"
                else None
            )
            if low is not None and low.any():
                raise _unfit(frame, int(np.argmax(low)), column.name, "has no logarithm of 1 + x")
        inputs = np.asarray(self.transformer.transform(parsed), dtype=np.float64)
        if (far := np.argwhere(np.abs(inputs) > _FARTHEST)).size:
            row, index = far[0]
            raise _unfit(
                frame, row, self.feature_names_out[index], "is too far from those of training rows for a model"
            )
        return inputs.astype(np.float32)

    def as_values(self, labels: Collection[str] = ()) -> Preparation:
        """Return the same preparation in the form "values".

        Args:
            labels: columns that only name what rows belong to; each client numbers its own words of them.

        Raises:
            SettingError: there is text, which has no such values.
        """
        if self.text is not None:
            raise SettingError(
                f"statistics and models are of numbers and categories, and column {shown(self.text.name, 40)} has "
                "text: leave tokenizer out"
            )
        numbered = {column.name for column in self.columns if not isinstance(column, CategoryColumn)}
        names = [name for name in labels if name not in numbered]
        columns = [column for column in self.columns if column.name not in names]
        return self.model_copy(
            update={"form": "values", "columns": [*columns, *(LabelColumn(name=name) for name in names)]}
        )

    @property
    def coded(self) -> dict[str, list[str]]:
        """The categories of each column of them, in the order of their numbers in the form "values"."""
        return {
            column.name: [*column.categories, *[OTHER] * column.rare]
            for column in self.columns if isinstance(column, CategoryColumn)
        }  # fmt: skip

    def _column_values(self, parsed: pd.DataFrame, numbered: dict[str, dict[str, int]]) -> NDArray[np.float64]:
        """Return the values of the columns [n, d] of a parsed table."""
        import pandas as pd

        values = np.empty((len(parsed), len(self.columns)))
        for index, column in enumerate(self.columns):
            if isinstance(column, CategoryColumn):
                codes = {name: float(code) for code, name in enumerate(column.categories)}
                words = parsed[column.name]
                # a word that is no category has the number after the last one; a gap stays NaN
                values[:, index] = words.map(codes).fillna(float(len(codes))).mask(words.isna()).astype(np.float64)
            elif isinstance(column, LabelColumn):
                indexes, labels = pd.factorize(parsed[column.name])
                numbers = numbered.setdefault(column.name, {})
                # the last one is for gaps, whose index is -1
                known = np.array([*(numbers.setdefault(label, len(numbers)) for label in labels), math.nan])
                values[:, index] = known[indexes]
            else:
                values[:, index] = parsed[f"{column.name}: days" if isinstance(column, DateColumn) else column.name]
        return values

    def outside_of_training(self, frame: pd.DataFrame) -> Iterator[str]:
        """Yield a sentence for each column whose numbers lie far outside of those of training rows."""
        for column in self.columns:
            if isinstance(column, NumericColumn) and column.name in frame.columns:
                yield from _outside(column, frame, self.gaps)

    def unlike_training(self, frame: pd.DataFrame) -> Iterator[str]:
        """Yield a sentence for each column that is not there, or has gaps, categories or sizes of numbers that training
        rows have not.
        """
        for column in self.columns:
            if column.name not in frame.columns and column.gaps:  # else the rows are refused
                yield f"there is no column {shown(column.name, 40)}, as in training rows: all rows count as gaps in it"
            if column.name not in frame.columns or isinstance(column, TokenColumn):
                continue
            gap = np.zeros(0) if column.gaps else factorized(frame[column.name], self.gaps)[0] < 0
            if gap.any():
                filled = {
                    "number": "the median stands for it",
                    "date": "the median stands for it",
                    "boolean": "the more frequent value stands for it",
                    "category": "it counts as another",
                }
                yield (
                    f"column {shown(column.name, 40)} has no value in row {row_number(frame, int(np.argmax(gap)))}"
                    f"{f' and in {int(gap.sum()) - 1} more rows' if gap.sum() > 1 else ''}, where training rows have "
                    f"one: {filled[column.kind]}"
                )
            if isinstance(column, NumericColumn):
                yield from _outside(column, frame, self.gaps)
            if isinstance(column, CategoryColumn):
                words = words_of(frame[column.name], self.gaps)
                rows = np.flatnonzero([word is not None and word not in column.categories for word in words])
                if len(rows):
                    yield (
                        f"column {shown(column.name, 40)} has {shown(words[rows[0]], 40)} in row "
                        f"{row_number(frame, rows[0])}"
                        f"{f' and others in {len(rows) - 1} more rows' if len(rows) > 1 else ''}, which is none of "
                        f"the {len(column.categories)} categories that training rows have often: it counts as another"
                    )

    def unscaled(self, frame: pd.DataFrame, client: str | None = None) -> pd.DataFrame:
        """Return the columns of a table as trees read them: numbers as they are, NaN for gaps, and 0/1 for categories.

        Args:
            frame, client: see `transform`.

        Raises:
            SettingError: a column is missing, or a value cannot be read.
        """
        import pandas as pd

        if self.text is not None:
            raise SettingError(f"trees read no text, as column {shown(self.text.name, 40)} has: leave tokenizer out")
        parsed, columns = self.parsed(frame, client), dict[str, Any]()
        for column in self.columns:
            if not isinstance(column, CategoryColumn):
                columns |= {name: parsed[name] for name in getattr(column, "parts", [column.name])}
                continue
            words = parsed[column.name]
            marks = {f"{column.name}={name}": words == name for name in column.categories}
            marks |= {f"{column.name} is another": ~words.isin(column.categories)} if column.rare else {}
            columns |= {name: mark.astype(float).mask(words.isna()) for name, mark in marks.items()}
        return pd.DataFrame(columns, index=frame.index)

    @property
    def said(self) -> str:
        """What becomes of the columns, in one line."""
        kinds: Mapping[str, Sequence[str]] = {
            kind: [column.name for column in self.columns if column.kind == kind]
            for kind in ("number", "category", "boolean", "date", "text")
        }
        plural = {"number": "numbers", "category": "categories", "boolean": "booleans", "date": "dates", "text": ""}
        parts = [f"{len(names)} {plural[kind] if len(names) > 1 else kind} ({shown(', '.join(names), 60)[1:-1]})"
                 for kind, names in kinds.items() if names]  # fmt: skip
        left_out = [f"{shown(name, 30)[1:-1]} left out ({reason})" for name, reason in self.left_out.items()]
        inputs = len(self.feature_names_out)
        count = f"{inputs} input{'s' * (inputs != 1)}{', numbers harmonised' if self.harmonised else ''}"
        if (text := self.text) is not None:
            count = f"{text.length} of {text.vocabulary:,} tokens by {shown(text.tokenizer, 60)} ({text.sha256[:12]})"
        unit = list[str]()
        if isinstance(self.target, NumberTarget):
            scaling = "in its own unit" if self.target.scale == "none" else "scaled"
            unit = [f"target {shown(', '.join(self.target.columns), 30)[1:-1]} {scaling}"]
        unit += [f"cleaned by the rules {self.cleaning.digest}"] if self.cleaning is not None else []
        return "; ".join([f"prepared alike at all clients: {', '.join(parts)}, {count}", *unit, *left_out])


def _unfit(frame: pd.DataFrame, row: int, column: str, why: str) -> SettingError:
    return SettingError(
        f"{frame.attrs['file'] + ': ' if 'file' in frame.attrs else ''}column {shown(column, 40)} has a number in row "
        f"{row_number(frame, row)} that {why}: correct it, or leave the cell empty"
    )


def _outside(column: NumericColumn, frame: pd.DataFrame, gaps: Sequence[str]) -> Iterator[str]:
    """Yield a sentence where numbers of a column lie far outside of those of training rows."""
    learnt, numbers = column.values, numbers_of(frame[column.name], gaps)
    # the means of logarithms and powers are those of other numbers
    if (learnt.scale != "standard" and not learnt.range) or not np.isfinite(numbers).any():
        return
    usual = Spread(len(numbers) + FEWEST, learnt.mean, learnt.deviation)
    known = f"mean {usual.mean:.4g}, deviation {usual.deviation:.4g}"
    if learnt.range:
        low, high = learnt.range
        known = f"nine tenths of them from {low:.4g} to {high:.4g}"
        deviation = learnt.deviation if learnt.scale == "standard" else math.inf
        usual = usual._replace(deviation=deviation, quantiles=(low, learnt.median, high))
    far, index, words = unlike_training(numbers, usual, column.name)
    if far.any():
        # per cents are read as shares of 1, so numbers without the sign are 100 times as large
        words = f"{words[:-1]}, or without %?" if words and column.unit == PERCENT else words
        yield (
            f"column {shown(column.name, 40)} has numbers outside of those of training rows ({known}) in "
            f"{int(far.sum())} of {len(numbers)} rows, such as {numbers[index]:.6g} in row "
            f"{row_number(frame, index)}{words}"
        )


def _values(column: Column, series: pd.Series, gaps: Sequence[str]) -> dict[str, Any]:
    """Return the values of a column by the names of the columns that they become."""
    if isinstance(column, NumericColumn):
        return {column.name: numbers_of(series, gaps)}
    if isinstance(column, BooleanColumn):
        return {column.name: truths_of(series, gaps)}
    if isinstance(column, DateColumn):
        parts = dates_of(series, gaps, column.forms)
        return {f"{column.name}: {part}": parts[part] for part in column.values}
    words = words_of(series, gaps)
    if isinstance(column, TokenColumn):
        return {column.name: np.where(words == np.array(None), "", words)}
    return {column.name: np.where(words == np.array(None), np.array(math.nan, dtype=object), words)}


class PrepareSettings(Cleaning, WordedModel):
    """How the columns of tables become inputs, the same at every client.

    Attributes:
        columns: the kinds of columns by name, where the guess is wrong: "number", "category", "boolean", "date",
            "text" (with a tokenizer), or "leave out".
        scale: how columns of numbers are scaled, by name: "standard" scores by default, those of the logarithm of 1 + x
            ("log") or of a power ("power", Yeo and Johnson 2000), the "rank" among the training rows, or "none".
            Of the target it is "standard", or "none", the default for a loss of one's own, which gets its numbers.
            Means, deviations, quantiles and what fills gaps count each row once, also where rows have weights, as those
            of scikit-learn's transformers in a pipeline do.
        gaps: values that stand for a gap, like "-9", besides empty cells, "?", "NA" and the like.
        least_rows: the rows from which on a client tells a category by name; rarer ones count together.
        one_hot: the most categories that become a column each; of more, a model learns an embedding.
        tokenizer: makes token ids of the one column that is read, which is text: a tokenizer.json of Hugging Face's
            tokenizers, the folder of one, or the name of a model on the Hugging Face Hub.
        length: token ids of each text, which is cut and filled up.
        harmonise: "combat" takes differences of place and scale between clients out of numbers (Johnson et al. 2007).
        agreed: what clients have agreed on, which a run keeps; None asks them.
        map: by column, words for spellings ({ sex = { m = "male" } }); an empty word is a gap.
        unit: by column, how numbers are converted: "mg/dl -> mmol/l", "kg" for numbers written with units of their own,
            or { factor = 0.0555, offset = 0 }.
        absent: by column, words and numbers that stand for a gap in it.
        parse: by column, how values are written: "number" (also with a unit, "70 kg"), "decimal comma", "decimal
            point", or the order of a date such as "day.month.year".
        by_site: by client, columns that have rules of their own there, in place of those for all.
        duplicates: "drop" leaves out rows that are copies of earlier ones of the same client in all columns.

    Raises:
        SettingError: a value is not allowed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    columns: dict[Name, Literal[Kind, "leave out"]] = Field(default={})
    scale: dict[Name, Scale] = Field(default={})
    gaps: list[Name] = Field(default=[], max_length=100)
    least_rows: int = Field(default=5, ge=1)
    one_hot: int = Field(default=20, ge=2, le=1000)
    tokenizer: str | None = Field(default=None, min_length=1, max_length=1000)
    length: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    harmonise: Literal["combat"] | None = None
    agreed: Preparation | None = None

    @classmethod
    def in_words(cls) -> str:
        return "prepare"

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        if (self.tokenizer is None) != (self.length is None):
            raise ValueError("tokenizer and length, the number of token ids of each text, belong together")
        if self.tokenizer is not None and self.harmonise is not None:
            raise ValueError("harmonise is for numbers, and a tokenizer reads text: leave one of them out")
        return self

    @property
    def cleaning(self) -> Cleaning | None:
        """What is done to the columns before all else, None for nothing; what clients have agreed on counts."""
        if self.agreed is not None:
            return self.agreed.cleaning
        rules = Cleaning.model_construct(**{name: getattr(self, name) for name in Cleaning.model_fields})
        return None if rules.is_empty else rules

    def read(self, frame: pd.DataFrame, apart: Collection[str | None] = ()) -> pd.DataFrame:
        """Return a table as these settings read it, for what needs no inputs: gaps are empty, kinds are those named.

        Args:
            frame: the rows.
            apart: columns that are none of the inputs and stay as they are.

        Raises:
            SettingError: there is no such column, or a value cannot be read.
        """
        columns: dict[str, Any] = {}
        for name in self.columns:
            if name not in frame.columns:
                raise unknown("column, which [prepare] names,", name, map(str, frame.columns))
        for name in frame.columns:
            kind = self.columns.get(name)
            if name in apart or (kind is None and not self.gaps):
                columns[name] = frame[name]
            elif kind != "leave out":
                numeric = kind == "number" or (kind is None and is_numeric(frame[name]))
                values = (numbers_of if numeric else words_of)(frame[name], self.gaps)
                columns[name] = frame[name].__class__(values, frame.index, "category" if kind == "category" else None)
        return frame.__class__(columns, index=frame.index)
