"""A site's files: the client state changes once for each training task that counts, whenever the process dies."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from piebald.federation.site.client_store import ClientStore, FinishedTask


def finish(store: ClientStore, id: int, value: float | None) -> None:
    store.finish(
        FinishedTask(id, "ab", "epoch", 3), b"abc", None if value is None else {"private": torch.tensor([value])}
    )


def value_in(store: ClientStore, before: int = 1 << 50) -> float | None:
    state: dict[str, Tensor] | None = store.state(before)
    return None if state is None else float(state["private"])


def test_results_are_kept_until_they_are_confirmed_and_survive_a_restart(tmp_path: Path) -> None:
    store = ClientStore(tmp_path / "state" / "run")
    assert value_in(store) is None
    for id in (3, 5, 7):
        finish(store, id, float(id))
    for again in (store, ClientStore(store.folder)):
        assert [done.id for done in again.done] == [3, 5, 7]
        assert again.result(5) == b"abc"
        assert value_in(again) == 7.0
        assert value_in(again, before=7) == 5.0  # what a question of before is answered with
        assert value_in(again, before=3) is None
    store.confirm(5)
    for again in (store, ClientStore(store.folder)):
        assert [done.id for done in again.done] == [7]
        assert value_in(again, before=7) == 5.0


def test_a_task_counts_once_where_the_site_dies_while_it_is_confirmed(tmp_path: Path) -> None:
    """The state is in the base file by then, and the task's own file still there."""
    store = ClientStore(tmp_path / "state" / "run")
    for id in (3, 5):
        finish(store, id, float(id))
    files = {path.name: path.read_bytes() for path in store.folder.iterdir()}
    store.confirm(3)
    for name in files.keys() - {path.name for path in store.folder.iterdir()}:
        (store.folder / name).write_bytes(files[name])
    again = ClientStore(store.folder)
    assert [done.id for done in again.done] == [5]
    assert again.trained == store.trained
    assert len(again.trained) == 2
    assert value_in(again, before=5) == 3.0


def test_a_task_can_be_discarded(tmp_path: Path) -> None:
    store = ClientStore(tmp_path / "state" / "run")
    for id in (3, 5, 7):
        finish(store, id, float(id))
    store.discard(5)
    for again in (store, ClientStore(store.folder)):
        assert [done.id for done in again.done] == [3]
        assert value_in(again) == 3.0


def test_training_without_a_new_state_still_has_a_result(tmp_path: Path) -> None:
    store = ClientStore(tmp_path / "state" / "run")
    finish(store, 1, 1.0)
    finish(store, 2, None)
    assert value_in(ClientStore(store.folder)) == 1.0
    store.confirm(2)
    assert value_in(ClientStore(store.folder)) == 1.0
    assert not store.done


def test_another_process_of_the_server_asks_for_the_same(tmp_path: Path) -> None:
    store = ClientStore(tmp_path / "state" / "run")
    finish(store, 1, 1.0)
    store.adopt(1, "another")
    (done,) = ClientStore(store.folder).done
    assert (done.epoch, done.digest) == ("another", "ab")
    assert store.result(1) == b"abc"


def _work(folder: Path) -> None:
    store = ClientStore(folder)
    while True:
        id = int(value_in(store) or 0) + 1
        finish(store, id, float(id))
        store.confirm(id)


@pytest.mark.full
def test_killed_at_any_moment_every_file_is_whole(tmp_path: Path) -> None:
    folder, rng, last = tmp_path / "state" / "run", random.Random(0), 0.0
    for _ in range(20):
        process = multiprocessing.get_context("fork").Process(target=_work, args=(folder,))
        process.start()
        time.sleep(rng.uniform(0.01, 0.06))
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        now = value_in(ClientStore(folder)) or 0.0
        assert now >= last  # nothing that was finished is lost
        last = now
    assert last > 0
