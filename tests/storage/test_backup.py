"""A backup that is made while a run goes on, or killed, and backups that an attacker made."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import signal
import stat
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import piebald
from piebald import data, models, partition
from piebald.cli import main
from piebald.core.errors import RunFolderError
from piebald.report import callbacks
from piebald.storage.backup import backup, restore
from piebald.storage.store import RunStore
from tests import processes
from tests.scripts import loaded
from tests.storage.test_kill import contents, dying_run, same

PROGRAM = Path(__file__)


def test_a_run_that_was_backed_up_while_it_ran_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    """HDAFL: the private layers of each client are of the same server step as the model."""
    clients = partition.Iid(clients=3, limit=240).split(data.digits())

    class BacksUp(callbacks.Callback):
        def on_server_step(self, step: Any) -> None:
            backup(tmp_path / "run", tmp_path / f"{step['version']}.tar")

    def model(seed: int) -> Any:
        return models.build_model("mlp", (1, 8, 8), 10, seed, hidden=[8])

    where = {"kind": "simulator", "engine": "sequential", "workers": 0}
    more: dict[str, Any] = {"rounds": 3, "runtime": where, "checkpoint_every": 1, "callbacks": [BacksUp()]}
    run = piebald.run("hdafl", clients, model, out=tmp_path / "run", **more)
    for own in (tmp_path / "1.tar.part", tmp_path / "again-1.part"):
        own.mkdir()  # somebody else's
    for version in (1, 2, 3):
        file = tmp_path / f"{version}.tar"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert restore(file, tmp_path / f"again-{version}")["step"] == version
        again = piebald.resume(tmp_path / f"again-{version}", clients, model)
        assert again._store.rows("score") == run._store.rows("score")
        ends = [one._store.checkpoint_of(3).tensors for one in (again, run)]
        assert ends[0].keys() == ends[1].keys()
        assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    left = {path.name for path in tmp_path.iterdir() if "part" in path.name}
    assert left == {"1.tar.part", "again-1.part"}


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_backups_that_are_killed_at_random_are_whole_or_not_there(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(PROGRAM.parents[2])}
    done = processes.run(
        [sys.executable, str(PROGRAM), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    with RunStore.open_read_only(tmp_path / "run") as store:
        undisturbed = contents(store)
    whole, versions = sorted(tmp_path.glob("*.tar")), set[int]()
    assert whole
    assert int(done.stdout)  # some were killed
    for file in whole:
        folder = file.with_suffix("")
        versions.add(restore(file, folder)["step"])
        with RunStore.open(folder) as store:
            dying_run.proceed(store)
            assert not store.notes
            version, checkpoint, tables = contents(store)
            assert (version, tables) == (undisturbed[0], undisturbed[2])
            same(checkpoint, undisturbed[1])
    assert len(versions) > 1


def tar_of(members: list[tuple[tarfile.TarInfo, bytes]], files: dict[str, bytes] | None = None, **more: Any) -> bytes:
    """A tar file with a list of files in front; of these members by default."""
    told = files if files is not None else {member.name: body for member, body in members}
    about = {name: {"bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()} for name, body in told.items()}
    text = json.dumps({"format": more.get("format", 1), "files": more.get("listed", about)}).encode()
    head, made = tarfile.TarInfo("backup.json"), io.BytesIO()
    head.size = len(text)
    with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(head, io.BytesIO(text))
        for member, body in members:
            tar.addfile(member, io.BytesIO(body))
    size = 512 * sum(1 + -(-len(body) // 512) for body in (text, *(body for _, body in members)))
    return made.getvalue()[:size] + bytes(1024)


def member(name: str, body: bytes = b"x", **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    made = tarfile.TarInfo(name)
    made.size = len(body)
    for field, value in more.items():
        setattr(made, field, value)
    return made, body


LINK = {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}
ATTACKS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "path": (lambda _: tar_of([member("../evil")]), "lists the file '../evil', which no run has"),
    "absolute": (lambda _: tar_of([member("/tmp/evil")]), "which no run has"),
    "unlisted": (lambda _: tar_of([member("../evil")], {"run.db": b"x"}), "which its list of files has not"),
    "link": (lambda _: tar_of([member("run.db", b"", **LINK)]), "is no file: a backup holds files only"),
    "hard link": (lambda _: tar_of([member("run.db", b"", type=tarfile.LNKTYPE, linkname="a")]), "is no file"),
    "folder": (lambda _: tar_of([member("run.db", b"", type=tarfile.DIRTYPE)]), "is no file"),
    "longer": (lambda _: tar_of([member("run.db", b"xy")], {"run.db": b"x"}), "which its list of files has not"),
    "twice": (
        lambda _: tar_of([member("run.db"), member("run.db")], {"run.db": b"x", "start.safetensors": b"x"}),
        "which its list of files has not",
    ),
    "more": (lambda _: tar_of([member("run.db"), member("run.db")]), "holds more than its list of files has"),
    "format": (lambda _: tar_of([member("run.db")], format=2), "has format 2, this Piebald reads 1: install the"),
    "no database": (lambda _: tar_of([member("start.safetensors")]), "it has no run.db"),
    "no run": (lambda _: tar_of([member("run.db", b"not a database" * 100)]), "the database is damaged"),
    "bomb": (lambda _: tar_of([], listed={"run.db": {"bytes": 10**18, "sha256": ""}}), "are free: make room"),
    "cut off": (lambda whole: whole[: len(whole) // 2], "is cut off"),
    "a bit": (lambda whole: whole.replace(b"SQLite format 3", b"SQLite format 4"), "is damaged: the SHA-256 of run.db"),
    "text": (lambda _: b"hello" * 1000, "is no backup of a run"),
}  # fmt: skip


@pytest.mark.parametrize("attack", sorted(ATTACKS))
def test_a_backup_that_is_none_writes_nothing(attack: str, tmp_path: Path) -> None:
    RunStore.create(tmp_path / "run", {"seed": 7}).close()
    backup(tmp_path / "run", tmp_path / "run.tar")
    change, says = ATTACKS[attack]
    (tmp_path / "run.tar").write_bytes(change((tmp_path / "run.tar").read_bytes()))
    with pytest.raises(RunFolderError, match=says):
        restore(tmp_path / "run.tar", tmp_path / "deep" / "again")
    assert sorted(path.name for path in tmp_path.rglob("*") if "run" not in path.name) == ["deep"]


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, file = str(tmp_path / "run"), str(tmp_path / "run.tar")
    RunStore.create(run, {"seed": 7}).close()
    assert main(["backup", run, file]) == 0
    assert "as of server step 0" in capsys.readouterr().out
    for words, says in (
        (["backup", run, file], "exists: choose another name for the backup"),
        (["restore", file, run], "exists, and a backup overwrites nothing: choose a new folder"),
        (["backup", str(tmp_path / "nowhere"), file], "there is no run folder"),
        (["restore", str(tmp_path / "nowhere"), str(tmp_path / "new")], "no such file or directory"),
    ):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1
    assert main(["restore", file, str(tmp_path / "new")]) == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["run.db"]


def run_and_kill(root: Path) -> int:
    """A run in one process, while others back it up; returns how many of these were killed in time."""
    dying_run = loaded(Path(__file__).with_name("dying_run.py"))
    writer = os.fork()
    if writer == 0:
        with RunStore.create(root / "run", {"seed": 7}) as store:
            dying_run.proceed(store, lambda _: time.sleep(0.3))
            store.finish("finished")
        os._exit(0)
    rng, count, killed = random.Random(3), 0, 0
    while os.waitpid(writer, os.WNOHANG) == (0, 0):
        if not (root / "run" / "run.db").exists():
            continue
        count += 1
        child = os.fork()
        if child == 0:
            backup(root / "run", root / f"{count}.tar")
            os._exit(0)
        if count % 2:  # the others may take as long as they take
            time.sleep(rng.uniform(0.0, 0.1))
            os.kill(child, signal.SIGKILL)
        killed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    return killed


if __name__ == "__main__":
    print(run_and_kill(Path(sys.argv[1])))
