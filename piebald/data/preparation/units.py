"""Columns of numbers that some rows have in another unit than the others, as their means and deviations tell.

A change of unit takes mean and deviation along: y = slope x + offset.  Known changes are looked for first; then one
that makes all numbers many times as large, whatever it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from piebald.core.errors import shown
from piebald.core.moments import Moments

Numbers = TypeVar("Numbers", float, NDArray[np.float64])

FEWEST = 5  # numbers whose mean and deviation tell something
LEVELS = (0.05, 0.5, 0.95)  # of the quantiles by which numbers are compared
_NORMAL = 1.6448536269514722  # deviations of a normal distribution that have these levels around them
_FAR, _FARTHEST = 4.0, 10.0  # deviations from the mean: of numbers in another known unit, and of any
_BENT = 3.0  # times the deviation that the quantiles of normal numbers have
_LARGE = 5.0  # factor that unlike sites hardly have in mean and deviation alike
_UNKNOWN = 10.0  # factor from which on another unit is supposed without a known one
_NEAR, _ALIKE = math.log(1.12), math.log(1.7)  # of ratios of sizes and of deviations to those of a unit


class Spread(NamedTuple):
    """How many numbers there are, and where they lie.

    Attributes:
        rows: how many.
        mean, deviation: of all, which a single huge one may decide.
        quantiles: those of 5, 50 and 95 per cent, which it may not; None where they are not known.
    """

    rows: int
    mean: float
    deviation: float
    quantiles: tuple[float, float, float] | None = None

    @classmethod
    def of_moments(cls, moments: Moments, quantiles: Sequence[float] = ()) -> Spread:
        """Return that of the first column of moments, with its quantiles where there are any."""
        rows = int(moments.present[0])
        low, middle, high = quantiles or (math.nan,) * 3
        deviation = math.sqrt(float(moments.scatter[0]) / max(rows, 1))
        return cls(rows, float(moments.mean[0]), deviation, (low, middle, high) if quantiles else None)

    @classmethod
    def of(cls, numbers: NDArray[np.float64]) -> Spread:
        """Return that of numbers [n], without gaps."""
        present = numbers[np.isfinite(numbers)]
        if not len(present):
            return cls(0, 0.0, 0.0)
        low, middle, high = np.quantile(present, LEVELS).tolist()
        return cls(len(present), float(present.mean()), float(present.std()), (low, middle, high))

    @property
    def robust(self) -> Spread:
        """The same with the median and the deviation of normal numbers that have these quantiles, where they differ."""
        if self.quantiles is None or not self.quantiles[0] < self.quantiles[2]:
            return self._replace(quantiles=None)
        low, middle, high = self.quantiles
        return self._replace(mean=middle, deviation=(high - low) / (2 * _NORMAL))

    @property
    def is_bent(self) -> bool:
        """True if a few numbers, far from the others, make most of the deviation."""
        return self.quantiles is not None and self.deviation > _BENT * self.robust.deviation

    @property
    def size(self) -> float:
        """The root mean square."""
        return math.hypot(self.mean, self.deviation)

    def scores(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return how many deviations numbers [n] are from the middle, on each side by its own quantile."""
        usual = self.robust
        below = above = usual.deviation
        if usual.quantiles is not None:  # a skewed column reaches farther on one side
            below, above = ((usual.mean - usual.quantiles[0]) / _NORMAL or below,
                            (usual.quantiles[2] - usual.mean) / _NORMAL or above)  # fmt: skip
        return np.abs(numbers - usual.mean) / np.where(numbers < usual.mean, below, above)


def _alike(own: Spread, usual: Spread) -> tuple[Spread, Spread]:
    """Return both by quantiles where one is bent and both have some that differ, else by moments, which vary less."""
    pair = own.robust, usual.robust
    bent = (own.is_bent or usual.is_bent) and all(spread.quantiles is not None for spread in pair)
    return pair if bent else (own._replace(quantiles=None), usual._replace(quantiles=None))


class Conversion(NamedTuple):
    """A change of unit: numbers in `unit` are slope x + offset of those in `usual`; `names` are columns it is for."""

    unit: str
    usual: str
    slope: float
    offset: float = 0.0
    names: str = ""

    @property
    def inverse(self) -> Conversion:
        """The change back."""
        return Conversion(self.usual, self.unit, 1 / self.slope, -self.offset / self.slope, self.names)

    def undone(self, numbers: Numbers) -> Numbers:
        """Return a number, or numbers [n], in the usual unit."""
        return (numbers - self.offset) / self.slope


_TABLE = (
    Conversion("mg/dl", "mmol/l", 18.016, names="gluc|sugar|bg|hba"),
    Conversion("mg/dl", "mmol/l", 38.67, names="chol|hdl|ldl"),
    Conversion("mg/dl", "mmol/l", 88.57, names="trig"),
    Conversion("umol/l", "mg/dl", 88.42, names="crea"),
    Conversion("umol/l", "mg/dl", 17.1, names="bili"),
    Conversion("umol/l", "mg/dl", 59.48, names="uric|urate"),
    Conversion("degrees Fahrenheit", "Celsius", 1.8, 32.0),
    Conversion("Kelvin", "degrees Celsius", 1.0, 273.15),
    Conversion("lb", "kg", 2.2046226),
    Conversion("cm", "inches", 2.54),
    Conversion("cm", "feet", 30.48),
    Conversion("feet", "m", 3.28084),
    Conversion("km", "miles", 1.60934),
    Conversion("mmHg", "kPa", 7.50062),
    Conversion("days", "weeks", 7.0, names="day|week|time|dur|age|stay"),
    Conversion("months", "years", 12.0, names="month|year|time|dur|age"),
    Conversion("days", "years", 365.25, names="day|year|time|dur|age"),
    Conversion("hours", "days", 24.0, names="hour|day|time|dur|stay"),
    Conversion("minutes", "hours", 60.0, names="min|hour|time|dur"),
    Conversion("cm (or %)", "m (or shares of 1)", 100.0),
)
CONVERSIONS = (*_TABLE, *(conversion.inverse for conversion in _TABLE))


def _fits(conversion: Conversion, name: str) -> bool:
    """Return whether a conversion may be that of a column: of single substances and of times only by its name."""
    return not conversion.names or re.search(conversion.names, name, re.IGNORECASE) is not None


def conversion_of(own: Spread, usual: Spread, name: str) -> Conversion | None:
    """Return the known change of unit that makes the spread of most rows that of some, None where none does.

    Args:
        own: of some rows.
        usual: of the others.
        name: the column.
    """
    own, usual = _alike(own, usual)
    if min(own.deviation, usual.deviation, own.size, usual.size) <= 0:
        return None
    best: tuple[float, Conversion] | None = None
    for conversion in CONVERSIONS:
        apart = abs(math.log(own.deviation / (usual.deviation * conversion.slope)))
        expected = Spread(usual.rows, conversion.slope * usual.mean + conversion.offset,
                          conversion.slope * usual.deviation)  # fmt: skip
        # with an offset the mean may be near zero, where its ratio says nothing
        apart_means = abs(own.mean - expected.mean) / max(own.deviation, expected.deviation)
        off = _NEAR * apart_means if conversion.offset else abs(math.log(own.size / expected.size))
        if off > _NEAR or apart > _ALIKE or not _fits(conversion, name):
            continue
        # what differs by a small factor may be unlike, and no other unit, unless hardly any numbers are common
        small = max(conversion.slope, 1 / conversion.slope) < _LARGE
        if small and abs(own.mean - usual.mean) < 2 * max(own.deviation, usual.deviation):
            continue
        # names of columns decide between near factors
        score = off + apart / 4 - 0.1 * bool(conversion.names)
        best = min(best or (score, conversion), (score, conversion), key=lambda pair: pair[0])
    return None if best is None else best[1]


def other_unit(own: Spread, usual: Spread, name: str, whose: str) -> str | None:
    """Return in words how numbers differ from others as those of another unit do, None where they do not.

    Args:
        own, usual, name: see `conversion_of`.
        whose: the others', such as "those of training rows".
    """
    own, usual = _alike(own, usual)
    if min(own.rows, usual.rows) < FEWEST or min(own.size, usual.size) <= 0:
        return None
    ratio = own.size / usual.size
    times = f"about {float(f'{ratio:.3g}'):g} times {whose}"
    if (conversion := conversion_of(own, usual, name)) is not None:
        if conversion.offset:
            times = f"a mean of {own.mean:.4g} where {whose} have {usual.mean:.4g}"
        return f"{times}: {conversion.unit} for {conversion.usual}?"
    spread = own.deviation / usual.deviation if usual.deviation > 0 else ratio
    factor = max(ratio, 1 / ratio)
    if factor < _UNKNOWN or not 1 / 3 < spread / ratio < 3:
        return None
    return f"{times}: are they in another unit?"


def units_at_sites(spreads: Mapping[str, Mapping[str, Spread]]) -> Iterator[str]:
    """Yield a sentence for each column that one client seems to have in another unit than most.

    Args:
        spreads: of each column, by client.
    """
    for column, by_client in spreads.items():
        telling = {client: spread for client, spread in by_client.items() if spread.rows >= FEWEST and spread.size > 0}
        if len(telling) < 2:
            continue
        usual = _in_the_middle(telling.values())
        for client, spread in telling.items():
            if (words := other_unit(spread, usual, column, "those of others")) is not None:
                yield f"column {shown(column, 40)} has at {client} numbers of {words}"


def _in_the_middle(spreads: Collection[Spread]) -> Spread:
    """Return the one that stands for most of them, however far the others are off."""
    return sorted(spreads, key=lambda spread: (spread.robust if spread.is_bent else spread).size)[
        (len(spreads) - 1) // 2
    ]


def odd_units(spreads: Mapping[str, Spread], name: str) -> Iterator[tuple[str, Conversion]]:
    """Yield each client that seems to have a column in another known unit than most, and the change of unit.

    Args:
        spreads: by client.
        name: the column.
    """
    telling = {client: spread for client, spread in spreads.items() if spread.rows >= FEWEST and spread.size > 0}
    usual = _in_the_middle(telling.values()) if len(telling) > 1 else None
    for client, spread in telling.items():
        if usual is not None and (conversion := conversion_of(spread, usual, name)) is not None:
            yield client, conversion


def unlike_training(numbers: NDArray[np.float64], usual: Spread, name: str) -> tuple[NDArray[np.bool_], int, str]:
    """Return which numbers [n] are far from those of training rows, the index of one of them (0 without any), and in
    words what may be the reason: all may be in another unit, or single ones.

    Args:
        numbers: of one column, NaN for gaps.
        usual: of training rows.
        name: the column.
    """
    if (words := other_unit(Spread.of(numbers), usual, name, "those of training rows")) is not None:
        return np.isfinite(numbers), int(np.isfinite(numbers).argmax()), f": {words}"
    scores, usual = usual.scores(numbers), usual.robust if usual.is_bent else usual
    # marks of rare things are far from their mean by nature
    far = (scores > _FAR) & ~np.isin(numbers, (0, 1))
    best: tuple[int, float, Conversion] | None = None  # by how many numbers it brings back, and how near
    for conversion in filter(lambda conversion: _fits(conversion, name), CONVERSIONS):
        apart = np.where(far, np.abs(conversion.undone(numbers) - usual.mean), math.inf)
        explained = int((apart < usual.deviation).sum())
        if explained and (best is None or (explained, -apart.min()) > best[:2]):
            best = explained, -float(apart.min()), conversion
    if best is None:
        far &= scores > _FARTHEST
        return far, int(far.argmax()), ""
    known = best[2]
    back = known.undone(numbers)
    changed = far & (np.abs(back - usual.mean) < usual.deviation)
    index = int(changed.argmax())
    words = f", which would be {back[index]:.3g} in {known.usual}: {known.unit} for {known.usual}?"
    return changed | (far & (scores > _FARTHEST)), index, words


_CALLED = {
    "f": "degrees fahrenheit", "fahrenheit": "degrees fahrenheit", "c": "celsius", "degrees celsius": "celsius",
    "k": "kelvin", "lbs": "lb", "pound": "lb", "pounds": "lb", "in": "inches", "inch": "inches", "ft": "feet",
    "foot": "feet", "mile": "miles", "d": "days", "day": "days", "week": "weeks", "month": "months", "y": "years",
    "yr": "years", "yrs": "years", "year": "years", "h": "hours", "hour": "hours", "min": "minutes",
    "minute": "minutes", "s": "seconds", "sec": "seconds", "second": "seconds", "%": "percent", "mcg": "ug",
    "shares of 1": "shares",
}  # fmt: skip
# of the same quantity in smaller parts, which are written out and never guessed
_PARTS = (
    Conversion("g", "kg", 1000.0), Conversion("mg", "g", 1000.0), Conversion("ug", "mg", 1000.0),
    Conversion("mm", "cm", 10.0), Conversion("m", "km", 1000.0), Conversion("seconds", "minutes", 60.0),
    Conversion("umol/l", "mmol/l", 1000.0), Conversion("mg/l", "mg/dl", 10.0), Conversion("g/l", "mg/dl", 0.01),
    Conversion("g/dl", "g/l", 0.1), Conversion("percent", "shares", 100.0),
)  # fmt: skip


# names of units in small letters
UNIT_NAMES = [*_CALLED, *(name for known in (*CONVERSIONS, *_PARTS) for name in (known.unit, known.usual))]


def unit_called(word: str) -> str:
    """Return the name of a unit, of which there are several: "lb" for "lbs", "celsius" for "°C".

    Examples:
        >>> unit_called("lbs"), unit_called("°C"), unit_called("mg/dL"), unit_called("cm (or %)")
        ('lb', 'celsius', 'mg/dl', 'cm')
    """
    plain = re.sub(r"[°º.]|\(or .*\)", "", word).replace("µ", "u").replace("\u03bc", "u").strip().lower()
    return _CALLED.get(plain, plain)


def change_of_unit(unit: str, usual: str, name: str) -> tuple[float, float] | None:
    """Return factor and offset that make numbers in one unit those in another, None where none are known.

    Args:
        unit: of the numbers.
        usual: the one that is wanted.
        name: the column, which tells the substance where units of amounts become those of weights.

    Examples:
        >>> [round(number, 2) for number in change_of_unit("F", "C", "temperature")]
        [0.56, -17.78]
        >>> change_of_unit("mg/dl", "mmol/l", "ward") is None
        True
    """
    first, last = unit_called(unit), unit_called(usual)
    steps = [(unit_called(known.unit), unit_called(known.usual), known)
             for known in (*CONVERSIONS, *_PARTS, *(known.inverse for known in _PARTS))]  # fmt: skip
    reached = {first: (1.0, 0.0)}
    for _ in range(3):  # changes one after the other, as of inches to m
        for before, after, known in steps:
            several = len({other.slope for start, end, other in steps if (start, end) == (before, after)}) > 1
            if before in reached and after not in reached and (not several or _fits(known, name)):
                factor, offset = reached[before]
                reached[after] = factor / known.slope, (offset - known.offset) / known.slope
    return reached.get(last)
