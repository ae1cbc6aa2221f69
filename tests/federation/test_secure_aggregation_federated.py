"""Secure aggregation among real processes: sites die before unmasking, and nothing unmasked is on the wire."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from piebald.contracts import SIGNATURE, ClientSecrets, Task, Update
from piebald.core.errors import Declined, SettingError
from piebald.federation.credentials.certificates import CertificateSigner, SignatureCheck
from piebald.federation.hub.server_messages import ServerMessages
from piebald.federation.link.wire_format import Piece
from piebald.privacy.secure_aggregation.key_queries import SIGNED, ShareKeys, public_keys
from piebald.privacy.secure_aggregation.masks import KEYS, texts
from piebald.privacy.secure_aggregation.server_side import SecureRound, repeatable
from piebald.privacy.secure_aggregation.transform import SecureAggregation
from tests.security.lying_server import told_keys

from .conftest import SITES, Sites, carry_out, provisioned, settings

MASKED = {"name": "fedavg", "transforms": [{"kind": "secure_aggregation"}]}


@pytest.mark.long
def test_a_site_that_dies_before_unmasking(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first round it comes back and unmasks with what is on its disk; in the second it is gone, and two of
    three shares are enough.  Both rounds count its update, so the model is that of an undisturbed simulation."""
    made = settings(MASKED, rounds=2, evaluate={"every": 0})
    plain = plain_changes(made, monkeypatch)
    undisturbed = carry_out(settings({"name": "fedavg"}, rounds=2, evaluate={"every": 0}))
    wire = captured(monkeypatch)
    real, calls = SecureRound._shares, []

    def dying(self: SecureRound, exchanged: Any, arrived: Any, signed: Any, context: Any) -> Any:
        calls.append(list(arrived))
        sites.kill("site-2")
        if len(calls) == 1:
            sites.start("site-2")
        else:
            shared = context._server.runtime.shared
            shared.timeouts = replace(shared.timeouts, patience=2.0)
        return real(self, exchanged, arrived, signed, context)

    monkeypatch.setattr(SecureRound, "_shares", dying)
    try:
        run = carry_out(made, credentials=str(sites.folder / "server"))
    finally:
        if "site-2" not in sites.running:  # other tests need it
            sites.start("site-2")
    assert calls == [[0, 1, 2], [0, 1, 2]]
    torch.testing.assert_close(run.cluster_models[0], undisturbed.cluster_models[0], atol=1e-4, rtol=1e-4)
    unmasked = [(row["version"], row["client"], row["status"]) for row in run.results if row["kind"] == "unmasking"]
    assert unmasked == [(1, 0, "ok"), (1, 1, "ok"), (1, 2, "ok"), (2, 0, "ok"), (2, 1, "lost"), (2, 2, "ok")]
    assert not found(plain, b"|".join(wire))


@pytest.mark.full
def test_what_is_searched_for_on_the_wire_is_there_without_masks(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plain_changes(settings(MASKED, rounds=1, evaluate={"every": 0}), monkeypatch)
    wire = captured(monkeypatch)
    carry_out(settings({"name": "fedavg"}, rounds=1, evaluate={"every": 0}), credentials=str(sites.folder / "server"))
    assert found(plain, b"|".join(wire))


def plain_changes(made: Any, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the clients would send unmasked, from a simulation of the same run."""
    plain: list[bytes] = []
    real = SecureAggregation.mask

    def mask(self: SecureAggregation, update: Update, task: Task, secrets: ClientSecrets) -> Update:
        plain.append(update.vectors["model"].numpy().tobytes())
        return real(self, update, task, secrets)

    with monkeypatch.context() as patch:
        patch.setattr(SecureAggregation, "mask", mask)
        carry_out(made)
    assert len(plain) == 3 * made.rounds
    return plain


def captured(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """All that sites deliver to the server from now on."""
    wire: list[bytes] = []
    real = ServerMessages._on_result_piece

    def receive(self: ServerMessages, origin: str, piece: Piece, data: memoryview) -> bytes:
        wire.append(bytes(data))
        return real(self, origin, piece, data)

    monkeypatch.setattr(ServerMessages, "_on_result_piece", receive)
    return wire


def found(plain: list[bytes], wire: bytes) -> bool:
    """Whether some neighbouring numbers of a change are on the wire as they are."""
    windows = (change[at : at + 8] for change in plain for at in range(0, len(change) - 8, 40))
    return any(window in wire for window in windows if window != bytes(8))


# --------------------------------------------------------------------------------------- keys that sites sign----


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return provisioned(tmp_path_factory.mktemp("signing"))


def signer(credentials: Path, name: str, run: str = "ab") -> CertificateSigner:
    return CertificateSigner(credentials / name, SITES, run)


def test_a_site_signs_its_own_keys_in_one_run(credentials: Path) -> None:
    signed = signer(credentials, "site-2").sign(b"keys")
    assert len(signed) == SIGNATURE
    reader = signer(credentials, "site-1")
    assert reader.check(1, b"keys", signed)
    assert not reader.check(0, b"keys", signed)
    assert not reader.check(7, b"keys", signed)
    assert not reader.check(1, b"other keys", signed)
    assert not signer(credentials, "site-1", run="cd").check(1, b"keys", signed)
    for place in (0, 40, 700):
        broken = bytes(255 - byte if at == place else byte for at, byte in enumerate(signed))
        assert not reader.check(1, b"keys", broken) or not any(signed[place:])
    assert not reader.check(1, b"keys", bytes(SIGNATURE))
    server = SignatureCheck(credentials / "server", SITES, "ab")  # it checks before it relays
    assert server.check(1, b"keys", signed)
    assert not server.check(0, b"keys", signed)


def test_nobody_else_can(credentials: Path, tmp_path: Path) -> None:
    """Neither the server, whose certificate is of the same authority, nor a site of the right name with another."""
    reader = signer(credentials, "site-1")
    assert not reader.check(1, b"keys", signer(credentials, "server").sign(b"keys"))
    assert not reader.check(1, b"keys", signer(credentials, "site-3").sign(b"keys"))
    assert not reader.check(1, b"keys", signer(provisioned(tmp_path / "strangers"), "site-2").sign(b"keys"))
    with pytest.raises(SettingError, match="one site for several clients"):
        CertificateSigner(credentials / "site-1", ["site-1", "site-2", "site-2"], "ab")


def test_keys_that_the_server_made_up_are_refused(credentials: Path) -> None:
    """A server in the middle gives site-1 keys of its own as those of the others; it has no signatures for them."""
    masking = SecureAggregation(aggregation={"kind": "equal_weighted"}, heaviest=1.0)
    held = {
        c: ClientSecrets(c, {}, repeatable(c), signer(credentials, name), rows={"train": 1})
        for c, name in enumerate(SITES)
    }
    digest, told = told_keys(masking, held)
    public = [texts(one[KEYS], 64)[0] for one in told.values()]
    signed = torch.cat([one[SIGNED] for one in told.values()])
    about = [0] * 3, digest
    ShareKeys().reply({**masking.graph(range(3), public, *about).vectors(), SIGNED: signed}, held[0], masking)
    digest, again = told_keys(masking, held)
    fresh = again[0]
    about = [0] * 3, digest
    false = [texts(fresh[KEYS], 64)[0], public_keys(bytes(32)), public[2]]
    mixed = masking.graph(range(3), false, *about).vectors()
    for some in ({SIGNED: torch.cat([fresh[SIGNED], signed[1:]])}, {}, {SIGNED: signed[:2]}):
        with pytest.raises(Declined, match=r"not signed by its site|signatures came|something else"):
            ShareKeys().reply({**mixed, **some}, held[0], masking)
