"""Units in which files write their numbers: those of one column must be the same wherever it is written."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, product
from operator import itemgetter

from piebald.core.errors import SettingError, shown
from piebald.core.moments import Moments
from piebald.data.preparation.written_forms import PERCENT

Units = Mapping[str, Sequence[str]]  # of each column that has some, "" where there is none
_LEAST, _MOST = 20.0, 500.0  # times that numbers in per cent are shares of other rows


def units_by_column(files: Collection[Mapping[str, str]]) -> dict[str, list[str]]:
    """Return the different units of each column in some files, "" for files without one."""
    columns = dict.fromkeys(chain.from_iterable(files))
    return {column: sorted({file.get(column, "") for file in files}) for column in columns}


def common_units(moments: Mapping[str, Sequence[Moments]], units: Mapping[str, Units]) -> dict[str, str]:
    """Return the unit of each column of numbers, "" where there is none.

    Args:
        moments: of each column, those of each client, or those of all rows where clients' own are masked.
        units: of columns, by client, in the same order.

    Raises:
        SettingError: a column has two units; a client writes some of its files in per cent; or numbers of one client
            are about 100 times those of another that writes them in per cent, which are shares of 1.
    """
    common = dict[str, str]()
    for column, by_client in moments.items():
        common[column] = _common_unit(column, units)
        if common[column] == PERCENT and len(by_client) == len(units):
            signed = [client for client, held in units.items() if column in held]
            _check_shares(column, signed, dict(zip(units, by_client, strict=True)))
    return common


def _common_unit(column: str, units: Mapping[str, Units]) -> str:
    held = [(unit, holder) for holder, of in units.items() for unit in of.get(column, ())]
    unit, first = next(filter(itemgetter(0), held), ("", ""))
    for other, holder in held:
        if other not in ("", unit):
            raise _unlike(column, f"the unit {shown(unit, 20)} at {first} and {shown(other, 20)} at {holder}")
        if unit == PERCENT and not other:
            raise _unlike(column, f"numbers with and without % in the files of {holder}")
    return unit


def _check_shares(column: str, signed: Collection[str], moments: Mapping[str, Moments]) -> None:
    sizes = dict(_sizes(moments))
    for client, unsigned in product(signed, sizes.keys() - signed):
        if client in sizes and _LEAST < (ratio := sizes[unsigned] / sizes[client]) < _MOST:
            raise _unlike(
                column, f"numbers in % at {client}, which are read as shares of 1, and numbers without % at {unsigned} "
                f"that are {ratio:.0f} times as large",
            )  # fmt: skip


def _sizes(moments: Mapping[str, Moments]) -> Iterator[tuple[str, float]]:
    """Yield the root mean squares of clients' numbers."""
    for client, of in moments.items():
        if (present := int(of.present[0])) and (of.mean[0] or of.scatter[0]):
            yield client, math.hypot(float(of.mean[0]), math.sqrt(float(of.scatter[0]) / present))


def _unlike(column: str, how: str) -> SettingError:
    return SettingError(
        f"column {shown(column, 40)} has {how}: write it alike everywhere, or name it in columns of [prepare] as "
        "'leave out'"
    )
