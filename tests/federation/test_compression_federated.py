"""Packed updates in a real federation: what is on the wire is what the simulator counts, byte for byte."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import torch

from piebald.federation.link.messaging import SERVER, Link

from .conftest import Sites, carry_out, settings

CASES: dict[str, dict[str, Any]] = {
    "top_k, private layers": {"name": "hdafl", "transforms": [{"kind": "top_k", "share": 0.01}]},
    "random_k": {"name": "fedavg", "transforms": [{"kind": "random_k", "share": 0.02}]},
    "qsgd, other vectors": {"name": "scaffold", "transforms": [{"kind": "qsgd", "bits": 3}]},
    "sign": {"name": "fedavg", "transforms": [{"kind": "sign"}]},
    "low_rank, clusters": {"name": "ifca", "k": 2, "transforms": [{"kind": "low_rank"}]},
    "random_k, masked": {
        "name": "fedavg",
        "transforms": [{"kind": "random_k", "share": 0.02, "positions": "common"}, {"kind": "secure_aggregation"}],
    },
    "zstandard": {"name": "fedavg", "transforms": [{"kind": "zstandard"}]},
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_the_wire_carries_the_bytes_that_are_counted(case: str, sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Framing is not counted: the head of a result, the names and shapes of its tensors, messages, and TLS."""
    bodies, real_on = dict[tuple[str, int], bytearray](), Link.on

    def on(link: Link, topic: str, kind: Any, handler: Any) -> None:
        def noted(origin: str, head: Any, data: memoryview) -> bytes:
            if topic == "result" and link.name == SERVER and head.trains:
                bodies.setdefault((origin, head.id), bytearray(head.size))[head.start : head.start + len(data)] = data
            reply: bytes = handler(origin, head, data)
            return reply

        real_on(link, topic, kind, noted)

    monkeypatch.setattr(Link, "on", on)
    made = settings(CASES[case], rounds=3, evaluate={"every": 0})
    simulated = carry_out(made)
    real = carry_out(made, credentials=str(sites.folder / "server"))
    carried = {int(origin.removeprefix("site-")) - 1: list[int]() for origin, _ in bodies}
    for (origin, _), body in sorted(bodies.items(), key=lambda pair: pair[0][1]):
        carried[int(origin.removeprefix("site-")) - 1].append(tensor_bytes(body))
    for run in (real, simulated):
        assert all(row["status"] == "ok" for row in run.results)
        trained = [row for row in run.results if row["kind"] == "train"]
        assert {c: [row["bytes_up"] for row in trained if row["client"] == c] for c in carried} == carried
    assert len(bodies) == 9
    for group, vector in simulated.cluster_models.items():
        torch.testing.assert_close(real.cluster_models[group], vector, atol=1e-4, rtol=1e-4)


def tensor_bytes(body: bytes | bytearray) -> int:
    """Bytes of the numbers in a body of JSON values and safetensors, read by hand."""
    (values,) = struct.unpack_from("<I", body)
    (head,) = struct.unpack_from("<Q", body, 4 + values)
    start = 12 + values + head
    described = json.loads(body[12 + values : start])
    ends = [about["data_offsets"][1] for name, about in described.items() if name != "__metadata__"]
    assert max(ends) == len(body) - start
    return len(body) - start
