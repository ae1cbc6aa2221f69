"""How often keys of the kind `name` find people who are spelt differently, and how often the wrong ones.

The people are drawn, so that the truth is known: names by how often they are in the United States (names.csv: the 1,000
commonest surnames of the census of 2010, and 250 first names of each sex), birth dates over 80 years.  Half of each
party's people are at the other one as well, where a tenth each are spelt as `CHANGES` says.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas
from shared import markdown
from shared.measured import spread

from piebald.vertical.match_keys import keys_of
from piebald.vertical.spelling import nearest_here, spellings

NAMES = Path(__file__).parent / "names.csv"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
KEYS = {  # people of each party, and the columns of the key
    "name and birth date": (20_000, ["name", "born"]),
    "name alone": (2_000, ["name"]),
}


def one_letter(name: str, rng: random.Random) -> str:
    """A name with a letter other, fewer or more, or with two that have changed places."""
    place = rng.randrange(len(name) - 1)
    left, one, two, right = name[:place], name[place], name[place + 1], name[place + 2 :]
    letter = rng.choice(LETTERS)
    return left + rng.choice([letter + two, two, letter + one + two, two + one]) + right


def two_letters(name: str, rng: random.Random) -> str:
    """A name in which that was done twice."""
    return one_letter(one_letter(name, rng), rng)


CHANGES: dict[str, Callable[[str, random.Random], str]] = {
    "as it is": lambda name, _: name,
    "in capitals, surname first": lambda name, _: ", ".join(name.upper().split(" ")[::-1]),
    "one letter": one_letter,
    "two letters": two_letters,
    "another surname": lambda name, rng: f"{name.split(' ')[0]} {rng.choice(_drawn('last', 1, rng))}",
}


@functools.cache
def _known(part: str) -> tuple[list[str], list[int]]:
    table = pandas.read_csv(NAMES, keep_default_na=False)
    table = table[table["part"] == part]
    return table["name"].tolist(), table["count"].tolist()


def _drawn(part: str, count: int, rng: random.Random) -> list[str]:
    return rng.choices(*_known(part), k=count)


def people(count: int, seed: int) -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """The tables of both parties, so many rows each, with who a row is and how it is spelt at the second party."""
    rng = random.Random(seed)
    whole = count + count // 2
    parts = zip(_drawn("first", whole, rng), _drawn("last", whole, rng), strict=True)
    names = [" ".join(part) for part in parts]
    days = pandas.to_datetime("1930-01-01") + pandas.to_timedelta([rng.randrange(80 * 365) for _ in names], unit="D")
    table = pandas.DataFrame({"who": range(whole), "name": names, "born": days.strftime("%Y-%m-%d")})
    shop = table[count // 2 :].copy()
    others = [name for name in CHANGES if name != "as it is"]
    shop["spelt"] = [rng.choice(others) if rng.random() < len(others) / 10 else "as it is" for _ in range(len(shop))]
    shop["name"] = [CHANGES[how](name, rng) for name, how in zip(shop["name"], shop["spelt"], strict=True)]
    return table[:count], shop


def shares(columns: Sequence[str], kind: str, count: int, seed: int) -> dict[str, float]:
    """Shares of the people at both who are found, by how they are spelt, and of the links that are wrong."""
    tables = people(count, seed)
    kinds = [kind if name == "name" else "date" for name in columns]
    keys = [keys_of(table, columns, kinds) for table in tables]
    names = nearest_here([{key: spellings(key, kinds) for key in one} for one in keys])
    linked = [
        table.assign(link=[of.get(key) for key in one]).dropna(subset="link")
        for table, one, of in zip(tables, keys, names, strict=True)
    ]
    links = linked[0].merge(linked[1], on="link")
    right = set(links["who_x"][links["who_x"] == links["who_y"]])
    both = tables[1][tables[1]["who"].isin(tables[0]["who"])]
    found = both["who"].isin(right).groupby(both["spelt"]).mean()
    return {**found.to_dict(), "wrong links": 1 - float((links["who_x"] == links["who_y"]).mean())}


def measure(seeds: Sequence[int]) -> dict[str, Any]:
    """All shares, by key, kind and what they are of, one for each seed."""
    found: dict[str, Any] = {}
    for key, (count, columns) in KEYS.items():
        for kind in ("text", "name"):
            each = [shares(columns, kind, count, seed) for seed in seeds]
            found.setdefault(key, {})[kind] = {name: [round(one[name], 5) for one in each] for name in each[0]}
    return found


def section(found: dict[str, Any]) -> str:
    """The results as a section of the page."""
    heads = ["key", "kind", *CHANGES, "wrong links"]
    rows = [
        [
            f"{key}, {KEYS[key][0]:,} people",
            kind,
            *(spread([100 * one for one in some[name]], ".1f") for name in heads[2:]),
        ]
        for key, kinds in found.items()
        for kind, some in kinds.items()
    ]
    return (
        "## Spelt differently\n\n`python benchmarks/match/run.py --spelling`: made people whose truth is known, of the "
        "commonest names of the United States (so\nmore of them are alike than elsewhere), half of each party's at "
        "both; of these a tenth each are spelt at the second party as\nthe columns say.  Per cent of them that are "
        "found, and of all pairs of rows with one `shared_id` those that are not one person:\nmedian of seeds, and the "
        "range.\n\n" + markdown.table(heads, rows) + "\n"
    )
