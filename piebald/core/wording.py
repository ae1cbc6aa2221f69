"""The wording of what is wrong with a setting or an argument: types, ranges and pydantic's errors in plain English.

Every sentence about a value says the same things in the same words, wherever the value came from: a file, a flag, a
component's field or an argument of a function.
"""

from __future__ import annotations

import collections.abc
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from piebald.core.errors import shown, unknown

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_PLAIN = (
    (r"^(\w+)\.(int|float|str|bool)\b", r"\1"),  # pydantic's name for one branch of a union
    (r"\bValue error, ", ""),
    (r"\bInput should be ", "must be "),
    (r"greater than or equal to ", "at least "),
    (r"less than or equal to ", "at most "),
    (r"greater than ", "above "),
    (r"less than ", "below "),
    (r"must be an? (valid )?integer[^']*?(?=,? got|$)", "must be a whole number"),
    (r"must be an? (valid )?number(, unable to parse[^']*)?(?=,? got|$)", "must be a number"),
    (r"must be an? (valid )?string", "must be text"),
    (r"must be an? (valid )?boolean[^']*?(?=,? got|$)", "must be true or false"),
    (r"must be a valid dictionary or instance of (\w+).*", r"must be a component of \1"),
    (r"must be an? (valid )?(dictionary|mapping)[^']*?(?=,? got|$)", "must be a table"),
    (r"'str' instances are not allowed as a Sequence value|must be an instance of Sequence", "must be a list"),
    (r"must be an? (valid )?(list|tuple|set)\b", "must be a list"),
    (r"must be a valid (\w+).*", r"must be a \1"),
)
_TYPES = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false", Path: "a path"}
_LIMITS: dict[type, Callable[[Any], str]] = {
    Ge: lambda rule: f"of at least {rule.ge:g}",
    Gt: lambda rule: f"above {rule.gt:g}",
    Le: lambda rule: f"of at most {rule.le:g}",
    Lt: lambda rule: f"below {rule.lt:g}",
}


def plain(message: str) -> str:
    """Replace pydantic's wording by that of the package.

    >>> plain("Input should be greater than or equal to 1")
    'must be at least 1'
    """
    # in this order: later patterns read what earlier ones have written
    for pattern, words in _PLAIN:
        message = re.sub(pattern, words, message)
    return message


def first_problem(error: ValidationError) -> ErrorDetails:
    """Return the problem to report: an unknown name if there is one, since what seems to be missing may be misspelt."""
    return min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")


def complaint(problem: ErrorDetails) -> str:
    """Return what is wrong with a value, as the end of a sentence that begins with its name."""
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    if problem["type"] == "too_short" and not problem["input"]:
        return "needs at least one entry"
    return f"{plain(problem['msg'])}, got {shown(problem['input'])}"


def sentence(error: ValidationError, what: str, fields: Mapping[str, Any]) -> str:
    """Return a pydantic error as one sentence: the first problem, and the nearest name where a name is unknown.

    Args:
        error: the error.
        what: what the settings are of, e.g. ``"recipe"``.
        fields: the settings that there are, by name.
    """
    problem = first_problem(error)
    place = problem["loc"]  # a field, then numbers of items and, where several types would do, what pydantic calls them
    name = ".".join(str(word) for i, word in enumerate(place) if not i or isinstance(word, int) or word in fields)
    if problem["type"] == "extra_forbidden":
        return str(unknown(f"setting of {what} called", name, fields))
    if problem["type"] == "missing":
        return f"{what} needs a value for {name}"
    text = complaint(problem)
    # messages of validators of ours may name the setting themselves
    complete = not name or (problem["type"] == "value_error" and text.startswith((name, "there is no")))
    return f"{what}: {text}" if complete else f"{what}: {name} {text}"


def behind_alias(annotation: Any) -> Any:
    """Return what an alias of a type stands for (PEP 695), as `numpy.typing.NDArray` is one since NumPy 2.5."""
    arguments = typing.get_args(annotation)
    alias = typing.get_origin(annotation) or annotation
    value = None if isinstance(alias, type) else getattr(alias, "__value__", None)
    if value is None:
        return annotation
    return behind_alias(value[arguments] if arguments else value)


def type_in_words(annotation: Any) -> str:
    """Return a type in words, with its range.

    >>> type_in_words(int | None)
    'a whole number'
    """
    annotation = behind_alias(annotation)
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        words = [type_in_words(kind) for kind in inner if kind not in (None, type(None))]
        # lists last, as theirs are followed by the types of their entries
        return " or ".join(sorted(dict.fromkeys(words), key=lambda word: word.startswith("a list")))
    if origin is Annotated:
        rules = [rule for extra in inner[1:] if isinstance(extra, FieldInfo) for rule in extra.metadata]
        limits = [words(rule) for rule in rules for kind, words in _LIMITS.items() if isinstance(rule, kind)]
        return " ".join([type_in_words(inner[0]), " and ".join(limits)]).strip()
    if origin is typing.Literal:
        return " or ".join(repr(choice) for choice in inner)
    if origin in (tuple, list, collections.abc.Sequence):
        return "a list" if not inner or inner[0] is Any else f"a list whose entries are each {type_in_words(inner[0])}"
    if origin in (dict, collections.abc.Mapping):
        return "a table"
    if origin is collections.abc.Callable:
        return "a function"
    if isinstance(origin, type):
        return f"a {origin.__name__}"
    return _TYPES.get(annotation) or f"a {getattr(annotation, '__name__', annotation)}"
