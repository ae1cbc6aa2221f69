"""The queue of a federation's server: experiments that it takes in turn, several at once where its sites can.

    <server's credentials>/queue/
      0001.json        an experiment as it was added: its settings, its run folder; never changed
      0001.state.json  how far it is, written by the server alone
      0001.stop        somebody asked that it be stopped
      0001.log         what its process has logged

Whoever adds an experiment makes a new file, whoever stops one makes another, and only the server changes any.  So no
two processes write the same file, and a server that is killed finds all that it needs.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from piebald.core.errors import SettingError
from piebald.core.private_files import write_private
from piebald.federation.credentials.party_files import read_table, write_table

State = Literal["waiting", "running", "finished", "failed", "stopped"]

FOLDER = "queue"
_OVER: tuple[State, ...] = ("finished", "failed", "stopped")
_NAMED = 3  # experiments of each state that a summary names
_ENTRY = re.compile(r"\d{4,}\.json")


MOST_OPEN = 20  # experiments of one who submits them from elsewhere, at a time
FORMAT = 2  # of the two files of an experiment, each by itself


@dataclass(frozen=True, slots=True)
class Queued:
    """An experiment of the queue.

    Attributes:
        number: its place; the smallest one is taken first.
        label: its name.
        experiment: its settings, in TOML.
        out: its run folder.
        start_from: the run whose models it begins with, "" for none.
        added: when it was added.
        again: whether it goes on with what is in the run folder from before.
        by: who submitted it from elsewhere, "" for a user of this machine.
        priority: the greater ones are taken first.
        state: how far it is.
        why: why it failed, "" where it did not.
        ended: when it ended, "" before.
        started: when it was taken last, "" before.
        slot: the slot that it runs in, or ran in; None before.
        set_aside: how often it made room for others, since it did not move.
    """

    number: int
    label: str
    experiment: str
    out: str
    start_from: str
    added: str
    again: bool = False
    by: str = ""
    priority: int = 0
    state: State = "waiting"
    why: str = ""
    ended: str = ""
    started: str = ""
    slot: int | None = None
    set_aside: int = 0

    @property
    def over(self) -> bool:
        """True if it has ended, in whichever way."""
        return self.state in _OVER

    @property
    def begun(self) -> bool:
        """True if its run folder may hold steps of its own."""
        return self.again or self.state == "running" or self.set_aside > 0


_CHANGES = ("state", "why", "ended", "started", "slot", "set_aside")
_ADDED = ("label", "experiment", "out", "start_from", "added", "again", "by", "priority")


class ExperimentQueue:
    """The queue in a server's credentials.

    Args:
        credentials: the server's.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as credentials:
        ...     queue = ExperimentQueue(Path(credentials))
        ...     entry = queue.add("fedavg", "rounds = 1", Path("runs/fedavg"))
        ...     queue.summary()
        '1 waiting (1 fedavg)'
        >>> entry.number, entry.begun, entry.over
        (1, False, False)
    """

    def __init__(self, credentials: Path) -> None:
        self.folder = credentials / FOLDER

    # -- for whoever adds and stops experiments

    def add(
        self, label: str, experiment: str, out: Path, start_from: Path | None = None, by: str = "", priority: int = 0
    ) -> Queued:
        """Put an experiment at the end.

        Args:
            label, experiment, by, priority: see `Queued`.
            out: its run folder.
            start_from: the run whose models it begins with.

        Raises:
            SettingError: an experiment of the queue that has not ended has this run folder, or whoever submits it has
                so many already that have not ended.
        """
        if by and sum(entry.by == by and not entry.over for entry in self.entries()) >= MOST_OPEN:
            raise SettingError(f"{by} has {MOST_OPEN} experiments that have not ended: wait for one, or stop one")
        start = "" if start_from is None else str(start_from)
        return self._put(Queued(0, label, experiment, str(out), start, "", by=by, priority=priority))

    def _put(self, entry: Queued) -> Queued:
        """Put an experiment at the end, under the next number."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        entries = self.entries()
        if owner := next(
            (other_entry for other_entry in entries if other_entry.out == entry.out and not other_entry.over), None
        ):
            raise SettingError(f"experiment {owner.number} of the queue has the run folder {owner.out}: choose another")
        entry = replace(entry, number=max((other_entry.number for other_entry in entries), default=0) + 1, added=_now())
        while not self._created(entry):
            entry = replace(entry, number=entry.number + 1)  # another process was faster
        return entry

    def _created(self, entry: Queued) -> bool:
        """Write an entry's file as a whole; return False where there is one with its number."""
        values = asdict(entry)
        temporary = self.folder / f".new-{os.getpid()}"
        write_table(temporary, {"format": FORMAT, **{name: values[name] for name in _ADDED}})
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
        write_private(self._path(number, ".stop"), _now() + "\n")
        return entry

    def take_up(self, number: int) -> Queued:
        """Put an experiment that was stopped or has failed at the end again; it goes on where it was.

        Raises:
            SettingError: there is none with this number, or it has not ended in this way.
        """
        entry = self.entry(number)
        if entry.state not in ("stopped", "failed"):
            raise SettingError(f"experiment {number} is {entry.state}: only one that was stopped or failed goes on")
        # in the slot that its run folder names
        fresh = self._put(replace(entry, again=True, state="waiting", why="", ended="", started="", set_aside=0))
        return self.change(fresh) if entry.slot else fresh

    # -- for everybody

    def entries(self) -> list[Queued]:
        """Return all experiments, the first added first.

        Raises:
            SettingError: a file cannot be read.
        """
        if not self.folder.is_dir():
            return []
        paths = sorted(path for path in self.folder.iterdir() if _ENTRY.fullmatch(path.name))
        # by number: as text, 10000 comes before 9999
        return sorted((self._read(path) for path in paths), key=lambda entry: entry.number)

    def entry(self, number: int) -> Queued:
        """Return one experiment.

        Raises:
            SettingError: there is none with this number.
        """
        entries = {entry.number: entry for entry in self.entries()}
        if number not in entries:
            numbers = f"its numbers are {', '.join(map(str, entries))}" if entries else "it is empty"
            raise SettingError(f"the queue has no experiment {number}: {numbers}")
        return entries[number]

    def summary(self, serves: bool = True) -> str:
        """Return the experiments that have not ended, by state, in words; "" where there is none.

        Args:
            serves: whether the server's process is there; without it, one that was running is interrupted.
        """
        open_ = [entry for entry in self.entries() if not entry.over]
        words = []
        for state in ("running", "waiting"):
            names = [f"{entry.number} {entry.label}" for entry in open_ if entry.state == state]
            rest = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
            word = "interrupted" if state == "running" and not serves else state
            words += [f"{len(names)} {word} ({', '.join([*names[:_NAMED], *rest])})"] if names else []
        return ", ".join(words)

    # -- for the server

    def in_turn(self) -> list[Queued]:
        """Return the experiments that have not ended, in the order in which they are taken.

        First those that a server has begun; then the greater priority, and those that have not been set aside; then
        whoever has the fewest at work, and had the last turn longest ago.
        """
        entries = self.entries()
        at_work = Counter(entry.by for entry in entries if entry.state == "running")
        turns = {entry.by: entry.started for entry in sorted(entries, key=lambda entry: entry.started)}
        return sorted(
            (entry for entry in entries if not entry.over),
            key=lambda entry: (
                entry.state != "running", -entry.priority, entry.set_aside,
                at_work[entry.by], turns[entry.by], entry.number,
            ),
        )  # fmt: skip

    def next(self) -> Queued | None:
        """Return the first experiment that is to be carried out, or gone on with."""
        return next(iter(self.in_turn()), None)

    def log_file(self, number: int) -> Path:
        """Return the file with the log of an experiment."""
        return self._path(number, ".log")

    def stop_wanted(self, entry: Queued) -> bool:
        """Return whether somebody asked that it be stopped."""
        return self._path(entry.number, ".stop").exists()

    def change(self, entry: Queued, **values: Any) -> Queued:
        """Record the progress of an experiment, and return it as it is then."""
        ended = _now() if values.get("state") in _OVER else entry.ended
        started = _now() if values.get("state") == "running" else entry.started
        changed = replace(entry, **values, ended=ended, started=started)
        state = {name: value for name, value in asdict(changed).items() if name in _CHANGES}
        write_table(self._path(entry.number, ".state.json"), {"format": FORMAT, **state})
        return changed

    # -- private

    def _path(self, number: int, suffix: str) -> Path:
        return self.folder / f"{number:04d}{suffix}"

    def _read(self, path: Path) -> Queued:
        number = int(path.name.removesuffix(".json"))
        values = _read_entry(path) or {}
        # two files, so that the server and whoever adds experiments never write the same one
        values |= _read_entry(self._path(number, ".state.json")) or {}
        try:
            entry = Queued(**{"number": number, **values})
        except TypeError:
            raise SettingError(f"{path} does not hold an experiment of a queue: remove it") from None
        if entry.state not in get_args(State):
            raise SettingError(f"{path} does not hold an experiment of a queue: remove it")
        # takes effect without a server that would record it
        stopped = entry.state == "waiting" and self.stop_wanted(entry)
        return replace(entry, state="stopped") if stopped else entry


def _read_entry(path: Path) -> dict[str, Any] | None:
    """Return the content of a file, None where there is no file."""
    values = read_table(path, "restore it, or remove it")
    if values is None:
        return None
    if (number := values.pop("format", None)) != FORMAT:
        raise SettingError(f"{path} has format {number!r}, this Piebald reads {FORMAT}: install the one that wrote it")
    return values


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
