from __future__ import annotations

import errno
import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from piebald.contracts import Checkpoint, Device
from piebald.core.errors import RunFolderError, SettingError
from piebald.storage import run_folder, schema, tensor_files
from piebald.storage.lock import RunLock, ask_to_stop, heed_stop
from piebald.storage.store import RunStore


def state(version, states=()):
    tensors = {"model": torch.full((8,), float(version)), "count": torch.tensor(version)}
    tensors |= {f"client_state/{client}/private": torch.full((10,), value) for client, value in states}
    return Checkpoint(tensors, {"version": version, "limit": math.inf})


def results(version, count=3):
    return [
        {"id": 1000 * version + client, "client": client, "kind": "train", "sent_version": version - 1, "staleness": 0}
        | {
            "sent": 1.0,
            "time": 2.0,
            "examples": 10,
            "steps": 5,
            "loss": 0.5,
            "norm": 0.1,
            "weight": 1 / count,
            "cluster": 0,
        }
        | {"bytes_down": 40, "bytes_up": 20, "status": "ok"}
        for client in range(count)
    ]


@pytest.fixture
def store(tmp_path):
    with RunStore.create(tmp_path / "run", {"seed": 1}) as store:
        yield store


@contextmanager
def one_sentence(*words):
    with pytest.raises(RunFolderError) as caught:
        yield
    text = str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in text
    for word in words:
        assert word in text


# --------------------------------------------------------------------------------------------- what goes in comes out


def test_notes_belong_to_a_step_and_are_replaced_with_it(tmp_path: Path) -> None:
    def note(name: str, value: object) -> dict[str, object]:
        return {"axis": "clustering", "cluster": 0, "name": name, "value": value}

    with RunStore.create(tmp_path / "run", {}) as store:
        store.commit({"version": 1}, [], state(1), [note("clusters", [[0], [1]])])
        store.commit({"version": 2}, [], None, [note("clusters", [[0, 1]]), note("divergence", None)])
        store.commit({"version": 2}, [], None, [note("clusters", [[1]])])  # as a resumed run repeats it
        found = [(row["version"], row["name"], row["value"]) for row in store.rows("note")]
    assert found == [(1, "clusters", [[0], [1]]), (2, "clusters", [[1]])]


@pytest.mark.parametrize("where", ["folder", None])
def test_rows_come_back(tmp_path, where):
    with RunStore.create(where and tmp_path / "a" / "b", {"seed": 1, "recipe": {"name": "fedavg"}}) as store:
        store.clients([{"client": 0, "name": "anna", "train": 5, "counts": [2, 3], "device": Device(down=10.0)}])
        store.clients([{"client": 1, "name": "björn", "device": {"up": 3}}])
        store.commit({"version": 1, "time": 3.5, "loss": math.nan}, results(1))
        store.scores(
            [{"version": 1, "client": None, "model": "global", "split": "test", "metric": "accuracy", "value": 0.5}]
        )
        store.scores(
            [{"version": 1, "client": None, "model": "global", "split": "test", "metric": "accuracy", "value": 0.6}]
        )
        store.set_meta(label="x", seed=2)
        store.finish("finished")
        assert {"seed": 2, "label": "x", "status": "finished"}.items() <= store.meta.items()
        assert store.meta["recipe"] == {"name": "fedavg"}
        anna, bjorn = store.rows("client")
        assert anna["counts"] == [2, 3]
        assert anna["device"]["up"] == math.inf
        assert bjorn["name"] == "björn"
        (step,) = store.rows("step")
        assert step["time"] == 3.5
        assert step["loss"] is None  # SQLite has no NaN
        assert 0 <= step["wall"] < 60
        assert [row["version"] for row in store.rows("result")] == [1, 1, 1]
        assert [row["value"] for row in store.rows("score")] == [0.6]


def test_in_memory_keeps_rows_and_no_checkpoints():
    with RunStore.create(None, {}) as store:
        store.commit({"version": 1}, [], state(1, [(0, 1.0)]))
        assert store.last_checkpoint() is None
        assert store.client_state(0) == {}


def test_wall_goes_on_after_a_resume(store):
    store.commit({"version": 1, "wall": 1000.0}, [])
    store.close()
    with RunStore.open(store.path) as again:
        again.commit({"version": 2}, [])
        assert 1000 <= again.rows("step")[1]["wall"] < 1060


def test_an_unknown_column_is_named(store):
    with pytest.raises(SettingError, match="there is no column of step called 'losss': did you mean 'loss'"):
        store.commit({"version": 1, "losss": 1.0}, [])
    assert store.version == 0
    assert store.rows("step") == []


# ------------------------------------------------------------------------------------------------------ checkpoints


def test_the_last_checkpoint_comes_back_and_two_are_kept(store):
    assert store.last_checkpoint() is None
    for version in range(1, 6):
        store.commit({"version": version}, [], state(version) if version != 4 else None)
    version, checkpoint = store.last_checkpoint()
    assert version == 5
    assert checkpoint.values == {"version": 5, "limit": math.inf}
    assert torch.equal(checkpoint.tensors["model"], torch.full((8,), 5.0))
    assert checkpoint.tensors["count"].dtype == torch.int64
    files = {path.name for path in store.path.glob("*.safetensors")}
    assert files == {"vectors-3.safetensors", "vectors-5.safetensors"}


def test_views_of_one_tensor_can_be_kept(store):
    stack = torch.arange(12.0).view(3, 4)
    tensors = {
        "a": stack,
        "b": stack.T,
        **{f"client_state/{i}/x": stack[i] for i in range(3)},
        "none": torch.empty(0, 2),
    }
    store.commit({"version": 1}, [], Checkpoint(tensors))
    _, found = store.last_checkpoint()
    assert all(torch.equal(found.tensors[name], tensors[name]) for name in tensors)


def test_only_changed_client_state_is_written_and_all_of_it_is_read(store):
    store.commit({"version": 1}, [], state(1, [(0, 1.0), (1, 1.1)]))
    store.commit({"version": 2}, [], state(2, [(1, 2.1)]))
    _, checkpoint = store.last_checkpoint()
    assert checkpoint.tensors["client_state/0/private"][0] == 1.0
    assert checkpoint.tensors["client_state/1/private"][0] == pytest.approx(2.1)
    assert store.client_state(1)["private"][0] == pytest.approx(2.1)
    assert store.client_state(5) == {}


def test_a_damaged_checkpoint_falls_back_with_the_client_state_of_that_step(store):
    for version in (1, 2, 3):
        store.commit({"version": version}, [], state(version, [(0, float(version))]))
    damage(store.path / "vectors-3.safetensors")
    version, checkpoint = store.last_checkpoint()
    assert version == 2
    assert checkpoint.tensors["client_state/0/private"][0] == 2.0
    assert len(store.notes) == 1
    assert "server step 3 was skipped" in store.notes[0]
    # the run goes on from there, in place of what came after
    store.commit({"version": 3, "loss": 9.0}, results(3), state(3, [(0, 33.0)]))
    store.commit({"version": 4}, [], state(4, [(0, 4.0)]))
    assert [row["loss"] for row in store.rows("step")] == [None, None, 9.0, None]
    damage(store.path / "vectors-4.safetensors")
    assert store.last_checkpoint()[1].tensors["client_state/0/private"][0] == 33.0


def test_a_damaged_client_state_file_falls_back_too(store):
    for version in (1, 2):
        store.commit({"version": version}, [], state(version, [(0, float(version))]))
    damage(store.path / "client-state-2.safetensors")
    assert store.last_checkpoint()[0] == 1


def test_a_missing_file_is_as_bad_as_a_damaged_one(store):
    store.commit({"version": 1}, [], state(1))
    (store.path / "vectors-1.safetensors").unlink()
    with one_sentence("no checkpoint of", "start a new run", "vectors-1.safetensors"):
        store.last_checkpoint()


@pytest.mark.full
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=25))
def test_client_state_stays_correct_and_small(tmp_path_factory, changes):
    with RunStore.create(tmp_path_factory.mktemp("runs") / "run", {}) as store:
        expected = [{}]
        for version, clients in enumerate(changes, 1):
            expected.append(expected[-1] | {client: float(version) for client in clients})
            store.commit({"version": version}, [], state(version, [(client, float(version)) for client in clients]))
        for version in (len(changes), len(changes) - 1):
            if version == 0:
                break
            number, checkpoint = store.last_checkpoint()
            assert number == version
            found = {
                int(k.split("/")[1]): v[0].item()
                for k, v in checkpoint.tensors.items()
                if k.startswith("client_state/")
            }
            assert found == expected[version]
            damage(store.path / f"vectors-{version}.safetensors")
        held = store._db.execute("SELECT sum(bytes) FROM client_state_file").fetchone()[0] or 0
        changed = sum(len(clients) for clients in changes[-2:])
        assert held <= 40 * (2 * 6 + changed + 6)  # twice what is current, and what the kept checkpoints still need


def damage(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 255
    path.write_bytes(content)


# ------------------------------------------------------------------------------------------------ what can be wrong


def test_a_run_is_never_started_over_another(store, tmp_path):
    with one_sentence("already holds a run", "piebald resume"):
        RunStore.create(store.path, {})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with one_sentence("is not empty", "choose another folder"):
        RunStore.create(tmp_path / "other", {})
    with one_sentence("is a file"):
        RunStore.create(tmp_path / "other" / "thesis.txt", {})


@pytest.mark.parametrize("opening", [RunStore.open, RunStore.open_read_only])
def test_what_is_no_run_is_refused(tmp_path, opening):
    with one_sentence("there is no run folder"):
        opening(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with one_sentence("is a file, not a run folder"):
        opening(tmp_path / "file")
    with one_sentence("has no run.db"):
        opening(tmp_path)
    with closing(sqlite3.connect(tmp_path / "run.db")) as db:
        db.execute("CREATE TABLE books (title)")
    with one_sentence("not written by Piebald"):
        opening(tmp_path)


@pytest.mark.parametrize("opening", [RunStore.open, RunStore.open_read_only])
def test_a_newer_schema_is_refused_naming_both(store, opening):
    store._db.execute("PRAGMA user_version = 99")
    store.close()
    with one_sentence("schema 99", f"schema {schema.SCHEMA}", "install"):
        opening(store.path)


def test_a_damaged_database_is_refused(store):
    for version in range(1, 200):
        store.commit({"version": version}, results(version))
    store.close()
    content = (store.path / "run.db").read_bytes()
    (store.path / "run.db").write_bytes(content[:8192] + b"\xff" * 8192 + content[16384:])
    with one_sentence("the database is damaged"):
        RunStore.open(store.path)
    (store.path / "run.db").write_bytes(b"garbage" * 1000)
    with one_sentence("the database is damaged"):
        RunStore.open_read_only(store.path)


@pytest.mark.full
def test_a_second_writer_is_refused_and_a_reader_welcome(store):
    store.commit({"version": 1}, [])
    program = "import sys; from piebald.storage.store import RunStore; RunStore.open(sys.argv[1])"
    root = Path(sys.modules["piebald.storage.store"].__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", program, store.path], capture_output=True, text=True, env=env)
    assert f"RunFolderError: {store.path} is being written to by process {os.getpid()}" in done.stderr
    with RunStore.open_read_only(store.path) as reader:
        assert len(reader.rows("step")) == 1
        store.commit({"version": 2}, [])
        assert len(reader.rows("step")) == 2
        with one_sentence("was opened for reading only"):
            reader.commit({"version": 3}, [])
    store.close()
    RunStore.open(store.path).close()


def test_no_journal_lies_beside_a_run_that_nobody_writes(store):
    def journals():
        return [path.name for path in store.path.glob("run.db-*")]

    store.commit({"version": 1}, [])
    assert journals()
    store.close()
    with RunStore.open_read_only(store.path) as reader:
        assert reader.version == 1
        with RunStore.open(store.path) as again:  # a reader does not keep a writer away
            again.commit({"version": 2}, [])
        assert len(reader.rows("step")) == 2
    RunStore.open(store.path).close()
    with RunStore.open_read_only(store.path) as reader:
        assert len(reader.rows("step")) == 2
    assert journals() == []


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_a_killed_run_can_be_read_before_it_is_resumed(tmp_path):
    root = Path(sys.modules["piebald.storage.store"].__file__).parents[2]
    program = (
        "import os, signal, sys; from piebald.storage.store import RunStore; "
        "s = RunStore.create(sys.argv[1], {'seed': 1}); s.commit({'version': 1}, []); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    env = os.environ | {"PYTHONPATH": str(root)}
    assert subprocess.run([sys.executable, "-c", program, tmp_path / "run"], env=env).returncode == -signal.SIGKILL
    with RunStore.open_read_only(tmp_path / "run") as reader:
        assert reader.meta["seed"] == 1
        assert reader.version == 1


FAULTS = {errno.ENOSPC: "the disk is full", errno.EROFS: "cannot be written", errno.EACCES: "cannot be written"}


@pytest.mark.parametrize("code", FAULTS, ids=errno.errorcode.get)
@pytest.mark.parametrize("where", ["os.fsync", "os.replace", "save_file", "end"])
def test_a_failing_disk_costs_one_step_and_nothing_before_it(store, monkeypatch, code, where):
    for version in (1, 2):
        store.commit({"version": version}, results(version), state(version, [(0, float(version))]))

    def fail(*_):
        raise OSError(code, os.strerror(code))

    owner = {"os": os, "save_file": tensor_files, "end": schema}[where.split(".")[0]]
    with monkeypatch.context() as patch:
        patch.setattr(owner, where.rpartition(".")[2], fail)
        with one_sentence("server step 3 could not be recorded", "earlier steps are safe", FAULTS[code]):
            store.commit({"version": 3}, results(3), state(3, [(0, 3.0)]))
    assert not list(store.path.glob("*.part"))
    assert store.version == 2
    assert len(store.rows("result")) == 6
    assert store.last_checkpoint()[1].tensors["client_state/0/private"][0] == 2.0
    store.commit({"version": 3}, results(3), state(3, [(0, 3.0)]))  # there is room again
    assert store.last_checkpoint()[0] == 3
    assert len(store.rows("result")) == 9


@pytest.mark.parametrize("where", ["os.fsync", "save_file"])
def test_a_step_waits_for_a_file_descriptor_that_others_give_back(store, monkeypatch, where):
    """Before, a federation's run failed where the server had none for some seconds."""
    owner = {"os": os, "save_file": tensor_files}[where.split(".")[0]]
    name = where.rpartition(".")[2]
    real, tried, waited = getattr(owner, name), [], []

    def fail(*arguments, **named):
        tried.append(name)
        if len(tried) <= 2:
            raise (
                SafetensorError("I/O error: Too many open files (os error 24)")
                if name == "save_file"
                else OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            )
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, fail)
    monkeypatch.setattr("piebald.storage.store.time.sleep", waited.append)
    store.commit({"version": 1}, results(1), state(1, [(0, 1.0)]))
    assert waited == [0.5, 1.0]
    assert store.last_checkpoint()[1].tensors["client_state/0/private"][0] == 1.0
    assert not list(store.path.glob("*.part"))


def test_a_disk_that_is_full_for_the_database(store):
    store.commit({"version": 1}, results(1), state(1))
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with one_sentence("could not be recorded", "the disk is full"):
        store.commit({"version": 2}, results(2, 5000), state(2))
    assert store.last_checkpoint()[0] == 1
    assert len(store.rows("step")) == 1


@pytest.mark.parametrize("code", FAULTS, ids=errno.errorcode.get)
def test_a_run_that_cannot_begin(tmp_path, monkeypatch, code):
    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", fail)
        with one_sentence("a run folder cannot be made at", FAULTS[code]):
            RunStore.create(tmp_path / "run", {})
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with one_sentence("a run folder cannot be made at", FAULTS[code]):
            RunStore.create(tmp_path / "run", {})
    RunStore.create(tmp_path / "run", {}).close()


def test_a_value_that_is_no_json_costs_nothing(store):
    with pytest.raises(TypeError):
        store.commit({"version": 1}, [], Checkpoint({"model": torch.zeros(2)}, {"odd": object()}))
    assert not list(store.path.glob("*.safetensors*"))
    assert json.dumps(store.meta)


@pytest.mark.parametrize("text", ["[]", '{"version": 3, "models": [1]}', '{"version": 3}', "3", "{"])
def test_temperatures_that_are_none_are_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / run_folder.FITTED).write_text(text)
    assert run_folder.read_fitted(tmp_path, 3, "global") is None
    run_folder.write_fitted(tmp_path, 3, "global", 1.5)
    run_folder.write_fitted(tmp_path, 3, "client 1", 2.0)
    assert run_folder.read_fitted(tmp_path, 3, "global") == 1.5
    assert run_folder.read_fitted(tmp_path, 4, "global") is None


def test_a_holder_is_asked_once_and_only_about_what_it_holds(tmp_path: Path) -> None:
    ask_to_stop(tmp_path)  # the one before, who has ended without a look at it
    lock = RunLock(tmp_path)
    heed_stop()
    ask_to_stop(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        heed_stop()
    heed_stop()
    lock.release()
    ask_to_stop(tmp_path)
    heed_stop()


def test_a_request_to_the_holder_before_is_void_where_there_are_no_locks_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    ask_to_stop(tmp_path)
    monkeypatch.setattr("piebald.storage.lock.fcntl.flock", refuse)
    lock = RunLock(tmp_path)
    heed_stop()
    lock.release()
