"""Checks of what users give: settings and arguments, strictly by their types, and refused in one sentence.

`settled` prepares the settings of components and files for pydantic's strict mode, and `checked` checks the arguments
of a public function by its annotations:

    @checked
    def run(..., rounds: Count | None = None): ...

Strict means that no value is taken for another: text is no number, true is no 1, bytes are no text.  NumPy's numbers
count as numbers, and lists as tuples.

What is wrong is said in plain English: types, ranges and pydantic's errors.  Every sentence about a value says the same
things in the same words, wherever the value came from: a file, a flag, a component's field or an argument of a
function.
"""

from __future__ import annotations

import collections.abc
import datetime
import difflib
import functools
import inspect
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ParamSpec, Protocol, TypeVar

import numpy as np
from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, ConfigDict, Field, InstanceOf, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from piebald.core.errors import SettingError, shown, unknown

_SAID_OTHERWISE = (
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
    for pattern, words in _SAID_OTHERWISE:
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


P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")

LARGEST = 2**63 - 1  # of whole numbers: what SQLite, NumPy and torch can hold
LARGEST_FLOAT = float(np.finfo(np.float32).max)
LONGEST_PATH = 4096
DEEPEST = 50  # lists and tables inside each other
STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_CONFIG = ConfigDict(arbitrary_types_allowed=True, **STRICT)
_PLAIN = (int, float, str, bool, bytes, type(None))
_CONTAINERS = (tuple, list, dict, set, frozenset)


def _usable(path: Path | str) -> Path | str:
    text = os.fspath(path)
    if not text or len(text) > LONGEST_PATH or any(ord(letter) < 32 for letter in text):
        raise ValueError(f"must be a path of 1 to {LONGEST_PATH} characters, without control characters")
    return path


def _different(seeds: Sequence[int]) -> Sequence[int]:
    """Seeds, at least one and none twice: a run that counted twice would narrow every interval."""
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"must be a list of different seeds, at least one, got {shown(list(seeds))}")
    return seeds


Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0)]
Seeds = Annotated[Sequence[Seed], AfterValidator(_different)]
SeedList = Annotated[list[Seed], Field(min_length=1), AfterValidator(_different)]  # of an experiment file
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
PathLike = Annotated[Path | str, AfterValidator(_usable)]


def settled(value: Any, depth: int = 0, *, dates: bool = False) -> Any:
    """A setting as strict checks take it: NumPy's numbers as Python's, lists as tuples.

    Args:
        dates: whether dates and times pass, which TOML has; no setting takes one, and run folders cannot keep it.

    Raises:
        ValueError: a number is larger than torch can hold, lists and tables are nested too deeply, the name of an
            entry is no text, or it is a date.
    """
    if depth > DEEPEST:
        raise ValueError(f"must be nested at most {DEEPEST} deep")
    if isinstance(value, np.bool_ | np.integer | np.floating):
        value = value.item()
    if isinstance(value, datetime.date | datetime.time) and not dates:  # a date with a time is a date, too
        raise ValueError(f"must be a number, text, true or false, a list or a table, got the date or time {value}")
    if isinstance(value, int) and not -LARGEST - 1 <= value <= LARGEST:
        raise ValueError(f"must be a whole number of at most 64 bits, got {shown(value)}")
    # infinity passes here: `STRICT` refuses it
    if isinstance(value, float) and LARGEST_FLOAT < abs(value) < float("inf"):
        raise ValueError(f"must be a number that 32 bits can hold, got {value}")
    # by exact type: a named tuple would lose its names
    if type(value) in (list, tuple):
        return tuple([settled(entry, depth + 1, dates=dates) for entry in value])
    if type(value) is dict:
        if odd := [name for name in value if not isinstance(name, str)]:
            raise ValueError(f"must be a table whose names are text, got the name {shown(odd[0])}")
        return {name: settled(entry, depth + 1, dates=dates) for name, entry in value.items()}
    return value


def wants_list(annotation: Any) -> bool:
    """Return whether a setting is kept as a list; a list is a tuple for all others, since components are frozen."""
    if typing.get_origin(annotation) is list:
        return True
    if typing.get_origin(annotation) in (dict, tuple, typing.Literal):  # lists inside of it are its own
        return False
    return any(wants_list(kind) for kind in typing.get_args(annotation))


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check the arguments of a function by its annotations, each time that it is called.

    Classes are checked with `isinstance`, `Any` and protocols not at all; ranges are given as `Annotated` types.

    Raises:
        SettingError: from the function that is made, where an argument is unknown, missing or not allowed.

    Examples:
        >>> @checked
        ... def train(rounds: Count) -> int:
        ...     return rounds
        >>> train(3)
        3
        >>> train(0)
        Traceback (most recent call last):
            ...
        piebald.core.errors.SettingError: rounds must be a whole number of at least 1, got 0
    """
    signature = inspect.signature(function)
    checks: dict[str, _Check] = {}  # made at the first call: imports of types may be circular before

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # defaults are not bound, so they are not checked
        bound = _bound(function, signature, args, kwargs)
        for name, value in bound.arguments.items():
            parameter = signature.parameters[name]
            if name == "self" or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            if name not in checks:
                checks[name] = _Check(_resolved(parameter.annotation, function), parameter.default)
            bound.arguments[name] = checks[name].value(name, value)
        return function(*bound.args, **bound.kwargs)

    return call


def check_some(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Check some arguments of a function by its annotations, as `checked` does, without calling it."""
    parameters = inspect.signature(function).parameters
    for name, value in given.items():
        parameter = parameters[name]
        _Check(_resolved(parameter.annotation, function), parameter.default).value(name, value)


_OF_RECIPES = ("lr", "epochs", "batch", "steps", "momentum", "optimizer", "weightdecay", "cohort", "clip", "mu")


def checked_class(made: type[C]) -> type[C]:
    """Check the arguments with which instances of a class are made, as `checked` does."""
    made.__init__ = checked(made.__init__)  # type: ignore[method-assign]
    return made


def _bound(
    function: Callable[..., Any], signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        names = [name for name in signature.parameters if name != "self"]
        called = function.__qualname__.removesuffix(".__init__")
        strange = next((name for name in kwargs if name not in names), None)
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
        if strange is not None and not open_ended:
            its = f"it belongs to the recipe: piebald.recipes.fedavg({strange}=...)"
            of_recipes = {**dict.fromkeys(_OF_RECIPES, its), "strategy": "a method is a recipe here"}
            of_recipes = of_recipes if "recipe" in names or "recipes" in names else {}
            raise unknown(f"argument of {called} called", strange, names, of_recipes) from None
        raise SettingError(f"{called} was called with arguments that do not fit: {error}") from None


class _Check:
    """The check of one argument.

    Args:
        annotation: its type.
        default: its default, which is always allowed.
    """

    def __init__(self, annotation: Any, default: Any) -> None:
        self.annotation, self.default = annotation, default
        self.adapter: TypeAdapter[Any] = TypeAdapter(strict(annotation), config=_CONFIG)

    def value(self, name: str, given: Any) -> Any:
        """The argument, with NumPy's numbers as Python's."""
        if given is self.default:
            return given
        given = given.item() if isinstance(given, np.bool_ | np.integer | np.floating) else given
        # so that the numbers of a range are checked like those of a list
        entries = tuple(given) if isinstance(given, range) else given
        try:
            if isinstance(entries, int | float | tuple) or (isinstance(entries, list) and self.annotation is not Any):
                settled(entries)
            self.adapter.validate_python(entries)
        except ValidationError as error:
            first = next((problem for problem in error.errors() if problem["type"] == "value_error"), None)
            reason = f"must be {type_in_words(self.annotation)}" if first is None else str(first["ctx"]["error"])
            got = "" if ", got " in reason else f", got {shown(given)}"
            raise SettingError(f"{name} {reason}{got}{self._advice(name, given)}") from None
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise SettingError(f"{name} {error}" if "must be" in str(error) else f"{name}: {error}") from None
        return given

    def _advice(self, name: str, argument: Any) -> str:
        """Return a hint at what was probably meant, or nothing."""
        if not isinstance(argument, str):
            return ""
        kinds = [self.annotation, *typing.get_args(self.annotation)]
        if any(typing.get_origin(kind) is collections.abc.Sequence for kind in kinds):
            return f": write {name}=[{shown(argument)}]"
        near = difflib.get_close_matches(
            argument[:100], [kind for kind in kinds if isinstance(kind, str)], n=1, cutoff=0.5
        )
        return f": did you mean {near[0]!r}?" if near else ""


def _resolved(annotation: Any, function: Callable[..., Any]) -> Any:
    """An annotation as a type; `Any` where it is only known to type checkers."""
    if not isinstance(annotation, str):
        # without `from __future__ import annotations` it is the type itself
        return Any if annotation is inspect.Parameter.empty else annotation
    try:
        unwrapped = inspect.unwrap(function)
        # text from the function's own source, never from anybody's settings
        return eval(
            annotation,
            vars(sys.modules[unwrapped.__module__]) if isinstance(unwrapped, type) else unwrapped.__globals__,
        )
    except (NameError, AttributeError, KeyError):
        return Any


def _refuse_builtin_container(value: Any) -> Any:
    """Refuse built-in containers, whose entries are checked elsewhere; those of other containers are not."""
    if isinstance(value, str | bytes | bytearray | list | tuple | dict):
        raise PydanticCustomError("entries", "has other entries")
    return value


def _instance(kind: type) -> Any:
    """The type of instances of a class, which are not looked into; arrays of objects are none of arrays."""

    def be(value: Any) -> Any:
        if not isinstance(value, kind) or (isinstance(value, np.ndarray) and value.dtype.hasobject):
            raise PydanticCustomError("instance", "is not an instance")
        return value

    return Annotated[Any, AfterValidator(be)]


_OTHER_SEQUENCE: Any = Annotated[_instance(collections.abc.Sequence), AfterValidator(_refuse_builtin_container)]
_OTHER_MAPPING: Any = Annotated[_instance(collections.abc.Mapping), AfterValidator(_refuse_builtin_container)]


def strict(annotation: Any) -> Any:
    """A type for pydantic whose classes are checked with `isinstance` and whose protocols are not checked."""
    annotation = behind_alias(annotation)
    if annotation is Any:
        return Any
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(strict(kind) for kind in inner)]  # noqa: UP007 - made of types known at run time only
    if origin is Annotated:
        # all classes are taken by their instances
        rules = [rule for rule in inner[1:] if not isinstance(rule, InstanceOf)]  # type: ignore[misc]
        return Annotated[(strict(inner[0]), *rules)] if rules else strict(inner[0])
    if origin is typing.Literal:
        return annotation
    if origin is collections.abc.Callable or annotation is collections.abc.Callable:
        return Callable
    if origin is collections.abc.Sequence:
        entry = strict(inner[0])
        return tuple[entry, ...] | list[entry] | _OTHER_SEQUENCE  # type: ignore[valid-type]
    if origin is collections.abc.Mapping:
        key, value = map(strict, inner)
        return dict[key, value] | _OTHER_MAPPING  # type: ignore[valid-type]
    if origin in _CONTAINERS:
        return origin[tuple(kind if kind is Ellipsis else strict(kind) for kind in inner)]
    if isinstance(origin, type):  # arrays, whose numbers are not looked at here
        return _instance(origin)
    if annotation in _PLAIN or annotation is None or not isinstance(annotation, type):
        return annotation if annotation in _PLAIN or annotation is None else Any
    if Protocol not in annotation.__bases__:
        return _instance(annotation)
    # the base of protocols first: it has methods only, and asking for a property may read all files of a data set
    return next((_instance(base) for base in reversed(annotation.__mro__) if _can_be_asked(base)), Any)


def _can_be_asked(protocol: type) -> bool:
    """Return whether `isinstance` works with a protocol."""
    try:
        isinstance(None, protocol)
    except TypeError:
        return False
    return Protocol in protocol.__bases__
