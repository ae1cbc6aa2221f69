"""Keys of the rows of a table, written alike by both parties before they are compared."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from piebald.core.errors import SettingError, unknown
from piebald.data.preparation.columns import dates_of, words_of

if TYPE_CHECKING:
    from pandas import DataFrame, Series

NAME = "name"
_LIKE = str.maketrans("øœæłđð", "ooaldd")  # letters that Unicode does not take for others with an accent
_ACCENTS = (202, 220, 230)  # classes of what stands at, below or above a letter, which is the same without it
_APOSTROPHES = "'`\u2018\u2019\u02bc"
KINDS = ("exact", "text", "date", "phone", NAME)
BETWEEN = "\x1f"  # the columns of a key, which no cell has in it


def keys_of(frame: DataFrame, columns: Sequence[str], kinds: Sequence[str], country: str = "") -> list[str]:
    """Return the key of each row, "" where one of its columns is empty.

    Args:
        frame: the rows.
        columns: the columns of the key, in the order that both parties have agreed on.
        kinds: how each of them is written alike: "exact" but for blanks around it; "text" without regard to case,
            repeated blanks and the Unicode form (NFKC, case folding); "date" as 2024-05-31; "phone" as + and digits;
            "name" as text without accents, hyphens and the like, its words in alphabetical order, and in a match it may
            differ in one letter (`spelling`).
        country: the digits that stand for the leading 0 of a phone number, such as "49".

    Raises:
        SettingError: a column is missing or there twice, the kinds are not as many as the columns, the country is not
            written in digits, or a value cannot be read.
    """
    if country and not (country.isascii() and country.isdigit()):
        raise SettingError(f"country must be digits, such as 49, without + or 0 before them, got {country!r}")
    if not columns or len(columns) != len(kinds):
        raise SettingError(f"each column of the key needs a kind, got {len(columns)} columns and {len(kinds)} kinds")
    for kind in kinds:
        if kind not in KINDS:
            raise unknown("kind of key", kind, KINDS)
    names = list(map(str, frame.columns))
    for name in columns:
        if name not in names:
            raise unknown("column", name, names)
        if names.count(name) > 1:
            raise SettingError(f"{names.count(name)} columns are called {name!r}: give each a name of its own")
    key = [frame.iloc[:, names.index(name)] for name in columns]
    for column in key:
        check_precise(column, f"column {str(column.name)!r}")
    cells = [_written(column, kind, country) for column, kind in zip(key, kinds, strict=True)]
    return [BETWEEN.join(row) if all(row) else "" for row in zip(*cells, strict=True)]


def check_precise(column: Series[Any], what: str) -> None:
    """Refuse floating-point numbers beyond 2^53, where whole numbers are skipped, and two keys could read alike.

    Raises:
        SettingError: there is one; `what` names the column.
    """
    if column.dtype.kind == "f" and (column.abs() >= 2.0**53).any():
        raise SettingError(f"{what} holds numbers of more than 15 digits: quote them")


def _written(series: Series[Any], kind: str, country: str) -> list[str]:
    if kind == "date":
        return ["" if day != day else str(math.floor(day)) for day in dates_of(series)["days"].tolist()]
    words = ["" if word is None else str(word).replace(BETWEEN, " ").strip() for word in words_of(series)]
    if kind == "exact":
        return words
    words = [unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", word).casefold()) for word in words]
    if kind == NAME:
        return [_name(word) for word in words]
    return [" ".join(word.split()) for word in words] if kind == "text" else [_phone(word, country) for word in words]


def _name(text: str) -> str:
    """Return the words of a name, for which there are several ways to write accents, and an order."""
    split = unicodedata.normalize("NFKD", text)
    plain = "".join(letter for letter in split if unicodedata.combining(letter) not in _ACCENTS)
    plain = unicodedata.normalize("NFC", plain).translate(_LIKE)
    plain = re.sub("([aou])e", r"\1", plain)  # Mueller is Müller
    # marks are letters, too: other scripts write vowels by them
    apart = ("" if one in _APOSTROPHES else one if unicodedata.category(one)[0] in "LMN" else " " for one in plain)
    return " ".join(sorted("".join(apart).split()))


def _phone(word: str, country: str) -> str:
    """Return a phone number as + and digits.

    Raises:
        SettingError: it begins with a 0 and no country is known.
    """
    before, digits = re.split(r"\d", word, maxsplit=1)[0], re.sub(r"\D", "", word.replace("(0)", ""))
    if not digits or "+" in before:
        return digits and f"+{digits}"
    if digits.startswith("00"):
        return f"+{digits[2:]}"
    if not country:
        raise SettingError(
            f"phone number {word!r} has no country: give its digits, such as country 49, which both parties agree on"
        )
    return f"+{country}{digits.removeprefix('0')}"
