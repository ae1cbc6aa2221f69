"""What is wanted of the columns: checked before a client is asked."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from piebald.core.arguments import checked
from piebald.core.errors import SettingError, shown, unknown
from piebald.statistics.bounded_sums import bounds_reason
from piebald.statistics.columns import ClientColumns

Bins = Annotated[int, Field(ge=1, le=10_000)]
_LARGEST = 1.7e308  # a whole number may be larger than any float
Quantiles = Sequence[Annotated[float, Field(ge=0, le=1)]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is wanted of the columns.

    Attributes:
        quantiles: shares of the numbers below, in [0, 1].
        bins: bins of each column's histogram; None for no histograms.
        bounds: the range of each column of numbers.
        categories: the categories of columns of text, and of numbers that are codes.
        tables: pairs of columns to count together.
        by_client: each client's own columns, too.
    """

    quantiles: tuple[float, ...]
    bins: int | None
    bounds: Mapping[str, tuple[float, float]]
    categories: Mapping[str, tuple[str, ...]]
    tables: tuple[tuple[str, str], ...]
    by_client: bool


@checked
def wanted_of_numbers(
    quantiles: Quantiles,
    bins: Bins | None,
    bounds: Mapping[str, Sequence[float]],
    by_client: bool,
    categories: Mapping[str, Sequence[str]] | None = None,
    tables: Sequence[Sequence[str]] = (),
) -> Wanted:
    """What is wanted of columns of numbers, some of which may be codes.

    Raises:
        SettingError: an argument is wrong.
    """
    limits = {name: _ends(name, ends) for name, ends in bounds.items()}
    stated = {name: _texts(name, values) for name, values in (categories or {}).items()}
    pairs = tuple(map(_pair, tables))
    return Wanted(tuple(map(float, quantiles)), bins, limits, stated, pairs, by_client)


def _pair(columns: Sequence[str]) -> tuple[str, str]:
    """The two columns of a table."""
    if isinstance(columns, str) or len(columns) != 2 or columns[0] == columns[1]:
        raise SettingError(f"tables must be pairs of different columns, got {shown(columns)}")
    return str(columns[0]), str(columns[1])


def _texts(name: str, values: Sequence[str]) -> tuple[str, ...]:
    """The categories of a column."""
    texts = tuple(map(str, values))
    if not texts or len(set(texts)) < len(texts):
        raise SettingError(f"categories of {name!r} must be different names, at least one, got {shown(values)}")
    return texts


def _ends(name: str, ends: Sequence[float]) -> tuple[float, float]:
    """The bounds of a column."""
    if len(ends) != 2 or not all(isinstance(end, int | float) and abs(end) <= _LARGEST for end in ends):
        raise SettingError(f"bounds of {name!r} must be two numbers, low and high, got {shown(ends)}")
    if reason := bounds_reason(*map(float, ends)):
        raise SettingError(f"bounds of {name!r} {reason}, got {shown(ends)}")
    return float(ends[0]), float(ends[1])


def wanted_of(
    clients: Sequence[ClientColumns], quantiles: Sequence[float], bins: int | None,
    bounds: Mapping[str, Sequence[float]], categories: Mapping[str, Sequence[str]], tables: Sequence[Sequence[str]],
    by_client: bool,
) -> Wanted:  # fmt: skip
    """What is wanted of columns that clients hold.

    Raises:
        SettingError: a column is not there, or an argument is wrong.
    """
    numbers, known = clients[0].numbers, [*clients[0].numbers, *clients[0].texts]
    limits = {}
    for name, ends in bounds.items():
        if name not in numbers:
            raise unknown("column of numbers to give bounds of,", name, numbers)
        limits[name] = _ends(name, ends)
    pairs = list(map(_pair, tables))
    stated = {name: _texts(name, values) for name, values in categories.items()}
    for name in [*stated, *itertools.chain(*pairs)]:
        if name not in known:
            raise unknown("column", name, known)
    return Wanted(tuple(map(float, quantiles)), bins, limits, stated, tuple(pairs), by_client)
