"""An agreed preparation as a fitted scikit-learn `ColumnTransformer`, and back.

The transformer is given its form by a few made-up rows, which have gaps and categories where the training rows have
some; whatever it has learnt from their numbers is then replaced by what clients agreed on.  Nothing is transformed
outside of scikit-learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
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

from piebald.data.preparation.column_models import (
    BooleanColumn,
    CategoryColumn,
    Column,
    DateColumn,
    Numbers,
    NumericColumn,
)

_RARE = "\0rare"  # made up, so that the encoder has a column for rare categories


def groups(columns: Sequence[Column]) -> dict[str, list[str]]:
    """Return the columns of the parsed table that are transformed alike, by the name of the transformer."""
    members: dict[str, list[str]] = {}
    for column in columns:
        if isinstance(column, NumericColumn | DateColumn):
            for index, (name, numbers) in enumerate(column.parts.items()):
                # one indicator for a date, and not one for each of its parts
                members.setdefault(f"parts {numbers.scale}" if index else f"numbers {numbers.scale}", []).append(name)
        else:
            members.setdefault(f"{column.kind} {getattr(column, 'coding', '')}".strip(), []).append(column.name)
    # embeddings come last, where `Preparation.embedded` looks for them
    return {name: members[name] for name in sorted(members, key=_order)}


def _order(group: str) -> int:
    return next(index for index, kind in enumerate(("numbers", "parts", "boolean", "category one", "category"))
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
