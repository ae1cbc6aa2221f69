"""What clients agree on of each column of a table, and of the target: plain values, checked."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Scale = Literal["standard", "log", "power", "rank", "none"]
LONGEST_NAME = 200
LONGEST_UNIT = 40
Name = Annotated[str, Field(max_length=LONGEST_NAME)]
Unit = Annotated[str, Field(max_length=LONGEST_UNIT)]  # of numbers, or the form of dates
Forms = Annotated[list[Unit], Field(max_length=100)]
MOST_COLUMNS = 4096
MOST_CATEGORIES = 10_000
MOST_TARGETS = 1000
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
        range: from the quantile of 5 per cent of the training rows to that of 95, before any change; empty where
            clients do not tell enough for it.
    """

    median: Finite
    mean: Finite = 0.0
    deviation: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    scale: Scale = "standard"
    exponent: Finite | None = None
    quantiles: Annotated[list[Finite], Field(max_length=1001)] = []
    error: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    range: Annotated[list[Finite], Field(max_length=2)] = []

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.scale == "power") != (self.exponent is not None):
            raise ValueError("exponent belongs to scale = 'power', and to no other")
        if (self.scale == "rank") != (len(self.quantiles) > 1) or self.quantiles != sorted(self.quantiles):
            raise ValueError("quantiles belong to scale = 'rank', at least two that do not fall, and to no other")
        if self.range and not (len(self.range) == 2 and self.range[0] < self.range[1]):
            raise ValueError("range must be two numbers that rise")
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
    others: Annotated[list[NumberTarget], Field(max_length=MOST_TARGETS - 1)] = []

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
