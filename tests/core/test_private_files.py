"""Files that only their owner reads, and that are there completely or not at all."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from piebald.core.private_files import clear_parts, replaced, write_private


def test_two_processes_may_write_one_file_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both parties of a transfer write the settings into one run folder: one took away the other's unfinished file."""
    path, replace = tmp_path / "settings.toml", os.replace

    def replace_after_another(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(os, "getpid", lambda: 1)
            write_private(path, "the other one's")
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_after_another)
    write_private(path, "mine")
    assert path.read_text() == "mine"
    assert [one.name for one in tmp_path.iterdir()] == ["settings.toml"]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    write_private(path, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_private(path, "new")
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["key"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_name_of_a_new_file_survives_a_power_failure_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a ledger of a privacy budget could come back as it was before the last question."""
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        events.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def renamed(source: Path, target: Path) -> None:
        events.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    write_private(tmp_path / "ledger", "1")
    assert events == ["file", "rename", "folder"]
    events.clear()
    write_private(tmp_path / "status", "1", lasting=False)
    assert events == ["rename"]


def test_what_killed_processes_had_begun_to_write_is_deleted(tmp_path: Path) -> None:
    """Before, each kill at the wrong moment left a file, as large as a site's result, for ever."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / "state").mkdir()
    names = ["status.json", "notes.part", f"key.{os.getppid()}.part"]  # the last one is being written
    left = [f"status.json.{ended.pid}.part", f"state/done-3.safetensors.{ended.pid}.part", f"key.{os.getpid()}.part"]
    for name in (*names, *left):
        (tmp_path / name).touch()
    clear_parts(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {*names}


def test_two_threads_may_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the second one took the first one's unfinished file away, and the first one failed."""
    path, flush, others = tmp_path / "status.json", os.fsync, ["second"]

    def interrupted(handle: int) -> None:
        if others:  # the first thread is before its end, and the other one writes the whole file
            other = threading.Thread(target=write_private, args=(path, others.pop()))
            other.start()
            other.join()
            assert path.read_text() == "second"
        flush(handle)

    monkeypatch.setattr(os, "fsync", interrupted)
    write_private(path, "first")
    assert path.read_text() == "first"
    assert [one.name for one in tmp_path.iterdir()] == ["status.json"]


def test_a_file_that_breaks_off_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("before")
    with pytest.raises(OSError, match="disk"), replaced(path) as part:  # noqa: PT012 - it breaks off while writing
        part.write_text("half of")
        assert path.read_text() == "before"
        raise OSError("the disk is full")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(path.name, "before")]
    with replaced(path) as part:
        part.write_text("after")
    assert path.read_text() == "after"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
