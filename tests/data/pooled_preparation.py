"""The preparation of pooled rows, fitted by scikit-learn: the reference for what clients agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from sklearn.impute import MissingIndicator

from piebald.data.preparation.answers import KindsAnswer, KindsQuestion, agreed_kinds, answer, parsed_numbers
from piebald.data.preparation.column_models import (
    BooleanColumn,
    CategoryColumn,
    ClassTarget,
    Column,
    DateColumn,
    Numbers,
    NumberTarget,
    NumericColumn,
    Scale,
)
from piebald.data.preparation.columns import factorized, numbers_of
from piebald.data.preparation.preparation import Preparation
from piebald.data.preparation.transformer import unfitted


def fitted(
    frame: pd.DataFrame, target: str, *, columns: Mapping[str, str] | None = None,
    scale: Mapping[str, Scale] | None = None, gaps: Sequence[str] = (), least_rows: int = 5, one_hot: int = 20,
) -> Preparation:  # fmt: skip
    """Fit the transformer to pooled rows, and read what it has learnt; the arguments are those of `PrepareSettings`."""
    scales, gaps = scale or {}, list(gaps)
    table = frame.drop(columns=target)
    told = answer(KindsQuestion(gaps=gaps), table)
    assert isinstance(told, KindsAnswer)
    kinds, left_out = agreed_kinds([told], columns or {}, scales)
    numbers = parsed_numbers(table, kinds, gaps, {})
    read: list[Column] = []
    for name, kind in kinds.items():
        scale = scales.get(name, "standard")
        blank = Numbers(median=0.0, scale=scale, exponent=1.0 if scale == "power" else None,
                        quantiles=[0.0, 1.0] if scale == "rank" else [])  # fmt: skip
        if kind == "number":
            read.append(NumericColumn(name=name, gaps=bool(np.isnan(numbers[name]).any()), values=blank))
        elif kind == "date":
            parts: dict[Any, Numbers] = {
                part.removeprefix(f"{name}: "): Numbers(median=0.0) for part, values in numbers.items()
                if part.startswith(f"{name}: ") and (part.endswith(": days") or np.nanmin(values) < np.nanmax(values))
            }  # fmt: skip
            read.append(DateColumn(name=name, gaps=bool(np.isnan(numbers[f"{name}: days"]).any()), values=parts))
        elif kind == "boolean":
            read.append(BooleanColumn(name=name, gaps=bool(np.isnan(numbers[name]).any()), common=False))
        else:
            codes, words = factorized(table[name], gaps)
            counts = np.bincount(codes[codes >= 0], minlength=len(words))
            named = sorted(word for word, count in zip(words, counts, strict=True) if count >= least_rows)
            read.append(CategoryColumn(
                name=name, categories=named, gaps=bool((codes < 0).any()),
                rare=bool((counts < least_rows).any()),
                coding="one-hot" if len(named) <= one_hot else "embedding",
            ))  # fmt: skip
    form = Preparation(columns=read, gaps=gaps, least_rows=least_rows)
    transformer = unfitted(form.columns, least_rows).fit(form.parsed(table))
    learnt: dict[str, Any] = {}
    for group, step, names in transformer.transformers_:
        kind, _, scale = group.partition(" ")
        if isinstance(step, MissingIndicator):
            continue
        if kind in ("numbers", "parts"):
            medians, scaler = step["gaps"].statistics_, step["scale"]
            scores = {"power": lambda one: one._scaler, "log": lambda one: one["score"]}.get(scale, lambda one: one)(
                scaler
            )
            for place, name in enumerate(names):
                fields: dict[str, Any] = {"median": float(medians[place]), "scale": scale}
                if scale in ("standard", "log", "power"):
                    fields |= {"mean": float(scores.mean_[place]), "deviation": float(scores.scale_[place])}
                if scale == "power":
                    fields["exponent"] = float(scaler.lambdas_[place])
                if scale == "rank":
                    fields["quantiles"] = np.maximum.accumulate(scaler.quantiles_[:, place]).tolist()
                learnt[name] = Numbers(**fields)
        elif kind == "boolean":
            learnt |= {name: bool(step.statistics_[place]) for place, name in enumerate(names)}
    return Preparation(
        columns=[_with(column, learnt) for column in form.columns], target=_target(frame, target, gaps),
        left_out=left_out, gaps=gaps, least_rows=least_rows,
    )  # fmt: skip


def _with(column: Column, learnt: dict[str, Any]) -> Column:
    """Return a column with what is learnt of it."""
    if isinstance(column, NumericColumn):
        return column.model_copy(update={"values": learnt[column.name]})
    if isinstance(column, DateColumn):
        return column.model_copy(update={"values": {part: learnt[f"{column.name}: {part}"] for part in column.values}})
    return column.model_copy(update={"common": learnt[column.name]}) if isinstance(column, BooleanColumn) else column


def _target(frame: pd.DataFrame, name: str, gaps: list[str]) -> ClassTarget | NumberTarget:
    series = frame[name]
    if getattr(series.dtype, "kind", "O") == "f":
        numbers = numbers_of(series, gaps)
        return NumberTarget(name=name, mean=float(numbers.mean()), deviation=float(numbers.std()) or 1.0)
    if getattr(series.dtype, "kind", "O") in "biu":  # classes are their numbers
        return ClassTarget(name=name, classes=[str(number) for number in range(int(series.max()) + 1)])
    return ClassTarget(name=name, classes=sorted(factorized(series, gaps)[1]))
