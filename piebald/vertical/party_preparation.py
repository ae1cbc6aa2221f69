"""How a party's table becomes inputs, fitted to its training rows and stored, so that new rows become inputs alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from piebald.core.errors import SettingError
from piebald.data.clients.client_tables import numbers_of
from piebald.data.preparation.agreement import fitted
from piebald.data.preparation.column_models import CategoryColumn, Column, Numbers, NumericColumn
from piebald.data.preparation.columns import is_numeric
from piebald.data.preparation.preparation import Preparation
from piebald.vertical.protocol import Role
from piebald.vertical.transfer_settings import PartyFile

if TYPE_CHECKING:
    from pandas import DataFrame

MOST_VALUES = 100  # of a column of categories, each of which becomes an input


class PartyPreparation(BaseModel):
    """How a party's table becomes inputs.

    Columns with stated bounds or values are prepared by these alone, whatever the rows hold; the others by the
    package's own plan: numbers become standard scores and categories 0/1 columns, gaps are filled.

    Attributes:
        features: names of the inputs.
        key: the column that names rows, "" for none.
        bounds: the least and the largest value of columns of numbers; what lies beyond counts as the bound.
        columns: how columns become inputs; None where inputs are taken as they are, by their names.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    features: tuple[str, ...]
    key: str = ""
    bounds: dict[str, tuple[float, float]] = {}
    columns: Preparation | None = None

    @classmethod
    def fitted(cls, frame: DataFrame, file: PartyFile, public: Role | None = None) -> Self:
        """Return the preparation of training rows.

        Args:
            frame: the training rows, with the columns of features.
            file: the settings of the file.
            public: the party all of whose columns must be stated; None lets the rows say the others.

        Raises:
            SettingError: a column is not stated, is stated as another kind than it is, or cannot be read.
        """
        stated = [name for name in frame.columns if name in file.bounds or name in file.values]
        others = [name for name in frame.columns if name not in stated]
        if public is not None and others:
            kind = "bounds" if is_numeric(frame[others[0]]) else "values"
            raise SettingError(
                f"column {others[0]!r} of {file.path} needs files.{public}.{kind}: with method.noise, no column may be "
                "prepared by the rows"
            )
        columns: list[Column] = [_stated(name, file) for name in stated]
        if others:
            columns += fitted(frame[others], one_hot=MOST_VALUES, columns=_kinds(frame[others])).columns
        prepared = Preparation(columns=columns)
        if prepared.embedded:
            many = next(
                column.name for column in columns if isinstance(column, CategoryColumn) and column.coding == "embedding"
            )
            raise SettingError(
                f"column {many!r} of {file.path} has more than {MOST_VALUES} different values: name the other columns "
                "in columns"
            )
        return cls(features=tuple(prepared.feature_names_out), key=file.key, bounds=dict(file.bounds), columns=prepared)

    def inputs(self, frame: DataFrame) -> Tensor:
        """Return the inputs [n, f], float64, of the rows of a table.

        Raises:
            SettingError: a column is missing, or a value cannot be read.
        """
        if self.columns is None:
            return torch.tensor(numbers_of(frame, self.features))
        import pandas

        if missing := [name for name in self.bounds if name not in frame.columns]:
            raise SettingError(f"the table has no column {missing[0]!r}, which the preparation reads: add it")
        # a word among numbers counts as a gap, which is filled with the middle
        stated = {
            name: pandas.to_numeric(frame[name], errors="coerce").astype("float64").clip(*bounds)
            for name, bounds in self.bounds.items()
        }
        return torch.from_numpy(self.columns.transform(frame.assign(**stated)).astype("float64"))


def _stated(name: str, file: PartyFile) -> Column:
    """Return a column that is prepared by its stated bounds, to numbers from -1 to 1, or by its stated values."""
    if name in file.bounds:
        least, largest = file.bounds[name]
        middle, half = (least + largest) / 2, (largest - least) / 2
        return NumericColumn(name=name, values=Numbers(median=middle, mean=middle, deviation=half))
    # any other value, and a gap, is one more category
    return CategoryColumn(name=name, categories=sorted({*file.values[name]}), rare=True)


def _kinds(frame: DataFrame) -> dict[str, str]:
    """Return the kinds of columns that are not guessed: numbers are features, whatever they may stand for."""
    return {str(name): "number" for name in frame.columns if is_numeric(frame[name])}
