"""How a federation stands, from the files that its processes keep up to date."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from piebald.errors import SettingError

try:
    import fcntl
except ImportError:  # Windows: a process there is stopped by hand
    fcntl = None  # type: ignore[assignment]


def look(folder: Path) -> dict[str, Any]:
    """How a run or a credentials's party stands.

    Raises:
        SettingError: there is nothing to see.
    """
    credentials = _kit(folder)
    try:
        found: dict[str, Any] = json.loads((credentials / "status.json").read_text())
    except (OSError, ValueError):
        raise SettingError(f"nothing has run in {folder} yet: start piebald server or piebald client with it") from None
    found["process"] = holder(folder)
    now = time.time()
    for row in (found, *found.get("sites", ())):
        if row.get("heard") is not None:
            row["heard"] = f"{max(0.0, now - row['heard']):.0f} s ago"
    return found


def holder(folder: Path) -> int | None:
    """The process that runs with a credentials or writes a run, None where none does."""
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


def _kit(folder: Path) -> Path:
    """The credentials that is meant; a run's folder names the one it was run with."""
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
    raise SettingError(f"{str(folder)!r} is no credentials and no run of a federation")
