"""A secure sum among real processes: sites die between sending and opening, and nothing plain is on the wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from piebald.contracts import Assignment, Secrets, Update
from piebald.runtimes.federation.coordinator import Coordinator
from piebald.runtimes.federation.messages import Piece
from piebald.update.secure_sum import SecureSum
from piebald.update.summing import Summing

from .conftest import Sites, carry_out, settings

SEALED = {"name": "fedavg", "update": [{"kind": "secure_sum"}]}


def test_a_site_that_dies_before_the_opening(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first commit it comes back and opens with what is on its disk; in the second it is gone, and two of three
    shares are enough.  Both commits count its update, so the model is that of an undisturbed simulation."""
    made = settings(SEALED, rounds=2, evaluate={"every": 0})
    plain = plain_changes(made, monkeypatch)
    undisturbed = carry_out(settings({"name": "fedavg"}, rounds=2, evaluate={"every": 0}))
    wire = captured(monkeypatch)
    real, calls = Summing._shares, []

    def dying(self: Summing, arrived: Any, centre: Any) -> Any:
        calls.append(list(arrived))
        sites.kill("site-2")
        if len(calls) == 1:
            sites.start("site-2")
        else:
            runtime = centre._controller.runtime
            runtime.settings = runtime.settings.model_copy(update={"silence": 2.0})
        return real(self, arrived, centre)

    monkeypatch.setattr(Summing, "_shares", dying)
    try:
        run = carry_out(made, kit=str(sites.folder / "server"), silence=120.0)
    finally:
        if "site-2" not in sites.running:  # other tests need it
            sites.start("site-2")
    assert calls == [[0, 1, 2], [0, 1, 2]]
    torch.testing.assert_close(run.groups[0], undisturbed.groups[0], atol=1e-4, rtol=1e-4)
    opened = [(row["version"], row["client"], row["status"]) for row in run.arrivals if row["kind"] == "secure_opening"]
    assert opened == [(1, 0, "ok"), (1, 1, "ok"), (1, 2, "ok"), (2, 0, "ok"), (2, 1, "lost"), (2, 2, "ok")]
    assert not found(plain, b"|".join(wire))


def test_what_is_looked_for_on_the_wire_is_there_without_a_seal(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plain_changes(settings(SEALED, rounds=1, evaluate={"every": 0}), monkeypatch)
    wire = captured(monkeypatch)
    carry_out(settings({"name": "fedavg"}, rounds=1, evaluate={"every": 0}), kit=str(sites.folder / "server"))
    assert found(plain, b"|".join(wire))


def plain_changes(made: Any, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the clients would send unsealed, from a simulation of the same run."""
    plain: list[bytes] = []
    real = SecureSum.seal

    def seal(self: SecureSum, update: Update, assignment: Assignment, secrets: Secrets) -> Update:
        plain.append(update.parts["model"].numpy().tobytes())
        return real(self, update, assignment, secrets)

    with monkeypatch.context() as patch:
        patch.setattr(SecureSum, "seal", seal)
        carry_out(made)
    assert len(plain) == 3 * made.rounds
    return plain


def captured(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """All that sites deliver to the server from now on."""
    wire: list[bytes] = []
    real = Coordinator._receive

    def receive(self: Coordinator, origin: str, piece: Piece, data: memoryview) -> bytes:
        wire.append(bytes(data))
        return real(self, origin, piece, data)

    monkeypatch.setattr(Coordinator, "_receive", receive)
    return wire


def found(plain: list[bytes], wire: bytes) -> bool:
    """Whether some neighbouring numbers of a change are on the wire as they are."""
    windows = (change[at : at + 8] for change in plain for at in range(0, len(change) - 8, 40))
    return any(window in wire for window in windows if window != bytes(8))
