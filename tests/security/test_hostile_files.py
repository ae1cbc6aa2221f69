"""Files of attackers and of broken disks: links, bombs, damage, full disks, media that cannot be written."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import sqlite3
import struct
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import piebald
from piebald import data, models, partition, recipes
from piebald.cli import main
from piebald.core.errors import RunFolderError
from piebald.data.clients.data_source import RunRows
from piebald.federation.site.site_rows import SiteSource, own_rows
from piebald.runs.adaptation import from_file
from piebald.storage import lock, schema, tensor_files
from piebald.storage.store import RunStore
from tests import processes
from tests.security.fuzzers import fuzzer

HERE = {"kind": "simulator", "workers": 0, "engine": "sequential", "stack": 1}


def federation() -> Any:
    return partition.Iid(clients=3, limit=60).split(data.digits())


def model() -> Any:
    return models.build_model("logistic", (1, 8, 8), 10)


def ran(out: Path, rounds: int = 4) -> piebald.Run:
    return piebald.run(
        recipes.scaffold(), federation(), model(), rounds=rounds, out=out, runtime=HERE, checkpoint_every=1
    )


def interrupted(out: Path, monkeypatch: pytest.MonkeyPatch, after: int = 3) -> None:
    """A run that was stopped after some steps."""
    commit = RunStore.commit

    def stop(self: RunStore, step: Any, *rest: Any, **more: Any) -> None:
        commit(self, step, *rest, **more)
        if step["version"] == after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "commit", stop)
        with pytest.raises(KeyboardInterrupt):
            ran(out, rounds=6)


# ------------------------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("name", ["run.lock", "run.db", "run.db-wal", "vectors-9.safetensors"])
@pytest.mark.parametrize("how", ["symbolic", "hard"])
def test_a_link_in_a_run_folder_is_not_written_through(tmp_path: Path, name: str, how: str, monkeypatch: Any) -> None:
    """Before, resume wrote its process number into the target of run.lock."""
    interrupted(tmp_path / "run", monkeypatch)
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "run" / name).unlink(missing_ok=True)
    link = os.symlink if how == "symbolic" else os.link
    link(precious, tmp_path / "run" / name)
    with pytest.raises(piebald.RunFolderError) as caught:
        piebald.resume(tmp_path / "run", federation(), model())
    assert "\n" not in str(caught.value)
    assert precious.read_text() == "mine"


def test_a_link_in_place_of_an_unfinished_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "x.safetensors.part").symlink_to(tmp_path / "precious")
    tensor_files.write(tmp_path, "x.safetensors", {})
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "x.safetensors").is_symlink()


def test_what_is_no_file_is_not_locked(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.lock")
    with pytest.raises(piebald.RunFolderError, match="is no file"):
        lock.RunLock(tmp_path)


# ------------------------------------------------------------------------------------------------------------ damage


def damage(folder: Path, how: str) -> None:
    newest = folder / "vectors-3.safetensors"
    if how == "a flipped bit":
        raw = bytearray(newest.read_bytes())
        raw[len(raw) // 2] ^= 1
        newest.write_bytes(raw)
    elif how == "nothing left":
        newest.write_bytes(b"")
    elif how == "terabytes claimed":
        newest.write_bytes(struct.pack("<Q", 1 << 50) + b"{}")
    else:
        values = {"values that are no JSON": "{", "values of another run": "{}"}[how]
        with closing(sqlite3.connect(folder / "run.db")) as db, db:
            db.execute("UPDATE checkpoint SET values_json = ? WHERE version = 3", (values,))
        db.close()


@pytest.mark.parametrize(
    "how",
    ["a flipped bit", "nothing left", "terabytes claimed", "values that are no JSON", "values of another run"],
)
def test_a_damaged_checkpoint_does_not_hide_the_older_one(
    tmp_path: Path, how: str, monkeypatch: Any, caplog: Any
) -> None:
    """Before, damaged values ended in a JSONDecodeError or a KeyError."""
    whole = ran(tmp_path / "whole", rounds=6)
    interrupted(tmp_path / "run", monkeypatch)
    damage(tmp_path / "run", how)
    again = piebald.resume(tmp_path / "run", federation(), model())
    assert "server step 3 was skipped" in caplog.text
    assert again.start().equal(whole.start())


# --------------------------------------------------------------------------------------------------------- full disks


@contextmanager
def failing(patch: pytest.MonkeyPatch, at: int) -> Iterator[list[str]]:
    """Writes of a run's start, of which one fails as on a full disk."""
    calls: list[str] = []

    def wrapped(name: str, real: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            calls.append(name)
            if len(calls) == at:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **more)

        return call

    with patch.context() as now:
        for owner, name in (
            (schema, "make"),
            (schema, "insert"),
            (schema, "connect"),
            (schema, "end"),
            (os, "replace"),
        ):
            now.setattr(owner, name, wrapped(name, getattr(owner, name)))
        yield calls


@pytest.mark.parametrize("at", range(1, 12))
def test_a_full_disk_leaves_a_folder_that_can_be_used(tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a folder was left that `run` refused as holding a run, and `resume` as being none."""
    out = tmp_path / "new" / "run"
    with failing(monkeypatch, at), pytest.raises(piebald.RunFolderError, match="the disk is full"):
        ran(out)
    if (out / "run.db").exists():
        assert piebald.resume(out, federation(), model()).rounds[-1]["version"] == 4
    else:
        assert not (tmp_path / "new").exists()
        assert ran(out).rounds[-1]["version"] == 4
    with RunStore.open_read_only(out) as store:
        assert len(store.rows("client")) == 3


# ------------------------------------------------------------------------------------------------------ reading alone


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A finished run in a folder that this process may not write."""
    ran(tmp_path / "run").close()
    (tmp_path / "run" / "run.lock").unlink()
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.getuid() and path != Path("/") and os.access(path, os.W_OK):
            path.chmod(path.stat().st_mode | 0o055)
    for path in (tmp_path / "run").iterdir():
        path.chmod(0o444)
    (tmp_path / "run").chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    yield tmp_path / "run"
    if root:
        os.seteuid(0)
    (tmp_path / "run").chmod(0o755)


def test_a_finished_run_on_read_only_media_can_be_reported(read_only: Path) -> None:
    """Before, SQLite could not open the database where it could not make its files beside it."""
    before = sorted(read_only.iterdir())
    with RunStore.open_read_only(read_only) as store:
        assert store.meta["status"] == "finished"
        assert len(store.rows("step")) == 4
    from piebald.report.tables import load

    [history] = load([read_only])
    assert history.final["rounds"] == 4
    history.close()
    assert sorted(read_only.iterdir()) == before


def test_a_finished_run_on_read_only_media_is_returned_by_resume(read_only: Path) -> None:
    """Before, it was opened for writing, and refused."""
    before = sorted(read_only.iterdir())
    run = piebald.resume(read_only, federation(), model())
    assert run.final["rounds"] == 4
    assert {name for name, _ in run.model().named_parameters()} == {name for name, _ in model().named_parameters()}
    assert run.model(1) is not None
    run.close()
    assert sorted(read_only.iterdir()) == before


STRANGE = [
    ("UPDATE step SET loss = 'x'", "the column loss of step holds a value of another type"),
    ("UPDATE result SET client = 0.5", "the column client of result holds a value of another type"),
    ("UPDATE client SET name = x'ff00'", "the column name of client holds a value of another type"),
    ("UPDATE meta SET value = '[' || value WHERE key = 'settings'", "the value of settings is no JSON value"),
    (f"UPDATE meta SET value = '{'9' * 5000}' WHERE key = 'seed'", "the value of seed is no JSON value"),
    (f"UPDATE meta SET value = '{'[' * 100_000}' WHERE key = 'label'", "the value of label is no JSON value"),
    ("UPDATE client SET counts = '{'", "a value of client is no JSON value"),
    ("UPDATE meta SET value = '-1' WHERE key = 'privacy'", "the value of privacy in its table meta is -1, and no run"),
    ("UPDATE meta SET value = '[1]' WHERE key = 'layout'", "the value of layout in its table meta is"),
    ("UPDATE meta SET value = 'true' WHERE key = 'seed'", "the value of seed in its table meta is True, and no run"),
    (
        "UPDATE meta SET value = '\"x\"' WHERE key = 'recipe'",
        "the value of recipe in its table meta is 'x', and no run",
    ),
]


def read_all(folder: Path) -> None:
    with RunStore.open_read_only(folder) as store:
        assert store.meta
        for table in schema.TABLES:
            store.rows(table)


def test_strange_values_in_a_database_are_one_sentence(tmp_path: Path) -> None:
    """Before, numbers of 5,000 digits, deep nests and text in place of numbers were raw errors."""
    ran(tmp_path / "run", rounds=1).close()
    whole = (tmp_path / "run" / "run.db").read_bytes()
    for change, says in STRANGE:
        for extra in ("-wal", "-shm"):
            (tmp_path / "run" / f"run.db{extra}").unlink(missing_ok=True)
        (tmp_path / "run" / "run.db").write_bytes(whole)
        with closing(sqlite3.connect(tmp_path / "run" / "run.db")) as db, db:
            db.execute(change)
        db.close()
        with pytest.raises(RunFolderError, match=says) as caught:
            read_all(tmp_path / "run")
        assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------------- bombs


def npz(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, raw in members.items():
            archive.writestr(f"{name}.npy", raw)
    return path


def array(value: Any, **more: Any) -> bytes:
    raw = io.BytesIO()
    np.save(raw, value, **more)
    return raw.getvalue()


def header(shape: tuple[int, ...]) -> bytes:
    raw = io.BytesIO()
    np.lib.format.write_array_header_1_0(raw, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return raw.getvalue()


META = {"classes": ["a", "b"], "settings": {"data": {"name": "digits"}}}


@pytest.mark.parametrize(
    "members",
    [
        pytest.param(
            {"x": array(np.zeros((1 << 18, 256), np.float64)), "y": array(np.zeros(3, np.int64))},
            marks=pytest.mark.full,
        ),
        {"x": header((1 << 40, 1 << 20)), "y": array(np.zeros(3))},
        {"x": header((-1, 5)), "y": array(np.zeros(3))},
        {"x": array(np.array([object()]), allow_pickle=True), "y": array(np.zeros(3))},
        {"x": b"", "y": b""},
        {"x": b"\x93NUMPY\x09\x00" + bytes(100), "y": b""},
        {"z": b""},
    ],
    ids=["zeros", "terabytes", "negative", "objects", "empty", "version", "others"],
)
def test_an_npz_bomb_is_refused(tmp_path: Path, members: dict[str, bytes]) -> None:
    """Before, a shape of 2**60 ended in a MemoryError, and zeros filled the memory."""
    with pytest.raises(piebald.SettingError) as caught:
        from_file(str(npz(tmp_path / "rows.npz", members)), None, META)
    assert str(caught.value).isprintable()
    assert "rows.npz" in str(caught.value)


@pytest.mark.full
def test_a_png_bomb_is_refused(tmp_path: Path) -> None:
    """Before, a DecompressionBombError came through."""
    folder = tmp_path / "images" / "class"
    folder.mkdir(parents=True)
    Image.new("1", (20_000, 20_000)).save(folder / "a.png")
    with pytest.raises(piebald.SettingError, match=r"a\.png cannot be read as an image"):
        data.image_folder(tmp_path / "images")
    raw = bytearray((folder / "a.png").read_bytes())
    raw[16:24] = struct.pack(">II", 2**31 - 1, 2**31 - 1)
    (folder / "a.png").write_bytes(raw)
    with pytest.raises(piebald.SettingError, match=r"a\.png"):
        data.image_folder(tmp_path / "images")


def test_a_table_of_absurd_width_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(",".join(f"c{number}" for number in range(150_000)) + "\n")
    with pytest.raises(piebald.SettingError, match="more than 100,000 columns"):
        piebald.clients_from(tmp_path / "t.csv", client="c0", target="c1")


@pytest.mark.parametrize(
    "source",
    ["raise ValueError('no\\nrows')", "import sys; sys.exit(3)", "def load():\n  raise SystemExit(3)", "def load(:"],
)
def test_the_sites_own_code_that_fails_is_one_sentence(tmp_path: Path, source: str) -> None:
    """Before, it ended the site's process with its own exit code or a traceback."""
    (tmp_path / "my_data.py").write_text(source)
    with pytest.raises(piebald.SettingError, match=r"my_data\.py") as caught:
        own_rows(SiteSource(source="my_data.py:load"), tmp_path, "a", RunRows(), ["a"])
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------------ signals


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_sigterm_is_a_clean_stop(tmp_path: Path, workers: int) -> None:
    """Before, it killed a simulation at once: exit code -15, and a run that seemed to be running."""
    kills = fuzzer("kills")
    (tmp_path / "e.toml").write_text(kills.FILE.format(workers=workers).replace("rounds = 30", "rounds = 100000"))
    words = processes.command("run", "e.toml", "--out", "run", "--quiet")
    process = processes.Popen(
        words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True, env=os.environ
    )
    kills.begun(tmp_path / "run", process, 2)
    os.killpg(process.pid, signal.SIGTERM) if workers else process.terminate()
    errors = process.communicate()[1]
    assert process.returncode == 130, errors
    assert "continue with: piebald resume run" in errors
    assert "Traceback" not in errors
    with RunStore.open_read_only(tmp_path / "run") as store:
        assert store.meta["status"] == "stopped"
        assert store.version >= 2


@pytest.mark.long
@pytest.mark.full
def test_kills_at_random_moments_do_not_change_the_result() -> None:
    for row in fuzzer("kills").run(6, seed=1):
        assert row.good, row.examples


def test_an_unknown_command_file_is_refused_with_code_2(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "e.toml").write_bytes(json.dumps({"a": 1}).encode())
    assert main(["run", str(tmp_path / "e.toml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# ----------------------------------------------------------------------------------------------------------- searches


@pytest.mark.parametrize(
    ("what", "says"),
    [("garbage", "cannot be read"), ("a pipe", "is no file"), ("a link", "is a link"), ("open", "written")],
)
def test_a_search_does_not_use_a_strange_record(what: str, says: str, tmp_path: Path) -> None:
    """Before, it ended in an error of the database, wrote through a link, and two searches shared one folder."""
    from piebald.advice.tuning.trial_runs import TRIALS, Record

    (precious := tmp_path / "precious").write_bytes(b"mine")
    (folder := tmp_path / "search").mkdir()
    with contextlib.ExitStack() as stack:
        if what == "garbage":
            (folder / TRIALS).write_bytes(b"garbage" * 999)
        elif what == "a pipe":
            os.mkfifo(folder / TRIALS)
        elif what == "a link":
            (folder / TRIALS).symlink_to(precious)
        else:
            stack.enter_context(contextlib.closing(Record(folder)))
        with pytest.raises(piebald.RunFolderError, match=says) as caught:
            Record(folder)
    assert "\n" not in str(caught.value)
    assert precious.read_bytes() == b"mine"
