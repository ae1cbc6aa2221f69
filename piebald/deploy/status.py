"""Status of a federation, from files that its processes keep up to date."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from piebald.errors import SettingError

try:
    import fcntl
except ImportError:  # Windows, where a process must be stopped by hand
    fcntl = None  # type: ignore[assignment]


def read_status(folder: Path) -> dict[str, Any]:
    """Read the status of a party.

    Args:
        folder: a party's credentials, or the run folder of a federation.

    Raises:
        SettingError: there is no status.
    """
    credentials = credentials_folder(folder)
    try:
        found: dict[str, Any] = json.loads((credentials / "status.json").read_text())
    except (OSError, ValueError):
        raise SettingError(f"nothing has run in {folder} yet: start piebald server or piebald client with it") from None
    found["process"] = running_process(folder)
    now = time.time()
    for row in (found, *found.get("sites", ())):
        if row.get("heard") is not None:
            row["heard"] = f"{max(0.0, now - row['heard']):.0f} s ago"
    return found


def running_process(folder: Path) -> int | None:
    """Id of the process that uses credentials or writes a run folder, or None."""
    if fcntl is None:
        return None
    try:
        with (folder / "run.lock").open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                text = file.read(20).strip()
                return int(text) if text.isdecimal() else None
    except OSError:
        return None
    return None


def credentials_folder(folder: Path) -> Path:
    """The folder of credentials: the given one, or the one that a run folder names."""
    if (folder / "credentials.json").exists():
        return folder
    if (folder / "federation" / "server" / "credentials.json").exists():
        return folder / "federation" / "server"
    if (folder / "run.db").exists():
        from piebald.report.store import RunStore

        with RunStore.open_read_only(folder) as store:
            runtime = store.meta.get("runtime") or {}
        if runtime.get("credentials"):
            return Path(runtime["credentials"])
    raise SettingError(f"{str(folder)!r} holds no credentials and no run of a federation")
