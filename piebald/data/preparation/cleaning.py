"""The cleaning of tables that sites share: spellings, units, words for gaps, and values as they are written.

It is a part of the section [prepare] of an experiment, is recorded with the preparation, and so is applied alike where
rows are read for training, statistics and predictions.  Rows are cleaned one by one: no row changes what becomes of
another, but for copies of rows, of which the first one stays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from piebald.core.errors import SettingError, shown, unknown
from piebald.data.preparation.column_models import Fields, Finite, Name
from piebald.data.preparation.columns import ROWS, factorized, is_numeric, unusable
from piebald.data.preparation.units import UNIT_NAMES, change_of_unit, unit_called
from piebald.data.preparation.written_forms import DATE_FORMS, dates_in_form, numbers_with_units

if TYPE_CHECKING:
    import pandas as pd


NUMBERS = {
    "number": "",
    "decimal point": ".",
    "decimal comma": ",",
}  # ways to write numbers, and what is before decimals
FORMS = (*NUMBERS, *DATE_FORMS)
ARROW = "->"
_MOST, _MOST_COLUMNS = 10_000, 1000  # words of a column, and columns
Words = Annotated[dict[Name, Annotated[str, Field(max_length=200)]], Field(max_length=_MOST)]


class UnitChange(Fields):
    """A change of unit: a number x becomes factor x + offset."""

    factor: Annotated[float, Field(allow_inf_nan=False, gt=0)]
    offset: Finite = 0.0


class Rules(Fields):
    """What is done to columns.

    Attributes:
        map: by column, words for spellings; without regard to case and blanks where no spelling is the very same.
            An empty word is a gap.
        unit: by column, how numbers are converted: "mg/dl -> mmol/l" for known units, "kg" for numbers that are written
            with units of their own, or { factor = 0.0555, offset = 0 }.
        absent: by column, words and numbers that stand for a gap.
        parse: by column, how values are written: "number" (also with a unit, "70 kg"), "decimal comma", "decimal
            point", or the order of a date such as "day.month.year".
    """

    map: dict[Name, Words] = Field(default={}, max_length=_MOST_COLUMNS)
    unit: dict[Name, Name | UnitChange] = Field(default={}, max_length=_MOST_COLUMNS)
    absent: dict[Name, Annotated[list[Name], Field(max_length=_MOST)]] = Field(default={}, max_length=_MOST_COLUMNS)
    parse: dict[Name, str] = Field(default={}, max_length=_MOST_COLUMNS)

    @field_validator("parse")
    @classmethod
    def _check_forms(cls, parse: dict[str, str]) -> dict[str, str]:
        if odd := next(((name, form) for name, form in parse.items() if form not in FORMS), None):
            raise ValueError(f"parse of {shown(odd[0], 40)}: {unknown('form', odd[1], FORMS)}")
        return parse

    @model_validator(mode="after")
    def _check_units(self) -> Self:
        for name, unit in self.unit.items():
            before, arrow, after = (word.strip() for word in str(unit).partition(ARROW))
            if isinstance(unit, str) and arrow and change_of_unit(before, after, name) is None:
                raise ValueError(
                    f"unit of {shown(name, 40)}: no conversion from {shown(before, 20)} to {shown(after, 20)} is known "
                    "for a column of this name: write { factor = ..., offset = ... }"
                )
            if self.parse.get(name, "number") not in NUMBERS:
                raise ValueError(f"{shown(name, 40)} has a unit, and parse takes it for a date: leave one of both out")
        return self

    @property
    def changed(self) -> list[str]:
        """The columns that are changed."""
        return [*dict.fromkeys(name for rules in (self.map, self.unit, self.absent, self.parse) for name in rules)]


class Cleaning(Rules):
    """What is done to the columns of tables before all else, at all sites alike.

    Attributes:
        by_site: by client, the columns for which it has rules of its own, in place of those for all.
        duplicates: "drop" leaves out rows that are copies of earlier ones of the same client in all columns.
    """

    by_site: dict[Name, Rules] = Field(default={}, max_length=_MOST)
    duplicates: Literal["keep", "drop"] = "keep"

    @property
    def is_empty(self) -> bool:
        """True if nothing is changed."""
        return self == Cleaning()

    @property
    def digest(self) -> str:
        """What names the version: the same for the same rules, in whatever order they are written."""
        return self.sha256[:12]

    @property
    def sha256(self) -> str:
        """The whole digest, for those whom others must not deceive."""
        text = json.dumps(self.model_dump(mode="json", exclude_defaults=True), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def as_written(self) -> frozenset[str]:
        """The columns that are to be read as they are written, since these rules say how."""
        return frozenset(name for rules in (self, *self.by_site.values()) for name in (*rules.parse, *rules.unit))

    @property
    def all_changed(self) -> list[str]:
        """The columns that are changed at some site."""
        return [*dict.fromkeys(name for rules in (self, *self.by_site.values()) for name in rules.changed)]

    def with_site(self, site: str, own: Rules) -> Cleaning:
        """Return the same rules with those of one site's own in place of those for it."""
        rules = Rules.model_construct(**_merged(self.by_site.get(site, Rules()), own))
        return self.model_copy(update={"by_site": {**self.by_site, site: rules}})

    def of_site(self, site: str | None) -> Rules:
        """Return the rules of one site, None for one without a name."""
        return Rules.model_construct(**_merged(self, self.by_site.get(site or "", Rules())))

    def as_table(self, site: str | None) -> dict[str, Any]:
        """Return one site's rules as plain values for programs without this package, by column.

        Units are resolved: each that can be converted has its factor and offset.
        """
        rules, table = self.of_site(site), dict[str, Any]()
        for name in rules.changed:
            unit, form = rules.unit.get(name), rules.parse.get(name)
            changes = dict[str, Any]()
            if isinstance(unit, UnitChange):
                changes = {"*": [unit.factor, unit.offset]}
            elif unit is not None:
                before, arrow, after = (word.strip() for word in unit.partition(ARROW))
                before, after = (before, after) if arrow else (after, before)
                changes = {
                    own: change for own in UNIT_NAMES if (change := change_of_unit(own, after, name)) is not None
                }
                changes |= {unit_called(after): (1.0, 0.0)}
                changes |= {"": change_of_unit(before, after, name) or (1.0, 0.0)}
            elif form in NUMBERS:
                changes = {"*": (1.0, 0.0)}
            table[name] = {
                "map": rules.map.get(name, {}), "absent": rules.absent.get(name, []),
                "form": NUMBERS.get(form or "number", form), "units": changes, "alike": unit is None,
            }  # fmt: skip
        return table

    def applied(
        self, frame: pd.DataFrame, sites: Sequence[str] | str | None = None, *, every_row: bool = False
    ) -> tuple[pd.DataFrame, list[str]]:
        """Return a cleaned table, and sentences about what was changed in how many rows.

        Args:
            frame: the rows.
            sites: the client of each row, or of all; None where it has no name.
            every_row: whether copies of rows stay, as in rows to predict.

        Raises:
            SettingError: a value is none that the rules can read.
        """
        told, columns, changed = list[str](), dict[Any, Any](), {*self.all_changed}
        whose = np.asarray(sites, dtype=object) if not isinstance(sites, str | None) else None
        # sites without rules of their own are one
        names = {str(site) for site in ({sites} if whose is None else {*whose.tolist()})}
        groups: list[tuple[str | None, Any]] = [
            (site, None if whose is None else whose == site) for site in sorted(names & {*self.by_site})
        ]
        rest = ~np.isin(whose, [*self.by_site]) if whose is not None else None
        groups += [(None, rest)] if (whose is None and not groups) or (rest is not None and rest.any()) else []
        rules_of = {site: self.of_site(site) for site, _ in groups}
        for name in frame.columns:
            if str(name) in changed:
                parts = []
                for site, rows in groups:
                    series = frame[name] if rows is None else frame[name][rows]
                    if series.ndim != 1:
                        raise SettingError(f"column {shown(str(name), 40)} occurs twice: rename one of them")
                    values, changes = _Column(series, rules_of[site]).cleaned()
                    parts.append((rows, values))
                    whom = site or (sites if whose is None else None)
                    if done := ", ".join(f"{change} in {count}" for change, count in changes if count):
                        at = f" of {whom}" if whom else ""
                        told.append(f"column {shown(str(name), 40)}{at}: {done} of {len(series)} rows")
                columns[name] = _joined(parts, len(frame))
            else:
                columns[name] = frame[name]
        cleaned = frame.__class__(columns, index=frame.index)
        cleaned.attrs = {**frame.attrs}
        if ROWS in frame.attrs:  # what has been converted has no unit any more
            as_written = self.as_written
            cleaned.attrs[ROWS] = tuple(
                rows._replace(units=tuple(unit for unit in rows.units if unit[0] not in as_written))
                for rows in frame.attrs[ROWS]
            )
        if self.duplicates == "drop" and not every_row:
            copies = (cleaned if whose is None else cleaned.assign(**{" of": whose})).duplicated().to_numpy()
            told += (
                [f"{copies.sum()} of {len(frame)} rows are copies of earlier ones and left out"] if copies.any() else []
            )
            cleaned = cleaned[~copies]
        return cleaned, told


def _merged(common: Rules, own: Rules) -> dict[str, Any]:
    return {name: {**getattr(common, name), **getattr(own, name)} for name in Rules.model_fields}


def _joined(parts: Sequence[tuple[NDArray[np.bool_] | None, NDArray[Any]]], rows: int) -> NDArray[Any]:
    """Return the values [n] of a column, whose parts may have numbers and words."""
    if len(parts) == 1 and parts[0][0] is None:
        return parts[0][1]
    kinds = {values.dtype.kind for _, values in parts}
    # whole numbers stay so: as classes they are no amounts
    column: NDArray[Any] = np.zeros(rows, dtype=np.int64 if kinds == {"i"} else np.float64)
    column = column if kinds <= {"i", "f"} else np.full(rows, None, dtype=object)
    for where, values in parts:
        column[where] = values
    return column


class _Rule(NamedTuple):
    words: Mapping[str, str]
    gaps: Collection[str]
    form: str | None
    unit: str | UnitChange | None


class _Column:
    """One column of rows that have the same rules."""

    def __init__(self, series: pd.Series, rules: Rules) -> None:
        self.series, self.name = series, str(series.name)
        name = self.name
        self.rule = _Rule(
            rules.map.get(name, {}), rules.absent.get(name, ()), rules.parse.get(name), rules.unit.get(name)
        )

    def cleaned(self) -> tuple[NDArray[Any], list[tuple[str, int]]]:
        """Return the values [n], float64 numbers or words, and what was done to how many of them."""
        rule, series = self.rule, self.series
        if not any(rule):
            return series.to_numpy(), []
        if is_numeric(series) and not rule.words:  # at once, since there may be many different ones
            numbers = series.to_numpy(dtype=np.float64, na_value=np.nan).copy()
            gaps = np.isin(numbers, [float(word) for word in rule.gaps if _is_number(word)])
            numbers[gaps] = np.nan
            converted, what = self._converted(numbers, [""] * len(numbers))
            changed = (converted != numbers) & ~np.isnan(numbers)
            return converted, [("gaps", int(gaps.sum())), (what, int(changed.sum()))]
        codes, words = factorized(series)
        counts = np.bincount(codes[codes >= 0], minlength=len(words))
        new, absent, exact = list[str | None](words), {*map(_folded, rule.gaps)}, rule.words
        folded = {_folded(spelling): word for spelling, word in exact.items()}
        done = {"gaps": 0, "spellings mapped": 0}
        for index, word in enumerate(words):
            if _folded(word) in absent:
                new[index], kind = None, "gaps"
            else:
                new[index], kind = exact.get(word, folded.get(_folded(word), word)) or None, "spellings mapped"
            done[kind] += int(counts[index]) * (new[index] != word)
        values, changes = self._read(new, codes, counts)
        if values.dtype.kind != "f" and is_numeric(series) and all(word is None or _is_number(word) for word in new):
            values = np.array([np.nan if word is None else float(word) for word in new])
            if series.dtype.kind in "iu" and (codes >= 0).all() and (values == np.round(values)).all():
                return values.astype(np.int64)[codes], [*done.items(), *changes]
        # the last one is for gaps, whose code is -1
        whole = np.append(values, np.array([np.nan if values.dtype.kind == "f" else None], dtype=values.dtype))
        return whole[codes], [*done.items(), *changes]

    def _read(
        self, words: Sequence[str | None], codes: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> tuple[NDArray[Any], list[tuple[str, int]]]:
        """Return what different words mean: numbers, or words, of dates such as 2024-05-31."""
        form, unit = self.rule.form, self.rule.unit
        if form is None and unit is None:
            return np.array([*words, None], dtype=object)[:-1], []
        held = [index for index, word in enumerate(words) if word is not None]
        texts = [str(words[index]) for index in held]

        def refuse(odd: int, what: str) -> SettingError:
            return unusable(self.series, int(np.argmax(codes == held[odd])), what)

        if form is not None and form not in NUMBERS:
            dates = dates_in_form(texts, form)
            if None in dates:
                raise refuse(dates.index(None), f"a date of the form {form}")
            new = np.array([None] * len(words), dtype=object)
            new[held] = dates
            return new, [
                (
                    f"dates read as {form}",
                    self._count(counts, held, [a != b for a, b in zip(dates, texts, strict=True)]),
                )
            ]
        read = numbers_with_units(texts, NUMBERS[form or "number"])
        numbers, units = np.full(len(words), np.nan), [""] * len(words)
        for index, number in zip(held, read, strict=True):
            if number is None:
                raise refuse(held.index(index), f"a number{'' if form in (None, 'number') else f' with a {form}'}")
            numbers[index], units[index] = number
        was_text = self._count(counts, held, [not _is_number(text) for text in texts])
        different = sorted({units[index] for index in held} - {""})
        if unit is None and len(different) > 1:
            raise SettingError(
                f"column {shown(self.name, 40)} has numbers in {shown(', '.join(different), 60)}: name one unit, "
                f"unit = {{ {self.name} = '{different[0]}' }} in [prepare]"
            )
        converted, what = self._converted(numbers, units)
        changed = (converted != numbers)[held].tolist()
        return converted, [("numbers read from text", was_text), (what, self._count(counts, held, changed))]

    @staticmethod
    def _count(counts: NDArray[np.int64], held: Sequence[int], changed: Sequence[bool]) -> int:
        return int(counts[np.array(held, dtype=np.int64)][np.array(changed, dtype=bool)].sum())

    def _converted(self, numbers: NDArray[np.float64], units: Sequence[str]) -> tuple[NDArray[np.float64], str]:
        """Return numbers [n] in the wanted unit, and in words what was done."""
        unit = self.rule.unit
        if unit is None:
            return numbers, ""
        if isinstance(unit, UnitChange):
            with np.errstate(over="ignore", invalid="ignore"):  # what is too large is refused with its row
                converted = unit.factor * numbers + unit.offset
            return converted, f"{unit.factor:g} x{f' + {unit.offset:g}' * bool(unit.offset)}"
        before, arrow, after = (word.strip() for word in unit.partition(ARROW))
        before, after = (before, after) if arrow else ("", before)
        converted = numbers.copy()
        for written in sorted({*units}):
            own = written or before
            if own in ("", after):
                continue
            change = change_of_unit(own, after, self.name)
            rows = np.array([other == written for other in units])
            if change is None:
                raise SettingError(
                    f"column {shown(self.name, 40)} has numbers in {shown(own, 20)}, and no conversion to "
                    f"{shown(after, 20)} is known: write unit = {{ {self.name} = {{ factor = ... }} }} for the site"
                )
            converted[rows] = change[0] * numbers[rows] + change[1]
        return converted, f"{before} {ARROW} {after}" if arrow else f"converted to {after}"


def _folded(word: str) -> str:
    return " ".join(word.split()).casefold()


def _is_number(word: str) -> bool:
    try:
        return bool(np.isfinite(float(word)))
    except ValueError:
        return False
