"""Status of a federation, from files that its processes keep up to date.

What runs is decided by locks, which the system releases when a process dies.  How a run ended is in its record: one
that is recorded as running and that nobody writes was killed.  So was a process that has left its number in the file of
its lock (`RunLock`).
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from piebald.core.errors import RunFolderError, SettingError
from piebald.core.reading.files import read_json, read_text, regular
from piebald.federation.operate.experiment_queue import ExperimentQueue

try:
    import fcntl
except ImportError:  # Windows, where a process must be stopped by hand
    fcntl = None  # type: ignore[assignment]

RUN = "run.json"  # in the server's credentials: the run folder that it writes
STALLED = 60.0  # seconds without a sign of life after which a process counts as ill
_STATUS = "status.json"  # in each party's credentials: what its process wrote last


def signs_of_life(credentials: Path, since: float = 0.0) -> float:
    """Seconds since a party's process gave its last sign of life, by writing its status.

    Args:
        credentials: the party's.
        since: when it began, in seconds since the epoch, which counts as a sign.
    """
    try:
        last = (credentials / _STATUS).stat().st_mtime
    except OSError:
        last = since
    return time.time() - max(last, since)


def give_sign(credentials: Path) -> None:
    """Give a sign of life where nothing has changed that the status tells."""
    try:
        os.utime(credentials / _STATUS)
    except FileNotFoundError:
        from piebald.core.private_files import write_private

        write_private(credentials / _STATUS, "{}", lasting=False)


def check_health(folder: Path) -> None:
    """Raise a `SettingError` where a party's process does not run, or has given no sign of life for a minute.

    Args:
        folder: a party's credentials, or the run folder of a federation.
    """
    credentials = credentials_folder(folder)
    process = running_process(credentials)
    if process is None:
        killed = killed_process(credentials)
        gone = "" if killed is None else f": process {killed} was killed"
        raise SettingError(f"nothing is running with {credentials}{gone}")
    if (silent := signs_of_life(credentials)) > STALLED:
        raise SettingError(f"process {process} has given no sign of life for {silent:.0f} seconds: see its log")


def read_status(folder: Path) -> dict[str, Any]:
    """The same as `status_values`, for people: a time is how long ago it was."""
    found = status_values(folder)
    now = time.time()
    for row in (found, *found.get("sites", ())):
        for name in ("last_sign", "heard"):
            if row.get(name) is not None:
                row[name] = f"{max(0.0, now - row[name]):.0f} s ago"
    return found


def status_values(folder: Path) -> dict[str, Any]:
    """Read the status of a party.

    Args:
        folder: a party's credentials, or the run folder of a federation.

    Returns:
        Its values by name, "state" among them: "running", "stopped" (by Ctrl-C, SIGTERM or `piebald stop`), "killed",
        "failed", "finished", or "waiting" for an experiment of the queue.  For the credentials of a server that takes
        experiments from a queue, this is the state of its process, else that of the run.

    Raises:
        SettingError: there is no status.
    """
    credentials = credentials_folder(folder)
    served = run_of(credentials)
    run = folder if (folder / "run.db").exists() else served
    found, process, killed = _written(credentials), None, None
    if run is None or served is None or run.resolve() == served.resolve():
        process, killed = running_process(credentials), killed_process(credentials)
    else:  # the server's process has gone on to another run, or this folder is a restored one
        found = {}
    process = process or (None if run is None else running_process(run))
    if found is None and process is None and killed is None:
        raise SettingError(f"nothing has run in {folder} yet: start piebald server or piebald client with it")
    found = {"party": credentials.name, **(found or {})}
    recorded = found.pop("state", None)
    if run is not None:
        recorded, steps = _recorded(run)
        found |= {} if steps is None else {"steps": steps}
    found.pop("over", None)
    found.pop("audit", None)
    about = {"party": found.pop("party"), "state": _state(recorded, process, killed), "process": process}
    queue = ExperimentQueue(credentials)
    if queue.folder.is_dir():
        about["queue"] = queue.summary(serves=process is not None) or "empty"
        if process is not None and recorded != "running":
            about["state"] = "waiting"  # for an experiment
        elif process is None and folder == credentials and (killed is not None or queue.next() is not None):
            about["state"] = "stopped" if killed is None else "killed"
    if about["state"] in ("killed", "stopped"):
        about |= _gone(credentials, run, queue)
    if run is not None:
        about["folder"] = str(run)
    if process is None or about["state"] == "waiting":  # what it knew of its sites is no news of theirs
        found["sites"] = [{**row, "state": None} for row in found.get("sites", ())]
    return {name: value for name, value in (about | found).items() if name != "sites" or value}


def _gone(credentials: Path, run: Path | None, queue: ExperimentQueue) -> dict[str, Any]:
    """When a party that is gone gave its last sign of life, and the command with which a server goes on."""
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        found["last_sign"] = (credentials / _STATUS).stat().st_mtime
    if queue.folder.is_dir() and queue.next() is not None:
        found["again"] = f"piebald server {credentials}"
    elif run is not None:
        found["again"] = f"piebald resume {run}"
    return found


def running_process(folder: Path) -> int | None:
    """Id of the process that uses credentials or writes a run folder, or None."""
    if fcntl is None:
        return None
    try:
        regular(folder / "run.lock")
        with (folder / "run.lock").open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                text = file.read(20).strip()
                return int(text) if text.isdecimal() else None
    except OSError:
        return None
    return None


def killed_process(folder: Path) -> int | None:
    """Id of the process that was killed while it used credentials, None where one runs or the last one has ended."""
    if fcntl is None or running_process(folder) is not None:
        return None
    try:
        left = read_text(folder / "run.lock", 100, "ascii").strip()
    except (OSError, ValueError):
        return None
    return int(left) if left.isdecimal() else None


def server_credentials(run: Path) -> Path | None:
    """The server's credentials of a run, None where it was no federation."""
    if (run / "federation" / "server" / "credentials.json").exists():
        return run / "federation" / "server"
    from piebald.storage.store import RunStore

    if not (run / "run.db").exists():
        return None
    with RunStore.open_read_only(run) as store:
        runtime = store.meta.get("runtime") or {}
    return Path(runtime["credentials"]) if runtime.get("credentials") else None


def _state(recorded: str | None, process: int | None, killed: int | None) -> str:
    """What a party does, from the record of its run, the process that holds the lock, and the one that was killed."""
    if recorded == "finished":
        return recorded
    if process is not None:
        return "running"
    if recorded == "running" or (recorded is None and killed is not None):
        return "killed"
    return recorded or "stopped"


def _recorded(run: Path) -> tuple[str | None, int | None]:
    """How the run is recorded to have ended, and its server steps; None where it cannot be read."""
    from piebald.storage.store import RunStore

    try:
        with RunStore.open_read_only(run) as store:
            return str(store.meta.get("status")), store.version
    except RunFolderError:
        return None, None


def was_started(credentials: Path) -> bool:
    """Whether a process of this party has written its status, as it does after it began its audit log."""
    return bool(_written(credentials))


def written_head(credentials: Path) -> tuple[int, str] | None:
    """Number and digest of the last line of the audit log, as the party's status has them; None where it has none."""
    try:
        line, digest = (_written(credentials) or {})["audit"]
        return int(line), str(digest)
    except (KeyError, ValueError, TypeError):
        return None


def _written(credentials: Path) -> dict[str, Any] | None:
    """What the party's process wrote last, None where none has."""
    try:
        found = read_json(credentials / _STATUS)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def run_of(credentials: Path) -> Path | None:
    """The run folder that a server's credentials name, None where there is none."""
    try:
        run = Path(read_json(credentials / RUN)["folder"])
    except (OSError, ValueError, KeyError, TypeError):
        run = credentials.parent.parent  # of a federation on this machine, whose credentials are in it
        if credentials.parent.name != "federation":
            return None
    return run if (run / "run.db").exists() else None


def credentials_folder(folder: Path) -> Path:
    """The folder of credentials: the given one, or the one that a run folder names."""
    if (folder / "credentials.json").exists():
        return folder
    found = server_credentials(folder)
    if found is None:
        raise SettingError(f"{str(folder)!r} holds no credentials and no run of a federation")
    return found
