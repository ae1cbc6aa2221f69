"""Numbers and dates as people and programs write them: 1.234,5, 12 %, 31.05.2024.

A column is read as what it means if all of its values have one reading alone.  Per cents are shares: 12 % is 0.12.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from decimal import Context
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

PERCENT = "%"
MINUS = "\u2212"  # as typesetters write it
OR = " or "  # between forms that dates may have
MOSTLY = 0.9  # share of values that have a form, from which on the others are mistakes
_LONGEST = 400  # letters of a number: float64 has none of more than 309 digits before its point
_DECIMALS = Context(prec=_LONGEST, traps=[])  # what is too large for it is infinite, and no error
_LOOKED_AT = 1000  # values, after which a form that fits none of them is given up
_UNIT = re.compile(r"([$€£¥]?)\s*([+-]?[\d.,'\u2019 \u00a0\u202f]*\d(?:[.,]|[eE][+-]?\d+)?)(\s*[%€$£¥]|\s+[^\W\d]\S*)?")
_SIGNED = re.compile(r"^([+-])\s*([$€£¥])\s*")  # -$5
_BETWEEN = {"": "", "a point": ".", "a comma": ",", "an apostrophe": "'\u2019", "a blank": " \u00a0\u202f"}
_BEFORE = {"a point": ".", "a comma": ",", "a comma or a point": ".,"}
DATE_FORMS = {
    "day.month.year": ("%d.%m.%Y", "%d.%m.%Y %H:%M", "%d.%m.%Y %H:%M:%S"),
    "day/month/year": ("%d/%m/%Y", "%d/%m/%Y %H:%M", "%d/%m/%Y %H:%M:%S"),
    "month/day/year": ("%m/%d/%Y", "%m/%d/%Y %H:%M", "%m/%d/%Y %H:%M:%S"),
    "day-month-year": ("%d-%m-%Y", "%d-%m-%Y %H:%M", "%d-%m-%Y %H:%M:%S"),
    "month-day-year": ("%m-%d-%Y", "%m-%d-%Y %H:%M", "%m-%d-%Y %H:%M:%S"),
    "year/month/day": ("%Y/%m/%d", "%Y/%m/%d %H:%M", "%Y/%m/%d %H:%M:%S"),
    "yearmonthday": ("%Y%m%d",),
    "day, name of the month, year": ("%d-%b-%Y", "%d %b %Y", "%d %B %Y"),
}
_LIKE_A_DATE = re.compile(r"\d{1,4}[./ -](\d{1,2}|[A-Za-z]{3,9})[./ -]\d{2,4}( \d{1,2}:\d{2}(:\d{2})?)?|\d{8}")


@dataclass(frozen=True, slots=True, eq=False)
class NumberReading:
    """A reading of texts as numbers.

    Attributes:
        numbers: of the texts [n].
        words: how they are written.
        unit: or the sign of a currency or of per cent that all have; "" where there is none.
    """

    numbers: NDArray[np.float64]
    words: str
    unit: str


def number_readings(texts: Sequence[str]) -> Iterator[NumberReading]:
    """Yield each different reading of texts that are no plain numbers.

    A unit or a sign of a currency is left out where all values have the same.  Numbers in brackets among others are
    below zero, as accountants write them.  Per cents are divided by 100; beside bare numbers they have two readings,
    unless all of those are shares.
    """
    minus = any(MINUS in text for text in texts)
    texts = [text.replace(MINUS, "-") for text in texts]
    in_brackets = [text.startswith("(") and text.endswith(")") for text in texts]
    if any(in_brackets) and not all(in_brackets):
        texts = [f"-{text[1:-1].strip()}" if inside else text for text, inside in zip(texts, in_brackets, strict=True)]
    texts = [_SIGNED.sub(r"\2\1", text) for text in texts]
    matches = [match for text in texts if len(text) <= _LONGEST and (match := _UNIT.fullmatch(text))]
    units = [match[1] + (match[3] or "").strip() for match in matches]
    if not texts or len(matches) < len(texts) or ({*units} != {"", PERCENT} and len({*units}) > 1):
        return
    bare, unit = [match[2] for match in matches], max(units)
    has_sign = np.array([held == PERCENT for held in units])
    seen: list[NDArray[np.float64]] = []
    for (between, marks), (before, points) in product(_BETWEEN.items(), _BEFORE.items()):
        pairs = rf"([{marks}]\d{{2}})*" if marks == "," else ""  # as in India: 12,34,567
        whole = rf"\d{{1,3}}{pairs}([{marks}]\d{{3}})+|\d+" if marks else r"\d+"
        form = re.compile(rf"[+-]?({whole})?([{points}]\d*)?([eE][+-]?\d+)?")
        # the same mark cannot be both between thousands and before decimals
        if {*marks} & {*points} or not all(form.fullmatch(text) for text in bare):
            continue
        plain = [re.sub(f"[{marks}]", "", text) if marks else text for text in bare]
        # in decimal, 12.3 % is 0.123, which 12.3 / 100 in float64 is not
        decimals = [_DECIMALS.create_decimal(text.replace(",", ".")) for text in plain]
        numbers, hundredths = (
            np.array([float(_DECIMALS.scaleb(number, -places)) for number in decimals]) for places in (0, 2)
        )
        # two ways of writing that give the same numbers are one reading
        if not any(np.array_equal(numbers, others) for others in seen):
            seen.append(numbers)
            words = [f"{before} before decimals"] if any(mark in "".join(plain) for mark in points) else []
            words += [f"{between} between thousands"] if plain != bare else []
            words += [] if not unit else ["per cent as shares of 1"] if unit == PERCENT else [f"the unit {unit}"]
            words += [f"{MINUS} for minus"] if minus else []
            words += ["brackets around what is below zero"] if any(in_brackets) else []
            yield NumberReading(np.where(has_sign, hundredths, numbers), " and ".join(words), unit)
            shares, signed = np.abs(numbers[~has_sign]), np.abs(numbers[has_sign])
            if has_sign.any() and shares.any() and (shares.max() > 1 or signed.max() <= 1):
                yield NumberReading(hundredths, "per cent in all rows", unit)


def units_among(texts: Sequence[str]) -> list[str]:
    """Return the different units of texts that are all numbers with one, [] of others."""
    matches = [match for text in texts if len(text) <= _LONGEST and (match := _UNIT.fullmatch(text))]
    units = sorted({match[1] + (match[3] or "").strip() for match in matches})
    return units if len(matches) == len(texts) and "" not in units else []


def date_readings(texts: pd.Series, forms: Collection[str] = ()) -> dict[str, pd.Series]:
    """Return different readings of texts as dates, by the form; values that it does not fit are NaT.

    Only forms that fit nearly all values count.  Dates as ISO 8601 writes them have no other reading.

    Args:
        texts: the values.
        forms: those that count where there are several readings, and one of these is among them.
    """
    readings: dict[str, pd.Series] = {}
    some = texts.iloc[:_LOOKED_AT]
    if not len(texts) or some.str.fullmatch(_LIKE_A_DATE.pattern).mean() < MOSTLY:
        return readings
    for form, styles in DATE_FORMS.items():
        # no values, in the type of dates, for forms that fit none
        dates = _dates(texts.iloc[:0], styles[0])
        for style in styles:
            if not _dates(some, style).isna().all():
                dates = _dates(texts, style) if not len(dates) else dates.combine_first(_dates(texts, style))
        fits = len(dates) and dates.notna().mean() > MOSTLY
        if fits and not any(dates.equals(others) for others in readings.values()):
            readings[form] = dates
    most = max((int(dates.notna().sum()) for dates in readings.values()), default=0)
    readings = {form: dates for form, dates in readings.items() if dates.notna().sum() == most}
    return {form: readings[form] for form in forms if form in readings} or readings


def are_like_dates(texts: pd.Series) -> bool:
    """Return whether nearly all texts look like dates, and not as ISO 8601 writes them."""
    import pandas as pd

    some = texts.iloc[:_LOOKED_AT]
    # eight digits alone may be any number
    looks = some.str.fullmatch(_LIKE_A_DATE.pattern) & ~some.str.fullmatch(r"\d+")
    if looks.mean() < MOSTLY:
        return False
    return bool(pd.to_datetime(some, format="ISO8601", errors="coerce").notna().mean() <= MOSTLY)


def _dates(texts: pd.Series, style: str) -> pd.Series:
    import pandas as pd

    return pd.to_datetime(texts, format=style, errors="coerce")
