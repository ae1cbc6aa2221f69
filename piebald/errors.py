"""The error family.  Each message is one sentence: what came, what is allowed, what to do.

PiebaldError
├── SettingError      a value, a combination or a file the user can mend          (exit code 2)
│   └── ParameterError    a model or vector that does not fit its layout
├── RunFolderError    a run folder that cannot be read, written or trusted        (exit code 2)
├── Declined          what a client does not do though it was asked; the sentence tells nothing of its rows
└── RuntimeFault      something broke while running: a worker died, no client left (exit code 1)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PiebaldError(Exception):
    """Anything Piebald refuses or fails to do, in one sentence.  `exit_code` is what the command line ends with."""

    exit_code = 1


class SettingError(PiebaldError, ValueError):
    """A setting, a combination of parts, an input file or an argument that cannot work."""

    exit_code = 2


class ParameterError(SettingError):
    """A model or a vector that does not fit the layout it is used with."""


class RunFolderError(PiebaldError):
    """A run folder that cannot be read, written or trusted."""

    exit_code = 2


class Declined(PiebaldError):
    """What a client was asked and does not do.  The server reads the sentence, so it says nothing about rows."""


class RuntimeFault(PiebaldError):
    """Something broke while running; what was committed is safe and `piebald resume` continues."""


def unknown(what: str, name: object, allowed: Iterable[str]) -> SettingError:
    """The error for a name that is not known, with the nearest known one.

    Args:
        what: the kind of thing that was named, e.g. ``"recipe"``.
        name: what came.
        allowed: the names that would do.
    """
    names = sorted(allowed)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of: {', '.join(names) or 'none are known'}"
    return SettingError(f"there is no {what} {str(name)!r}: {hint}")
