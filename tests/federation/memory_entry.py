"""What a server's process does with a model of 16 MB and eight sites; prints the peak of each stage, in models.

A stage's peak is the memory beyond what the process had before it.  "left" is what stays after many short pieces have
come and gone.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from piebald import recipes
from piebald.contracts import Result, Task, Update
from piebald.federation.hub.server_runtime import return_freed_memory
from piebald.federation.link.transfer import Assembly, piece_at
from piebald.federation.link.wire_format import PIECE, Piece, StoredBody, digest, pack_update, task_body, unpack_update
from piebald.server.cluster_models import ClusterModels, cohort_of
from piebald.storage import tensor_files

SIZE, SITES = 4 << 20, 8


def now(name: str) -> float:
    """A number of /proc/self/status, in models."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024 / (4 * SIZE)


@contextmanager
def stage(name: str, found: dict[str, float]) -> Iterator[None]:
    """Measure what is done meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
    before = now("VmRSS")
    yield
    found[name] = now("VmHWM") - before


def received(body: bytes, folder: Path) -> Update:
    """An update that came in pieces."""
    assembly = Assembly(folder)
    head = Piece(run="ab", epoch="cd", id=1, trains=True, start=0, size=len(body), digest=digest(body))
    for start in range(0, len(body), PIECE):
        piece = head.model_copy(update={"start": start})
        _, whole = assembly.take(piece, piece_at(body, start), 1 << 30)
    assert isinstance(whole, StoredBody)
    update, _ = unpack_update(whole)
    assert update is not None
    return update


def left_by_pieces() -> float:
    """What stays of a thousand pieces of 64 KB that come at once, among small things that are kept."""
    before = now("VmRSS")
    both = [(bytearray(1 << 16), bytes(600)) for _ in range(1000)]
    kept = [small for _, small in both]
    del both
    left = now("VmRSS") - before
    assert len(kept) == 1000
    return left


def main() -> None:
    """Go through the stages."""
    return_freed_memory()
    context: Any = SimpleNamespace(known=SITES, state={}, version=0, spec=SimpleNamespace(seed=0))
    torch.set_num_threads(1)
    found, model = {"left": left_by_pieces()}, torch.randn(SIZE)
    body = pack_update(Update({"model": torch.randn(SIZE)}, 10, 1, {"loss": 1.0}), None)
    clusters = ClusterModels(recipes.fedavg(), model)
    tasks = [Task(number + 1, number, 0, {"model": clusters.of(number).model}) for number in range(SITES)]
    with tempfile.TemporaryDirectory() as place:
        with stage("sending", found):
            bodies = [task_body(task) for task in tasks]
            assert len({one.digest() for one in bodies}) == SITES
            assert all(len(one[start : start + PIECE]) for one in bodies for start in range(0, len(one), PIECE))
        with stage("arriving", found):
            results = [Result(task, received(body, Path(place)), 0.0, 1.0) for task in tasks]
        with stage("stepping", found):
            clusters.step(cohort_of(results, 0), lambda axis, cluster: context)
        with stage("saving", found):
            tensor_files.write(Path(place), "vectors-1.safetensors", clusters.state().tensors)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
