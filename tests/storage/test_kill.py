"""A killed run is found as it was after its last server step, and ends as if it had not been killed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from piebald.storage.store import RunStore
from tests import processes
from tests.scripts import loaded

PROGRAM = Path(__file__).with_name("dying_run.py")
dying_run = loaded(PROGRAM)

pytestmark = [pytest.mark.full, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")]


def contents(store):
    version, checkpoint = store.last_checkpoint()
    tables = {name: store.rows(name) for name in ("step", "result", "score")}
    return version, checkpoint, tables


def same(left, right):
    assert left.values == right.values
    assert left.tensors.keys() == right.tensors.keys()
    assert all(torch.equal(left.tensors[name], right.tensors[name]) for name in left.tensors)


@pytest.mark.long
def test_killed_anywhere_and_resumed_it_ends_like_an_undisturbed_run(tmp_path):
    piebald = Path(sys.modules["piebald.storage.store"].__file__).parents[2]
    done = processes.run(
        [sys.executable, str(PROGRAM), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(piebald)},
    )
    assert done.returncode == 0, done.stderr
    runs = sorted((path for path in tmp_path.iterdir() if path.is_dir()), key=lambda path: int(path.name))
    assert len(runs) > 80
    with RunStore.open_read_only(runs[-1]) as store:
        assert store.meta["status"] == "finished"
        undisturbed = contents(store)
    never_began = 0
    for folder in runs[:-1]:
        done_steps = int(folder.with_suffix(".done").read_text() or 0)
        if not (folder / "run.db").exists():
            assert done_steps == 0
            RunStore.create(folder, {"seed": 7}).close()  # what is left of an unborn run is no obstacle
            never_began += 1
        with RunStore.open(folder) as store:
            assert store.version in (done_steps, done_steps + 1), folder.name
            assert not list(folder.glob("*.part"))
            found = store.last_checkpoint()
            assert not store.notes
            due = [v for v in range(1, store.version + 1) if v not in dying_run.WITHOUT_CHECKPOINT]
            assert (found[0] if found else None) == (due[-1] if due else None)
            if found:
                same(found[1], dying_run.state(found[0], 0))
            dying_run.proceed(store)
            version, checkpoint, tables = contents(store)
            assert (version, tables) == (undisturbed[0], undisturbed[2])
            same(checkpoint, undisturbed[1])
    assert 0 < never_began < 10
