"""Two parties find the keys that both have: as pandas' merge does, and nothing else of a key is on the wire."""

from __future__ import annotations

import hashlib
import json
import math
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy
import pandas
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from piebald import vertical
from piebald.cli import main
from piebald.core.errors import PiebaldError, RuntimeFault, SettingError
from piebald.data.clients.owner import read_owners, records_of
from piebald.privacy.ledger import FOLDER
from piebald.vertical.channel import InMemoryChannel
from piebald.vertical.encryption.backend import MessageLength
from piebald.vertical.key_matching import MOST_MATCHES, Matched, match_keys, ristretto
from piebald.vertical.match_keys import keys_of
from piebald.vertical.party_messages import HEADER, TAG, MessageFault, MessageKind, PartyEnded, pack_frame
from tests import processes

from .conftest import credentials, talk
from .tampered import Killed, Mortal, Tampered

group = pytest.importorskip("rbcl")
ristretto()  # removes the file that the import leaves behind
BANK, SHOP = ["anna", "bert", "carl", "dora"], ["dora", "emil", "anna"]


def matched(keys: dict[str, list[str]], learns: str = "both", floor: int = 1, ends=None) -> dict[str, Matched]:
    """What each party learns."""
    found: dict[str, Matched] = {}

    def act(role, session):
        session.handshake({})
        found[role] = match_keys(session, keys[role], learns, floor)
        session.finish()

    for error in talk(act, ends).values():
        raise error
    return found


KEYS = st.sets(st.text(min_size=1, max_size=6), min_size=1, max_size=12)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(KEYS, KEYS, KEYS)
def test_the_keys_in_common_are_those_of_a_merge(bank, shop, common):
    tables = {
        role: pandas.DataFrame({"key": sorted(one | common)}) for role, one in (("source", bank), ("target", shop))
    }
    expected = set(tables["source"].merge(tables["target"], on="key")["key"])
    found = matched({role: list(table["key"]) for role, table in tables.items()})
    assert set(found["source"].names) == set(found["target"].names) == expected
    assert found["source"].names == found["target"].names
    assert len(set(found["source"].names.values())) == len(expected) == found["source"].size


@pytest.mark.parametrize("learns", ["both", "source", "target", "size"])
def test_only_who_may_learns_and_no_more(learns):
    found = matched({"source": BANK, "target": SHOP}, learns)
    for role, one in found.items():
        may = learns in ("both", role)
        assert set(one.names) == ({"anna", "dora"} if may else set())
        assert one.size == (2 if may or learns == "size" else None)
    assert matched({"source": BANK, "target": SHOP}, "size", floor=3)["source"] == Matched(None, {})


def recorded(learns: str = "both") -> tuple[list[bytes], list[bytes]]:
    """The frames that each party sends."""
    one, other = InMemoryChannel.pair()
    ends = tuple(Tampered(end, 10**6, lambda frames: b"") for end in (one, other))
    matched({"source": BANK, "target": SHOP}, learns, ends=ends)
    return ends[0].frames, ends[1].frames


def test_neither_a_key_nor_a_hash_of_one_is_on_the_wire():
    wire = b"".join(frame for frames in recorded() for frame in frames)
    for key in {*BANK, *SHOP}:
        plain = [key.encode(), key.encode("utf-16-le"), key[::-1].encode()]
        hashes = [
            hashlib.new(name, text).digest() for text in plain[:2] for name in ("md5", "sha1", "sha256", "blake2b")
        ]
        hashes += [hashlib.blake2b(plain[0], digest_size=32, person=b"piebald match").digest()]
        points = [group.crypto_core_ristretto255_from_hash(one[:64].ljust(64, b"\0")) for one in hashes]
        for part in (*plain, *hashes, *(one.hex().encode() for one in hashes), *points):
            assert part not in wire


def test_the_scalar_and_the_order_are_drawn_anew_in_each_match(monkeypatch):
    """In one session, where the hash of a key is always the same."""
    runs: list[list[bytes]] = []

    def act(role, session):
        session.handshake({})
        for _ in range(2):
            runs.append([role, *_own_points(session, lambda: match_keys(session, list(map(str, range(50))), "both"))])
        session.finish()

    assert not talk(act)
    for role in ("source", "target"):
        first, second = (points for name, *points in runs if name == role)
        assert len(set(first)) == len(set(second)) == 50
        assert not set(first) & set(second)
    monkeypatch.setattr("piebald.vertical.key_matching.ristretto", lambda: Unblinded)
    runs.clear()
    assert not talk(act)
    first, second = (points for name, *points in runs if name == "source")
    assert set(first) == set(second)
    assert first != second


class Unblinded:
    """libsodium's group with a scalar of 1: points are hashes of keys."""

    crypto_core_ristretto255_from_hash = staticmethod(group.crypto_core_ristretto255_from_hash)
    crypto_scalarmult_ristretto255 = staticmethod(group.crypto_scalarmult_ristretto255)

    @staticmethod
    def crypto_core_ristretto255_scalar_reduce(_: bytes) -> bytes:
        return (1).to_bytes(32, "little")


def _own_points(session, step) -> list[bytes]:
    """The points that a party sends for its own keys in a step."""
    sent: list[bytes] = []
    send = session.send

    def noted(kind, parts):
        if kind is MessageKind.POINTS:
            sent.extend(parts)
        send(kind, parts)

    session.send = noted
    step()
    session.send = send
    return [sent[0][start : start + 32] for start in range(0, len(sent[0]), 32)]


# --------------------------------------------------------- what a party can learn that does not follow the protocol


def test_with_the_size_alone_multiples_of_points_still_tell_which_keys_are_in_common():
    """The documented limit: the shop multiplies the point of its n-th key by n, and knows it again."""
    learnt: list[str] = []
    keys = ["dora", "emil", "anna", "zoe"]

    def times(number: int, point: bytes) -> bytes:
        return bytes(group.crypto_scalarmult_ristretto255(number.to_bytes(32, "little"), point))

    def act(role, session):
        session.handshake({})
        if role == "source":
            match_keys(session, BANK, "size")
        else:
            hashes = _hashes(session, keys)
            session.send(MessageKind.POINTS, [b"".join(times(n, point) for n, point in enumerate(hashes, 2))])
            theirs = _received(session, MessageKind.POINTS, len(BANK))
            session.send(MessageKind.RETURNED, [b"".join(theirs)])
            returned = set(_received(session, MessageKind.RETURNED, len(keys)))
            learnt.extend(key for n, key in enumerate(keys, 2) if {times(n, point) for point in theirs} & returned)
        session.finish()

    assert not talk(act)
    assert learnt == ["dora", "anna"]


def test_a_party_that_sends_points_back_makes_all_keys_common():
    """The documented limit: no proof says that what came back are this party's points under the other's scalar."""
    bank: list[Matched] = []

    def act(role, session):
        session.handshake({})
        if role == "source":
            bank.append(match_keys(session, BANK, "both"))
        else:
            session.send(MessageKind.POINTS, [b"".join(_hashes(session, ["1", "2", "3", "4"]))])
            _received(session, MessageKind.POINTS, len(BANK))
            session.send(MessageKind.RETURNED, [b"".join(_received(session, MessageKind.RETURNED, 4))])
        session.finish()

    assert not talk(act)
    assert set(bank[0].names) == set(BANK)


def _hashes(session, keys: list[str]) -> list[bytes]:
    """H(k) of keys, which whoever is in the session can compute."""
    digests = [hashlib.blake2b(key.encode(), key=session.id, person=b"piebald match").digest() for key in keys]
    return list(map(group.crypto_core_ristretto255_from_hash, digests))


def _received(session, kind: MessageKind, count: int) -> list[bytes]:
    (data,) = session.receive(kind, [MessageLength(32 * count)])
    return [data[start : start + 32] for start in range(0, len(data), 32)]


def points(frames: list[bytes], kind: MessageKind) -> list[bytes]:
    (frame,) = (frame for frame in frames if HEADER.unpack(frame[: HEADER.size])[1] == kind)
    data = frame[HEADER.size + 8 : -TAG]
    return [data[start : start + 32] for start in range(0, len(data), 32)]


def test_with_the_size_alone_points_come_back_sorted():
    returned = points(recorded("size")[0], MessageKind.RETURNED)
    assert len(returned) == len(SHOP)
    assert returned == sorted(returned)


ORDER = 2**255 - 19  # of the field


def _other(data: bytes, point: int) -> bytes:
    """Points, the last of which is another one."""
    return data[:-32] + point.to_bytes(32, "little")


def _negative(data: bytes) -> bytes:
    """Points, the last of which is written as the other one of the two numbers that could stand for it."""
    return _other(data, ORDER - int.from_bytes(data[-32:], "little"))


BAD = {
    "the identity": lambda data: _other(data, 0),  # which libsodium calls a valid point
    "negative": _negative,
    "beyond the field": lambda data: _other(data, ORDER + 2),
    "with a bit too many": lambda data: _other(data, int.from_bytes(data[-32:], "little") | 1 << 255),
    "of no point": lambda data: _other(data, 2),
    "twice": lambda data: data[:32] * (len(data) // 32),
    "cut": lambda data: data[:-1],
}


@pytest.mark.parametrize("kind", BAD)
def test_what_are_no_points_ends_the_match_in_a_sentence(kind):
    one, other = InMemoryChannel.pair()

    def change(frames):
        head = HEADER.unpack(frames[-1][: HEADER.size])
        return pack_frame(MessageKind(head[1]), *head[2:5], [BAD[kind](frames[-1][HEADER.size + 8 : -TAG])])

    with pytest.raises(MessageFault, match="POINTS message holds"):
        matched({"source": BANK, "target": SHOP}, ends=(Tampered(one, 1, change), other))


def test_a_party_that_stops_is_a_sentence():
    def act(role, session):
        session.handshake({})
        if role == "source":
            match_keys(session, BANK, "both")
        else:
            session.channel.close()

    assert isinstance(talk(act)["source"], PartyEnded)


# ---------------------------------------------------------------------------------------- keys that are written alike


@pytest.mark.parametrize(
    ("kind", "country", "one", "other"),
    [
        ("exact", "", " A 7", "A 7 "),
        ("exact", "", 1000.0, 1000),
        ("text", "", "Anna  MÜLLER", "anna mu\u0308ller "),
        ("text", "", "Stra\u00dfe", "STRASSE"),
        ("text", "", "\uff21\uff22", "ab"),
        ("date", "", "2024-05-01", "2024-05-01 00:00"),
        ("date", "", "1960-05-01", "1960-05-01 18:00"),
        ("phone", "49", "0170 / 123-45", "+49 (0)170 12345"),
        ("phone", "49", "0049 170 12345", "+4917012345"),
        ("phone", "49", "(+49) 170 12345", "0170 12345"),
    ],
)
def test_keys_are_written_alike(kind, country, one, other):
    first, second = (keys_of(pandas.DataFrame({"k": [cell]}), ["k"], [kind], country) for cell in (one, other))
    assert first == second != [""]


@pytest.mark.parametrize(("one", "other"), [("A 7", "a 7"), ("007", "7"), ("A7", "A 7")])
def test_exact_keys_are_not(one, other):
    first, second = (keys_of(pandas.DataFrame({"k": [cell]}), ["k"], ["exact"]) for cell in (one, other))
    assert first != second


def test_several_columns_are_one_key_and_a_gap_in_one_is_no_key():
    frame = pandas.DataFrame(
        {"name": ["Ann", "Ann", None, "An"], "born": ["2001-02-03", None, "2001-02-03", "2001-02-03"]}
    )
    keys = keys_of(frame, ["name", "born"], ["text", "date"])
    assert [bool(key) for key in keys] == [True, False, False, True]
    assert keys[0] != keys[3]
    pair = pandas.DataFrame({"a": ["x", "xy"], "b": ["yz", "z"]})
    assert len(set(keys_of(pair, ["a", "b"], ["exact", "exact"]))) == 2


@pytest.mark.parametrize(
    ("columns", "kinds", "said"),
    [
        (["nmae"], ["exact"], "did you mean 'name'"),
        (["name"], ["txt"], "did you mean 'text'"),
        (["name", "born"], ["text"], "got 2 columns and 1 kinds"),
        (["born"], ["date"], "a date like 2024-05-31"),
        (["phone"], ["phone"], "has no country"),
    ],
)
def test_keys_that_cannot_be_written_are_one_sentence(columns, kinds, said):
    frame = pandas.DataFrame({"name": ["Ann"], "born": ["soon"], "phone": ["0170 123"]})
    with pytest.raises(SettingError, match=said):
        keys_of(frame, columns, kinds)


@pytest.mark.parametrize("country", ["+49", "DE", "0049 ", "\u0664\u0669"])
def test_a_country_is_digits(country):
    with pytest.raises(SettingError, match="country must be digits, such as 49"):
        keys_of(pandas.DataFrame({"phone": ["0170 123"]}), ["phone"], ["phone"], country)


# ------------------------------------------------------------------------------------------------ over the federation


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    people = [f"Person {index}" for index in range(40)]
    for name, rows in (("bank", people[:25]), ("shop", [person.upper() for person in people[15:]])):
        rng.shuffle(rows)
        table = pandas.DataFrame({"name": [*rows, None, rows[0]], "value": range(len(rows) + 2)})
        table.to_csv(f"{name}.csv", index=False)
    return tmp_path


def commands(*more: str, shop: tuple[str, ...] = ()) -> dict[str, int | PiebaldError]:
    """Both parties' commands; their exit codes."""
    if not Path("kit").exists():
        credentials(Path("kit"))
    codes: dict[str, int | PiebaldError] = {}

    def act(name: str, party: str, words: tuple[str, ...]) -> None:
        given = ["match", f"{name}.csv", "--key", "name", "--kind", "text", "--credentials", f"kit/{party}"]
        codes[name] = main([*given, "--out", f"{name} matched.csv", *more, *words])

    threads = [threading.Thread(target=act, args=given) for given in (("bank", "bank", ()), ("shop", "server", shop))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return codes


def test_two_tables_get_a_column_by_which_their_rows_belong_together(folder):
    assert commands() == {"bank": 0, "shop": 0}
    bank, shop = (pandas.read_csv(f"{name} matched.csv") for name in ("bank", "shop"))
    assert len(bank) == 27
    named = [table.dropna(subset="shared_id").drop_duplicates("shared_id") for table in (bank, shop)]
    together = named[0].merge(named[1], on="shared_id")
    assert len(together) == len(named[0]) == len(named[1]) == 10
    assert (together["name_x"].str.casefold() == together["name_y"].str.casefold()).all()
    # each row of a repeated key has it, and one without a key has none
    assert bank.loc[bank["name"].isna(), "shared_id"].isna().all()
    assert (bank.groupby("name", dropna=True)["shared_id"].nunique(dropna=False) == 1).all()
    assert not any(word in Path("bank matched.csv").read_text().split("shared_id")[1] for word in ("PERSON",))


def test_other_normalisation_at_the_other_side_is_a_sentence_and_both_can_start_again(folder, capfd):
    codes = commands(shop=("--country", "49"))
    assert set(codes.values()) <= {1, 2}
    assert "settings differ: give both the same --kind" in capfd.readouterr().err
    assert not Path("bank matched.csv").exists()
    assert commands("--learns", "source") == {"bank": 0, "shop": 0}
    assert Path("shop matched.csv").exists() != Path("bank matched.csv").exists()


def counted(folder: Path) -> int:
    """Matches that the ledger beside the tables has counted, of both of them."""
    path = folder / FOLDER / "ledger.json"
    return sum(count for _, count in json.loads(path.read_text())["entries"]) if path.exists() else 0


def test_each_match_is_counted_beside_the_rows_and_too_many_are_refused(folder, capfd, monkeypatch):
    """A partner that comes with other keys each time finds out a set of keys one by one."""
    monkeypatch.setattr("piebald.vertical.key_matching.MOST_MATCHES", 2)
    for number in (1, 2):
        assert commands() == {"bank": 0, "shop": 0}
        assert counted(folder) == 2 * number
    # the table with the names of the last match has the same rows, in whatever order
    pandas.read_csv("bank matched.csv").sample(frac=1, random_state=0).to_csv("bank.csv", index=False)
    capfd.readouterr()
    assert 2 in commands().values()
    assert "answers at most 2" in capfd.readouterr().err
    assert counted(folder) == 4


def test_a_match_that_tells_nothing_is_not_counted(folder, capsys):
    given = credentials(folder / "kit")
    words = ["match", "bank.csv", "--key", "name", "--credentials", str(given["bank"].folder), "--timeout", "0.01"]
    for _ in range(MOST_MATCHES + 1):
        assert main(words) == 1
    assert counted(folder) == 0
    assert 2 in commands(shop=("--country", "49")).values()
    assert counted(folder) == 0


def test_a_ledger_that_cannot_be_written_is_one_sentence_and_nothing_is_told(folder, capfd, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("piebald.vertical.key_matching.RowLedger.count", full)
    assert 2 in commands().values()
    assert "cannot be written, so nothing is sent: no space left" in capfd.readouterr().err


def meet(monkeypatch, lives: dict[str, float]) -> dict[str, BaseException | None]:
    """Both parties match over channels of such lives; how each ended."""
    ends = dict(zip(("bank", "server"), Mortal.pair(), strict=True))
    for party, channel in ends.items():
        channel.life = lives.get(party, math.inf)
    monkeypatch.setattr("piebald.vertical.key_matching.open_channel", lambda given, *_: ends[given.party])
    ended: dict[str, BaseException | None] = {}

    def act(table: str, party: str) -> None:
        try:
            vertical.match(f"{table}.csv", ["name"], f"kit/{party}", f"{table} matched.csv", kinds=["text"],
                           timeout=20, tell=lambda _: None)  # fmt: skip
            ended[party] = None
        except (PiebaldError, Killed) as error:
            ended[party] = error
            ends[party].close()

    threads = [threading.Thread(target=act, args=given) for given in (("bank", "bank"), ("shop", "server"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


@pytest.mark.parametrize("victim", ["bank", "server"])
@pytest.mark.parametrize("life", range(8))
def test_a_match_goes_on_after_the_end_of_either_party_at_any_message_and_tells_nothing_more(
    folder, monkeypatch, victim, life
):
    credentials(Path("kit"))
    ended = meet(monkeypatch, {victim: life})
    assert isinstance(ended[victim], Killed)
    written = {name: path.read_bytes() for name in ("bank", "shop") if (path := Path(f"{name} matched.csv")).exists()}
    other = "bank" if victim == "server" else "server"
    if ended[other] is None:  # all was done but for the victim's last message, and its table is there
        assert set(written) == {"bank", "shop"}
    else:
        assert meet(monkeypatch, {}) == {"bank": None, "server": None}
        assert not list(Path().glob("*.match"))
    for name, before in written.items():
        assert Path(f"{name} matched.csv").read_bytes() == before  # the same names as before
    bank, shop = (pandas.read_csv(f"{name} matched.csv").dropna(subset="shared_id") for name in ("bank", "shop"))
    assert set(bank["shared_id"]) == set(shop["shared_id"])
    assert bank["shared_id"].nunique() == 10
    assert counted(folder) == 2  # once for each table, however often it was begun


def test_other_keys_after_an_interruption_are_another_match_and_counted(folder, monkeypatch):
    credentials(Path("kit"))
    meet(monkeypatch, {"bank": 5})
    assert counted(folder) == 2  # the shop has told of the bank's points, and the bank was about to
    table = pandas.read_csv("bank.csv")
    table[table["name"].isna() | (table["name"] != table["name"].iloc[0])].to_csv("bank.csv", index=False)
    assert meet(monkeypatch, {}) == {"bank": None, "server": None}
    assert counted(folder) == 4


@pytest.mark.parametrize("damage", ["{", "[]", {"seed": ""}, {"seed": "00"}, {"seed": "zz"}, {"seed": 3}, {"told": 3}])
def test_what_is_kept_of_a_match_is_its_owners_alone_and_a_damaged_file_begins_another(damage, folder, monkeypatch):
    credentials(Path("kit"))
    meet(monkeypatch, {"bank": 5})
    kept = Path("shop matched.csv.match")
    assert kept.stat().st_mode & 0o777 == 0o600
    assert not any(f"person {number}" in kept.read_text().casefold() for number in range(40))
    kept.write_text(damage if isinstance(damage, str) else json.dumps(json.loads(kept.read_text()) | damage))
    assert meet(monkeypatch, {}) == {"bank": None, "server": None}
    assert counted(folder) == 4


DYING = """
import os, signal, sys
from piebald import cli
from piebald.vertical.channel import SecureChannel

left, send, receive = int(sys.argv.pop(1)), SecureChannel._put, SecureChannel.receive

def live():
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)

def dying_send(self, frame):
    live()
    send(self, frame)

def dying_receive(self, *given):
    frame = receive(self, *given)
    live()
    return frame

SecureChannel._put, SecureChannel.receive = dying_send, dying_receive
sys.exit(cli.main(sys.argv[1:]))
"""


def begin(name: str, party: str, life: int = 1000) -> subprocess.Popen[str]:
    words = [
        "match",
        f"{name}.csv",
        "--key",
        "name",
        "--kind",
        "text",
        "--credentials",
        f"kit/{party}",
        "--timeout",
        "60",
    ]
    return processes.Popen([sys.executable, "-c", DYING, str(life), *words, "--out", f"{name} matched.csv"],
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    "kills",
    [[("server", 4)], pytest.param([(party, life) for life in range(1, 6) for party in ("bank", "server")],
                                   marks=pytest.mark.long)],
    ids=["one", "ten"],
)  # fmt: skip
def test_processes_that_are_killed_go_on_with_their_match(folder, kills):
    credentials(Path("kit"))
    tables = {"bank": "bank", "server": "shop"}
    for victim, life in kills:
        running = {
            party: begin(name, party, life if party == victim else 1000) for party, name in tables.items()
        }  # fmt: skip
        said = {party: process.communicate(timeout=300)[1] for party, process in running.items()}
        assert running[victim].returncode == -signal.SIGKILL, said
        left = "bank" if victim == "server" else "server"
        assert running[left].returncode == 1, said
        assert "the other party" in said[left]
    running = {party: begin(name, party) for party, name in tables.items()}
    said = {party: process.communicate(timeout=300)[1] for party, process in running.items()}
    assert [process.returncode for process in running.values()] == [0, 0], said
    bank, shop = (pandas.read_csv(f"{name} matched.csv").dropna(subset="shared_id") for name in ("bank", "shop"))
    assert set(bank["shared_id"]) == set(shop["shared_id"])
    assert bank["shared_id"].nunique() == 10
    assert counted(folder) == 2


def test_the_names_of_a_match_make_no_other_rows_for_any_ledger(folder):
    """Else each match would give all that was spent on the rows of a transfer, or a federation, once more."""
    frame = pandas.read_csv("bank.csv")
    known = [
        records_of(read_owners(table), "bank").tolist()
        for table in (frame, frame.assign(shared_id="a" * 24), frame.assign(shared_id=range(len(frame))))
    ]
    assert known[0] == known[1] == known[2] != []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": "gone.csv"}, "there is no file gone.csv"),
        ({"columns": ["nmae"]}, "did you mean 'name'"),
        ({"credentials": "nowhere"}, "holds no credentials"),
        ({"rows": pandas.DataFrame({"name": [None, None]})}, "1 to 4,194,304 different keys, got 0"),
        ({"learns": "all"}, "learns"),
        ({"rows": {"a": pandas.DataFrame({"name": ["x"]}), "b": pandas.DataFrame({"name": ["y"]})}}, "one table"),
        ({"rows": [(numpy.zeros((3, 2)), numpy.zeros(3))]}, "one table"),
        ({"rows": pandas.DataFrame([["x", "y"]], columns=["name", "name"])}, "2 columns are called 'name'"),
        ({"rows": pandas.DataFrame({"name": [2.0**60, 2.0**60 + 512]})}, "more than 15 digits: quote them"),
    ],
)
def test_bad_input_is_one_sentence(folder, changes, said):
    place = str(credentials(folder / "kit")["bank"].folder)
    with pytest.raises(PiebaldError, match=said):
        vertical.match(**{"rows": "bank.csv", "columns": ["name"], "credentials": place} | changes)


def test_a_missing_library_is_named_with_its_install_command(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "rbcl", None)
    with pytest.raises(SettingError, match=r"rbcl, which is not installed: pip install '\.\[match\]'"):
        vertical.match("bank.csv", ["name"], credentials(folder / "kit")["bank"].folder, tell=lambda _: None)


def test_the_library_leaves_no_file_behind():
    path = Path(ristretto()._sodium._name)
    assert path.is_absolute()
    assert not path.exists()


def test_a_library_that_cannot_be_loaded_is_a_sentence(tmp_path, monkeypatch):
    def refused(_: str) -> None:
        raise OSError("failed to map segment from shared object")

    for name in [name for name in sys.modules if name.split(".")[0] == "rbcl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("ctypes.cdll.LoadLibrary", refused)
    with pytest.raises(SettingError, match=r"failed to map.*let TMPDIR name a folder"):
        ristretto()


def test_nobody_there_is_a_sentence(folder):
    place = credentials(folder / "kit")["bank"].folder
    with pytest.raises(RuntimeFault, match="was not at"):
        vertical.match("bank.csv", ["name"], place, timeout=0.2, tell=lambda _: None)
