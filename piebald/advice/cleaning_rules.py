"""Rules that would make the tables of several sites alike, proposed from how each writes its values.

A proposal is a guess that a person looks at: units by sizes of numbers, codings of classes by what the others have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from piebald.core.errors import SettingError
from piebald.data.clients.table_files import gap_codes
from piebald.data.preparation.cleaning import ARROW, Cleaning
from piebald.data.preparation.columns import WORDS_OF_FALSE, WORDS_OF_TRUE, factorized
from piebald.data.preparation.units import Spread, change_of_unit, odd_units, unit_called
from piebald.data.preparation.written_forms import date_readings, numbers_with_units

_NUMERIC = 0.8  # share of rows with numbers, from which on other words among them stand for gaps
_PAIRS = 0.05  # of rows that are alike by chance, below which copies are mistakes
_ODD = 5  # such words, and classes that have a coding
_SYNONYMS: tuple[tuple[str, ...], ...] = (  # the first one is the spelling for all, where some site has it
    ("male", "m", "man", "männlich", "maennlich", "mann", "homme", "masculin", "hombre", "masculino", "maschio"),
    ("female", "f", "w", "woman", "weiblich", "frau", "femme", "féminin", "feminin", "mujer", "femenino", "femmina"),
    ("yes", *sorted(WORDS_OF_TRUE)), ("no", *sorted(WORDS_OF_FALSE)),
)  # fmt: skip
# letters of homme and femme, and of hombre and mujer, which mean this only where a site has both
_LETTERS: tuple[dict[str, str], ...] = ({"h": "male", "f": "female"}, {"h": "male", "m": "female"})

Texts = Mapping[str, Counter[str]]  # by site, how many rows have each text


def proposed(frame: Any, sites: Sequence[str], target: str) -> Cleaning:
    """Return rules that make the columns of some sites alike.

    Args:
        frame: the rows, as they are written.
        sites: the site of each row.
        target: the column to predict, whose classes have one coding.
    """
    common: dict[str, Any] = {"map": {}, "unit": {}, "absent": {}, "parse": {}}
    own: dict[str, dict[str, Any]] = {}
    whose = np.asarray(sites, dtype=object)
    for name in map(str, frame.columns):
        texts = {site: _counted(frame[name][whose == site]) for site in sorted({*whose.tolist()})}
        texts = {site: counts for site, counts in texts.items() if counts}
        for whom, numbers in _as_numbers(texts).items():
            own.setdefault(whom, {}).setdefault("map", {})[name] = numbers
            texts[whom] = Counter(numbers[word] for word in texts[whom].elements())
        kinds = {site: _kind(counts) for site, counts in texts.items()}
        if not texts:
            continue
        rules = [*_of_words(name, texts, is_target=name == target)]
        if [*kinds.values()].count("number") * 2 > len(kinds):
            rules = [*_of_numbers(name, texts, is_target=name == target)] or rules
        elif "date" in kinds.values():
            rules = [*_of_dates(texts)]
        for site, rule, value in rules:
            by_column = (common if site is None else own.setdefault(site, {})).setdefault(rule, {})
            if rule == "map" and name in by_column:
                # words that became numbers above, which a coding changes once more
                value = {word: value.get(number, number) for word, number in by_column[name].items()}
            by_column[name] = value
    copies = frame.assign(**{" of": whose}).duplicated().any() and _pairs_by_chance(frame.drop_duplicates()) < _PAIRS
    return Cleaning(**{**common, "by_site": own, "duplicates": "drop" if copies else "keep"})


def _pairs_by_chance(frame: Any) -> float:
    """Return how many pairs of rows would be alike in all columns if columns were independent."""
    shares = [float(np.square(frame[name].value_counts(normalize=True, dropna=False)).sum()) for name in frame]
    return float(np.prod(shares)) * len(frame) ** 2 / 2


Rule = tuple[str | None, str, Any]  # the site, None for all, the kind of the rule, and its value


def _counted(series: Any) -> Counter[str]:
    codes, words = factorized(series)
    counts = np.bincount(codes[codes >= 0], minlength=len(words))
    return Counter({word: int(count) for word, count in zip(words, counts, strict=True) if count})


def _kind(counts: Counter[str]) -> str:
    numeric = sum(rows for word, rows in counts.items() if _number(word) is not None)
    if numeric >= _NUMERIC * counts.total():
        return "number"
    return "date" if _readings(counts) else "word"


def _as_numbers(texts: Texts) -> dict[str, dict[str, str]]:
    """Return 1 and 0 for the words of yes and no of each site that has them, where another site writes these numbers.

    A letter counts only at a site that has both.  Where others have 1 and 2 alone nothing is returned, as either may be
    yes.
    """
    numbers = {site: {_number(word) for word in counts} for site, counts in texts.items()}
    if {(0.0, ""), (1.0, "")} not in numbers.values():
        return {}
    truths = dict.fromkeys(WORDS_OF_TRUE, "1") | dict.fromkeys(WORDS_OF_FALSE, "0")
    read = {site: {word: truths.get(_folded(word), "") for word in counts} for site, counts in texts.items()}
    known = {site: words for site, words in read.items() if "" not in words.values()}
    return {site: words for site, words in known.items()
            if len({*words.values()}) == 2 or all(len(_folded(word)) > 1 for word in words)}  # fmt: skip


def _number(word: str, point: str = ".") -> tuple[float, str] | None:
    return numbers_with_units([word], point)[0]


def _readings(counts: Collection[str]) -> list[str]:
    import pandas

    return [*date_readings(pandas.Series([*counts], dtype=object))]


def _of_dates(texts: Texts) -> Iterator[Rule]:
    """Yield how each site writes dates that are not like 2024-05-31; what is not clear follows from the others."""
    readings = {site: _readings(counts) for site, counts in texts.items()}
    clear = {forms[0] for forms in readings.values() if len(forms) == 1}
    for site, forms in readings.items():
        likely = forms if len(forms) == 1 else [form for form in forms if form in clear]
        if len(likely) == 1:
            yield site, "parse", likely[0]


def _of_numbers(name: str, texts: Texts, is_target: bool) -> Iterator[Rule]:
    """Yield how numbers are read, in which unit, and what stands for a gap among them."""
    numbers, units, words = dict[str, Any](), Counter[str](), set[str]()
    doubtful, written = dict[str, Counter[str]](), dict[str, list[tuple[float, str]]]()
    for site, counts in texts.items():
        held = {word: rows for word, rows in counts.items() if _number(word) is not None}
        # several words in more rows than numbers are classes of a site, and no gaps
        words |= {*counts} - {*held} if 2 * sum(held.values()) > counts.total() or len(counts) == 1 else set()
        try:
            read = numbers_with_units([*held])
        except SettingError:
            doubtful[site] = Counter(held)
            continue
        if (before := _form([*held])) is not None:
            yield site, "parse", before
        numbers[site] = _repeated(read, [*held.values()])
        pairs = zip(read, held.values(), strict=True)
        written[site] = [pair for pair, rows in pairs if pair is not None for _ in range(rows)]
        units.update(pair[1] for pair in read if pair is not None and pair[1])
    usual = [Spread.of(values) for values in numbers.values()]
    for site, counts in doubtful.items():
        both = {form: _repeated(numbers_with_units([*counts], point), [*counts.values()])
                for form, point in (("decimal comma", ","), ("decimal point", "."))}  # fmt: skip
        # the reading whose size is nearer to those of others
        sizes = sorted(spread.size for spread in usual if spread.size > 0)
        if sizes:
            middle = sizes[len(sizes) // 2]
            form = min(both, key=lambda form: abs(np.log(max(Spread.of(both[form]).size, 1e-300) / middle)))
            yield site, "parse", form
            numbers[site] = both[form]
    if 0 < len(words) <= _ODD:
        yield None, "absent", sorted(words)
    if units and (common := _common_unit(name, written)) is not None:
        yield None, "unit", common
        numbers = {site: _in_unit(read, common, name) for site, read in written.items()}
        for site, conversion in odd_units({site: Spread.of(values) for site, values in numbers.items()}, name):
            if not any(own for _, own in written[site]):
                yield site, "unit", f"{_plain(conversion.unit)} {ARROW} {_plain(conversion.usual)}"
        return
    codes = {f"{code:g}" for values in numbers.values() for code, _ in gap_codes(_series(values))}
    if codes:
        yield None, "absent", sorted({*words, *codes})
    if is_target or all(len(np.unique(values[~np.isnan(values)])) <= 2 for values in numbers.values()):
        yield from _of_codings(
            {site: {f"{value:g}" for value in np.unique(values)} for site, values in numbers.items()}
        )
        return
    spreads = {site: Spread.of(values[~np.isin(values, [*map(float, codes)])]) for site, values in numbers.items()}
    for site, conversion in odd_units(spreads, name):
        yield site, "unit", f"{_plain(conversion.unit)} {ARROW} {_plain(conversion.usual)}"


def _in_unit(written: Sequence[tuple[float, str]], unit: str, name: str) -> Any:
    """Return numbers [n] of one unit; those that are written without one are taken to be in it."""
    changes = {own: change_of_unit(own or unit, unit, name) or (math.nan, math.nan) for _, own in written}
    return np.array([changes[own][0] * number + changes[own][1] for number, own in written])


def _common_unit(name: str, written: Mapping[str, Sequence[tuple[float, str]]]) -> str | None:
    """Return the written unit to which all others can be changed and that makes sites most alike, None for none.

    Args:
        name: the column.
        written: the numbers of each site with their units.
    """
    units = Counter(unit for pairs in written.values() for unit in {unit for _, unit in pairs if unit})
    apart = dict[str, float]()
    for unit in sorted(units):
        spreads = [Spread.of(_in_unit(pairs, unit, name)) for pairs in written.values()]
        sizes = np.log([spread.size for spread in spreads if spread.rows and spread.size > 0])
        if all(unit_called(other) == unit_called(unit) or change_of_unit(other, unit, name) for other in units):
            apart[unit] = round(float(np.ptp(sizes)), 1) if len(sizes) else 0.0
    return min(apart, key=lambda unit: (apart[unit], -units[unit], unit), default=None)


def _plain(unit: str) -> str:
    return unit.partition(" (")[0]


def _series(values: Any) -> Any:
    import pandas

    return pandas.Series(values)


def _repeated(read: Sequence[tuple[float, str] | None], rows: Sequence[int]) -> Any:
    return np.repeat([pair[0] if pair is not None else np.nan for pair in read], rows)


def _form(words: Sequence[str]) -> str | None:
    """Return what is before decimals where numbers have commas, which few rows to predict would not tell."""
    if not any("," in word for word in words):
        return None
    as_read = numbers_with_units(words)
    return next((form for form, point in (("decimal comma", ","), ("decimal point", "."))
                 if numbers_with_units(words, point) == as_read), None)  # fmt: skip


def _of_codings(classes: Mapping[str, set[str]]) -> Iterator[Rule]:
    """Yield the words of most sites for classes that one codes by other numbers, such as 1 and 2 for 0 and 1."""
    codings = Counter(frozenset(names) for names in classes.values())
    usual, count = codings.most_common(1)[0]
    for site, names in classes.items():
        ours, others = sorted(names, key=float), sorted(usual, key=float)
        steps = {float(a) - float(b) for a, b in zip(ours, others, strict=False)}
        if names != usual and len(ours) == len(others) <= _ODD and len(steps) == 1 and count > 1:
            yield site, "map", dict(zip(ours, others, strict=True))


def _of_words(name: str, texts: Texts, is_target: bool) -> Iterator[Rule]:
    """Yield one spelling for words that differ in case, blanks or language."""
    letters = {site: own for site, counts in texts.items() for own in _LETTERS if {*map(_folded, counts)} == {*own}}
    total = sum((counts for site, counts in texts.items() if site not in letters), Counter[str]())
    groups: dict[str, list[str]] = {}
    for word in total:
        group = next((synonyms[0] for synonyms in _SYNONYMS if _folded(word) in synonyms), _folded(word))
        groups.setdefault(group, []).append(word)
    both = {*groups} <= {"yes", "no"}
    # letters such as m, f, n and y mean this only where all of the column is of one kind
    known = both or {*groups} <= {"male", "female"}
    if both and not is_target:
        return  # read as 1 and 0 at each site
    spellings = dict[str, str]()
    for group, words in groups.items():
        kinds = {*map(_folded, words)}
        if len(words) > 1 and (known or len(kinds) == 1):
            whole = [word for word in words if len(word.strip()) > 1] or words
            best = max(whole, key=lambda word: (total[word], word))
            best = group if group in words else best
            spellings |= {word: best for word in sorted(words) if word != best}
    if spellings and len(spellings) <= 1000:
        yield None, "map", spellings
    for site, own in letters.items() if total and {*groups} <= {"male", "female"} else ():
        common = {group: spellings.get(words[0], words[0]) for group, words in groups.items()}
        yield site, "map", {word: common.get(own[_folded(word)], own[_folded(word)]) for word in sorted(texts[site])}


def _folded(word: str) -> str:
    return " ".join(word.split()).casefold()
