"""Numbers and dates as people and programs write them: 1.234,5, 12 %, 31.05.2024.

A column is read as what it means if all of its values have one reading alone.  Per cents are shares: 12 % is 0.12.

Warnings of names that clients may write in different ways: those of clients, and of classes.

Units in which files write their numbers: those of one column must be the same wherever it is written.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context
from itertools import chain, product
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from piebald.core.errors import SettingError, shown
from piebald.core.moments import Moments

if TYPE_CHECKING:
    import pandas as pd


PERCENT = "%"
MINUS = "\u2212"  # as typesetters write it
OR = " or "  # between forms that dates may have
MOSTLY = 0.9  # share of values that have a form, from which on the others are mistakes
_LONGEST = 400  # letters of a number: float64 has none of more than 309 digits before its point
_DECIMALS = Context(prec=_LONGEST, traps=[])  # what is too large for it is infinite, and no error
_LOOKED_AT = 1000  # values, after which a form that fits none of them is given up
_NUMBER = r"([$€£¥]?)\s*([+-]?[\d.,'\u2019 \u00a0\u202f]*\d(?:[.,]|[eE][+-]?\d+)?)"
_UNIT = re.compile(_NUMBER + r"(\s*[%€$£¥]|\s+[^\W\d]\S*)?")
_WITH_UNIT = re.compile(_NUMBER + r"(\s*(?:[%€$£¥°]|[^\W\d])\S*)?")  # also 70kg, where it is said that there are units
_SIGNED = re.compile(r"^([+-])\s*([$€£¥])\s*")  # -$5
_PLAIN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_POINTS = ".,"
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
MOST_COMPARED, _NAMED = 50, 4  # clients whose classes are compared, and that are named in a sentence
_MOST_CODINGS, _MOST_CODED = 3, 20  # sets of classes, and classes in them, which unlike clients would exceed
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


def numbers_with_units(texts: Sequence[str], point: str = "") -> list[tuple[float, str] | None]:
    """Return each text as a number and the unit that it is written with, "" for none; None where it is no number.

    Per cents are shares, without a unit.

    Args:
        texts: the values.
        point: what is before decimals; "" to take what all of them have in common.

    Raises:
        SettingError: numbers may be read in two ways.
    """
    matches = [_WITH_UNIT.fullmatch(text.replace(MINUS, "-")) if len(text) <= _LONGEST else None for text in texts]
    bare = [match[2] for match in matches if match]
    if point:
        between = _POINTS.replace(point, "")
        plain = [re.sub(f"[{between}'\u2019 \u00a0\u202f]", "", text).replace(",", ".") for text in bare]
    elif all(map(_is_plain, bare)):
        plain = bare
    else:
        readings = [*number_readings(bare)]
        if len(readings) > 1:
            odd, ways = next(text for text in bare if not _is_plain(text)), [reading.words for reading in readings]
            raise SettingError(
                f"numbers like {shown(odd)} may be read with {' or with '.join(ways)}: set parse of the column to "
                "'decimal comma' or 'decimal point' in [prepare]"
            )
        plain = [repr(number) for number in readings[0].numbers.tolist()] if readings else bare
    numbers = iter(plain)
    read = [next(numbers) if match else "" for match in matches]
    units = [match[1] + (match[3] or "").strip() if match else "" for match in matches]
    return [
        None if not _is_plain(number) else (float(f"{number}e-2"), "") if unit == PERCENT else (float(number), unit)
        for number, unit in zip(read, units, strict=True)
    ]


def _is_plain(text: str) -> bool:
    return _PLAIN.fullmatch(text) is not None


def dates_in_form(texts: Sequence[str], form: str) -> list[str | None]:
    """Return texts as dates like 2024-05-31 where they have a form, or are such dates already, else None."""
    import pandas as pd

    series = pd.Series(texts, dtype=object)
    dates = pd.to_datetime(
        series.where(series.str.fullmatch(r"\d{4}-\d{1,2}-\d{1,2}.*")), errors="coerce", format="ISO8601"
    )
    for style in DATE_FORMS[form]:
        dates = dates.combine_first(_dates(series, style))
    timed = dates.notna() & (dates != dates.dt.normalize())
    written = dates.dt.strftime("%Y-%m-%d").where(~timed, dates.dt.strftime("%Y-%m-%d %H:%M:%S"))
    return [text if isinstance(text, str) else None for text in written]


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


VALUES_LOG = "piebald.data.values"  # of what a look at the table says as well
log = logging.getLogger("piebald.data")


def warn_of_like_names(names: Sequence[str], origin: str, what: str = "clients") -> None:
    """Log a warning where names differ in blanks and case alone."""
    by_form: dict[str, str] = {}
    for name in names:
        form = " ".join(name.split()).lower()
        if form in by_form:
            log.warning(
                "%s%s %r and %r differ in blanks or capitals alone: correct one if they are one",
                origin, what, by_form[form], name,
            )  # fmt: skip
            return
        by_form[form] = name


def warn_of_unlike_classes(classes: Mapping[str, Collection[str]], target: str | None) -> None:
    """Log a warning where clients seem to code the same classes in different ways.

    A client with some of another's classes may have no row of the others, and where each of many clients has classes of
    its own they are unlike and not odd.  So clients are told where each has one of two or three codings.

    Args:
        classes: that each client has, by its name.
        target: the column of them, None where it has no name.
    """
    if len(classes) > MOST_COMPARED:
        return
    clients_of = dict[frozenset[str], list[str]]()
    for client, names in classes.items():
        clients_of.setdefault(frozenset(names), []).append(client)
    # one class alone is what unlike clients may have
    codings = [own for own in clients_of if len(own) > 1 and not any(own < other for other in clients_of)]
    if not 2 <= len(codings) <= _MOST_CODINGS or len(frozenset().union(*codings)) > _MOST_CODED:
        return
    odd, *_, usual = sorted(codings, key=lambda own: len(clients_of[own]))
    log.warning(
        "%s%s the classes %s, and %s %s: code them alike%s, or they count as %d classes",
        "" if target is None else f"target {target!r}: ", _have(clients_of[odd]), _listed(odd),
        _have(clients_of[usual]), _listed(usual), _shift(odd, usual), len(odd | usual),
    )  # fmt: skip


def _have(clients: Sequence[str]) -> str:
    others = f" and {len(clients) - _NAMED} more" if len(clients) > _NAMED else ""
    return f"{', '.join(clients[:_NAMED])}{others} {'has' if len(clients) == 1 else 'have'}"


def _listed(names: Collection[str]) -> str:
    return shown(", ".join(sorted(names)), 40)


def _shift(odd: Collection[str], usual: Collection[str]) -> str:
    """Return in words what makes one coding the other, where classes are numbers and one difference does."""
    try:
        ours, others = (np.sort([float(name) for name in names]) for names in (odd, usual))
    except ValueError:
        return ""
    if len(ours) != len(others) or np.ptp(ours - others) > 0:
        return ""
    step = float((ours - others)[0])
    return f" ({_listed(odd)} less {step:g} are the others')" if step > 0 else f" (add {-step:g} to {_listed(odd)})"


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
