"""Status of a federation, from files that its processes keep up to date.

What runs is decided by locks, which the system releases when a process dies.  How a run ended is in its record: one
that is recorded as running and that nobody writes was killed.  So was a process that has left its number in the file of
its lock (`RunLock`).
"""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from piebald.core.errors import RunFolderError, SettingError
from piebald.core.files import read_json, read_text, regular
from piebald.federation.operate.experiment_queue import ExperimentQueue
from piebald.storage import lease

try:
    import fcntl
except ImportError:  # Windows, where a process must be stopped by hand
    fcntl = None  # type: ignore[assignment]

RUN = "run.json"  # in the server's credentials: the run folder that it writes
STALLED = 60.0  # seconds without a sign of life after which a process counts as ill
STATES = ("waiting", "training", "stalled", "failing", "stopped", "killed", "failed", "finished")  # the first word
_LOCK = "run.lock"  # its process holds it, see `RunLock`
_STATUS = "status.json"  # in each party's credentials: what its process wrote last
_signs: dict[Path, float] = {}  # when this process gave its last sign of life, by credentials


def silence(credentials: Path) -> float:
    """Return the seconds since a party's process began (it locks its folder then), or wrote its status."""
    return time.time() - max(_changed(credentials / name) or 0.0 for name in (_STATUS, _LOCK))


def silence_here(credentials: Path) -> float:
    """Return the seconds since this process gave a sign of life, which it knows also where its disk is full."""
    return min(silence(credentials), time.monotonic() - _signs.get(credentials.absolute(), -math.inf))


def lives(credentials: Path) -> None:
    """Note a sign of life of this process, which works for a party."""
    _signs[credentials.absolute()] = time.monotonic()


def give_sign(credentials: Path) -> None:
    """Give a sign of life while the status does not change."""
    lives(credentials)
    with suppress(OSError):  # of a full disk, or one that is read alone
        lease.check()
        try:
            os.utime(credentials / _STATUS)
        except FileNotFoundError:
            lease.write(credentials / _STATUS, "{}", lasting=False)


def check_health(folder: Path) -> None:
    """Raise a `SettingError` where a party's process does not run, has given no sign of life for a minute, or fails.

    Args:
        folder: a party's credentials, or the run folder of a federation.
    """
    credentials = credentials_folder(folder)
    process = running_process(credentials)
    if process is None:
        killed = killed_process(credentials)
        gone = "" if killed is None else f": process {killed} was killed"
        raise SettingError(f"nothing is running with {credentials}{gone}")
    if (silent := silence(credentials)) > STALLED:
        raise SettingError(f"process {process} has given no sign of life for {silent:.0f} seconds: see its log")
    activity = (_written(credentials) or {}).get("activity") or {}
    if activity.get("state") in ("stalled", "failing"):
        raise SettingError(f"process {process} is {activity['state']} until {activity.get('ends')}")


def read_status(folder: Path) -> dict[str, Any]:
    """Return `status_values` for people: a time becomes how long ago it was."""
    values = status_values(folder)
    now = time.time()
    for row in (values, *values.get("sites", ())):
        for name in ("heard", "since"):
            if row.get(name) is not None:
                row[name] = f"{max(0.0, now - row[name]):.0f} s ago"
    return values


def status_values(folder: Path) -> dict[str, Any]:
    """Read the status of a party.

    Args:
        folder: a party's credentials, or the run folder of a federation.

    Returns:
        Its values by name, among them "state", since when it is so ("since") and what would end it ("ends").  The
        state is "waiting for" sites, the server, or an experiment of the queue; "training"; "stalled" (work is under
        way and does not move); "failing" (all of the last tasks failed); "stopped" (by Ctrl-C, SIGTERM or `piebald
        stop`), "killed", "failed" or "finished".  For the credentials of a server that takes experiments from a queue,
        this is the state of its process, else that of the run.

    Raises:
        SettingError: there is no status.
    """
    credentials = credentials_folder(folder)
    served = run_of(credentials)
    run = folder if (folder / "run.db").exists() else served
    written, process, killed = _written(credentials), None, None
    if run is None or served is None or run.resolve() == served.resolve():
        process, killed = running_process(credentials), killed_process(credentials)
    else:  # the server's process has gone on to another run, or this folder is a restored one
        written = {}
    process = process or (None if run is None else running_process(run))
    if written is None and process is None and killed is None:
        raise SettingError(f"nothing has run in {folder} yet: start piebald server or piebald client with it")
    # the run that the server has left says itself when it ended
    last_sign = _changed(credentials / _STATUS if written or run is None else run / "run.db")
    values = {"party": credentials.name, **(written or {})}
    recorded = values.pop("state", None)
    if run is not None:
        recorded, progress, absent = _recorded(run)
        values |= progress
        # sites are in the order of the clients' numbers
        values["sites"] = [
            {**row, "absent": absent.get(number, 0)} for number, row in enumerate(values.get("sites", ()))
        ]
    values.pop("over", None)
    values.pop("audit", None)
    activity = values.pop("activity", None) or {}
    status: dict[str, Any] = {name: values.pop(name) for name in ("federation", "party") if name in values}
    if process is not None and recorded != "finished":
        now = {"state": "stalled", "since": last_sign, "ends": "it gives a sign of life: see its log"}
        now = now if silence(credentials) > STALLED else activity
        status |= {"state": "training", **{name: value for name, value in now.items() if value is not None}}
    else:
        ended = recorded != "running" and (recorded is not None or killed is None)
        status["state"] = recorded or "stopped" if ended else "killed"
        status |= {"since": last_sign} if process is None else {}
    status["process"] = process
    queue = ExperimentQueue(credentials)
    if queue.folder.is_dir():
        begun = queue.next()
        status["queue"] = queue.summary(serves=process is not None) or "empty"
        if process is not None and recorded != "running":
            # an experiment that is being prepared has no run folder yet
            ends = f"piebald queue add {credentials} FILE" if begun is None else f"{begun.label} is prepared"
            times = [entry.ended for entry in queue.entries() if entry.over]
            times += [] if begun is None else [begun.added]
            since = [datetime.fromisoformat(at).timestamp() for at in times]
            since.append(_changed(credentials / _LOCK) or 0.0)  # when its process began
            status |= {"state": "waiting for an experiment", "since": max(since), "ends": ends}
        elif process is None and folder == credentials and (killed is not None or begun is not None):
            status["state"] = "stopped" if killed is None else "killed"
    if status["state"] in ("killed", "stopped", "failed") and process is None:
        if queue.next() is not None:
            status["again"] = f"piebald server {credentials}"
        elif run is not None:
            status["again"] = f"piebald resume {run}"
    if run is not None:
        status["folder"] = str(run)
    # what it knew of its sites is no news of theirs
    if process is None or status["state"] == "waiting for an experiment":
        values["sites"] = [{**row, "state": None} for row in values.get("sites", ())]
    return {name: value for name, value in (status | values).items() if name != "sites" or value}


def _changed(path: Path) -> float | None:
    """Return when a file was changed last, None where there is none."""
    return path.stat().st_mtime if path.exists() else None


def running_process(folder: Path) -> int | None:
    """Return the id of the process that uses credentials or writes a run folder, or None."""
    if fcntl is None:
        return None
    try:
        regular(folder / _LOCK)
        with (folder / _LOCK).open("r+") as file:
            try:
                # a lock ends with its process, however that dies; a number in a file may belong to another one by then
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                text = file.read(20).strip()
                return int(text) if text.isdecimal() else None
    except OSError:
        return None
    return None


def is_visible(process: int, folder: Path) -> bool:
    """Return whether a process of this number, as it is seen here, is the one that uses a folder.

    One in another container, or on another machine with the same disk, has a number there that is somebody else's here.
    """
    files = Path(f"/proc/{process}/fd")
    if not Path("/proc/self/fd").is_dir():  # a system without containers of its own
        return True
    try:
        lock = (folder / _LOCK).stat()
        opened = [file.stat() for file in files.iterdir() if file.exists()]
    except OSError:  # there is none, or it is another user's
        return False
    return any((one.st_dev, one.st_ino) == (lock.st_dev, lock.st_ino) for one in opened)


def killed_process(folder: Path) -> int | None:
    """Return the id of a process that was killed while it used credentials, None where one runs or has ended."""
    if fcntl is None or running_process(folder) is not None:
        return None
    try:
        text = read_text(folder / _LOCK, 100, "ascii").strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdecimal() else None


def server_credentials(run: Path) -> Path | None:
    """Return the server's credentials of a run, None where it was no federation."""
    if (run / "federation" / "server" / "credentials.json").exists():
        return run / "federation" / "server"
    from piebald.storage.store import RunStore

    if not (run / "run.db").exists():
        return None
    with RunStore.open_read_only(run) as store:
        runtime = store.meta.get("runtime") or {}
    return Path(runtime["credentials"]) if runtime.get("credentials") else None


def _recorded(run: Path) -> tuple[str | None, dict[str, int | None], dict[int, int]]:
    """Return the recorded state of a run, its server steps, made and to make, and of how many each client was absent.

    None and nothing where it cannot be read.
    """
    from piebald.storage.store import RunStore

    try:
        with RunStore.open_read_only(run) as store:
            absent = store.query(
                "SELECT client, count(DISTINCT version) AS steps FROM result WHERE status = 'absent' GROUP BY client"
            )
            progress = {"steps": store.version, "rounds": store.meta.get("rounds")}
            return str(store.meta.get("status")), progress, {row["client"]: row["steps"] for row in absent}
    except RunFolderError:
        return None, {}, {}


def was_started(credentials: Path) -> bool:
    """Return whether a process of this party has written its status, as each does after it began its audit log."""
    return bool(_written(credentials))


def written_head(credentials: Path) -> tuple[int, str] | None:
    """Return number and digest of the audit log's last line from the party's status; None where it has none."""
    try:
        line, digest = (_written(credentials) or {})["audit"]
        return int(line), str(digest)
    except (KeyError, ValueError, TypeError):
        return None


def _written(credentials: Path) -> dict[str, Any] | None:
    """Return the status that the party's process wrote last, None where there is none."""
    try:
        values = read_json(credentials / _STATUS)
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def run_of(credentials: Path) -> Path | None:
    """Return the run folder that a server's credentials name, None where there is none."""
    try:
        run = Path(read_json(credentials / RUN)["folder"])
    except (OSError, ValueError, KeyError, TypeError):
        run = credentials.parent.parent  # of a federation on this machine, whose credentials are in it
        if credentials.parent.name != "federation":
            return None
    return run if (run / "run.db").exists() else None


def credentials_folder(folder: Path) -> Path:
    """Return the folder of credentials: the given one, or the one that a run folder names."""
    if (folder / "credentials.json").exists():
        return folder
    credentials = server_credentials(folder)
    if credentials is None:
        raise SettingError(f"{str(folder)!r} holds no credentials and no run of a federation")
    return credentials
