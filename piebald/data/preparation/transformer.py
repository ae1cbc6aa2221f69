"""An agreed preparation as a fitted scikit-learn `ColumnTransformer`, and back.

The transformer is given its form by a few made-up rows, which have gaps and categories where the training rows have
some; whatever it has learnt from their numbers is then replaced by what clients agreed on.  Nothing is transformed
outside of scikit-learn.

What clients agree on of each column of a table, and of the target: plain values, checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, get_args

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from sklearn.compose import ColumnTransformer
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    OneHotEncoder,
    OrdinalEncoder,
    PowerTransformer,
    QuantileTransformer,
    StandardScaler,
)

Scale = Literal["standard", "log", "power", "rank", "none"]
LONGEST_NAME = 200
LONGEST_UNIT = 40
Name = Annotated[str, Field(max_length=LONGEST_NAME)]
Unit = Annotated[str, Field(max_length=LONGEST_UNIT)]  # of numbers, or the form of dates
Forms = Annotated[list[Unit], Field(max_length=100)]
MOST_COLUMNS = 4096
MOST_CATEGORIES = 10_000
MOST_TOKENS = 1 << 15  # of a text
DatePart = Literal["days", "day", "month", "weekday", "hour"]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Fields(BaseModel):
    """Plain values that are checked strictly."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Numbers(Fields):
    """What is learnt of a column of numbers, or of one part of a date.

    Attributes:
        median: stands for gaps (`SimpleImputer.statistics_`).
        mean, deviation: of the training rows with gaps filled in (`StandardScaler.mean_`, `scale_`), after the change
            that `scale` asks for.
        scale: "standard" scores; those of the logarithm of 1 + x ("log") or of Yeo and Johnson's power ("power"); the
            "rank" among training rows, from 0 to 1; or "none".
        exponent: of the power (`PowerTransformer.lambdas_`).
        quantiles: of the training rows at equal distances (`QuantileTransformer.quantiles_`), for ranks.
        error: the most by which the median, a quantile or the exponent may be off.
    """

    median: Finite
    mean: Finite = 0.0
    deviation: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    scale: Scale = "standard"
    exponent: Finite | None = None
    quantiles: Annotated[list[Finite], Field(max_length=1001)] = []
    error: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.scale == "power") != (self.exponent is not None):
            raise ValueError("exponent belongs to scale = 'power', and to no other")
        if (self.scale == "rank") != (len(self.quantiles) > 1) or self.quantiles != sorted(self.quantiles):
            raise ValueError("quantiles belong to scale = 'rank', at least two that do not fall, and to no other")
        return self


class NumericColumn(Fields):
    """A column of numbers; `gaps` adds an indicator of them, and `unit` is the one that they are written with."""

    kind: Literal["number"] = "number"
    name: Name
    gaps: bool = False
    unit: Unit = ""
    values: Numbers

    @property
    def parts(self) -> dict[str, Numbers]:
        """The numbers by the name of the column that they become."""
        return {self.name: self.values}


class DateColumn(Fields):
    """A column of dates: elapsed days and parts of the calendar, each a column of numbers.

    Attributes:
        forms: in which clients write theirs, by which dates with several readings are read.
    """

    kind: Literal["date"] = "date"
    name: Name
    gaps: bool = False
    forms: Forms = []
    values: dict[DatePart, Numbers]

    @field_validator("values")
    @classmethod
    def _in_order(cls, values: dict[DatePart, Numbers]) -> dict[DatePart, Numbers]:
        """Return the parts in one order, which JSON need not keep: it is that of the inputs."""
        return {part: values[part] for part in get_args(DatePart) if part in values}

    @property
    def parts(self) -> dict[str, Numbers]:
        """The numbers by the name of the column that they become."""
        return {f"{self.name}: {part}": numbers for part, numbers in self.values.items()}


class BooleanColumn(Fields):
    """A column of true and false, 1 and 0; `common` stands for gaps, and `gaps` adds an indicator of them."""

    kind: Literal["boolean"] = "boolean"
    name: Name
    gaps: bool = False
    common: bool


class CategoryColumn(Fields):
    """A column of categories.

    Attributes:
        categories: their names, sorted.
        rare: whether there is one more for all others, also for those that nobody had in training.
        gaps: whether a gap is a category of its own.
        coding: "one-hot", a column for each category; or "embedding", one column of their numbers from 0, with -1 for
            all others and -2 for gaps, which a model reads by an embedding.
    """

    kind: Literal["category"] = "category"
    name: Name
    gaps: bool = False
    categories: Annotated[list[Name], Field(min_length=1, max_length=MOST_CATEGORIES)]
    rare: bool = False
    coding: Literal["one-hot", "embedding"] = "one-hot"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.categories != sorted({*self.categories}):
            raise ValueError("categories must be different names in order")
        return self


class LabelColumn(Fields):
    """A column of values that name what rows belong to, such as a patient: each client numbers its own."""

    kind: Literal["label"] = "label"
    name: Name
    gaps: Literal[False] = False


class TokenColumn(Fields):
    """A column of text, which becomes token ids and is the only one that is read; a gap is an empty text.

    Attributes:
        tokenizer: a tokenizer.json, the folder of one, or the name of a model on the Hugging Face Hub.
        sha256: of the tokenizer's file.
        length: token ids of each text, which is cut and filled up.
        vocabulary: how many different tokens there are.
    """

    kind: Literal["text"] = "text"
    name: Name
    gaps: Literal[False] = False
    tokenizer: Annotated[str, Field(max_length=1000)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    length: Annotated[int, Field(ge=1, le=MOST_TOKENS)]
    vocabulary: Annotated[int, Field(ge=1)]

    def __eq__(self, other: object) -> bool:
        """Return whether texts become the same token ids, wherever the tokenizer's file lies."""
        same = isinstance(other, TokenColumn) and other.model_copy(update={"tokenizer": self.tokenizer})
        return isinstance(same, TokenColumn) and super().__eq__(same)


Column = Annotated[
    NumericColumn | DateColumn | BooleanColumn | CategoryColumn | LabelColumn | TokenColumn,
    Field(discriminator="kind"),
]


class ClassTarget(Fields):
    """A target of classes, numbered in the order of their names."""

    kind: Literal["classes"] = "classes"
    name: Name
    classes: Annotated[list[Name], Field(min_length=1, max_length=100_000)]


class NumberTarget(Fields):
    """A target of numbers, of which a model learns standard scores, or the numbers themselves.

    Attributes:
        name: of its column.
        mean, deviation: by which scores are made; 0 and 1 where a loss gets the numbers themselves.
        scale: what [prepare] asks for; None where it follows from the loss.
        others: further columns that are predicted together with this one.
    """

    kind: Literal["number"] = "number"
    name: Name
    mean: Finite = 0.0
    deviation: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    scale: Literal["standard", "none"] | None = None
    others: Annotated[list[NumberTarget], Field(max_length=1000)] = []

    def unscaled(self) -> NumberTarget:
        """Return the same target, of which a loss gets the numbers themselves."""
        return NumberTarget(name=self.name, scale="none", others=[other.unscaled() for other in self.others])

    @property
    def columns(self) -> list[str]:
        """The names of all columns that are predicted."""
        return [self.name, *(other.name for other in self.others)]

    @property
    def constants(self) -> tuple[float | tuple[float, ...], float | tuple[float, ...]]:
        """The mean and the deviation; of each column where there are several."""
        if not self.others:
            return self.mean, self.deviation
        both = [self, *self.others]
        return tuple(column.mean for column in both), tuple(column.deviation for column in both)


_RARE = "\0rare"  # made up, so that the encoder has a column for rare categories


def groups(columns: Sequence[Column]) -> dict[str, list[str]]:
    """Return the columns of the parsed table that are transformed alike, by the name of the transformer."""
    members: dict[str, list[str]] = {}
    for column in columns:
        if isinstance(column, NumericColumn | DateColumn):
            for place, (name, numbers) in enumerate(column.parts.items()):
                # one indicator for a date, and not one for each of its parts
                members.setdefault(f"parts {numbers.scale}" if place else f"numbers {numbers.scale}", []).append(name)
        else:
            members.setdefault(f"{column.kind} {getattr(column, 'coding', '')}".strip(), []).append(column.name)
    # embeddings come last, where `Preparation.embedded` looks for them
    return {name: members[name] for name in sorted(members, key=_order)}


def _order(group: str) -> int:
    return next(place for place, kind in enumerate(("numbers", "parts", "boolean", "category one", "category"))
                if group.startswith(kind))  # fmt: skip


def unfitted(columns: Sequence[Column], least_rows: int) -> ColumnTransformer:
    """Return the transformer before it is fitted.

    Args:
        columns: of which kinds, codings and scales count.
        least_rows: rows of a category that is not rare.
    """
    steps, known = [], {column.name: column for column in columns if isinstance(column, CategoryColumn)}
    for group, names in groups(columns).items():
        kind, _, scale = group.partition(" ")
        if kind in ("numbers", "parts"):
            # a column without a value would be dropped otherwise, and all places after it move
            filled = SimpleImputer(strategy="median", keep_empty_features=True)
            step: Any = Pipeline([("gaps", filled), ("scale", _scaler(scale))])
        elif kind == "boolean":
            step = SimpleImputer(strategy="most_frequent", keep_empty_features=True)
        elif scale == "one-hot":
            step = OneHotEncoder(min_frequency=least_rows, handle_unknown="infrequent_if_exist", sparse_output=False)
        else:
            step = OrdinalEncoder(
                categories=[
                    np.array([*known[name].categories, *[np.nan] * known[name].gaps], dtype=object) for name in names
                ],
                handle_unknown="use_encoded_value", unknown_value=-1, encoded_missing_value=-2,
            )  # fmt: skip
        steps.append((group, step, names))
        # beside the scaler and not within the imputer: 0 and 1 are not scaled
        if missing := _with_indicator(columns, group, names):
            steps.append((f"{group} missing", MissingIndicator(features="all"), missing))
    return ColumnTransformer(steps)


def _with_indicator(columns: Sequence[Column], group: str, names: Sequence[str]) -> list[str]:
    """Return those of a group's columns of whose gaps there is an indicator: one for a date, none for categories."""
    gaps = {next(iter(getattr(column, "parts", [column.name]))) for column in columns if column.gaps}
    return [name for name in names if name in gaps] if group.startswith(("numbers", "boolean")) else []


def _scaler(scale: str) -> Any:
    """Return the transformer of filled-in numbers."""
    if scale == "none":
        return FunctionTransformer()
    if scale == "rank":
        return QuantileTransformer(n_quantiles=101, subsample=None)
    if scale == "power":
        return PowerTransformer()
    return (
        Pipeline([("log", FunctionTransformer(np.log1p)), ("score", StandardScaler())])
        if scale == "log"
        else StandardScaler()
    )


def column_transformer(columns: Sequence[Column]) -> ColumnTransformer:
    """Return the fitted transformer of the table that `Preparation.parsed` returns."""
    fitted = unfitted(columns, least_rows=2).fit(_made_up(columns))
    numbers = {name: part for column in columns if isinstance(column, NumericColumn | DateColumn)
               for name, part in column.parts.items()}  # fmt: skip
    common = {column.name: column.common for column in columns if isinstance(column, BooleanColumn)}
    for group, step, names in fitted.transformers_:
        kind, _, scale = group.partition(" ")
        if isinstance(step, MissingIndicator):
            continue  # it learns nothing
        if kind == "boolean":
            step.statistics_ = np.array([float(common[name]) for name in names])
        elif kind in ("numbers", "parts"):
            learnt = [numbers[name] for name in names]
            step["gaps"].statistics_ = np.array([part.median for part in learnt])
            _learn(step["scale"], scale, learnt)
    return fitted


def _learn(scaler: Any, scale: str, learnt: list[Numbers]) -> None:
    """Put the agreed numbers in the place of those that a scaler has learnt."""
    if scale == "none":
        return
    if scale == "rank":
        scaler.quantiles_ = np.array([part.quantiles for part in learnt]).T
        scaler.references_ = np.linspace(0, 1, len(scaler.quantiles_))
        scaler.n_quantiles_ = len(scaler.quantiles_)
        return
    if scale == "power":
        scaler.lambdas_ = np.array([part.exponent for part in learnt])
    # scikit-learn has no public name for it
    scores = scaler._scaler if scale == "power" else scaler["score"] if scale == "log" else scaler
    scores.mean_ = np.array([part.mean for part in learnt])
    scores.scale_ = np.array([part.deviation for part in learnt])
    scores.var_ = scores.scale_**2


def _made_up(columns: Sequence[Column]) -> pd.DataFrame:
    """Return rows of the form of the training rows, with categories, twice each, and gaps where those have some."""
    counts = [len(column.categories) for column in columns if isinstance(column, CategoryColumn)]
    # each category twice, or it would be rare itself; 101 rows, since there are no more quantiles than rows
    rows, table = 2 * max(counts, default=0) + 101, dict[str, Any]()
    for column in columns:
        if isinstance(column, CategoryColumn):
            values: list[Any] = [
                value for value in [*column.categories, *([np.nan] if column.gaps else [])] for _ in (1, 2)
            ]
            # once, which is too rare for a column of its own
            values += [_RARE] if column.rare else []
            table[column.name] = np.array(values + values[:1] * (rows - len(values)), dtype=object)
            continue
        parts = column.parts if isinstance(column, NumericColumn | DateColumn) else {column.name: None}
        for name in parts:
            table[name] = np.linspace(0.0, 1.0, rows) if len(parts) > 1 or column.kind != "boolean" else np.ones(rows)
            if column.gaps:
                table[name][0] = np.nan
    return pd.DataFrame(table)


def names_out(all_columns: Sequence[Column]) -> list[str]:
    """Return the names of the inputs, in the order of the transformer's columns."""
    columns = {name: column for column in all_columns
               for name in getattr(column, "parts", [column.name])}  # fmt: skip
    names: list[str] = []
    for group, members in groups(all_columns).items():
        if group == "category one-hot":
            for name in members:
                column = columns[name]
                assert isinstance(column, CategoryColumn)
                # as scikit-learn orders them: gaps last among categories, rare ones after all
                names += [f"{name}={category}" for category in column.categories]
                names += [f"{name} is missing"] * column.gaps + [f"{name} is another"] * column.rare
            continue
        names += members
        names += [f"{columns[name].name} is missing" for name in _with_indicator(all_columns, group, members)]
    return names
