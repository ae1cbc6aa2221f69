"""A small run that dies by SIGKILL at its n-th write to the disk, for every n; `test_kill.py` starts it.

Usage: python dying_run.py FOLDER.  Run n lies in FOLDER/n, and FOLDER/n.done holds the newest step that was recorded.
The last run is the one that was not disturbed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from piebald.contracts import Checkpoint
from piebald.storage import schema, tensor_files
from piebald.storage.store import RunStore

STEPS = 7
WITHOUT_CHECKPOINT = {3, 6}
CLIENTS = 3


def state(version: int, since: int) -> Checkpoint:
    """The state after a server step; of client state what changed after `since`.  Step v changes client v % 3."""
    tensors = {"model": torch.full((50,), float(version)), "step/momentum": torch.arange(5) * version}
    for step in range(since + 1, version + 1):
        client = step % CLIENTS
        tensors[f"client_state/{client}/private"] = torch.full((20,), step + client / 10)
        if step < CLIENTS:  # never changes again, so its file is thinned out
            tensors[f"client_state/{client}/once"] = torch.full((2,), float(client))
    return Checkpoint(tensors, {"version": version, "note": "é"})


def proceed(store: RunStore, recorded: Callable[[int], None] = lambda version: None) -> None:
    """Go on from the last checkpoint to the end."""
    found = store.last_checkpoint()
    since = found[0] if found else 0
    if found:  # the run may have been killed between a step and its scores
        score(store, since)
    for version in range(since + 1, STEPS + 1):
        checkpoint = None
        if version not in WITHOUT_CHECKPOINT:
            checkpoint, since = state(version, since), version
        results = [{"id": 10 * version + i, "client": i, "kind": "train", "status": "ok"} for i in range(CLIENTS)]
        store.commit({"version": version, "time": 0.5 * version, "wall": 0.0, "loss": 1 / version}, results, checkpoint)
        recorded(version)
        score(store, version)


def score(store: RunStore, version: int) -> None:
    row = {"version": version, "model": "global", "split": "test", "metric": "accuracy", "value": 0.1}
    store.scores([row | {"client": client} for client in (0, 1, None)])


class Reaper:
    """Kills the process at the n-th call of a watched function."""

    def __init__(self, n: int) -> None:
        self.left = n

    def strike(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, owner: object, name: str) -> None:
        real = getattr(owner, name)

        def watched(*args: object, **kwargs: object) -> object:
            self.strike()
            result = real(*args, **kwargs)
            self.strike()
            return result

        setattr(owner, name, watched)

    def watch_half_writing(self) -> None:
        real = tensor_files.save_file

        def half(tensors: dict[str, torch.Tensor], path: str) -> None:
            self.strike()
            real(tensors, path)
            if self.left == 1:
                os.truncate(path, Path(path).stat().st_size // 2)
            self.strike()

        tensor_files.save_file = half


def run(folder: Path, n: int) -> None:
    handle = os.open(folder.with_suffix(".done"), os.O_CREAT | os.O_WRONLY)
    reaper = Reaper(n)
    reaper.watch_half_writing()
    reaper.watch(os, "fsync")
    reaper.watch(os, "replace")
    reaper.watch(Path, "unlink")
    reaper.watch(schema, "end")
    with RunStore.create(folder, {"seed": 7}) as store:
        proceed(store, lambda version: os.pwrite(handle, str(version).encode(), 0) and None)
        store.finish("finished")


if __name__ == "__main__":
    root, n, finished = Path(sys.argv[1]), 0, False
    while not finished:
        n += 1
        child = os.fork()
        if child == 0:
            try:
                run(root / str(n), n)
            except BaseException as error:
                print(f"point {n}: {error!r}", file=sys.stderr)
                os._exit(3)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status not in (0, -signal.SIGKILL):
            sys.exit(f"run {n} ended with {status}")
        finished = status == 0
