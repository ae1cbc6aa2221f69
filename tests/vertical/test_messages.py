"""What is not exactly the message that must come now ends the run, with one sentence on both sides."""

from __future__ import annotations

import queue
import re
import socket
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piebald.core.errors import RuntimeFault
from piebald.vertical.channel import InMemoryChannel, SocketChannel
from piebald.vertical.encryption.backend import FixedPointScale, InvalidMessage, MessageLength
from piebald.vertical.party_messages import (
    HEADER,
    EndReason,
    MessageFault,
    MessageKind,
    PartyEnded,
    body_length,
    pack_frame,
    unpack_frame,
)
from piebald.vertical.protocol import HELLO, ROLES, PartySession, SettingsDiffer, receive_numbers, send_numbers

from .conftest import party, small, talk, train_both
from .tampered import Tampered

SESSION = bytes(range(16))
TWO = [MessageLength(3), MessageLength(10, exact=False)]


def frame(parts=(b"abc", b"defg"), kind=MessageKind.MASKED, session=SESSION, number=5, sender=1) -> bytes:
    return pack_frame(kind, sender, session, number, parts)


def opened(data) -> list[bytes]:
    return unpack_frame(data, MessageKind.MASKED, 1, SESSION, 5, TWO)


@given(st.binary(min_size=3, max_size=3), st.binary(max_size=10))
def test_a_message_comes_out_as_it_went_in(one, other):
    assert opened(frame((one, other))) == [one, other]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (frame()[:-1], "damaged or cut off"),
        (frame()[:10], "damaged or cut off"),
        (b"", "damaged or cut off"),
        (frame() + b"x", "damaged or cut off"),
        (frame(session=bytes(16)), "another session"),
        (frame(sender=0), "this party's own MASKED message, or one in its name, was sent back to it"),
        (frame(number=4), "message 4 of the other party came where message 5 must: it is replayed"),
        (frame(kind=MessageKind.DECRYPTED), r"kind 5 \(DECRYPTED\) where MASKED must come"),
        (frame((b"ab", b"")), "part 1 of the other party's MASKED message has the wrong length"),
        (frame((b"abc", b"x" * 11)), "part 2 of the other party's MASKED message has the wrong length"),
        (frame((b"abc",)), "part 2 of the other party's MASKED message has the wrong length"),
        (frame((b"abc", b"", b"")), "more parts than the 2 declared"),
    ],
)
def test_what_is_not_the_message_is_refused(data, said):
    with pytest.raises(MessageFault, match=said):
        opened(data)


@given(st.integers(0, len(frame()) - 1), st.integers(1, 255))
def test_no_byte_can_be_changed(place, change):
    data = bytearray(frame())
    data[place] ^= change
    with pytest.raises(MessageFault):
        opened(bytes(data))


@given(st.binary(max_size=80))
def test_noise_is_no_message(data):
    with pytest.raises(MessageFault):
        opened(data)


def test_lengths_are_checked_before_anything_is_read():
    head = HEADER.pack(b"PBT2", 4, 1, SESSION, 0, 2**60)
    with pytest.raises(MessageFault, match="claims 1,152,921,504,606,846,976 bytes where at most 100 are allowed"):
        body_length(head, 100)
    with pytest.raises(MessageFault, match="no message of this protocol"):
        body_length(b"GET / HTTP/1.1" + bytes(24), 100)


def test_an_abort_carries_a_reason_and_no_text():
    with pytest.raises(PartyEnded, match="its user interrupted it"):
        opened(frame((bytes([EndReason.INTERRUPTED]),), kind=MessageKind.ABORT))
    with pytest.raises(PartyEnded, match="it gave no reason"):
        opened(frame((b"\xff",), kind=MessageKind.ABORT))


# ----------------------------------------------------------------------------------------------------------- both sides


def flipped(frames: list[bytes]) -> bytes:
    data = bytearray(frames[-1])
    data[len(data) // 2] ^= 1
    return bytes(data)


def wrong_product(frames: list[bytes]) -> bytes:
    """A well-formed message whose numbers are none of the product's, as those under another key would be."""
    head = HEADER.unpack(frames[-1][: HEADER.size])
    body = bytearray(frames[-1][HEADER.size : -16])
    body[8:] = np.random.default_rng(0).bytes(len(body) - 8)
    size = struct.unpack_from("<Q", body)[0]
    rest = frames[-1][HEADER.size + 8 + size : -16]
    parts = [bytes(body[8 : 8 + size])]
    while rest:
        size = struct.unpack_from("<Q", rest)[0]
        parts.append(rest[8 : 8 + size])
        rest = rest[8 + size :]
    return pack_frame(MessageKind(head[1]), *head[2:5], parts)


@pytest.mark.parametrize(
    ("number", "change", "said"),
    [
        (2, flipped, "damaged or cut off"),
        (2, lambda frames: frames[-1][:-20], "damaged or cut off"),
        (6, lambda frames: frames[2], "message 2 of the other party came where message 6 must: it is replayed"),
        (1, lambda frames: frames[0], "bytes where at most|another session"),
        (4, wrong_product, "outside its declared range, so it was encrypted under another key"),
    ],
    ids=["changed", "truncated", "replayed", "replayed greeting", "wrong key"],
)
def test_both_parties_end_with_one_sentence_that_holds_no_values(number, change, said):
    from piebald.vertical.party_data import load

    settings, (one, other) = small(), InMemoryChannel.pair()
    held = load(settings.data, 0)

    def act(role, session):
        session.handshake(settings.agreed())
        list(party(role, held[role], settings).train(session))

    errors = talk(act, (Tampered(one, number, change), other))
    assert isinstance(errors["target"], InvalidMessage)
    assert re.search(said, str(errors["target"]))
    assert str(errors["source"]) == (
        "the other party ended the run: it refused a message of this party as damaged, replayed or made under "
        "another key"
    )
    for error in errors.values():
        assert "\n" not in str(error)
        assert len(str(error)) < 250


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda role, session: session.handshake({"lr": role}), "settings differ"),
        (
            lambda role, session: session.handshake({}, (4, 2) if role == "source" else (8, 6)),
            "no checkpoint of the same step",
        ),
    ],
)
def test_parties_that_do_not_fit_part_at_the_greeting(act, said):
    errors = talk(act)
    assert any(isinstance(error, SettingsDiffer) and said in str(error) for error in errors.values())
    assert len(errors) == 2


def test_two_sources_do_not_fit():
    def act(role, session):
        session.role = "source"
        session.handshake({})

    assert "both parties say they are the source" in str([*talk(act).values()])


def test_the_latest_common_checkpoint_is_taken():
    taken = {}

    def act(role, session):
        taken[role] = session.handshake({}, (60, 40) if role == "source" else (40, 20))

    assert talk(act) == {}
    assert taken == {"source": 40, "target": 40}


def test_an_error_here_is_only_a_number_there():
    def act(role, session):
        if role == "source":
            raise ValueError("the secret value is 42")
        session.handshake({})

    errors = talk(act)
    assert isinstance(errors["source"], ValueError)
    assert "an error occurred there" in str(errors["target"])
    assert "42" not in str(errors["target"])


def test_numbers_meant_for_both_must_be_finite():
    def act(role, session):
        if role == "source":
            send_numbers(session, MessageKind.WATCH, np.array([1.0, np.nan]))
        receive_numbers(session, MessageKind.WATCH, 2)

    assert "not finite" in str(talk(act)["target"])


@pytest.mark.parametrize(
    ("method", "numbers"), [({"kind": "smmd", "kernel": "linear"}, 8), ({"kind": "ftl"}, 18 * 8)], ids=["linear", "ftl"]
)
def test_a_constant_is_told_once_and_needs_no_product(method, numbers):
    """The other party learns it whatever it multiplies, so before a third of the bytes of a step hid nothing."""
    settings, (one, other) = small(method=method, steps=1, watch_every=9), InMemoryChannel.pair()
    recorded = Tampered(one, 10**6, lambda frames: b"")
    parties, _ = train_both(settings, ends=(recorded, other))
    kinds = {HEADER.unpack(frame[: HEADER.size])[1]: frame for frame in recorded.frames}
    at = HEADER.size + 8
    size = struct.unpack_from("<Q", kinds[MessageKind.STATISTICS], HEADER.size)[0]
    told = kinds[MessageKind.STATISTICS][at + size + 8 : -16]
    start = party("source", parties["source"].data, settings)
    constant = start.terms[1].statistics(start.view())[0].constant
    digits = FixedPointScale.of(start.terms[1].owned[0]).statistics
    assert np.array_equal(np.frombuffer(told, "<i8"), np.rint(np.ldexp(constant, digits)).ravel())
    assert len(told) == 8 * numbers
    # the products of the label's term are the only ones, of 18 rows and 8 units
    assert len(kinds[MessageKind.MASKED]) == HEADER.size + 2 * (8 + 8 * 8) + 16
    assert len(kinds[MessageKind.DECRYPTED]) == HEADER.size + 8 + 8 * 18 * 8 + 16


# -------------------------------------------------------------------------------------------------------------- sockets


@pytest.mark.full
def test_a_socket_carries_what_memory_does_and_counts_it():
    one, other = (SocketChannel(end) for end in socket.socketpair())
    large = frame((b"abc", b""), number=0) * 30_000  # more than the system holds: sending must not wait
    one.send(frame())
    one.send(large)
    other.send(frame())
    assert other.receive(100, 5) == one.receive(100, 5) == frame()
    assert one.received == len(frame())
    assert one.sent == len(frame()) + len(large)
    one.close()
    other.close()


def test_a_whole_run_over_a_socket_is_the_run_in_memory():
    import torch

    from piebald.vertical.party_data import load

    settings = small()
    held, parties = load(settings.data, 0), {}

    def act(role, session):
        session.handshake(settings.agreed())
        parties[role] = party(role, held[role], settings)
        list(parties[role].train(session))

    assert talk(act, tuple(SocketChannel(end) for end in socket.socketpair())) == {}
    for role, one in train_both(settings)[0].items():
        for found, expected in zip(parties[role].network.parameters(), one.network.parameters(), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (b"", PartyEnded, "the other party is gone"),
        (frame()[:20], PartyEnded, "in the middle of a message"),
        (frame()[:-3], PartyEnded, "in the middle of a message"),
        (b"\x00" * 60, MessageFault, "no message of this protocol"),
    ],
)
def test_a_broken_connection_is_one_sentence(data, error, said):
    one, other = socket.socketpair()
    other.sendall(data)
    other.close()
    channel = SocketChannel(one)
    with pytest.raises(error, match=said):
        channel.receive(100, 5)
    channel.close()


def test_silence_ends_the_wait():
    one, other = socket.socketpair()
    channel = SocketChannel(one)
    with pytest.raises(PartyEnded, match=r"silent for 0.05 seconds"):
        channel.receive(100, 0.05)
    channel.close()
    other.close()
    with pytest.raises(PartyEnded, match=r"silent for 0.05 seconds"):
        InMemoryChannel.pair()[0].receive(100, 0.05)


def test_errors_of_a_run_are_faults_that_can_be_resumed():
    assert issubclass(InvalidMessage, RuntimeFault)
    assert issubclass(PartyEnded, RuntimeFault)


def test_of_a_raw_table_and_one_whose_rows_have_their_names_the_former_is_told_what_differs():
    """The same file and the same options at both do not help, as --key is none of them."""
    terms = {"source": {"rows": {"steps": 2}}, "target": {"steps": 2}}
    errors = talk(lambda role, session: session.handshake(terms[role]))
    assert "--key to both or to neither" in str(errors["source"])


class Echo(InMemoryChannel):
    """The other end knows nothing, and gives back what it was sent in the other role and with a nonce of its own."""

    def send(self, frame):
        version, _, digest, _, steps = unpack_frame(frame, MessageKind.HELLO, None, bytes(16), 0, HELLO)
        answer = [version, bytes([ROLES.index("target")]), digest, b"n" * 16, steps]
        self._inbox.put(pack_frame(MessageKind.HELLO, ROLES.index("target"), bytes(16), 0, answer))


def test_who_sends_a_digest_back_does_not_know_what_it_is_of():
    """A partner who waited for the digest of keys and settings could claim them all by repeating it."""
    inbox = queue.Queue()
    with pytest.raises(SettingsDiffer, match="settings differ"):
        PartySession(Echo(inbox, inbox), "source", 5).handshake({"keys": "secret"})
