"""TOML documents that keep the line or the flag of each value, and a writer for plain values.

The places of settings in a file: each error becomes one sentence with the line or the flag of its value.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from bisect import bisect_left
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

from piebald.core.arguments import DEEPEST, complaint, first_problem, settled
from piebald.core.errors import SettingError, shown, unknown

Key = tuple[str | int, ...]
Lines = Callable[[int], int]  # the line of a position
Walk = Generator[tuple[Key, int], None, int]  # yields keys with their lines, returns the position after them

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t\r\n,]|#[^\n]*)*")
# The long quotes come first, or a long string would be read as an empty one followed by something.
_STRING = re.compile(r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\])*"|\'[^\']*\'', re.DOTALL)
_SCALAR = re.compile(r"[^,\]}\n#]*")
# What a text is made of, so far as dotted keys are concerned; a string without an end takes the rest of its line.
_PART = r'(?:[A-Za-z0-9_-]+|"(?:\\[^\n]|[^"\\\n])*"?|\'[^\'\n]*\'?)'
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\]|\\\Z)*?(?:"{3,5}|\Z)|\'\'\'.*?(?:\'{3,5}|\Z)|#[^\n]*|'
    rf"(?P<key>{_PART}(?:[ \t]*\.[ \t]*{_PART})*)",
    re.DOTALL,
)
_LONGEST = 1 << 20  # letters of a document
_STEPS = 4_000_000  # that `tomllib` takes along dotted keys, each of which costs the square of its parts
_PLACES = 100_000  # values whose lines are remembered


class Document:
    r"""A TOML file and the `--set` flags on top of it.

    Attributes:
        name: the name of the file in error messages.
        values: the content as plain values.

    Examples:
        >>> document = Document('[recipe]\nname = "fedavg"\nlr = 0.1', "experiment.toml")
        >>> document.values["recipe"]["lr"], document.origin(("recipe", "lr"))
        (0.1, 'experiment.toml:3')
        >>> document.set("recipe.lr=0.2")
        >>> document.values["recipe"]["lr"], document.origin(("recipe", "lr"))
        (0.2, '--set recipe.lr')
    """

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        try:
            self.values = _parsed(text, name)
        except tomllib.TOMLDecodeError as error:
            raise SettingError(_syntax(error, text, name)) from None
        self._origins: dict[Key, str] = {}
        # a value in several places, such as a table that is opened twice, has the place of the first
        for key, line in itertools.islice(lines(text), _PLACES):
            self._origins.setdefault(key, f"{name}:{line}")

    @classmethod
    def of(cls, values: Mapping[str, Any], name: str) -> Document:
        """A document from plain values instead of a file."""
        document = cls("", name)
        document.values = dict(values)
        return document

    def origin(self, key: Key) -> str:
        """The source of a value: "experiment.toml:7" or "--set recipe.lr"; the file's name if it is absent."""
        for length in range(len(key), 0, -1):
            if key[:length] in self._origins:
                return self._origins[key[:length]]
        return self.name

    def set(self, flag: str) -> None:
        """Override a value with `a.b=c`, where c is a TOML value or else text."""
        name, equals, text = flag.partition("=")
        if not equals or not name.strip():
            raise SettingError(f"--set needs key=value, like --set recipe.lr=0.1, got {shown(flag)}")
        origin = f"--set {name.strip()}"
        if not text.strip():
            raise SettingError(f"{origin} needs a value after the = sign")
        key = self._place(_words(name.strip()), origin)
        target: Any = self.values
        for word in key[:-1]:
            target = target[word]
        target[key[-1]] = value_of(text.strip(), origin)
        self._forget(key, origin)

    def choose_scale(self, name: str | None) -> None:
        r"""Merge the table [scales.NAME] into the document, a table for recipes into each of them; drop all scales.

        Args:
            name: of the scale; None for the settings as they stand.

        Raises:
            SettingError: the document has no such scale.

        Examples:
            >>> text = "[[recipes]]\nlr = 0.1\n[scales.full]\nrounds = 50\nrecipes.lr = 0.01"
            >>> document = Document(text, "table.toml")
            >>> document.choose_scale("full")
            >>> document.values
            {'recipes': [{'lr': 0.01}], 'rounds': 50}
        """
        scales = self.values.pop("scales", {})
        if not isinstance(scales, dict) or not all(isinstance(scale, dict) for scale in scales.values()):
            raise SettingError(f"{self.origin(('scales',))}: scales must be tables, such as [scales.full]")
        if name is None:
            return
        if name not in scales:
            known = ", ".join(map(shown, scales)) or "none"
            raise SettingError(f"{self.name} has no [scales.{name}] for --scale {name}; its scales are: {known}")
        self._merge(self.values, scales[name], (), ("scales", name))

    def _merge(self, target: dict[str, Any], changes: Mapping[str, Any], key: Key, source: Key) -> None:
        for word, value in changes.items():
            old, place, line = target.get(word), (*key, word), (*source, word)
            if isinstance(value, dict) and isinstance(old, dict):
                self._merge(old, value, place, line)
            elif isinstance(value, dict) and isinstance(old, list) and all(isinstance(entry, dict) for entry in old):
                for index, entry in enumerate(old):
                    self._merge(entry, value, (*place, index), line)
            else:
                target[word] = value
                self._forget(place, self.origin(line))

    def put(self, key: str, value: Any, origin: str) -> None:
        """Override one top-level value."""
        self.values[key] = value
        self._forget((key,), origin)

    def refuse_dates(self) -> None:
        """Refuse the first date or time, for files of which no setting takes one.

        Raises:
            SettingError: with its line and key.
        """
        for key, value in _values_in(self.values, ()):
            try:
                settled(value)
            except ValueError as error:
                raise SettingError(f"{self.origin(key)}: {dotted(key)} {error}") from None

    def _forget(self, key: Key, origin: str) -> None:
        self._origins = {other_key: place for other_key, place in self._origins.items() if other_key[: len(key)] != key}
        self._origins[key] = origin

    def _place(self, words: Sequence[str], origin: str) -> Key:
        """The key that a flag names; missing tables on the way are created."""
        target: Any = self.values
        key: list[str | int] = []
        for depth, word in enumerate(words):
            if isinstance(target, list):
                if not word.isdecimal() or int(word) >= len(target):
                    places = f"{len(target)} entries, numbered from 0"
                    raise SettingError(f"{origin}: {dotted(key)} is a list of {places}: there is none called {word!r}")
                key.append(int(word))
            elif isinstance(target, dict):
                key.append(word)
            else:
                raise SettingError(f"{origin}: {dotted(key)} is {target!r}, which has no {word!r} inside")
            if depth < len(words) - 1:
                target = target.setdefault(word, {}) if isinstance(target, dict) else target[int(word)]
        return tuple(key)


def _values_in(value: Any, key: Key) -> Iterator[tuple[Key, Any]]:
    if isinstance(value, dict | list):
        for word, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _values_in(inner, (*key, word))
    else:
        yield key, value


def dotted(key: Sequence[str | int]) -> str:
    """A key in its written form: recipe.lr, recipes[1].name."""
    text = ""
    for word in key:
        text += f"[{word}]" if isinstance(word, int) else f".{word}" if text else str(word)
    return text


def check_length(text: str, name: str) -> None:
    """Refuse a text that `tomllib` could not read in the memory and time of a machine: it keeps each part of each key.

    Raises:
        SettingError: it is too long, or has too long keys.
    """
    if len(text) > _LONGEST:
        raise SettingError(f"{name}: settings must be at most {_LONGEST:,} letters, got {len(text):,}")
    steps = 0
    for token in _TOKEN.finditer(text):
        if token["key"] and (parts := len(re.findall(_PART, token["key"])) if "." in token["key"] else 1) > 2:
            steps += parts**2
            if parts > DEEPEST or steps > _STEPS:
                line = text.count("\n", 0, token.start()) + 1
                raise SettingError(
                    f"{name}:{line}: a key must have at most {DEEPEST} parts, and a document at most {_STEPS:,} steps "
                    f"along its keys, got {parts:,} parts"
                )


def _syntax(error: tomllib.TOMLDecodeError, text: str, name: str) -> str:
    message = str(error)
    match = re.search(r"^(.*) \(at (?:line (\d+), column (\d+)|end of document)\)$", message, re.DOTALL)
    if not match:
        return f"{name}: {message}"
    reason, line, column = match.groups()
    if line is None:  # at the end of the document
        line, column = text.count("\n") + 1, len(text) - text.rfind("\n")
    if name.lower().endswith((".csv", ".parquet", ".tsv")):
        return f"{name} is a table: name it as source in [data] of an experiment file; piebald look writes one"
    return f"{name}:{line}:{column}: this is not TOML: {reason[0].lower()}{reason[1:]}"


def _parsed(text: str, place: str) -> dict[str, Any]:
    """Return the values of a TOML text.

    Raises:
        TOMLDecodeError: it is not TOML.
        SettingError: it is too long or nested too deeply, or a number in it is too large.
    """
    check_length(text, place)
    try:
        values = tomllib.loads(text)
        settled(values, dates=True)  # a setting that gets a date says so itself, with its line
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise SettingError(f"{place}: lists and tables must be nested at most {DEEPEST} deep") from None
    except ValueError as error:
        digits = "must be a number of at most 64 bits, got one of thousands of digits"  # where Python gives up
        message = str(error) if str(error).startswith("must be") else digits
        raise SettingError(f"{place}: a value {message}") from None
    return values


def _words(name: str) -> list[str]:
    """The words of a dotted key, quoted or not."""
    check_length(name, "--set")
    words = [word for word, _ in _key_words(name, 0)]
    if not words or not all(words):
        raise SettingError(f"--set needs a key like recipe.lr, got {name!r}")
    return words


def value_of(text: str, origin: str) -> Any:
    """A TOML value; any other word is text, so that names need no quotes."""
    try:
        values = _parsed(f"value = {text}", origin)
    except tomllib.TOMLDecodeError:
        # such a beginning was meant as a value, and a mistake in it must not become text
        if text[0] in "[{\"'":
            example = 'like 0.1, true, [1, 2] or "text"'
            raise SettingError(f"{origin}: {shown(text)} is not a TOML value, {example}") from None
        return text
    # with a line break, a text could be several settings
    return values["value"] if len(values) == 1 else text


# ----------------------------------------------------------------------------------------------------- lines of keys


def lines(text: str) -> Iterator[tuple[Key, int]]:
    """Each key of a TOML text with its line.  `tomllib` must have accepted the text: nothing is checked here."""
    ends = [match.start() for match in re.finditer("\n", text)]

    def line_of(place: int) -> int:
        return bisect_left(ends, place) + 1

    counts: dict[Key, int] = {}  # elements so far of each array of tables
    table: Key = ()
    place = 0
    while (place := _blank(text, place)) < len(text):
        line = line_of(place)
        if text[place] != "[":
            key, place = _key(text, place)
            place = yield from _assignment(text, place, table, key, line_of)
            continue
        array = text.startswith("[[", place)
        key, place = _key(text, place + 2 if array else place + 1)
        table = ()
        for depth, word in enumerate(key):
            table = (*table, word)
            yield table, line
            if depth == len(key) - 1 and array:
                counts[table] = counts.get(table, 0) + 1
            # [a.b] after [[a]] belongs to the newest element of a
            if table in counts:
                table = (*table, counts[table] - 1)
                yield table, line
        place = text.index("]]" if array else "]", place) + (2 if array else 1)


def _assignment(text: str, place: int, table: Key, key: Sequence[str], line_of: Lines) -> Walk:
    """The part after a key: `= value`."""
    line = line_of(place)
    for depth in range(len(key)):
        yield (*table, *key[: depth + 1]), line
    return (yield from _walk(text, text.index("=", place) + 1, (*table, *key), line_of))


def _walk(text: str, place: int, key: Key, line_of: Lines) -> Walk:
    """One value, and the keys inside it."""
    place = _blank(text, place)
    if text[place] in "[{":
        closing = "]" if text[place] == "[" else "}"
        place, index = _blank(text, place + 1), 0
        while text[place] != closing:
            if closing == "]":
                yield (*key, index), line_of(place)
                place = yield from _walk(text, place, (*key, index), line_of)
            else:
                inner, place = _key(text, place)
                place = yield from _assignment(text, place, key, inner, line_of)
            place, index = _blank(text, place), index + 1
        return place + 1
    match = _STRING.match(text, place) or _SCALAR.match(text, place)
    return match.end() if match else place


def _blank(text: str, place: int) -> int:
    """The position after white space, commas and comments."""
    match = _BLANK.match(text, place)
    return match.end() if match else place


def _key(text: str, place: int) -> tuple[list[str], int]:
    words = list(_key_words(text, place))
    return [word for word, _ in words], words[-1][1]


def _key_words(text: str, place: int) -> Iterator[tuple[str, int]]:
    """The words of a dotted key, each with the position after it."""
    while True:
        while text[place : place + 1] in (" ", "\t"):
            place += 1
        match = _BARE.match(text, place) or _STRING.match(text, place)
        if not match:
            yield "", place
            return
        word, place = match.group(), match.end()
        # tomllib undoes the escapes of a quoted key
        yield (tomllib.loads(f"word = {word}")["word"] if word[0] in "\"'" else word), place
        while text[place : place + 1] in (" ", "\t"):
            place += 1
        if text[place : place + 1] != ".":
            return
        place += 1


# ------------------------------------------------------------------------------------------------------------- writing


def dumps(values: Mapping[str, Any]) -> str:
    """Return plain values as TOML: top-level tables get a heading, deeper ones are inline; None is left out.

    >>> print(dumps({"rounds": 3, "recipe": {"name": "fedavg", "training": {"kind": "sgd", "lr": 0.1}}}))
    rounds = 3
    <BLANKLINE>
    [recipe]
    name = "fedavg"
    training = { kind = "sgd", lr = 0.1 }
    <BLANKLINE>

    Raises:
        SettingError: a value is none that TOML has.
    """
    blocks = [""]
    for key, value in values.items():
        single = isinstance(value, Mapping)
        if single or (_is_list(value) and value and all(isinstance(table, Mapping) for table in value)):
            name = pair(key, 0).removesuffix(" = 0")
            heading = f"[{name}]" if single else f"[[{name}]]"
            blocks += [f"{heading}\n{_pairs(table)}" for table in ([value] if single else value)]
        else:
            blocks[0] += _pairs({key: value})
    return "\n".join(block for block in blocks if block)


def _pairs(table: Mapping[str, Any]) -> str:
    return "".join(f"{pair(key, value)}\n" for key, value in table.items() if value is not None)


def pair(key: str, value: Any) -> str:
    """Return one value on one line, with its key.

    >>> pair("milestones", [0.5, 0.75])
    'milestones = [0.5, 0.75]'
    """
    try:
        # in a list in a list, tomli-w writes every table inline; the two lists are taken off again
        text = tomli_w.dumps({key: [[_writable(value)]]}, indent=0)
    except TypeError:
        allowed = "numbers, text, true or false, lists and tables"
        raise SettingError(f"settings can hold {allowed}, got {shown(value)}") from None
    text = text.replace("[\n[\n", "", 1).removesuffix(",\n],\n]\n")
    # strings hold no line break, so each of them is one between the entries of a list
    return text.replace("[\n", "[").replace(",\n]", "]").replace(",\n", ", ")


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | set | frozenset)


def _writable(value: Any) -> Any:
    """Return a value without the entries of tables that are None, and with lists for all that are like lists."""
    if isinstance(value, Mapping):
        return {key: _writable(entry) for key, entry in value.items() if entry is not None}
    return [_writable(entry) for entry in value] if _is_list(value) else value


OF_OTHERS = {  # names of other programs, without "_"
    "strategy": "a method is a recipe here, such as recipe = { name = 'fedavg' }",
    "batchsize": "it is recipe.batch here",
    "learningrate": "it is recipe.lr here",
    "numrounds": "it is rounds here",
    "localepochs": "it is recipe.epochs here",
}
LOCAL_TRAINING = ("epochs", "batch", "lr", "steps", "momentum", "cohort", "mu", "optimizer", "weight_decay")


def of_document(error: ValidationError, document: Document, model: type[BaseModel]) -> SettingError:
    """Return the first error about a document, in one sentence with its place.

    Args:
        error: the errors that pydantic found.
        document: the values that were checked.
        model: the model that they were checked against; its sections are models too.
    """
    problem = first_problem(error)
    section, key = _place(model, document, problem["loc"])
    place, text = document.origin(key), complaint(problem)
    if problem["type"] == "extra_forbidden":
        subject = "setting or section called" if len(key) == 1 else f"setting of [{dotted(key[:-1])}] called"
        elsewhere = {str(key[-1]).replace("_", ""): at} if len(key) == 1 and (at := _home(model, str(key[0]))) else None
        return SettingError(f"{place}: {unknown(subject, key[-1], section.model_fields, elsewhere)}")
    if problem["type"] == "value_error":  # a sentence of ours
        return SettingError(f"{place}: {dotted(key)} {text}" if text.startswith("must ") else f"{place}: {text}")
    if problem["type"] == "missing" and len(key) == 1:
        if not _sections(section.model_fields[str(key[0])].annotation):
            return SettingError(f"{document.name} needs a value for {key[0]}")
        wants = "kind" if key[0] == "partition" else "name"
        return SettingError(f"{document.name} needs a section [{key[0]}] with a {wants}")
    if problem["type"] == "missing":
        return SettingError(f"{document.origin(key[:-1])}: [{dotted(key[:-1])}] needs a {key[-1]}")
    if problem["type"] in ("model_type", "model_attributes_type"):
        text = f"must be a table, like [{dotted(key)}], got {shown(problem['input'])}"
    return SettingError(f"{place}: {dotted(key)} {text}")


def _home(model: type[BaseModel], name: str) -> str | None:
    """Return where a setting belongs that stands outside of any section, None where no section has one of its name."""
    if name in LOCAL_TRAINING:
        return f"it belongs to the recipe, as recipe.{name}"
    homes = [title for title, field in model.model_fields.items()
             if any(name in section.model_fields for section in _sections(field.annotation))]  # fmt: skip
    where = f"it belongs to {' or '.join(f'[{home}]' for home in homes)}, as {homes[0]}.{name}" if homes else None
    return OF_OTHERS.get(name.replace("_", ""), where)


def _place(model: type[BaseModel], document: Document, path: Key) -> tuple[type[BaseModel], Key]:
    """Return the section that a path is in, and the path without pydantic's names for the branches of unions."""
    key: list[str | int] = []
    values: Any = document.values
    for number, word in enumerate(path):
        last = number == len(path) - 1
        is_given = word in values if isinstance(values, Mapping) else isinstance(word, int)
        if is_given or (last and word in model.model_fields):  # the second where it is missing
            key.append(word)
            values = values[word] if is_given else None
        if not last and str(word) in model.model_fields:
            sections = _sections(model.model_fields[str(word)].annotation)
            model = next((section for section in sections if section.__name__ in path), next(iter(sections), model))
    return model, tuple(key)


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in an annotation, such as the one in `Model | None`."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for kind in get_args(annotation) for model in _sections(kind)]


@dataclass(frozen=True, slots=True)
class SettingPlaces:
    """The file and the lines where settings of a document were given."""

    document: Document

    def at(self, *key: str | int) -> str:
        """Return the place of a key."""
        return self.document.origin(key)

    def check_names(
        self, key: Key, table: Iterable[str], known: Sequence[str], what: str, changes: Container[str] = (),
        elsewhere: Callable[[str], Mapping[str, str] | None] = lambda name: None,
    ) -> None:  # fmt: skip
        """Refuse a setting of a section that `what`, as messages call it, does not have; see `errors.unknown`."""
        for name in table:
            if name not in known:
                error = unknown(f"setting of {what} called", name, known, elsewhere(name))
                raise SettingError(f"{self._of(key, name, changes)}: {error}")

    def placed(
        self, error: SettingError, key: Key, given: BaseModel | Mapping[str, Any], changes: Container[str] = ()
    ) -> SettingError:
        """Return the error with the place and the full name of its key.

        Components know nothing of files, so the key is found in the message by its name, or else by its value.
        """
        table = given.model_dump() if isinstance(given, BaseModel) else given
        message = re.sub(r"^(recipe|\w+ '[^']*'): ", "", str(error))
        words = re.findall(r"\w+", message)
        name = next((word for word in words if word in table), None)
        name = name or next((name for name, value in table.items() if repr(value) in message), None)
        start = f"{dotted(key)}." if words[:1] == [name] else ""
        place = self.at(*key) if name is None else self._of(key, name, changes)
        return SettingError(f"{place}: {start}{message}")

    def _of(self, key: Key, name: str, changes: Container[str]) -> str:
        """Return the place of a setting of a section; `changes` are the settings from the grid."""
        return self.at("grid", f"recipe.{name}") if name in changes else self.at(*key, name)
