"""What an earlier version kept is read, brought to the present form as a whole, and never lost."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import piebald
from piebald import data, models, partition
from piebald.contracts import Clients
from piebald.core.errors import RunFolderError, SettingError
from piebald.core.format_versions import FormatVersions
from piebald.federation.credentials import provisioning
from piebald.federation.operate import experiment_queue
from piebald.federation.operate.experiment_queue import ExperimentQueue
from piebald.storage import backup, schema
from piebald.storage.store import RunStore


def number_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def add_caption(db: sqlite3.Connection) -> None:
    """The step to a version of Piebald that keeps one value more."""
    db.execute("INSERT INTO meta SELECT 'caption', value FROM meta WHERE key = 'seed'")


def federation() -> tuple[Clients, torch.nn.Module]:
    clients = partition.Dirichlet(clients=3, alpha=1.0, limit=90).split(data.digits())
    return clients, models.build_model("logistic", (1, 8, 8), 10)


def trained(folder: Path, rounds: int) -> Path:
    piebald.run("fedavg", *federation(), rounds=rounds, out=folder)
    return folder


def test_a_run_of_the_version_before_is_read_migrated_once_and_kept(tmp_path: Path) -> None:
    run, before = trained(tmp_path / "run", 1), schema.SCHEMA.number
    with RunStore.open(run) as store:
        store.set_meta(rounds=2, status="stopped")
    backup.backup(run, tmp_path / "backup.tar")
    untouched = (run / schema.DATABASE).read_bytes()
    with schema.SCHEMA.with_step(add_caption):
        with RunStore.open_read_only(run) as store:  # a report, or a status, changes nothing
            assert "caption" in store.meta
            assert store.version == 1
        assert (run / schema.DATABASE).read_bytes() == untouched
        assert [path for path in run.iterdir() if "schema" in path.name] == []
        for _ in range(2):
            with RunStore.open(run) as store:
                assert "caption" in store.meta
        assert number_of(run / schema.DATABASE) == before + 1
        (kept,) = [path for path in run.iterdir() if "schema" in path.name]
        assert kept.stat().st_mode & 0o077 == 0
        piebald.resume(run, *federation())
        with RunStore.open_read_only(run) as ended, RunStore.open_read_only(trained(tmp_path / "once", 2)) as once:
            ends = [store.last_checkpoint() for store in (ended, once)]
            tensors = [end[1].tensors for end in ends if end is not None]
            assert tensors[0].keys() == tensors[1].keys()
            assert all(torch.equal(one, tensors[1][name]) for name, one in tensors[0].items())
        backup.restore(tmp_path / "backup.tar", tmp_path / "restored")  # a backup of the version before
        with RunStore.open(tmp_path / "restored") as store:
            assert "caption" in store.meta
    with pytest.raises(RunFolderError, match=f"schema {before + 1} but this Piebald reads up to schema {before}"):
        RunStore.open_read_only(run)
    kept.replace(run / schema.DATABASE)  # the way back
    with RunStore.open(run) as store:
        assert "caption" not in store.meta


def test_a_migration_that_fails_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    with RunStore.create(tmp_path / "run", {"seed": 1}) as store:
        run = store.path
    assert run is not None

    def half_way(db: sqlite3.Connection) -> None:
        add_caption(db)
        db.execute("UPDATE no_such_table SET key = 1")

    with schema.SCHEMA.with_step(half_way), pytest.raises(RunFolderError, match="cannot be opened: no such table"):
        RunStore.open(run)
    with RunStore.open(run) as store:
        assert "caption" not in store.meta


@pytest.mark.parametrize("number", [-1, 0])
def test_a_schema_that_no_version_had_is_refused(number: int, tmp_path: Path) -> None:
    with RunStore.create(tmp_path / "run", {"seed": 1}):
        pass
    with closing(sqlite3.connect(tmp_path / "run" / schema.DATABASE)) as db:
        db.execute(f"PRAGMA user_version = {number}")
    with pytest.raises(RunFolderError, match=f"has schema {number}"):
        RunStore.open(tmp_path / "run")


def test_credentials_and_queues_of_the_version_before_are_read(tmp_path: Path) -> None:
    described = provisioning.Description.model_validate({"host": "localhost", "sites": ["north"]})
    provisioning.provision(described, tmp_path)
    queue = ExperimentQueue(tmp_path / "server")
    entry = queue.change(queue.add("fedavg", "", tmp_path / "run"), state="stopped")

    def rename_host(about: dict[str, Any]) -> None:
        about["host"] = about["host"] + ".example"

    def shout(about: dict[str, Any]) -> None:
        if "label" in about:
            about["label"] = about["label"].upper()

    with provisioning.FORMAT.with_step(rename_host), experiment_queue.FORMAT.with_step(shout):
        assert provisioning.read(tmp_path / "north").host == "localhost.example"
        assert queue.entry(entry.number).label == "FEDAVG"
        again = queue.change(queue.entry(entry.number), state="running")
        assert queue.entry(again.number).state == "running"
        (tmp_path / "moved").mkdir()
        provisioning.provision(described.model_copy(update={"host": "other"}), tmp_path / "moved")
    number = provisioning.FORMAT.number
    with pytest.raises(SettingError, match=f"have format {number + 1}, this Piebald reads up to {number}"):
        provisioning.read(tmp_path / "moved" / "north")
    number = experiment_queue.FORMAT.number
    with pytest.raises(SettingError, match=f"has format {number + 1}, this Piebald reads up to {number}"):
        queue.entry(entry.number)


@pytest.mark.parametrize("found", [True, 1.0, "1", None, 0, 3])
def test_what_is_no_number_of_this_form_is_not_read(found: object) -> None:
    form = FormatVersions[list[int]](first=1, steps=(lambda kept: kept.append(2),))
    assert form.reads(1)
    assert form.reads(2)
    assert not form.reads(found)
    kept = [1]
    form.upgrade(kept, 2)
    assert kept == [1]
    form.upgrade(kept, 1)
    assert kept == [1, 2]
