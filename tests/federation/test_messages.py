"""What travels: read back as it was, refused where it is anything else, never more room than was agreed."""

from __future__ import annotations

import json
import pickle
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piebald.contracts import Task, Update
from piebald.errors import SettingError
from piebald.queries import Evaluate
from piebald.runtimes.federation.messages import (
    LONGEST,
    PIECE,
    Hello,
    Piece,
    Refused,
    Reply,
    TermsRequest,
    Welcome,
    decode,
    encode,
)
from piebald.runtimes.federation.run_terms import RunTerms
from piebald.runtimes.federation.transfer import send_body
from piebald.runtimes.federation.wire_format import (
    Assembly,
    digest,
    pack,
    pack_task,
    pack_update,
    piece_at,
    unpack,
    unpack_task,
    unpack_update,
)
from tests.core.fakes import few

HELLO = Hello(protocol=1, version="0.1", incarnation="ab")


def piece(body: bytes, **more: object) -> Piece:
    fields = {
        "run": "ab",
        "epoch": "cd",
        "id": 1,
        "trains": True,
        "start": 0,
        "size": len(body),
        "digest": digest(body),
    }
    return Piece(**fields | more)


def test_a_message_is_read_back() -> None:
    head, body = decode(Hello, encode(HELLO, b"rest"))
    assert head == HELLO
    assert bytes(body) == b"rest"


@few
@given(data=st.binary(max_size=200))
@pytest.mark.parametrize("kind", [Hello, Welcome, Piece, TermsRequest, Reply])
def test_whatever_comes_is_read_or_refused(kind: type, data: bytes) -> None:
    for whole in (data, struct.pack("<I", len(data)) + data):
        with pytest.raises(Refused):
            decode(kind, whole)


@pytest.mark.parametrize(
    "change",
    [
        {"held": [-1]},
        {"held": [1] * 10_001},
        {"protocol": "1"},
        {"incarnation": "x y"},
        {"refused": "a" * 301},
        {"more": 1},
    ],
    ids=str,
)
def test_fields_are_checked(change: dict[str, object]) -> None:
    text = json.dumps(HELLO.model_dump() | change).encode()
    with pytest.raises(Refused, match="no hello"):
        decode(Hello, struct.pack("<I", len(text)) + text)


def test_too_long_a_message_is_refused() -> None:
    with pytest.raises(Refused, match="at most"):
        decode(Hello, encode(HELLO, bytes(LONGEST)))


def test_tasks_and_updates_are_read_back() -> None:
    vectors = {"model": torch.randn(5), "control": torch.randn(5), "candidates": torch.randn(2, 5)}
    sent = Task(7, 1, 3, vectors, Evaluate(split="validation"), attempt=2, committed=9)
    got = unpack_task(pack_task(sent))
    assert (got.id, got.client, got.version, got.query, got.attempt, got.committed) == (7, 1, 3, sent.query, 2, 9)
    assert all(torch.equal(got.vectors[name], part) for name, part in vectors.items())
    update, failure = unpack_update(
        pack_update(Update(vectors, 10, 4, {"loss": 0.5, "auc": float("nan")}, 2.0, None, 60), None)
    )
    assert failure is None
    assert update is not None
    assert (update.examples, update.steps, update.nbytes) == (10, 4, 60)
    assert update.norm == pytest.approx(float(vectors["model"].norm()))  # not the 2.0 that was claimed
    assert update.metrics == {"loss": 0.5}  # one that does not exist is not sent
    assert unpack_update(pack_update(None, "no rows")) == (None, "no rows")


def test_an_update_cannot_claim_more_bytes_than_it_has() -> None:
    update, _ = unpack_update(pack_update(Update({"model": torch.zeros(5)}, 1, 1, {}, 0.0, None, 10**12), None))
    assert update is not None
    assert update.nbytes == 20


@few
@given(data=st.binary(min_size=1, max_size=300), cut=st.integers(0, 200))
def test_damaged_bodies_are_refused(data: bytes, cut: int) -> None:
    whole = pack_task(Task(1, 0, 0, {"model": torch.zeros(3)}))
    for body in (data, whole[: cut % len(whole)], whole[:40] + data + whole[40:]):
        with pytest.raises(Refused):
            unpack_task(body)


def test_nothing_is_unpickled() -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (pytest.fail, ("unpickled",))

    for body in (pickle.dumps(Bomb()), struct.pack("<I", 2) + b"{}" + pickle.dumps(Bomb())):
        with pytest.raises(Refused):
            unpack(body)


def test_names_and_numbers_of_tensors_are_limited() -> None:
    with pytest.raises(Refused, match="called"):
        unpack(pack({}, {"../etc": torch.zeros(1), "a b": torch.zeros(1)}))
    with pytest.raises(Refused, match="65 tensors"):
        unpack(pack({}, {str(number): torch.zeros(1) for number in range(65)}))


def test_a_long_body_comes_together_also_when_pieces_come_twice_or_are_lost() -> None:
    body = np.random.default_rng(0).bytes(2 * PIECE + 17)
    head, assembly = piece(body), Assembly()

    def give(start: int) -> tuple[str, bytearray | None]:
        reply, whole = assembly.take(head.model_copy(update={"start": start}), piece_at(body, start), len(body))
        return reply.status, whole

    assert give(PIECE) == ("again", None)  # the first one was lost
    assert give(0) == ("go on", None)
    assert give(0) == ("go on", None)  # its answer was lost
    assert give(PIECE) == ("go on", None)
    assert give(PIECE) == ("go on", None)
    assert give(2 * PIECE) == ("done", bytearray(body))


def test_an_assembly_makes_no_room_on_a_claim_and_refuses_what_is_not_as_said() -> None:
    assembly = Assembly()
    with pytest.raises(Refused, match="at most 100"):
        assembly.take(piece(b"x", size=101), memoryview(b"x"), 100)
    with pytest.raises(Refused, match="more bytes"):
        assembly.take(piece(b"x", size=1), memoryview(b"xy"), 100)
    with pytest.raises(Refused, match="digest"):
        assembly.take(piece(b"x", digest="00"), memoryview(b"x"), 100)


class ScriptedLink:
    """A link whose receiver replies as a script says; `starts` collects the offsets of what was sent."""

    def __init__(self, *replies: str | None) -> None:
        self.replies, self.starts, self.reports = list(replies), [], []

    def request(self, target: str, topic: str, head: Piece, body: memoryview, timeout: float) -> memoryview | None:
        self.starts.append(head.start)
        status = self.replies.pop(0)
        return None if status is None else memoryview(encode(Reply(status=status)))

    def report(self, sentence: str) -> None:
        self.reports.append(sentence)


@pytest.mark.parametrize(
    ("replies", "starts", "status"),
    [
        (["go on", "done"], [0, PIECE], "done"),
        (["known"], [0], "known"),
        (["go on", "again", "go on", "done"], [0, PIECE, 0, PIECE], "done"),
        (["go on", None], [0, PIECE], None),
        (["again"] * 3, [0, 0, 0], None),
        (["go on"] * 2, [0, PIECE], None),  # it asks for more than there is
    ],
    ids=str,
)
def test_a_body_is_sent_in_pieces(replies: list[str | None], starts: list[int], status: str | None) -> None:
    body, link = bytes(PIECE + 5), ScriptedLink(*replies)
    assert send_body(link, "server", "result", piece(body), body, timeout=1.0) == status  # type: ignore[arg-type]
    assert (link.starts, link.replies, link.reports) == (starts, [], [])


def test_terms_of_another_version_are_refused_with_both_versions_named() -> None:
    with pytest.raises(SettingError, match=r"Piebald 0\.1\.0, the server 9\.9"):
        RunTerms.read({"piebald": "9.9"})
