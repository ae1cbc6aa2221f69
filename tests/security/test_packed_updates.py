"""Packed updates of a site that wants to stop or steer the server: refused for that site, and the run goes on."""

from __future__ import annotations

import io
import resource
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard

from piebald.contracts import Update
from piebald.contracts.component import build
from piebald.core.parameters import Layout
from piebald.federation.link.wire_format import pack_update
from piebald.methods.transforms import positions
from piebald.methods.transforms.bit_fields import pack
from piebald.methods.transforms.compression import Compressor, WireContext, as_bytes

from .server_entry import Entry


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("credentials")


def body(packed: Any, nbytes: int = 100) -> bytes:
    """A result whose update is packed so."""
    model = packed if isinstance(packed, torch.Tensor) else torch.tensor(np.frombuffer(bytes(packed), dtype=np.uint8))
    return pack_update(Update({"model": model}, 50, 5, {"loss": 0.5}, nbytes=nbytes), None)


def frame(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


def lying(size: int, claimed: int) -> bytes:
    """A frame of so many zeros that claims to have another number of them."""
    honest = bytearray(frame(bytes(size)))
    parameters = zstandard.get_frame_parameters(bytes(honest))
    assert parameters.content_size == size
    head = 4 + 1  # magic number, descriptor; the size follows in 4 bytes, as for every size from 65,792 to 4 GB
    assert honest[4] >> 6 == 2
    honest[head : head + 4] = claimed.to_bytes(4, "little")
    return bytes(honest)


def streamed(size: int) -> bytes:
    """A frame that does not say how much it holds."""
    made = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(made, closefd=False) as writer:
        writer.write(bytes(size))
    return made.getvalue()


def top_k(values: list[float], places: bytes) -> bytes:
    return as_bytes(values).tobytes() + places


def numbers(*values: int) -> bytes:
    return b"\x01" + np.array(values, dtype="<i4").tobytes()


HOSTILE: dict[str, tuple[str, Callable[[int], Any]]] = {
    "top_k: a position out of range": ("top_k", lambda s: top_k([1, 1, 1], numbers(0, 1, s))),
    "top_k: a negative position": ("top_k", lambda s: top_k([1, 1, 1], numbers(-1, 0, 1))),
    "top_k: a position twice": ("top_k", lambda s: top_k([1, 1, 1], numbers(0, 7, 7))),
    "top_k: positions in another order": ("top_k", lambda s: top_k([1, 1, 1], numbers(9, 8, 7))),
    "top_k: more values": ("top_k", lambda s: top_k([1] * 4, numbers(0, 1, 2, 3))),
    "top_k: gaps that would wrap around": ("top_k", lambda s: top_k([1, 1, 1], b"\x02\x3f" + b"\xff" * 24 + b"\xf8")),
    "top_k: NaN": ("top_k", lambda s: top_k([1, float("nan"), 1], numbers(0, 1, 2))),
    "top_k: infinite": ("top_k", lambda s: top_k([1, float("inf"), 1], numbers(0, 1, 2))),
    "top_k: nothing": ("top_k", lambda s: b""),
    "top_k: the change itself": ("top_k", lambda s: torch.zeros(s)),
    "top_k: bytes in rows": ("top_k", lambda s: torch.zeros(3, 4, dtype=torch.uint8)),
    "top_k: many more bytes": ("top_k", lambda s: bytes(8 * 4 * s)),
    "random_k: positions that nobody asked for": ("random_k", lambda s: top_k([1, 1, 1], numbers(0, 1, 2))),
    "qsgd: a level that does not exist": ("qsgd", lambda s: as_bytes([1.0]).tobytes() + b"\xff" * -(-s // 2)),
    "qsgd: a length that is NaN": ("qsgd", lambda s: as_bytes([np.nan]).tobytes() + pack(np.full(s, 7), 4).tobytes()),
    "qsgd: no levels": ("qsgd", lambda s: as_bytes([1.0]).tobytes()),
    "sign: a scale that is infinite": ("sign", lambda s: as_bytes([np.inf] * 4).tobytes() + bytes(-(-s // 8))),
    "low_rank: fewer numbers": ("low_rank", lambda s: as_bytes([1.0]).tobytes()),
    "low_rank: NaN": ("low_rank", lambda s: as_bytes([np.nan] * 137).tobytes()),
    "zstandard: no frame": ("zstandard", lambda s: b"abc"),
    "zstandard: a bomb": ("zstandard", lambda s: frame(bytes(1 << 26))),
    "zstandard: a bomb that claims little": ("zstandard", lambda s: lying(1 << 26, 4 * s)),
    "zstandard: a little that claims much": ("zstandard", lambda s: lying(1 << 17, (1 << 32) - 1)),
    "zstandard: a bomb that claims nothing": ("zstandard", lambda s: streamed(1 << 26)),
    "zstandard: more behind the frame": ("zstandard", lambda s: frame(bytes(4 * s)) + frame(bytes(4 * s))),
    "zstandard: NaN": ("zstandard", lambda s: frame(b"\xff" * 4 * s)),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in HOSTILE.values()}))
def test_packed_bytes_of_a_hostile_site_are_refused_and_others_count(kind: str, folder: Path) -> None:
    setting = {"share": 0.01} if kind.endswith("_k") else {"bucket": 4096} if kind == "qsgd" else {}
    entry = Entry(folder, {"name": "fedavg", "transforms": [{"kind": kind, **setting}]})
    work, cases = entry.plan.work, [(name, make) for name, (own, make) in HOSTILE.items() if own == kind]
    assert work.layout.shared == 310
    entry.join("site-1")
    entry.join("site-2")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for id, (name, make) in enumerate(cases, start=1):
        entry.task(id)
        assert entry.deliver(body(make(310)), id=id) == "refused", name
        result = entry.result()
        assert result is not None, name
        assert result.refused, name
        assert "sent an update that cannot be unpacked" in str(result.failure) or "not finite" in str(result.failure)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18  # kilobytes: no bomb took 256 MB
    task = entry.task(99, client=1)
    change = 0.01 * torch.ones(310)
    made = work.compressor.compress(change, work.initial_state(), work.wire_context(1, task.rng_version))  # type: ignore[union-attr]
    assert entry.deliver(body(made.packed, nbytes=10**9), id=99, site="site-2") == "done"
    result = entry.result()
    assert result is not None
    assert result.update is not None
    assert torch.equal(result.update.vectors["model"], made.change)
    assert result.bytes_up == len(made.packed)  # and not what the site says
    assert result.update.norm == pytest.approx(float(made.change.norm()))
    entry.server.close()


def test_what_is_packed_for_another_task_or_client_is_not_taken_for_it(folder: Path) -> None:
    """Positions of random_k follow from client and version: the same bytes mean another change."""
    entry = Entry(folder, {"name": "fedavg", "transforms": [{"kind": "random_k", "share": 0.1}]})
    work, change = entry.plan.work, torch.arange(310.0)
    made = work.compressor.compress(change, work.initial_state(), work.wire_context(0, 5))  # type: ignore[union-attr]
    entry.join("site-1")
    entry.task(1)
    assert entry.deliver(body(made.packed)) == "done"
    result = entry.result()
    assert result is not None
    assert result.update is not None
    assert not torch.equal(result.update.vectors["model"], made.change)
    entry.server.close()


def test_no_more_memory_is_taken_than_an_honest_update_takes() -> None:
    """Before, zeros in place of gaps took 140 times the model, and a bucket longer than it as much as it says."""
    layout = Layout.of(torch.nn.Linear(300, 300), frozenset())
    context, size = WireContext(layout, 0, 0, 0), layout.shared
    sparse, rounded = (
        build("transforms", {"kind": "top_k", "share": 0.001}),
        build("transforms", {"kind": "qsgd", "bucket": 10**15}),
    )
    assert isinstance(sparse, Compressor)
    assert isinstance(rounded, Compressor)
    zeros = as_bytes(np.ones(90)).tobytes() + b"\x02\x00" + bytes(8 * size - 400)
    honest = positions.pack(np.array([size - 90, *range(size - 89, size)]), size)  # all gaps in one number
    assert positions.unpack(honest, 90, size)[0] == size - 90
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="gaps between positions that cannot be read"):
            sparse.decompress(torch.tensor(np.frombuffer(zeros, dtype=np.uint8)), context)
        made = rounded.compress(torch.ones(size), {}, context)
        assert torch.equal(rounded.decompress(made.packed, context), made.change)
        assert tracemalloc.get_traced_memory()[1] < 100 * size
    finally:
        tracemalloc.stop()
