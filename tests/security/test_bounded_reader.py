"""Files that wait, never end, expand, start programs or open others: each is one sentence, and takes little memory.

Before, `piebald report`, `resume` and `export` waited for ever on a pipe, a Parquet file of 42 kB was read up to
41.9 GB, a .png that is PostScript started Ghostscript, and a view of `run.db` was computed without end.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import random
import resource
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import piebald
from piebald import data, models, partition
from piebald.cli import main
from piebald.core import files, reading
from piebald.core.errors import PiebaldError, RunFolderError, SettingError
from piebald.data import embeddings
from piebald.data.clients.client_tables import read_table
from piebald.data.sets import folders
from piebald.data.sets.dataset import decode
from piebald.data.sets.formats import read_idx, read_members, read_zip
from piebald.federation.credentials import provisioning
from piebald.federation.operate.experiment_queue import ExperimentQueue
from piebald.federation.site.site_process import SiteSettings
from piebald.report import export
from piebald.settings.toml_document import Document, check_length, value_of
from piebald.storage import backup, schema
from piebald.storage.store import RunStore
from tests.federation.conftest import provisioned

SMALL = 64 << 20  # bytes of memory that the machine of these tests is said to have
COMMANDS = {
    "report": lambda run, out: ["report", str(run), "--out", str(out / "report")],
    "resume": lambda run, out: ["resume", str(run)],
    "export": lambda run, out: ["export", str(run), "--out", str(out / "model.safetensors")],
    "backup": lambda run, out: ["backup", str(run), str(out / "backup.tar")],
}


class Stuck(BaseException):
    """What did not end; no error that anybody explains."""


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    """What waits for ever is interrupted, and fails."""

    def stop(*_: object) -> None:
        raise Stuck

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(200)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "memory", lambda: 2 * SMALL)
    monkeypatch.setattr(files, "SMALL", 1 << 20)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    clients = partition.Iid(clients=3, limit=60).split(data.digits())
    model = models.build_model("logistic", (1, 8, 8), 10)
    piebald.run("scaffold", clients, model, rounds=2, out=folder, runtime={"kind": "simulator", "workers": 0}).close()
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def refused(call: Callable[[], Any], says: str = ".", kind: type[PiebaldError] = PiebaldError) -> str:
    with pytest.raises(kind, match=says) as caught:
        call()
    assert str(caught.value).isprintable()
    return str(caught.value)


def put(kind: str, path: Path) -> None:
    """Something in the place of a file."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to /dev/zero":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        here = os.open(".", os.O_RDONLY)
        os.chdir(path.parent)  # the path of a socket is short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
        os.fchdir(here)
        os.close(here)


KINDS = ["pipe", "link to /dev/zero", "directory", "socket"]


# -------------------------------------------------------------------------------------------------- what is no file


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["run.db", "run.db-wal", "run.db-journal", "vectors-2.safetensors"])
def test_what_is_no_file_in_a_run_folder_is_refused(
    run: Path, kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(kind, run / name)
    for words in COMMANDS.values():
        assert main(words(run, tmp_path)) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert name in told


@pytest.mark.parametrize("name", ["/dev/zero", "../elsewhere", ".", ""])
def test_a_database_names_no_file_elsewhere(run: Path, name: str, tmp_path: Path) -> None:
    shutil.copy(run / "vectors-2.safetensors", tmp_path / "elsewhere")
    with closing(sqlite3.connect(run / "run.db")) as db, db:
        db.execute("UPDATE checkpoint SET file = ?", (name,))
    with RunStore.open_read_only(run) as store:
        refused(store.last_checkpoint, "names the file|cannot be read", RunFolderError)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_nowhere_read(kind: str, tmp_path: Path) -> None:
    for name in ("t.csv", "t.csv.gz", "t.parquet", "t.npz", "w.safetensors", "w.pt", "e.toml", "idx", "idx.gz"):
        put(kind, tmp_path / name)
    put(kind, tmp_path / "site.toml")
    (tmp_path / "images" / "a").mkdir(parents=True)
    module = models.build_model("logistic", (4,), 2)
    for call in (
        lambda: read_table(tmp_path / "t.csv"),
        lambda: read_table(tmp_path / "t.csv.gz"),
        lambda: read_table(tmp_path / "t.parquet"),
        lambda: reading.read_arrays(tmp_path / "t.npz"),
        lambda: read_idx(tmp_path / "idx"),
        lambda: read_idx(tmp_path / "idx.gz"),
        lambda: export.load_weights(module, tmp_path / "w.safetensors"),
        lambda: export.load_weights(module, tmp_path / "w.pt"),
    ):
        refused(call)
    assert main(["run", str(tmp_path / "e.toml")]) == 2
    assert main(["provision", str(tmp_path / "e.toml"), "--out", str(tmp_path / "out")]) == 2
    refused(lambda: SiteSettings.load(tmp_path / "site.toml"), "site.toml cannot be read: it is", SettingError)


def test_what_is_no_file_is_one_sentence_wherever_it_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that has no words of its own for it names it all the same."""
    put("pipe", tmp_path / "odd")
    monkeypatch.setattr("piebald.cli.app.check_run", lambda _: files.read_bytes(tmp_path / "odd"))
    assert main(["resume", "run"]) == 2
    assert capsys.readouterr().err == f"{tmp_path / 'odd'}: it is a pipe, and only files are read\n"


def test_a_policy_that_cannot_be_read_is_not_the_default_one(tmp_path: Path) -> None:
    for target in ("site.toml", "nowhere"):
        (tmp_path / "site.toml").unlink(missing_ok=True)
        (tmp_path / "site.toml").symlink_to(target)
        refused(lambda: SiteSettings.load(tmp_path / "site.toml"), "site.toml cannot be read", SettingError)


@pytest.mark.parametrize("name", ["credentials.json", "certificate.pem", "key.pem"])
def test_credentials_are_files(name: str, tmp_path: Path) -> None:
    folder = provisioned(tmp_path, ["north"]) / "north"
    put("pipe", folder / name)
    (folder / name).chmod(0o600)
    refused(lambda: provisioning.read(folder), kind=SettingError)


def test_entries_of_a_queue_are_short_and_shallow_files(tmp_path: Path) -> None:
    queue = ExperimentQueue(tmp_path)
    queue.add("a", "rounds = 1", tmp_path / "run", tmp_path)
    entry = queue.folder / "0001.json"
    for content in (b"[" * 100_000, b" " * (files.MOST_TEXT + 1), b"9" * 10_000):
        entry.write_bytes(content)
        refused(queue.entries, "0001.json", SettingError)
    put("pipe", entry)
    refused(queue.entries, "0001.json", SettingError)


def test_a_link_that_the_user_names_is_followed_and_its_run_checked_alike(run: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(run)
    with RunStore.open_read_only(tmp_path / "latest") as store:
        assert store.version == 2
    put("pipe", run / "run.db-wal")
    refused(lambda: RunStore.open_read_only(tmp_path / "latest"), "is no file", RunFolderError)


# ------------------------------------------------------------------------------------------------------- databases


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n"
FOREIGN = {
    "view": [
        "ALTER TABLE step RENAME TO was",
        f"CREATE VIEW step AS {ENDLESS.replace('SELECT x FROM', 'SELECT x AS version, 0.0 AS wall FROM')}",
    ],
    "trigger": ["CREATE TRIGGER t AFTER INSERT ON meta BEGIN DELETE FROM result; END"],
    "virtual table": ["CREATE VIRTUAL TABLE v USING fts5(x)"],
    "generated column": [
        "DROP TABLE measure",
        "CREATE TABLE measure (client INTEGER, name TEXT, value REAL AS (length(zeroblob(900000000))))",
    ],
    "check": ["DROP TABLE measure", "CREATE TABLE measure (client INTEGER CHECK (length(zeroblob(900000000)) > 1))"],
    "default": ["DROP TABLE measure", "CREATE TABLE measure (client INTEGER DEFAULT (randomblob(900000000)))"],
    "index of an expression": ["CREATE INDEX i ON meta (length(value || zeroblob(900000000)))"],
    "partial index": ["CREATE INDEX i ON meta (key) WHERE length(zeroblob(900000000)) > 1"],
}


@pytest.mark.parametrize("part", FOREIGN)
def test_nothing_of_a_strangers_database_is_computed(
    run: Path, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(sqlite3.connect(run / "run.db", isolation_level=None)) as db:
        db.execute("PRAGMA writable_schema = ON")  # as somebody does who means harm
        for statement in FOREIGN[part]:
            db.execute(statement) if "CREATE INDEX" not in statement else _planted(db, statement)
    for words in COMMANDS.values():
        assert main(words(run, tmp_path)) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert "which is never used" in told or "damaged" in told or "malformed" in told


def _planted(db: sqlite3.Connection, statement: str) -> None:
    """An index whose expression was never computed, in the schema alone."""
    db.execute("CREATE INDEX i ON meta (key)")
    db.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'i'", (statement,))


def test_no_query_of_a_database_runs_for_ever(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_TICK", 1000)
    with RunStore.open_read_only(run) as store:
        refused(lambda: store.query(ENDLESS), "does not end", RunFolderError)
        assert store.rows("step")  # each query counts by itself
        refused(lambda: store.query("ATTACH 'x' AS y"), "too many attached", RunFolderError)


def test_a_value_that_no_run_writes_is_refused_by_its_length(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(sqlite3.connect(run / "run.db")) as db, db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'label'", (json.dumps("x" * (3 << 20)),))
    with RunStore.open_read_only(run) as store:
        assert len(store.meta["label"]) == 3 << 20
    limits = {**reading._LIMITS, sqlite3.SQLITE_LIMIT_LENGTH: 1 << 20}
    monkeypatch.setattr(reading, "_LIMITS", limits)
    with RunStore.open_read_only(run) as store:
        refused(lambda: store.meta, "a value in the database has more than", RunFolderError)


def test_a_value_that_fills_the_memory_once_it_is_decoded_is_refused(run: Path, little_memory: None) -> None:
    with closing(sqlite3.connect(run / "run.db")) as db, db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'label'", ("[" + "[]," * (1 << 20) + "0]",))
    with RunStore.open_read_only(run) as store:
        refused(lambda: store.meta, "would take", RunFolderError)


def test_damaged_pages_end_in_one_sentence(run: Path) -> None:
    rng, whole = random.Random(0), (run / "run.db").read_bytes()
    for number in range(60):
        raw = bytearray(whole)
        for _ in range(rng.choice([1, 20, 400])):
            raw[rng.randrange(100 if number % 3 else 16, len(raw))] = rng.randrange(256)
        for suffix in ("-wal", "-shm"):
            (run / f"run.db{suffix}").unlink(missing_ok=True)
        (run / "run.db").write_bytes(raw)
        with suppress(RunFolderError), RunStore.open_read_only(run) as store:
            assert store.meta is not None
            for table in schema.TABLES:
                store.rows(table)
            store.last_checkpoint()


def test_a_backup_is_read_with_the_same_limits(run: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(run / "run.db")) as db, db:
        db.execute(FOREIGN["trigger"][0])
    refused(lambda: backup.backup(run, tmp_path / "b.tar"), "which is never used", RunFolderError)
    put("pipe", tmp_path / "c.tar")
    refused(lambda: backup.restore(tmp_path / "c.tar", tmp_path / "new"), kind=RunFolderError)


def test_tables_and_indexes_of_a_run_are_plain() -> None:
    with closing(sqlite3.connect(":memory:")) as db:
        schema.make(db)
        assert reading.foreign_part(db, schema._INDEXES) is None
        assert reading.foreign_part(db, ()) is not None
        db.execute("ALTER TABLE meta ADD COLUMN caption TEXT")  # as a later version may have done
        assert reading.foreign_part(db, schema._INDEXES) is None


# -------------------------------------------------------------------------------------------------------- Parquet


def parquet(path: Path, rows: int, groups: int, **columns: Any) -> Path:
    """A Parquet file of equal values, whose metadata list one group of rows many times."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as format_

    table = pyarrow.table({name: pyarrow.array([value] * rows) for name, value in columns.items()})
    format_.write_table(table, path, row_group_size=rows, compression="zstd")
    about = format_.read_metadata(path)
    again = about
    while again.num_row_groups < groups:
        copy = format_.read_metadata(path)
        while 2 * copy.num_row_groups + again.num_row_groups <= groups:
            copy.append_row_groups(copy)
        again.append_row_groups(copy)
    footer = io.BytesIO()
    again.write_metadata_file(footer)
    whole = path.read_bytes()
    (length,) = struct.unpack("<I", whole[-8:-4])
    path.write_bytes(whole[: -8 - length] + footer.getvalue()[4:])
    return path


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def test_a_parquet_of_equal_numbers_is_refused_by_its_metadata(tmp_path: Path) -> None:
    path = parquet(tmp_path / "t.parquet", 1 << 20, 5000, client="a", target=1)
    assert path.stat().st_size < 3 << 20
    before = peak()
    refused(lambda: read_table(path), "would take", SettingError)
    assert peak() - before < 1 << 30


@pytest.mark.long
def test_a_parquet_of_equal_texts_is_metered_while_it_is_read(tmp_path: Path, little_memory: None) -> None:
    """By its metadata it is small: the text is in it once."""
    path = parquet(tmp_path / "t.parquet", 20_000, 1, client="a" * 100_000, target=1)
    before = peak()
    refused(lambda: read_table(path), "would take", SettingError)
    assert peak() - before < 1 << 30


def test_a_parquet_of_lists_is_no_table(tmp_path: Path) -> None:
    path = parquet(tmp_path / "t.parquet", 10, 1, client="a", target=[1, 2], deep={"a": {"b": 1}})
    assert "lists or tables" in refused(lambda: read_table(path), "'target'|'deep'", SettingError)


def test_a_parquet_of_many_damages_is_one_sentence(tmp_path: Path) -> None:
    """Among them are page headers that promise gigabytes."""
    path = parquet(tmp_path / "t.parquet", 100, 1, client="a", target=1)
    rng, whole = random.Random(0), path.read_bytes()
    before = peak()
    for _ in range(300):
        raw = bytearray(whole)
        for _ in range(rng.choice([1, 3])):
            raw[rng.randrange(len(raw))] = rng.choice([0, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        path.write_bytes(raw)
        with suppress(SettingError):
            read_table(path)
    assert peak() - before < 1 << 30


@pytest.mark.full
def test_a_parquet_is_read_as_pandas_reads_it(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {
            "number": [1.5, None, 3.0],
            "text": ["a", None, "b"],
            "kind": pandas.Categorical(["u", "v", "u"]),
            "day": pandas.date_range("2020-01-01", periods=3),
            "whole": pandas.array([1, None, 3], dtype="Int64"),
            "raw": [b"x", b"y", b"z"],
        }
    )
    for one in (frame, frame.set_index("number"), pandas.concat([frame] * 30_000)):
        one.to_parquet(tmp_path / "t.parquet")
        pandas.testing.assert_frame_equal(
            read_table(tmp_path / "t.parquet"), pandas.read_parquet(tmp_path / "t.parquet")
        )


@pytest.mark.long
def test_a_parquet_of_terabytes_in_a_process_of_little_memory(tmp_path: Path) -> None:
    """As it was done: a file of some kilobytes, 41.9 GB once it is read, here in a process that may have 4 GB."""
    parquet(tmp_path / "t.parquet", 10_000_000, 512, client=0, target=1)
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (4 << 30,) * 2)\n"
        "from piebald.cli import main\n"
        "sys.exit(main(['run', sys.argv[1], '--quiet']))"
    )
    (tmp_path / "e.toml").write_text(
        'rounds = 1\n[data]\nsource = "t.parquet"\nclient = "client"\ntarget = "target"\n'
        '[model]\nname = "logistic"\n[recipe]\nname = "fedavg"\n'
    )
    words = [sys.executable, "-c", program, str(tmp_path / "e.toml")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=180, cwd=tmp_path)
    assert ended.returncode == 2, ended.stderr
    assert "would take" in ended.stderr
    assert ended.stderr.count("\n") == 1


# ---------------------------------------------------------------------------------------------------------- texts


def hole(path: Path, size: int) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


def test_a_hole_is_no_table_and_no_checkpoint(run: Path, tmp_path: Path) -> None:
    """A line of zeros that the disk does not hold."""
    before = peak()
    for name in ("t.csv", "t.parquet", "t.npz", "images.png"):
        with pytest.raises(OSError, match="would take 2,147,483,648 bytes in memory but has 0"):
            files.opened(hole(tmp_path / name, 2 << 30))
    refused(lambda: read_table(tmp_path / "t.csv"), "would take", SettingError)
    hole(run / "vectors-2.safetensors", 4 << 30)
    with RunStore.open_read_only(run) as store:
        refused(lambda: store.checkpoint_of(2), "would take", RunFolderError)
    hole(run / "run.db-wal", 4 << 30)
    refused(lambda: RunStore.open_read_only(run), "would take", RunFolderError)
    assert peak() - before < 256 << 20


def test_a_file_with_some_data_and_a_hole_is_measured_by_what_it_has(tmp_path: Path) -> None:
    with hole(tmp_path / "t.csv", 2 << 30).open("r+b") as file:
        file.write(b"a,b\n1,2\n")
    refused(lambda: read_table(tmp_path / "t.csv"), "would take", SettingError)


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
def test_a_first_line_without_end_is_refused(tmp_path: Path, suffix: str) -> None:
    content = b"a" * (8 << 20)
    (tmp_path / f"t{suffix}").write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    refused(lambda: read_table(tmp_path / f"t{suffix}"), "a first line of more than", SettingError)


def test_cells_are_counted_before_they_are_parsed(tmp_path: Path, little_memory: None) -> None:
    """A comma is a byte in the file, and eight in memory."""
    (tmp_path / "t.csv").write_text("a,b\n" + ",\n" * 5_000_000)
    refused(lambda: read_table(tmp_path / "t.csv"), "would take", SettingError)


def test_what_is_packed_twice_is_unpacked_once(tmp_path: Path) -> None:
    once = gzip.compress(b"a,b\n1,2\n" * 100)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(once))
    refused(lambda: read_table(tmp_path / "t.csv.gz"), kind=SettingError)
    (tmp_path / "t.csv").write_bytes(once)  # and not at all where its name does not say so
    refused(lambda: read_table(tmp_path / "t.csv"), kind=SettingError)


@pytest.mark.full
def test_what_is_packed_is_metered(tmp_path: Path, little_memory: None) -> None:
    bomb = gzip.compress(bytes(100 << 20))
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * (25 << 20)))
    (tmp_path / "idx.gz").write_bytes(bomb)
    with tarfile.open(tmp_path / "t.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("x/data.bin")
        member.size = 100 << 20
        archive.addfile(member, io.BytesIO(bytes(member.size)))
    with zipfile.ZipFile(tmp_path / "t.zip", "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("data.bin", bytes(100 << 20))
    before = peak()
    for call in (
        lambda: read_table(tmp_path / "t.csv.gz"),
        lambda: read_idx(tmp_path / "idx.gz"),
        lambda: read_members(tmp_path / "t.tar.gz", ["data.bin"]),
        lambda: read_zip(tmp_path / "t.zip", ["data.bin"], "t.zip"),
        lambda: read_zip((tmp_path / "t.zip").read_bytes(), ["data.bin"], "t.zip"),
    ):
        refused(call, "would take", SettingError)
    assert peak() - before < 300 << 20


def test_zip_members_are_packed_by_zlib_or_not_at_all(tmp_path: Path) -> None:
    """LZMA takes the memory that the file asks for."""
    raw = io.BytesIO()
    np.save(raw, np.arange(3))
    for method in (zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2):
        with zipfile.ZipFile(tmp_path / "t.npz", "w", method) as zipped:
            zipped.writestr("x.npy", raw.getvalue())
        refused(lambda: reading.read_arrays(tmp_path / "t.npz"), "packed in a way that is not read", SettingError)
    (tmp_path / "t.tar.gz").write_bytes(lzma.compress(bytes(10_000)))
    refused(lambda: read_members(tmp_path / "t.tar.gz", ["x"]), "cannot be read as a tar archive", SettingError)


# ----------------------------------------------------------------------------------------------------------- images


def folder_of(tmp_path: Path, name: str, content: bytes) -> Path:
    (tmp_path / "images" / "class").mkdir(parents=True, exist_ok=True)
    (tmp_path / "images" / "class" / name).write_bytes(content)
    return tmp_path / "images"


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def picture(kind: str, size: tuple[int, int] = (8, 8), **more: Any) -> bytes:
    raw = io.BytesIO()
    Image.new("RGB", size).save(raw, kind, **more)
    return raw.getvalue()


@pytest.mark.parametrize("suffix", folders.IMAGES)
def test_a_picture_is_decoded_as_its_name_says_and_starts_no_program(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import EpsImagePlugin

    def started(*_: object, **__: object) -> None:
        raise AssertionError("Ghostscript")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", started)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", "gs")
    assert Image.open(io.BytesIO(POSTSCRIPT)).format == "EPS"  # as Pillow reads it by itself
    refused(
        lambda: data.image_folder(folder_of(tmp_path, f"a{suffix}", POSTSCRIPT), side=4), "cannot be read", SettingError
    )
    other = picture("PNG" if suffix != ".png" else "BMP")
    folder_of(tmp_path, f"a{suffix}", other)
    refused(lambda: data.image_folder(tmp_path / "images", side=4), "its name says", SettingError)
    own = picture({"jpg": "JPEG", "tif": "TIFF"}.get(suffix[1:], suffix[1:].upper()))
    folder_of(tmp_path, f"a{suffix}", own)
    assert data.image_folder(tmp_path / "images", side=4).x.shape == (1, 3, 4, 4)


def test_images_in_arrays_are_jpeg_and_nothing_else() -> None:
    for content in (POSTSCRIPT, picture("PNG"), picture("TIFF")):
        stored = np.frombuffer(content, np.uint8)
        refused(
            lambda stored=stored: decode(stored, np.array([0, len(stored)]), "file"), "cannot be decoded", SettingError
        )
    stored = np.frombuffer(picture("JPEG"), np.uint8)
    assert decode(stored, np.array([0, len(stored)]), "file").shape == (1, 3, 8, 8)


@pytest.mark.full
def test_pictures_of_absurd_size_and_many_frames_take_little_memory(tmp_path: Path) -> None:
    before = peak()
    bmp = bytearray(picture("BMP"))
    bmp[18:26] = struct.pack("<ii", 1, 10**9)
    refused(
        lambda: data.image_folder(folder_of(tmp_path, "a.bmp", bytes(bmp))), "cannot be read as an image", SettingError
    )
    (tmp_path / "images" / "class" / "a.bmp").unlink()
    frames = [Image.new("RGB", (256, 256), (shade, 0, 0)) for shade in range(200)]
    for kind in ("gif", "webp"):
        raw = io.BytesIO()
        frames[0].save(raw, kind, save_all=True, append_images=frames[1:])
        folder_of(tmp_path, f"b.{kind}", raw.getvalue())
    assert len(data.image_folder(tmp_path / "images", side=4)) == 2
    assert peak() - before < 256 << 20


# ------------------------------------------------------------------------------------------------------------ TOML


LONG_KEY = ".".join(["a"] * 50_000)
TOML = {
    "dotted key": f"{LONG_KEY} = 1",
    "heading": f"[{LONG_KEY}]",
    "array of tables": f"[[{LONG_KEY}]]",
    "quoted key": ".".join(['"a"'] * 50_000) + " = 1",
    "blanks": " . ".join(["a"] * 50_000) + " = 1",
    "inline table": f"a = {{ {LONG_KEY} = 1 }}",
    "after a comment with a quote": f"# it's\n{LONG_KEY} = 1",
    "after a string": f'a = "#\\""\nb = \'"\'\nc = """\n"a" \\""""\n{LONG_KEY} = 1',
    "many long keys": "\n".join(f"k{number}." + ".".join(["a"] * 45) + " = 1" for number in range(8_000)),
    "many keys": "\n".join(f"k{number} = 1" for number in range(10**6)),
    "lists": "a = " + "[" * 100_000,
    "tables": "a = " + "{a=" * 10_000 + "1",
    "quotes": '"\\' * 300_000,
    "long quotes": '"""\\' * 200_000,
    "apostrophes": "'" * 1_000_001,
}


@pytest.mark.parametrize("what", TOML)
def test_a_document_of_absurd_keys_is_refused_before_it_is_parsed(what: str) -> None:
    """Before, a dotted key of 50,000 parts took all memory: `tomllib` keeps each part of it."""
    before = peak()
    refused(lambda: Document(TOML[what], "e.toml"), "e.toml", SettingError)
    assert peak() - before < 512 << 20


def test_a_flag_of_absurd_parts_is_refused() -> None:
    document = Document("", "e.toml")
    refused(lambda: document.set(f"{LONG_KEY}=1"), "--set", SettingError)
    refused(lambda: value_of(f"{{ {LONG_KEY} = 1 }}", "--set a"), "--set", SettingError)


@pytest.mark.full
def test_many_values_are_read_once() -> None:
    """Before, each value counted all lines before it: minutes for a file of a megabyte."""
    text = "\n".join(f"k{number} = [{number}, 1]" for number in range(20_000))
    document = Document(text, "e.toml")
    assert document.values["k19999"] == [19999, 1]
    assert document.origin(("k19999", 1)) == "e.toml:20000"


@given(
    st.lists(st.sampled_from(['"', "'", '"""', "'''", "\\", "#", "\n", "a.a", ".", " ", "=", "[", "]"]), max_size=40)
)
def test_no_text_hides_a_long_key_from_the_check(pieces: list[str]) -> None:
    """Whatever `tomllib` accepts before a key, the key is seen."""
    import tomllib

    before = "".join(pieces) + "\n"
    try:
        tomllib.loads(before)
    except tomllib.TOMLDecodeError:
        return
    refused(lambda: check_length(before + ".".join(["a"] * 60) + " = 1", "e.toml"), "60 parts", SettingError)


@pytest.mark.parametrize(
    "text", [f'a = "{LONG_KEY}"', f'a = """\n{LONG_KEY}\n"""', f"a = '{LONG_KEY}'", f"# {LONG_KEY}", "a = 1.5"]
)
def test_long_texts_are_no_long_keys(text: str) -> None:
    assert Document(text, "e.toml").name == "e.toml"


# ---------------------------------------------------------------------------------------------- sizes of networks


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [{"hidden": [10**9]}, {"hidden": [10**5] * 3}, {"hidden": [10**12]}, {"hidden": [1] * 25_000}],
    ids=["width", "widths", "wider than memory", "layers"],
)
def test_a_network_of_absurd_settings_is_refused_before_it_has_numbers(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("piebald.models.networks.memory", lambda: 8 << 30)
    before = peak()
    refused(lambda: models.build_model("mlp", (64,), 10, **settings), "mlp|Mlp", SettingError)
    assert peak() - before < 1 << 30


@pytest.mark.parametrize(
    ("name", "value"),
    [("n_layers", 10**7), ("n_layers", 10**12), ("n_layers", 9999), ("dim", 10**9), ("hidden_dim", 10**9),
     ("vocab_size", 10**9), ("max_position_embeddings", 10**9), ("max_position_embeddings", 10**13)],
)  # fmt: skip
def test_a_configuration_of_absurd_settings_is_refused(tmp_path: Path, name: str, value: int) -> None:
    """Before, num_hidden_layers = 10^7 built layers until the memory was full."""
    transformers = pytest.importorskip("transformers", reason="needs the extra: pip install '.[hf]'")
    config = transformers.DistilBertConfig(
        vocab_size=50, dim=8, n_layers=1, n_heads=2, hidden_dim=16, max_position_embeddings=16
    )
    transformers.DistilBertForSequenceClassification(config).save_pretrained(tmp_path)
    assert models.pretrained(tmp_path, 3)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**about, name: value}))
    before = peak()
    refused(lambda: models.pretrained(tmp_path, 3), "no network has|allowed|tensors of parameters", SettingError)
    assert peak() - before < 1 << 30


# ----------------------------------------------------------------------------------------------------------- weights


def safetensors(path: Path, head: Any, body: bytes = b"", length: int | None = None) -> Path:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)
    return path


LIES: dict[str, dict[str, Any]] = {
    "a header of exabytes": {"head": b"{}", "length": 1 << 62},
    "a header longer than the file": {"head": b"{}", "length": 1000},
    "tensors in one another": {
        "head": {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in ("a", "b")},
        "body": bytes(8),
    },
    "a tensor behind the end": {
        "head": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        "body": bytes(4),
    },
    "a shape of exabytes": {
        "head": {"a": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 8]}},
        "body": bytes(8),
    },
    "a deep header": {"head": b'{"a":' * 10_000},
}


@pytest.mark.parametrize("lie", LIES)
def test_weights_that_lie_are_one_sentence(lie: str, tmp_path: Path) -> None:
    from piebald.models.weights_folder import mapped_tensors
    from piebald.storage.tensor_files import pick

    path = safetensors(tmp_path / "model.safetensors", **LIES[lie])
    module = models.build_model("logistic", (4,), 2)
    refused(lambda: export.load_weights(module, path), kind=SettingError)
    refused(lambda: mapped_tensors(tmp_path), kind=SettingError)
    refused(lambda: pick(tmp_path, path.name), kind=RunFolderError)


def test_weights_of_torch_are_tensors_in_a_zip_that_does_not_expand(tmp_path: Path, little_memory: None) -> None:
    module = models.build_model("logistic", (4,), 2)
    torch.save(module.state_dict(), tmp_path / "w.pt")
    assert export.load_weights(module, tmp_path / "w.pt") is module
    with zipfile.ZipFile(tmp_path / "w.pt") as archive:
        members = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(tmp_path / "w.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content + (bytes(100 << 20) if name.endswith("/0") else b""))
    refused(lambda: export.load_weights(module, tmp_path / "w.pt"), "would take", SettingError)
    torch.save(module.state_dict(), tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    refused(lambda: export.load_weights(module, tmp_path / "w.pt"), "cannot be read as weights", SettingError)


def test_an_hdf5_file_opens_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h5py = pytest.importorskip("h5py", reason="needs the extra: pip install '.[weights]'")
    layer = next(iter(embeddings.LAYERS.values()))
    (tmp_path / "secret").write_bytes(bytes(range(64)))
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["rows"] = np.arange(4.0)
    monkeypatch.setattr(embeddings, "is_prepared", lambda *_: False)  # on a machine that has the weights already
    monkeypatch.setattr(embeddings, "official", lambda *_: tmp_path / "weights.h5")
    layout = h5py.VirtualLayout((4,), "f8")
    layout[:] = h5py.VirtualSource(tmp_path / "other.h5", "rows", (4,))
    outside = [(str(tmp_path / "secret"), 0, 64)]
    for make in (
        lambda file: file.create_virtual_dataset(f"{layer}/x", layout),
        lambda file: file.create_dataset(f"{layer}/x", (64,), "u1", external=outside),
        lambda file: file.create_dataset(f"{layer}/x", (1 << 40,), "f4", chunks=(1 << 20,), fillvalue=1.0),
        lambda file: file.__setitem__(layer, h5py.ExternalLink(str(tmp_path / "other.h5"), "rows")),
    ):
        with h5py.File(tmp_path / "weights.h5", "w") as file:
            make(file)
        refused(embeddings.squeezenet, "does not hold the known weights", SettingError)
        held: dict[Any, Any] = {}
        with h5py.File(tmp_path / "weights.h5") as file:
            try:
                file.visititems(lambda path, found, held=held: embeddings._take(held, path, found))
            except (OSError, ValueError):
                continue
        assert not held  # a link to another file is not followed


# ------------------------------------------------------------------------------------------------ the reader itself


def test_limits_hold_on_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b'"abcd"')
    assert files.read_bytes(path, 6) == b'"abcd"'
    with pytest.raises(OSError, match="longer than the 5 bytes"):
        files.read_bytes(path, 5)
    assert files.read_json(path) == "abcd"
    (tmp_path / "link").symlink_to(path)
    assert files.read_bytes(tmp_path / "link") == b'"abcd"'
    with pytest.raises(OSError, match="it is a link, and only files are read"):
        files.read_bytes(tmp_path / "link", links=False)


def test_a_file_may_expand_to_half_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "memory", lambda: 4 << 30)
    files.check_size("x", 2 << 30, 1 << 30)
    with pytest.raises(OSError, match="would take"):
        files.check_size("x", (2 << 30) + 1, 1 << 30)
    files.check_size("x", files.SMALL, 1)
    stored = (1 << 30) // files.RATIO + 1
    files.check_size("x", 1 << 30, stored)
    with pytest.raises(OSError, match="would take"):
        files.check_size("x", 1 << 30, stored - 1)


def test_the_limit_of_a_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 30, resource.RLIM_INFINITY))
    assert files.memory() == 1 << 30
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert files.memory() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_text_tables_are_measured_by_any_separator(tmp_path: Path, little_memory: None) -> None:
    (tmp_path / "t.tsv").write_text("a\tb\n" + "\t\n" * 5_000_000)
    refused(lambda: read_table(tmp_path / "t.tsv"), "would take", SettingError)
    assert reading.MOST_COLUMNS == 100_000
