"""Parties that send little, often, and something new each time: nothing of the others waits, grows or is hidden."""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from piebald.core.tensor_store import LARGE
from piebald.federation.hub.local_federation import free_port
from piebald.federation.link import messaging, tls, transfer
from piebald.federation.link.messaging import FRAMING, SERVER, FrameKind, Link, encode_frame
from piebald.federation.link.transfer import Assembly, piece_at
from piebald.federation.link.wire_format import PIECE, WINDOW, Hello, Piece, StoredBody, digest, encode, pack_update
from tests.federation.conftest import provisioned, until

from .server_entry import Entry, true_update


def head(body: bytes, id: int = 1) -> Piece:
    return Piece(run="ab", epoch="cd", id=id, trains=True, start=0, size=len(body), digest=digest(body))


def test_pieces_of_a_byte_ahead_of_a_gap_are_kept_by_the_hundred_and_not_by_the_million() -> None:
    """Their bytes were counted and not they: four million would have taken half a gigabyte, and minutes of a lock."""
    assembly, body = Assembly(), bytes(2 * WINDOW)
    first = head(body)
    for start in range(1, 4000):
        assembly.take(first.model_copy(update={"start": start}), memoryview(b"x"), len(body))
    assert len(assembly) == transfer._AHEAD
    body = random.Random(0).randbytes(WINDOW)
    first, done = head(body), list[bytearray | StoredBody | None]()
    for start in random.Random(1).sample(range(0, len(body), 1 << 14), len(body) >> 14):  # a bad link's, out of order
        done.append(assembly.take(first.model_copy(update={"start": start}), piece_at(body, start, 1 << 14), WINDOW)[1])
    assert done[-1] == body


def test_pieces_of_two_bodies_in_turn_never_make_one_and_leave_no_file(tmp_path: Path) -> None:
    """Each begins anew: a member that does so delivers nothing, and takes one file at a time."""
    first, second = bytes(LARGE + PIECE), bytes([1]) * (LARGE + PIECE)
    assembly = Assembly(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    heads = head(first, 1), head(second, 2)
    for start in range(0, len(first), PIECE):
        for body, piece in zip((first, second), heads, strict=True):
            reply, whole = assembly.take(piece.model_copy(update={"start": start}), piece_at(body, start), len(body))
            assert whole is None
            assert reply.received <= PIECE
            assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert len(assembly) <= WINDOW
    assembly.drop()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_piece_of_another_member_joins_no_body(tmp_path: Path) -> None:
    """Also with the same head: site-2 sends the middle of what site-1 delivers, with other bytes."""
    entry = Entry(tmp_path, {"name": "fedavg"})
    try:
        for site in ("site-1", "site-2"):
            entry.join(site)
        entry.task(1, client=0)
        body = pack_update(true_update(entry), None)
        half = len(body) // 2
        shared = entry.server.shared
        whole = Piece(
            run=shared.run, epoch=shared.epoch, id=1, trains=True, start=0, size=len(body), digest=digest(body)
        )
        entry.wire.deliver("site-1", "result", encode(whole, body[:half]))
        forged = whole.model_copy(update={"start": half})
        entry.wire.deliver("site-2", "result", encode(forged, bytes(len(body) - half)))
        assert entry.result() is None
        entry.wire.deliver("site-1", "result", encode(forged, body[half:]))
        result = entry.result()
        assert result is not None
        assert result.update is not None
        assert result.update.examples == 50
    finally:
        entry.server.close()


def test_a_member_whose_messages_are_refused_hides_no_other_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first thousand different sentences were reported, and nothing more: one member could use them all."""
    folder, port, said = provisioned(tmp_path), free_port(), list[str]()
    server = Link(SERVER, ("127.0.0.1", port), folder / SERVER, lambda name: name.startswith("site-"), said.append)
    server.start()
    try:
        for site, count in (("site-1", 2 * messaging._REPORTS), ("site-2", 1)):
            with tls.context(folder / site, False).wrap_socket(
                socket.create_connection(("127.0.0.1", port))
            ) as secured:
                secured.sendall(b"piebald" + bytes([FRAMING]))
                for number in range(count):
                    secured.sendall(encode_frame(FrameKind.REQUEST, number, f"topic-{number}", b"x"))
                until(lambda: server.received[site] == count)  # noqa: B023
                until(lambda: any(line.startswith(f"{site} sent a message on 'topic-0'") for line in said))  # noqa: B023
        assert sum(line.startswith("site-1") for line in said) <= messaging._REPORTS
        server.report("results cannot be taken, the disk is full")
        assert said[-1].startswith("results")
    finally:
        server.stop()


def test_a_site_that_says_something_new_with_each_hello_fills_no_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each reason, activity and number of a process was a line of the log, and each reason one of the audit log."""
    entry = Entry(tmp_path, {"name": "fedavg"})
    caplog.set_level(logging.INFO, "piebald.federation")
    try:
        entry.join("site-2")
        caplog.clear()
        for number in range(500):
            entry.join(
                "site-1", refused=f"reason {number}" if number % 2 else "", incarnation=f"{number:x}",
                doing=f"reading row {number}", pending=bool(number % 3), ready=entry.server.shared.terms,
            )  # fmt: skip
        assert len(caplog.records) < 130
        audit = (tmp_path / "server" / "audit.jsonl").read_text().splitlines()
        assert len(audit) < 130
        assert entry.server.shared.members[0].refused == "reason 499"  # and the last one counts
        entry.join("site-3")
        assert "site-3 joined" in caplog.text
    finally:
        entry.server.close()


def test_bytes_that_drip_do_not_lengthen_a_handshake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger who sends a byte of a handshake now and then holds a thread for as long as a silent one."""
    monkeypatch.setattr(tls, "HANDSHAKE", 0.5)
    folder, refused = provisioned(tmp_path), threading.Event()
    listener = tls.Listener(
        ("127.0.0.1", 0), tls.RenewedContext(folder / SERVER, True), pytest.fail, lambda *_: refused.set()
    )
    thread = threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        with socket.create_connection(listener.server_address[:2]) as plain, suppress(OSError):  # type: ignore[arg-type]
            began = time.monotonic()
            plain.sendall(b"\x16\x03\x01\x02\x00")  # a record of 512 bytes
            while not refused.wait(0.05):
                plain.sendall(b"\x01")
                assert time.monotonic() - began < 20
        assert refused.is_set()
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


def test_a_head_of_any_length_is_measured_before_it_is_read() -> None:
    """A message says how long its head is: what is longer than allowed, or than the message, is not parsed."""
    for length in (0xFFFFFFFF, 1 << 20 | 1, 1000):
        message = length.to_bytes(4, "little") + b"{" * 100
        said = list[str]()
        assert messaging.serve((Hello, pytest.fail), "site-1", message, said.append) is None
        assert said == ["site-1 sent a message without a whole head"]
