"""Errors of the package.  Each message is one sentence: the argument, what is allowed, what was given, what to do.

PiebaldError
├── SettingError      a value, a combination or a file that the user can correct  (exit code 2)
│   ├── ParameterError    a model or vector that does not fit its layout
│   └── UnknownClient     a number that no client has; also an IndexError
├── RunFolderError    a run folder that cannot be read, written or trusted        (exit code 2)
├── Declined          a request that a client declines; the message reveals nothing about its rows
└── RuntimeFault      something broke while running: a worker died, no client left (exit code 1)
    ├── CannotTrain       what one client's rows do not allow; the message reveals nothing else about them
    └── DeviceLost        a GPU that computes nothing more for this process
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any


class PiebaldError(Exception):
    r"""Base class of all errors; `exit_code` is the exit code of the command line.

    Examples:
        >>> str(PiebaldError("a message\nof two lines"))  # it may quote a file
        'a message of two lines'
    """

    exit_code = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*(_line(arg) if isinstance(arg, str) else arg for arg in args))


class SettingError(PiebaldError, ValueError):
    """A setting, a combination of components, an input file or an argument that cannot work.

    Examples:
        >>> from piebald import recipes
        >>> recipes.fedavg(lr=-1.0)
        Traceback (most recent call last):
            ...
        piebald.core.errors.SettingError: training 'sgd': lr must be above 0, got -1.0
    """

    exit_code = 2


class ParameterError(SettingError):
    """A model or a vector that does not fit the layout it is used with.

    Examples:
        >>> import torch
        >>> from piebald.core.parameters import Layout
        >>> Layout.of(torch.nn.Linear(2, 1)).check(torch.zeros(4))
        Traceback (most recent call last):
            ...
        piebald.core.errors.ParameterError: a model vector must have 3 numbers on its last axis, got shape [4]
    """


class UnknownClient(SettingError, IndexError):
    """A number that no client has."""


class RunFolderError(PiebaldError):
    """A run folder that cannot be read, written or trusted.

    Examples:
        >>> from piebald.storage.store import RunStore
        >>> RunStore.open("no_such_folder")
        Traceback (most recent call last):
            ...
        piebald.core.errors.RunFolderError: there is no run folder at no_such_folder: check the path
    """

    exit_code = 2


class Declined(PiebaldError):
    """A request that a client declines.  The server reads the message, so it must reveal nothing about rows."""


class RuntimeFault(PiebaldError):
    """A failure during a run; completed server steps are safe and `piebald resume` continues the run.

    Examples:
        >>> RuntimeFault.exit_code, SettingError.exit_code
        (1, 2)
    """


class CannotTrain(RuntimeFault):
    """A client whose rows are too few for this model or trainer; the server reads the message, which says no more."""


class DeviceLost(RuntimeFault):
    """A GPU that refuses whatever this process asks of it, so that nothing else is tried here."""


_CANNOT = "cannot train on "
_AT = " at the "


def failure_reason(error: Exception, told: bool = True) -> str:
    """Return why the work of one client ended without a result.

    Args:
        error: that was raised.
        told: whether the error's own message may be told, which may quote the client's rows.

    Examples:
        >>> failure_reason(ValueError("no such word")), failure_reason(ValueError("no such word"), told=False)
        ('ValueError at the client: no such word', 'ValueError at the site, whose log says more')
    """
    if isinstance(error, CannotTrain):
        return str(error)
    kind = type(error).__name__
    return _line(f"{kind}{_AT}client: {error}")[:300] if told else f"{kind}{_AT}site, whose log says more"


def failure_kind(reason: str) -> str | None:
    """Return the part of a reason in which failures of clients' own work are alike; None for other reasons.

    Clients that failed so take no part in a step, and are asked again.

    Examples:
        >>> failure_kind("ValueError at the client: no such word"), failure_kind("lost")
        ('ValueError', None)
    """
    if reason.startswith(_CANNOT) or diverged(reason):
        return reason
    kind, at, _ = reason.partition(_AT)
    return kind if at and kind.isidentifier() else None


TOO_LONG = " is longer than longest_step allows"  # no number, so that a client has one reason in all rounds


def diverged(reason: str) -> bool:
    """Return whether an update does not count because training went too far: no finite numbers, or too long a step."""
    return reason.endswith(("not finite", TOO_LONG))


def _line(text: str) -> str:
    """A message on one line, without control characters: it may quote a file, a path or another program."""
    words = " ".join(text.split())
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in words)


def shown(value: object, longest: int = 80) -> str:
    """A value as an error message shows it: on one line, cut where it is long, never failing.

    Examples:
        >>> shown(list(range(1000)), longest=20)
        '[0, 1, 2, 3, 4, 5, 6...'
    """
    try:
        text = " ".join(repr(str(value) if isinstance(value, PurePath) else value).split())
    except Exception:  # a number of 5,000 digits has no repr, and an object may have a broken one
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= longest else f"{text[:longest]}..."


@contextmanager
def about(what: str) -> Iterator[None]:
    """Begin the message of a wrong setting with what it is about.

    Examples:
        >>> with about("trial.toml, line 3"):
        ...     raise SettingError("lr must be above 0")
        Traceback (most recent call last):
            ...
        piebald.core.errors.SettingError: trial.toml, line 3: lr must be above 0
    """
    try:
        yield
    except SettingError as error:
        raise SettingError(f"{what}: {error}") from None


def unknown(
    what: str, name: object, allowed: Iterable[str], elsewhere: Mapping[str, str] | None = None
) -> SettingError:
    """The error for an unknown name, with the most similar known name.

    Args:
        what: what was named, e.g. ``"recipe"``.
        name: the unknown name.
        allowed: the known names.
        elsewhere: what does the same here, by names of other programs in small letters without "_" and "-".

    Examples:
        >>> unknown("recipe", "fedavgg", ["fedavg", "fedprox"])
        SettingError("there is no recipe 'fedavgg': did you mean 'fedavg'?")
        >>> unknown("recipe", "Fed-Per", ["fedavg", "hdafl"], {"fedper": "hdafl keeps the classifier private, too"})
        SettingError("there is no recipe 'Fed-Per': hdafl keeps the classifier private, too")
    """
    # sorted, since a set has another order in each process
    names = sorted(allowed)
    written = name if isinstance(name, str) else shown(name)
    plain = written[:100].lower().replace("-", "")
    if same := (elsewhere or {}).get(plain.replace("_", "")):
        return SettingError(f"there is no {what} {shown(written)}: {f'it is {same!r} here' if same in names else same}")
    # difflib's time grows with the square of the length, and the name may be a stranger's
    near = difflib.get_close_matches(written[:100], names, n=1, cutoff=0.5) or [at for at in names if at == plain]
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of: {', '.join(names) or 'none are known'}"
    return SettingError(f"there is no {what} {shown(written)}: {hint}")


TOKENS = "give clients_from tokens=True, or [data] tokens = true"


def install(extra: str) -> str:
    """Return the command that installs an extra.

    Piebald is on no index yet, so anybody could put a package of its name there.

    Examples:
        >>> install("trees")
        "pip install '.[trees]' in a clone of Piebald"
    """
    return f"pip install '.[{extra}]' in a clone of Piebald"


def import_extra(module: str, extra: str, sentence: str) -> Any:
    """Import a module that an extra brings.

    Args:
        module: its name.
        extra: the extra.
        sentence: what needs the module, for the error.

    Raises:
        SettingError: it is not installed; with the command that installs it.

    Examples:
        >>> import_extra("json", "trees", "boosted trees need json").dumps(1)
        '1'
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise SettingError(f"{sentence}: {install(extra)}") from None


def check_names(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse the first unknown name; `what` names its kind, e.g. ``"argument of resume"``."""
    allowed = list(known)
    for name in given:
        if name not in allowed:
            raise unknown(f"{what} called", name, allowed)
