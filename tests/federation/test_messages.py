"""What travels: read back as it was, refused where it is anything else, never more room than was agreed."""

from __future__ import annotations

import json
import pickle
import struct
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piebald.contracts import Task, Update
from piebald.core.errors import SettingError
from piebald.core.tensor_store import LARGE, NamelessFile, StoredVectors
from piebald.federation.hub.run_terms import RunTerms
from piebald.federation.link.transfer import Assembly, piece_at, send_body
from piebald.federation.link.wire_format import (
    LONGEST,
    MINOR,
    PIECE,
    PROTOCOL,
    WINDOW,
    Hello,
    Piece,
    Refused,
    Reply,
    StoredBody,
    TermsRequest,
    Welcome,
    contents,
    decode,
    digest,
    encode,
    pack,
    pack_update,
    task_body,
    unpack,
    unpack_task,
    unpack_update,
)
from piebald.methods.queries import Evaluate
from piebald.version import __version__
from tests.fakes import few

HELLO = Hello(protocol=3, version="0.1", incarnation="ab")


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
    got = unpack_task(bytes(task_body(sent)))
    assert (got.id, got.client, got.version, got.query, got.attempt, got.committed) == (7, 1, 3, sent.query, 2, 9)
    assert all(torch.equal(got.vectors[name], part) for name, part in vectors.items())
    update, failure = unpack_update(pack_update(Update(vectors, 10, 4, {"loss": 0.5}, 2.0, None, 60), None))
    assert failure is None
    assert update is not None
    assert (update.examples, update.steps, update.nbytes) == (10, 4, 60)
    assert update.norm == pytest.approx(float(vectors["model"].norm()))  # not the 2.0 that was claimed
    assert update.metrics == {"loss": 0.5}
    assert unpack_update(pack_update(None, "no rows")) == (None, "no rows")


def test_a_model_that_many_tasks_bring_is_sent_from_where_it_lies() -> None:
    """Before, a server with 200 sites held 200 packed models, later two."""
    vectors = {"model": torch.randn(1000), "control": torch.randn(7).double()}
    for id in range(1, 4):
        task = Task(id, id, 3, dict(vectors))
        body, whole = task_body(task), bytes(task_body(task))
        assert (len(body), body.digest()) == (len(whole), digest(whole))
        edge = len(whole) - 4000 - 56
        for start, length in [
            (0, 10),
            (edge - 3, 7),
            (edge, 9),
            (edge + 50, 9),
            (len(whole) - 4, 100),
            (0, len(whole)),
        ]:
            assert bytes(body[start : start + length]) == whole[start : start + length]
        assert np.shares_memory(np.frombuffer(body[edge + 56 : edge + 56 + 4000], np.uint8), vectors["model"].numpy())


def test_a_long_body_is_in_a_file_and_holds_what_one_in_memory_holds(tmp_path: Path) -> None:
    vectors = {"model": torch.randn(LARGE // 2), "control": torch.randn(2, 5).double()}
    whole, assembly = pack_update(Update(vectors, 10, 4, {"loss": 0.5}), None), Assembly(tmp_path)
    for start in range(0, len(whole), PIECE):
        status, _, body = give(assembly, whole, start)
        assert len(assembly) == 0
    assert (status, list(tmp_path.iterdir())) == ("done", [])
    assert isinstance(body, StoredBody)
    (near, _), (far, _) = unpack_update(whole), unpack_update(body)
    assert near is not None
    assert far is not None
    assert contents(body) == contents(whole)
    assert isinstance(far.vectors, StoredVectors)
    assert (far.norm, far.examples, dict(far.metrics)) == (near.norm, near.examples, dict(near.metrics))
    assert all(torch.equal(far.vectors[name], part) for name, part in near.vectors.items())


@pytest.mark.parametrize(
    "about",
    [
        {"model": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}},
        {"model": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"model": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}},
        {"model": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
         "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        {"model": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
        {"model": [1, 2]}, [1], "model",
    ],
)  # fmt: skip
def test_a_head_that_does_not_fit_its_tensors_is_refused_wherever_the_body_is(about: object, tmp_path: Path) -> None:
    head = json.dumps(about).encode()
    whole = struct.pack("<I", 2) + b"{}" + struct.pack("<Q", len(head)) + head + bytes(4)
    stored = StoredBody(NamelessFile(tmp_path))
    stored.extend(whole)
    for body in (whole, stored):
        with pytest.raises(Refused):
            unpack(body)


def test_an_update_cannot_claim_more_bytes_than_it_has() -> None:
    update, _ = unpack_update(pack_update(Update({"model": torch.zeros(5)}, 1, 1, {}, 0.0, None, 10**12), None))
    assert update is not None
    assert update.nbytes == 20


@few
@given(data=st.binary(min_size=1, max_size=300), cut=st.integers(0, 200))
def test_damaged_bodies_are_refused(data: bytes, cut: int) -> None:
    whole = bytes(task_body(Task(1, 0, 0, {"model": torch.zeros(3)})))
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


def give(
    assembly: Assembly, body: bytes, start: int, most: int = 1 << 30
) -> tuple[str, int, bytearray | StoredBody | None]:
    """Hand over the piece that begins at an offset; returns the status, how much is there, and the body."""
    head = piece(body, start=start)
    reply, whole = assembly.take(head, piece_at(body, start), most)
    return reply.status, reply.received, whole


def test_a_long_body_comes_together_from_pieces_in_any_order_also_when_they_come_twice() -> None:
    body, assembly = np.random.default_rng(0).bytes(3 * PIECE + 17), Assembly()
    assert give(assembly, body, PIECE) == ("go on", 0, None)  # it was overtaken by the one before
    assert give(assembly, body, 0) == ("go on", 2 * PIECE, None)
    assert give(assembly, body, 5) == ("go on", 2 * PIECE, None)
    assert give(assembly, body, 3 * PIECE) == ("go on", 2 * PIECE, None)
    assert give(assembly, body, 2 * PIECE - 9) == ("go on", 3 * PIECE - 9, None)  # not where another one ended
    assert give(assembly, body, 2 * PIECE) == ("done", len(body), bytearray(body))
    assert len(assembly) == 0


def test_a_piece_without_bytes_asks_how_much_is_there() -> None:
    body, assembly = bytes(3 * PIECE), Assembly()
    nothing = memoryview(b"")
    assert assembly.take(piece(body), nothing, len(body))[0].received == 0
    give(assembly, body, 0)
    reply, _ = assembly.take(piece(body), nothing, len(body))
    assert (reply.status, reply.received) == ("again", PIECE)
    other = piece(bytes(7))
    assert assembly.take(other, nothing, len(body))[0].received == 0  # one body at a time
    assert len(assembly) == 0


def test_an_assembly_makes_no_room_on_a_claim_and_refuses_what_is_not_as_said() -> None:
    assembly = Assembly()
    with pytest.raises(Refused, match="at most 100"):
        assembly.take(piece(b"x", size=101), memoryview(b"x"), 100)
    with pytest.raises(Refused, match="more bytes"):
        assembly.take(piece(b"x", size=1), memoryview(b"xy"), 100)
    with pytest.raises(Refused, match="digest"):
        assembly.take(piece(b"x", digest="00"), memoryview(b"x"), 100)


def test_pieces_ahead_take_no_more_room_than_a_window() -> None:
    body, assembly = bytes(WINDOW + 8 * PIECE), Assembly()
    head = piece(body)
    for start in [*range(1, len(body) - PIECE, PIECE), *range(1, 50)]:  # the first byte never comes
        assembly.take(head.model_copy(update={"start": start}), piece_at(body, start), len(body))
    assert len(assembly) <= WINDOW
    give(assembly, body, 0)
    assert len(assembly) > WINDOW  # what was kept is used


def test_a_piece_that_is_too_long_is_refused() -> None:
    body, assembly = bytes(2 * PIECE), Assembly()
    with pytest.raises(Refused, match=f"a piece of more than {PIECE:,} bytes"):
        assembly.take(piece(body), memoryview(body)[: PIECE + 1], len(body))
    assert not len(assembly)
    assert assembly.take(piece(body), memoryview(body)[:PIECE], len(body))[0].received == PIECE


class Receiver:
    """A link to a receiver with an assembly; `plan` says what becomes of pieces: "ok", "lost" or "broken".

    Replies come when the sender has sent `behind` pieces more, or asks.
    """

    def __init__(self, plan: list[str], behind: int = 0) -> None:
        self.assembly, self.plan, self.behind = Assembly(), plan, behind
        self.late = list[tuple[Future[memoryview], Reply | None]]()
        self.bytes, self.body, self.reports = 0, None, list[str]()

    def send(self, target: str, topic: str, head: Piece, data: memoryview) -> Future[memoryview]:
        what, future = self.plan.pop(0) if self.plan and len(data) else "ok", Future[memoryview]()
        if what == "broken":
            for waiting, _ in [*self.late, (future, None)]:
                waiting.cancel()
            self.late.clear()
            return future
        self.bytes += len(data)
        if what == "ok":
            reply, body = self.assembly.take(head, memoryview(data), 1 << 30)
            self.body = body or self.body
            self.late.append((future, reply))
        is_last = head.start + len(data) == head.size
        while len(self.late) > (self.behind if len(data) and not is_last else 0):
            waiting, reply = self.late.pop(0)
            waiting.set_result(memoryview(encode(reply)))
        return future


def sent_by(link: Receiver, body: bytes, **more: object) -> str | None:
    return send_body(link, "server", "result", piece(body), body, **{"timeout": 0.5} | more)  # type: ignore[arg-type]


@pytest.mark.parametrize("behind", [0, 5])
def test_a_body_that_breaks_off_again_and_again_goes_on_where_it_broke(behind: int) -> None:
    body = np.random.default_rng(1).bytes(2 * WINDOW + 17)
    link = Receiver((["ok"] * 29 + ["lost"] * 3 + ["broken"]) * 40, behind)
    confirmed: list[int] = []
    assert sent_by(link, body, timeout=20.0, confirmed=confirmed.append) == "done"
    assert link.body == body
    assert confirmed == sorted(set(confirmed))
    assert link.bytes < 1.5 * len(body)  # before, each break began at the first byte again
    assert link.plan  # it was not over before a connection broke


def test_a_body_that_was_begun_before_goes_on_there() -> None:
    body, link = np.random.default_rng(1).bytes(2 * WINDOW), Receiver([])
    for start in range(0, WINDOW, PIECE):
        give(link.assembly, body, start)
    assert sent_by(link, body) == "done"
    assert link.bytes <= len(body) - WINDOW + PIECE


def test_a_receiver_that_says_nothing_gets_one_window_and_is_given_up() -> None:
    body, link = bytes(np.random.default_rng(1).bytes(3 * WINDOW)), Receiver(["lost"] * 1000)
    assert sent_by(link, body) is None
    assert link.bytes <= WINDOW + PIECE
    assert sent_by(link, body, wanted=lambda: False) is None


class Answering:
    """A link whose receiver answers like this."""

    def __init__(self, answer: bytes | None) -> None:
        self.answer, self.reports = answer, list[str]()

    def send(self, target: str, topic: str, head: Piece, body: memoryview) -> Future[memoryview]:
        reply = Future[memoryview]()
        if self.answer is not None:
            reply.set_result(memoryview(self.answer))
        return reply

    def report(self, sentence: str) -> None:
        self.reports.append(sentence)


@pytest.mark.parametrize(
    ("answer", "status"),
    [("done", "done"), ("known", "known"), ("refused", "refused"), ("again", None), ("go on", None), (None, None)],
)
def test_a_small_body_is_one_request(answer: str | None, status: str | None) -> None:
    body, link = bytes(PIECE), Answering(answer and encode(Reply(status=answer)))
    assert send_body(link, "server", "result", piece(body), body, timeout=0.3) == status  # type: ignore[arg-type]
    assert send_body(Answering(b"?"), "server", "result", piece(b"x"), b"x", timeout=1.0) is None  # type: ignore[arg-type]


def test_terms_of_another_protocol_are_refused_with_both_releases_named() -> None:
    with pytest.raises(
        SettingError, match=rf"{__version__} with protocol {PROTOCOL}, the server Piebald 9\.9 with protocol 1"
    ):
        RunTerms.read({"piebald": "9.9", "protocol": 1, "minor": 0})


def test_terms_may_have_a_field_more_from_another_minor_alone() -> None:
    known: dict[str, Any] = {
        "protocol": PROTOCOL, "minor": MINOR, "piebald": "9.9", "experiment": {}, "training": {}, "transforms": [],
        "private": [], "layout": [], "objective": "mse", "metrics": [], "seed": 0, "shape": [1], "outputs": [1],
        "clients": [], "sites": [],
    }  # fmt: skip
    RunTerms.read(known)
    with pytest.raises(SettingError, match=r"'later'.*extra_forbidden"):
        RunTerms.read({**known, "later": 1})
    assert RunTerms.read({**known, "later": 1, "minor": MINOR + 1}).seed == 0
