"""Files in a party's folder: tables in JSON, and writes to a disk that may be full or read-only for a while."""

from __future__ import annotations

import errno
import json
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from piebald.core.errors import SettingError
from piebald.core.files import os_reason, read_json
from piebald.storage import lease

PAUSE = 2.0  # seconds between two attempts
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.ESTALE)

log = logging.getLogger("piebald.federation")


class Ended(Exception):
    """The process ends, so that a write is not tried again."""


def remedy(error: OSError) -> str:
    """Return what an operator can do about an error of a write."""
    descriptors = error.errno in (errno.EMFILE, errno.ENFILE)
    return "raise the limit of open files, or close some" if descriptors else "make room, or mend it"


def raise_passing(error: BaseException) -> None:
    """Raise the error of the system behind an error, where it is one that passes: what met it can be tried again.

    Raises:
        OSError: no file can be opened now, or nothing can be written.
    """
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.errno in _PASSING:
            raise behind
        behind = behind.__cause__ or behind.__context__


class DiskWrites:
    """Tries writes to a party's folder, each again until it succeeds.  Threads may share it.

    What a write is for is its name: the log says once that it fails, and once that it succeeds again.

    Args:
        folder: the folder.
        over: set when the process ends.
    """

    def __init__(self, folder: Path, over: threading.Event) -> None:
        self._folder, self._over = folder, over
        self._lock = threading.Lock()
        self._failing: dict[str, OSError] = {}

    @property
    def trouble(self) -> str:
        """Reason why writes fail now, "" while none does."""
        with self._lock:
            errors = list(self._failing.values())
        if not errors:
            return ""
        reasons, remedies = (sorted({of(error) for error in errors}) for of in (os_reason, remedy))
        return f"{self._folder} cannot be written ({', '.join(reasons)}): {'; '.join(remedies)}"

    def attempt(self, name: str, write: Callable[[], object]) -> bool:
        """Try a write once, and return whether it succeeded."""
        try:
            write()
        except OSError as error:
            with self._lock:
                before, self._failing[name] = self._failing.get(name), error
            if before is None or os_reason(before) != os_reason(error):
                fields = {"event": "disk", "folder": str(self._folder), "what": name, "why": os_reason(error)}
                log.error(
                    "%(what)s cannot be written to %(folder)s (%(why)s): %(remedy)s; it is tried again every %(pause)g "
                    "seconds", {**fields, "remedy": remedy(error), "pause": PAUSE},
                )  # fmt: skip
            return False
        with self._lock:
            failed = self._failing.pop(name, None)
        if failed is not None:
            fields = {"event": "disk", "folder": str(self._folder), "what": name}
            log.info("%(what)s is written to %(folder)s again", fields)
        return True

    def insist(self, name: str, write: Callable[[], object]) -> None:
        """Try a write until it succeeds.

        Raises:
            Ended: the process ends first.
        """
        while not self.attempt(name, write):
            if self._over.wait(PAUSE):
                raise Ended


def stamp_of(path: Path) -> tuple[int, int] | None:
    """Return a value that changes when a file is replaced, None where there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino  # a replacement within one tick of the clock is another file


def read_table(path: Path, remedy: str = "remove it") -> dict[str, Any] | None:
    """Read a table in JSON; None where there is no file.

    Args:
        path: the file.
        remedy: advice about a file that cannot be read.

    Raises:
        SettingError: it cannot be read, or holds something else.
    """
    try:
        table = read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise SettingError(f"{path} cannot be read: {type(error).__name__}: {remedy}") from None
    if not isinstance(table, dict):
        raise SettingError(f"{path} cannot be read: it holds no table: {remedy}")
    return table


def write_table(path: Path, values: Mapping[str, Any]) -> None:
    """Write a table in JSON as `lease.write` does."""
    lease.write(path, json.dumps(values, indent=2) + "\n")
