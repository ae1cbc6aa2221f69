"""Which of several servers works with the same credentials: the holder of their lease, and whoever takes it over."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from piebald.core.errors import RunFolderError, SettingError
from piebald.core.plain_text import printable
from piebald.federation.credentials.slots import FOLDER
from piebald.federation.link.supervision import repeated
from piebald.federation.operate.experiment_queue import ExperimentQueue
from piebald.federation.operate.status import run_of, running_process
from piebald.storage import lease
from piebald.storage.lease import HeldLease, Lease
from piebald.storage.lock import RunLock
from piebald.storage.schema import explained

_LOOK = 0.5  # seconds between two looks at the lease
BEAT = 1.0  # seconds between two signs of life
_QUIET = 3.0  # seconds without a sign of life after which a process without a lock is taken for dead

log = logging.getLogger("piebald.federation")


@contextmanager
def leased(folder: Path, expiry: float | None = None) -> Iterator[Lease]:
    """The lease of a server's credentials while the block runs, and none of the files of a holder that lost it.

    Args:
        folder: the credentials.
        expiry: seconds without a sign of life after which the lease of a process that has not ended is taken, None to
            raise an error in place of standing by.

    Raises:
        SettingError: another process has the credentials.
        RunFolderError: the credentials cannot be written, or taken over.
    """
    with explained(f"{folder} cannot be used"):
        held, seen = _taken(folder, expiry)
    try:
        if seen is not None:  # its holder has not given it back: it may hang, and wake
            fields = {"event": "takeover", "folder": str(folder), "from": seen.holder, "token": held.token}
            log.warning("the lease of %(folder)s, held %(from)s, has expired: this server takes over", fields)
            with repeated(held.beat, BEAT):  # copies of large files take long
                _seize_all(folder)
    except BaseException:
        Lease.current = None  # and not given back: whoever takes it next has to seize what this one has not
        raise
    try:
        yield held
    finally:
        held.give_back()


def _taken(folder: Path, expiry: float | None) -> tuple[Lease, HeldLease | None]:
    """Wait for the lease, and return it with the one that it was taken from, None where that was given back."""
    before, since, told = lease.newest(folder), time.monotonic(), False
    while True:
        process, now = running_process(folder), lease.newest(folder)
        if moved := now != before:
            before, since = now, time.monotonic()
        quiet = time.monotonic() - since
        if expiry is None and process is not None:
            RunLock(folder).drop()  # which says who has it
        if expiry is None and moved and now is not None:
            raise SettingError(f"{folder} is held {now.holder}: end that server, or stand by with --standby")
        free = process is None and (now is None or quiet > _QUIET)
        if (free or (now and quiet > (expiry or math.inf))) and (held := Lease.take(folder, now)) is not None:
            return held, now
        if expiry is not None and process is not None and not told:
            fields = {"event": "standby", "process": process, "folder": str(folder), "expiry": f"{expiry:g}"}
            text = "standing by until process %(process)d, which has %(folder)s, has ended, or given no sign of life "
            log.info(text + "for %(expiry)s seconds", fields)
            told = True
        time.sleep(_LOOK)


def _seize_all(folder: Path) -> None:
    """Seize the credentials, their slots and queue, and the runs under way; of these one that is broken fails alone."""
    queue = ExperimentQueue(folder)
    for place in (folder, queue.folder, *(slot for slot in (folder / FOLDER).glob("*") if slot.is_dir())):
        lease.seize(place)
    runs = {Path(entry.out): entry for entry in queue.entries() if entry.state == "running"}
    served = run_of(folder)  # of a server without a queue
    for run in [*runs] if served is None or served in runs else [*runs, served]:
        try:
            lease.seize(run)
        except RunFolderError as error:
            fields = {"event": "takeover", "run": str(run), "why": printable(str(error), 300)}
            log.error("the run %(run)s is not taken over: %(why)s", fields)
            if entry := runs.get(run):
                queue.change(entry, state="failed", why=str(error))
