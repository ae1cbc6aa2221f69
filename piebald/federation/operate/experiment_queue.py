"""The queue of a federation's server: experiments that it takes one after another, or in turns, on its credentials.

    <server's credentials>/queue/
      0001.json        an experiment as it was added: its settings, its run folder; never changed
      0001.state.json  how far it is, written by the server alone
      0001.stop        somebody asked that it be stopped

Whoever adds an experiment makes a new file, whoever stops one makes another, and only the server changes any.  So no
two processes write the same file, and a server that is killed finds all that it needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from piebald.core.errors import SettingError
from piebald.core.format_versions import KeptForm
from piebald.core.reading.files import read_json

FOLDER = "queue"
FORMAT = KeptForm[dict[str, Any]](first=1)  # of the two files of an experiment, each by itself
State = Literal["waiting", "running", "paused", "finished", "failed", "stopped"]
_OVER: tuple[State, ...] = ("finished", "failed", "stopped")
_NAMED = 3  # experiments of each state that a summary names
_ENTRY = re.compile(r"\d{4,}\.json")


@dataclass(frozen=True, slots=True)
class Queued:
    """An experiment of the queue.

    Attributes:
        number: its place; the smallest one is taken first.
        label: its name.
        experiment: its settings, in TOML.
        out: its run folder; after sites came, that of the part that runs.
        start_from: the run whose models it begins with, "" for none.
        added: when it was added.
        again: whether it goes on with what is in the run folder from before.
        state: how far it is.
        why: why it failed, "" where it did not.
        ended: when it ended, "" before.
        sites: the sites that the part which runs was begun with, where it takes any.
        parts: run folders of the parts before, each of which ended since sites came.
        rounds: server steps of the part that runs, 0 for those of the experiment.
        until: the server step at which this part ends, since sites came; 0 for all its steps.
        paused: when its last turn ended, "" before.
    """

    number: int
    label: str
    experiment: str
    out: str
    start_from: str
    added: str
    again: bool = False
    state: State = "waiting"
    why: str = ""
    ended: str = ""
    sites: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    rounds: int = 0
    until: int = 0
    paused: str = ""

    @property
    def over(self) -> bool:
        """Whether it has ended, in whichever way."""
        return self.state in _OVER

    @property
    def begun(self) -> bool:
        """Whether its run folder may hold steps of its own."""
        return self.again or self.state in ("running", "paused")


_CHANGES = ("state", "why", "ended", "sites", "parts", "rounds", "until", "paused", "out", "start_from")
_ADDED = ("label", "experiment", "out", "start_from", "added", "again", "sites", "parts", "rounds", "until")


class ExperimentQueue:
    """The queue in a server's credentials.

    Args:
        credentials: the server's.
    """

    def __init__(self, credentials: Path) -> None:
        self.folder = credentials / FOLDER

    # -- for whoever adds and stops experiments

    def add(self, label: str, experiment: str, out: Path, start_from: Path | None = None) -> Queued:
        """Put an experiment at the end.

        Args:
            label, experiment: see `Queued`.
            out: its run folder.
            start_from: the run whose models it begins with.

        Raises:
            SettingError: an experiment of the queue that has not ended has this run folder.
        """
        start = "" if start_from is None else str(start_from)
        return self._put(Queued(0, label, experiment, str(out), start, ""))

    def _put(self, entry: Queued) -> Queued:
        """Put an experiment at the end, under the next number."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        found = self.entries()
        if taken := next((one for one in found if one.out == entry.out and not one.over), None):
            raise SettingError(f"experiment {taken.number} of the queue has the run folder {taken.out}: choose another")
        entry = replace(entry, number=max((one.number for one in found), default=0) + 1, added=_now())
        while not self._created(entry):
            entry = replace(entry, number=entry.number + 1)  # another process was faster
        return entry

    def _created(self, entry: Queued) -> bool:
        """Write an entry's file as a whole; False where there is one with its number."""
        values = asdict(entry)
        made = {name: values[name] for name in _ADDED}
        temporary = self.folder / f".new-{os.getpid()}"
        _write(temporary, json.dumps({"format": FORMAT.number, **made}, indent=2) + "\n")
        try:
            os.link(temporary, self._path(entry.number, ".json"))  # fails where there is one, and is whole at once
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True

    def ask_to_stop(self, number: int) -> Queued:
        """Ask the server to stop an experiment: one that waits is not begun, one that runs is stopped cleanly.

        Raises:
            SettingError: there is none with this number, or it has ended.
        """
        entry = self.entry(number)
        if entry.over:
            raise SettingError(f"experiment {number} has ended already: it is {entry.state}")
        _write(self._path(number, ".stop"), _now() + "\n")
        return entry

    def take_up(self, number: int) -> Queued:
        """Put an experiment that was stopped or has failed at the end again; it goes on where it was.

        Raises:
            SettingError: there is none with this number, or it has not ended in this way.
        """
        entry = self.entry(number)
        if entry.state not in ("stopped", "failed"):
            raise SettingError(f"experiment {number} is {entry.state}: only one that was stopped or failed goes on")
        return self._put(replace(entry, again=True, state="waiting", why="", ended=""))

    # -- for everybody

    def entries(self) -> list[Queued]:
        """All experiments, the first added first.

        Raises:
            SettingError: a file cannot be read.
        """
        if not self.folder.is_dir():
            return []
        paths = sorted(path for path in self.folder.iterdir() if _ENTRY.fullmatch(path.name))
        return sorted((self._read(path) for path in paths), key=lambda one: one.number)

    def entry(self, number: int) -> Queued:
        """One experiment.

        Raises:
            SettingError: there is none with this number.
        """
        known = {one.number: one for one in self.entries()}
        if number not in known:
            numbers = ", ".join(map(str, known)) or "none"
            raise SettingError(f"the queue has no experiment {number}: its numbers are {numbers}")
        return known[number]

    def summary(self, serves: bool = True) -> str:
        """The experiments that have not ended, by what they do, in words; "" where there is none.

        Args:
            serves: whether the server's process is there; without it, one that was running is interrupted.
        """
        open_ = [one for one in self.entries() if not one.over]
        words = []
        for state in ("running", "paused", "waiting"):
            found = [f"{one.number} {one.label}" for one in open_ if one.state == state]
            more = [f"{len(found) - _NAMED} more"] if len(found) > _NAMED else []
            word = "interrupted" if state == "running" and not serves else state
            words += [f"{len(found)} {word} ({', '.join([*found[:_NAMED], *more])})"] if found else []
        return ", ".join(words)

    # -- for the server

    def next(self) -> Queued | None:
        """The experiment to go on with: one that a killed server has begun, else the first that had no turn yet, else
        the one whose turn is longest ago.
        """
        waiting = [one for one in self.entries() if not one.over]
        return min(waiting, key=lambda one: (one.state != "running", one.paused, one.number), default=None)

    def others_wait(self, entry: Queued) -> bool:
        """Whether there are experiments besides this one that have not ended."""
        return any(not one.over and one.number != entry.number for one in self.entries())

    def stop_wanted(self, entry: Queued) -> bool:
        """Whether somebody asked that it be stopped."""
        return self._path(entry.number, ".stop").exists()

    def change(self, entry: Queued, **values: Any) -> Queued:
        """Write down how far an experiment is; returns it as it is then."""
        ended = _now() if values.get("state") in _OVER else entry.ended
        paused = _now("milliseconds") if values.get("state") == "paused" else entry.paused
        made = replace(entry, **values, ended=ended, paused=paused)
        about = {name: value for name, value in asdict(made).items() if name in _CHANGES}
        text = json.dumps({"format": FORMAT.number, **about}, indent=2)
        _write(self._path(entry.number, ".state.json"), text + "\n")
        return made

    # -- private

    def _path(self, number: int, suffix: str) -> Path:
        return self.folder / f"{number:04d}{suffix}"

    def _read(self, path: Path) -> Queued:
        number = int(path.name.removesuffix(".json"))
        values = _present(path)
        with contextlib.suppress(FileNotFoundError):
            values |= _present(self._path(number, ".state.json"), absent=1)  # which had none at first
        try:
            values.pop("search", None)  # a folder to import from, which entries named before
            lists = {name: tuple(values.get(name, ())) for name in ("sites", "parts")}
            entry = Queued(**{"number": number, **values, **lists})
        except TypeError:
            raise SettingError(f"{path} is no experiment of a queue: remove it") from None
        if entry.state not in get_args(State):
            raise SettingError(f"{path} is no experiment of a queue: remove it")
        stopped = entry.state in ("waiting", "paused") and self.stop_wanted(entry)
        return replace(entry, state="stopped") if stopped else entry


def _present(path: Path, absent: int | None = None) -> dict[str, Any]:
    """What a file holds, in the present format; `absent` is the number of one that has none."""
    values = _table(path)
    if not FORMAT.reads(found := values.pop("format", absent)):
        raise SettingError(
            f"{path} has format {found!r}, this Piebald reads up to {FORMAT.number}: install the one that wrote it"
        )
    FORMAT.upgrade(values, found)
    return values


def _table(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise SettingError(f"{path} cannot be read: {type(error).__name__}: restore it, or remove it") from None
    if not isinstance(found, Mapping):
        raise SettingError(f"{path} is no experiment of a queue: remove it")
    return dict(found)


def _now(precision: str = "seconds") -> str:
    return datetime.now(UTC).isoformat(timespec=precision)


def _write(path: Path, text: str) -> None:
    """Write a private file.  The import is for those who only read the queue, as a health check every minute does."""
    from piebald.core.private_files import write_private

    write_private(path, text)
