"""Well-framed but hostile messages of the other party end a transfer with one sentence, never with a raw exception."""

from __future__ import annotations

import json
import random
import stat
import struct
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from piebald.cli import main
from piebald.contracts.component import build
from piebald.core.errors import PiebaldError, SettingError
from piebald.vertical.channel import Channel, InMemoryChannel
from piebald.vertical.encryption.backend import InvalidMessage
from piebald.vertical.kernels import ProductSize
from piebald.vertical.party_data import load
from piebald.vertical.party_messages import HEADER, TAG, MessageKind, pack_frame
from piebald.vertical.party_store import PartyStore
from piebald.vertical.protocol import ROLES, PartySession
from piebald.vertical.transfer_runs import resume, run, train_party
from tests.vertical.conftest import LIBRARY, checkpoint, encrypted, party, small, talk
from tests.vertical.tampered import Tampered

SMALL = small(steps=2, watch_every=1)
HELD = load(SMALL.data, 0)
SIZES = [ProductSize(6, 4, 3, 4.0), ProductSize(1, 9, 3, 4.0), ProductSize(6, 4, 1, 4.0)]


def opened(frame: bytes) -> tuple[list, list[bytes]]:
    """The header and the parts of a frame."""
    body, parts = frame[HEADER.size : -TAG], []
    while body:
        size = struct.unpack_from("<Q", body)[0]
        parts.append(body[8 : 8 + size])
        body = body[8 + size :]
    return list(HEADER.unpack(frame[: HEADER.size])), parts


def reframed(head: list, parts: list[bytes]) -> bytes:
    return pack_frame(head[1], head[2], head[3], head[4], parts)


# ------------------------------------------------------------------------------------------------------------- a fuzzer


SPECIAL = [0.0, -1.0, 2.0, 1e308, -1e308, float("inf"), float("nan"), 5e-324]


def mutation(rng: random.Random) -> Callable[[list[bytes]], bytes]:
    """A random change of one frame, given all frames sent so far."""

    def numbers(data: bytes) -> bytes:
        count = len(data) // 8
        return struct.pack(f"<{count}d", *rng.choices(SPECIAL, k=count)) + data[8 * count :]

    def flipped(data: bytes) -> bytes:
        made = bytearray(data)
        for _ in range(rng.choice([1, 1, 5, 50])):
            if made:
                made[rng.randrange(len(made))] ^= rng.randrange(1, 256)
        return bytes(made)

    of_a_part: list[Callable[[bytes], bytes]] = [
        flipped,
        numbers,
        lambda data: bytes(len(data)),
        lambda data: b"\xff" * len(data),
        lambda data: b"\x01" + bytes(max(len(data) - 1, 0)),
        lambda data: rng.randbytes(len(data)),
        lambda data: data[: len(data) // 2],
        lambda data: data + rng.randbytes(8),
        lambda data: data[::-1],
        lambda data: b"\x00" * 7 + b"\x80" + data[8:],  # the least of 64 bits
        lambda data: data[:16] + flipped(data[16:24]) + data[24:],  # SEAL's header
    ]

    def change(frames: list[bytes]) -> bytes:
        head, parts = opened(frames[-1])
        what = rng.random()
        if what < 0.7 and parts:
            place = rng.randrange(len(parts))
            parts[place] = rng.choice(of_a_part)(parts[place])
        elif what < 0.8:
            parts = rng.choice([[], parts[:-1], [*parts, b"more"], parts[::-1], [b"".join(parts)]])
        elif what < 0.9:
            head[1] = rng.randrange(12)
        elif what < 0.95:
            head[rng.choice([2, 4])] = rng.randrange(256)
        else:
            head, parts = opened(rng.choice(frames))
        return reframed(head, parts)

    return change


def attacked(settings, number: int, seed: int, attacker: str) -> tuple[dict, list[int]]:
    """A whole run in which one frame of the attacker is changed: the errors of both, and the kinds it sent."""
    one, other = InMemoryChannel.pair()
    ends = {"source": one, "target": other}
    changed = Tampered(ends[attacker], number, mutation(random.Random(seed)))
    ends[attacker] = changed

    def act(role: str, session: PartySession) -> None:
        session.handshake(settings.agreed())
        for step in party(role, HELD[role], settings).train(session):
            json.dumps(step.table(), allow_nan=False)

    errors = talk(act, (ends["source"], ends["target"]))
    return errors, [HEADER.unpack(frame[: HEADER.size])[1] for frame in changed.frames]


def fuzz(settings, seeds: range) -> dict[str, int]:
    """Change each message of a run in many ways; how often each kind was changed."""
    _, kinds = attacked(settings, 10**6, 0, "source")
    counted = dict.fromkeys(MessageKind.__members__, 0)
    for seed in seeds:
        attacker, number = ROLES[seed % 2], seed // 2 % len(kinds)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            errors, _ = attacked(settings, number, seed, attacker)
        counted[MessageKind(kinds[number]).name] += 1
        for role, error in errors.items():
            assert isinstance(error, PiebaldError), (seed, role, repr(error))
            assert not isinstance(error, SettingError)
            assert error.exit_code in (1, 2)
            assert "\n" not in str(error)
            assert len(str(error)) < 300
        refused = errors.get(ROLES[1 - seed % 2])
        assert refused is None or "other party" in str(refused) or "own" in str(refused) or "part" in str(refused)
    return counted


@pytest.mark.full
@pytest.mark.parametrize("backend", ["plain", "fixed"])
def test_no_mutated_message_is_a_raw_exception(backend):
    counted = fuzz(small(steps=2, watch_every=1, backend=backend), range(120))
    assert {kind for kind, count in counted.items() if count} == {*MessageKind.__members__} - {
        "ABORT", "NEAR", "POINTS", "RETURNED",  # the last three are of a match, see `tests/vertical/test_match.py`
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.full
@pytest.mark.parametrize("backend", [encrypted("bfv")])
def test_no_mutated_ciphertext_is_a_raw_exception(backend):
    fuzz(small(steps=1, watch_every=1, backend=backend), range(1000, 1036))


@pytest.mark.parametrize("parts", [[], [b""], [b"\x00"], [b"\x03\x04"], [b"\xff" * 40], [b"a", b"b"]])
def test_any_abort_is_the_end_and_nothing_else(parts):
    one, other = InMemoryChannel.pair()
    abort = Tampered(one, 2, lambda frames: reframed([b"", 9, *opened(frames[-1])[0][2:]], parts))

    def act(role: str, session: PartySession) -> None:
        session.handshake(SMALL.agreed())
        list(party(role, HELD[role], SMALL).train(session))

    error = talk(act, (abort, other))["target"]
    assert isinstance(error, PiebaldError)
    assert "the other party" in str(error)


# ---------------------------------------------------------------------------------------------------------- reflections


@pytest.mark.parametrize("number", range(6))
def test_no_frame_can_be_sent_back_to_its_sender(number):
    """Before, a party took its own KEY, STATISTICS, MASKED and DECRYPTED messages for the other's."""
    one, other = InMemoryChannel.pair()

    class Mirror(Channel):
        """Delivers the target its own frame, from one number on."""

        def __init__(self) -> None:
            super().__init__()
            self.kept: list[bytes] = []

        def send(self, frame: bytes) -> None:
            self.kept.append(frame)
            other.send(frame)

        def receive(self, most: int, timeout: float) -> bytes:
            frame = other.receive(10**9, timeout)
            return self.kept[number] if opened(frame)[0][4] == number else frame

        def close(self) -> None:
            other.close()

    def act(role: str, session: PartySession) -> None:
        session.handshake(SMALL.agreed())
        list(party(role, HELD[role], SMALL).train(session))

    error = talk(act, (one, Mirror()))["target"]
    kind = list(MessageKind)[number].name
    assert isinstance(error, InvalidMessage)
    assert f"this party's own {kind} message" in str(error)


# ---------------------------------------------------------------------------------------------------------- ciphertexts


def bfv():
    """A BFV owner, evaluator and their context, for one product of each layout."""
    made = build("backend", "bfv")
    owner = made.owner(SIZES)
    return made, owner, made.evaluator(owner.announcement, SIZES), owner.he


def hostile_ciphertexts(he, key) -> dict[str, bytes]:
    """Ciphertexts that SEAL saves and loads without a word, though no honest party sends them."""
    seal, plain = he.seal, he.encode(np.arange(he.degree))
    from piebald.vertical.encryption.bfv import context

    def fresh():
        return he.load(seal.Ciphertext(), he.save(key.encrypt_symmetric(plain)), "own")

    middle, ntt, three, zero = fresh(), fresh(), fresh(), seal.Ciphertext()
    he.evaluator.mod_switch_to_next_inplace(middle)
    he.evaluator.transform_to_ntt_inplace(ntt)
    he.evaluator.multiply_inplace(three, fresh())
    zero.resize(he.context, 2)
    other = context(16384)
    keys = seal.KeyGenerator(other.context)
    foreign = seal.Encryptor(other.context, keys.secret_key()).encrypt_symmetric(other.encode(np.arange(16384)))
    return {
        "another level": he.save(middle),
        "transformed": he.save(ntt),
        "three polynomials": he.save(three),
        "readable without a key": he.save(zero),
        "other parameters": other.save(foreign),
        "a plaintext": he.save(plain),
        "nothing": b"",
        "a header alone": he.save(ntt)[:16],
    }


@pytest.mark.parametrize("backend", [encrypted("bfv")])
def test_hostile_bfv_ciphertexts_are_refused(backend):
    """Before, other levels, transformed ones and three polynomials ended in SEAL's own errors, or in a wrong result."""
    from piebald.vertical.encryption.seal import join

    made, owner, evaluator, he = bfv()
    for name, blob in hostile_ciphertexts(he, owner._encryptor).items():
        for size in SIZES:
            plan = made.layout(size)
            prepared = evaluator.prepare(np.ones((size.rows, size.inner)) / 16, size)
            with pytest.raises(InvalidMessage, match=r"statistics"):
                evaluator.multiply(join([blob] * plan.inputs), prepared, size)
            with pytest.raises(InvalidMessage, match="masked result"):
                owner.decrypt(join([blob] * plan.outputs), size, np.zeros(size.width))
        assert name


@pytest.mark.parametrize("backend", [encrypted("bfv")])
def test_hostile_bfv_keys_are_refused(backend):
    """Before, a key without rotations was taken, and the first product ended in an error of SEAL's."""
    from piebald.vertical.encryption.seal import join, split

    made, owner, _, he = bfv()
    seal, (public, galois) = he.seal, split(owner.announcement, 2, "key")
    keys = seal.KeyGenerator(he.context)
    ciphertext = he.save(owner._encryptor.encrypt_symmetric(he.encode(np.arange(he.degree))))
    elements = made.elements(SIZES)
    others = [3**9 % (2 * he.degree), *elements[1:]]
    for bad in (
        [public, b""],
        [public, he.save(keys.create_galois_keys(elements[:-1]))],
        [public, he.save(keys.create_galois_keys([*elements, 3**11 % (2 * he.degree)]))],
        [public, he.save(keys.create_galois_keys(others))],
        [public, public],
        [ciphertext, galois],
        [galois, galois],
        [b"", galois],
        [public[:-1], galois],
    ):
        with pytest.raises(InvalidMessage, match="public key"):
            made.evaluator(join(bad), SIZES)
    with pytest.raises(InvalidMessage, match="no product needs one"):
        made.evaluator(owner.announcement, SIZES[1:])
    most = made.announced(SIZES).most
    assert len(owner.announcement) < most < 2 * len(owner.announcement)


# ------------------------------------------------------------------------------------ a whole run, its folder, its exit


def disturbed(settings, folder: Path, number: int, change: Callable[[list[bytes]], bytes]) -> dict[str, BaseException]:
    """A run with run folders in which one frame of the source is changed; the errors of both."""
    one, other = InMemoryChannel.pair()
    ends, errors = {"source": Tampered(one, number, change), "target": other}, {}
    (folder / "transfer.toml").write_text(settings.text())

    def act(role: str) -> None:
        torch.set_num_threads(1)
        try:
            with PartyStore.of(folder, role) as store:
                train_party(role, settings, HELD[role], ends[role], store)
        except BaseException as error:
            errors[role] = error

    threads = [threading.Thread(target=act, args=(role,)) for role in ROLES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def zeros(frames: list[bytes]) -> bytes:
    head, parts = opened(frames[-1])
    return reframed(head, [bytes(len(part)) for part in parts])


KINDS = ["HELLO", "KEY", "STATISTICS", "MASKED", "DECRYPTED"]


@pytest.mark.full
@pytest.mark.parametrize("backend", [encrypted("bfv")])
@pytest.mark.parametrize("kind", ["STATISTICS", "MASKED"])
def test_a_hostile_message_is_named_with_exit_code_2_and_the_run_goes_on_later(backend, kind, tmp_path):
    settings = small(steps=2, checkpoint_every=1, watch_every=9, backend=backend)
    number = KINDS.index(kind) + 4  # of the second step, after the first one's losses
    folder = tmp_path / "run"
    folder.mkdir()
    errors = disturbed(settings, folder, number, zeros)
    assert errors["target"].exit_code == 2
    assert f"the other party's {kind} message is refused: " in str(errors["target"])
    assert (folder / "target" / "vectors-1.safetensors").exists()
    resume(folder)
    whole = tmp_path / "whole"
    run(small(steps=2, checkpoint_every=1, watch_every=9), out=whole)
    for role in ROLES:
        found, expected = (checkpoint(one / role, 2) for one in (folder, whole))
        assert all(torch.equal(found[name], expected[name]) for name in expected)


# ------------------------------------------------------------------------------------------- folders, connections, keys


@pytest.mark.parametrize("mask", [0, *(pytest.param(mask, marks=pytest.mark.full) for mask in (0o022, 0o077))])
def test_run_folders_are_private_whatever_the_umask(tmp_path, mask, monkeypatch, capsys):
    """Before, hidden rows, weights and predictions were readable by every user of the machine."""
    import os

    monkeypatch.chdir(tmp_path)
    file = tmp_path / "transfer.toml"
    file.write_text(small().text())
    before = os.umask(mask)
    try:
        assert main(["transfer", str(file), "--out", "runs/one"]) == 0
        (tmp_path / "open").mkdir(mode=0o755)
        assert main(["transfer", str(file), "--out", "open"]) == 0
    finally:
        os.umask(before)
    for folder in (tmp_path / "runs" / "one", tmp_path / "open"):
        paths = [folder, *folder.rglob("*")]
        assert len(paths) >= 10
        for path in paths:
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_files_that_were_open_are_closed_when_a_run_goes_on(tmp_path):
    run(small(), out=tmp_path / "run")
    for path in (tmp_path / "run" / "source").iterdir():
        path.chmod(0o666)
    (tmp_path / "run" / "source").chmod(0o777)
    resume(tmp_path / "run")
    paths = [tmp_path / "run" / "source", *(tmp_path / "run" / "source").iterdir()]
    assert not any(path.stat().st_mode & 0o077 for path in paths)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["backend.kind=fixed"], ["keys: 0 bits: nothing is encrypted", "protects nobody", "inside one process"]),
        (["backend.kind=bfv"], ["keys: 128 bits (BFV, degree 8192, modulus of 218 bits"]),
        pytest.param(
            ['method={kind="ftl"}'],
            ["each party learns the other's hidden rows of all co-occurring samples"],
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_run_says_before_it_starts_and_in_its_results_what_protects_it(tmp_path, monkeypatch, capsys, options, said):
    if "bfv" in options[0]:
        pytest.importorskip(LIBRARY["bfv"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "transfer.toml").write_text(small(steps=1).text())
    words = [word for option in options for word in ("--set", option)]
    assert main(["transfer", "transfer.toml", "--out", "run", *words]) == 0
    printed = capsys.readouterr().out
    start, end = printed[: printed.index("AUC")], printed[printed.index("AUC") :]
    page = (tmp_path / "run" / "report.html").read_text()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    for words in said:
        assert words in start
        told = words.removeprefix("keys: ").removeprefix("connection: ")
        assert told in " ".join(end.split())
        assert told.replace("'", "&#x27;") in page or told in page
        assert told in " ".join(result["secrecy"].values())


@pytest.mark.parametrize(
    ("table", "bits"),
    [
        ({"kind": "bfv"}, "128 bits"),
        ({"kind": "bfv", "degree": 16384}, "192 bits"),
        ({"kind": "plain"}, "0 bits"),
    ],
)
def test_the_security_level_is_that_of_the_standards(table, bits):
    assert build("backend", table).security.startswith(bits)


@pytest.mark.parametrize("backend", [encrypted("bfv")])
def test_the_table_of_the_standard_is_the_librarys_own(backend):
    from piebald.vertical.encryption.seal import STANDARD, library

    seal = library()
    for degree, levels in STANDARD.items():
        for bits, most in levels.items():
            assert seal.CoeffModulus.MaxBitCount(degree, getattr(seal.SEC_LEVEL_TYPE, f"TC{bits}")) == most
