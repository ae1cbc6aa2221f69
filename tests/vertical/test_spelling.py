"""Keys that differ in one letter belong together at both parties, and nothing is told of others."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path

import numpy
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piebald import vertical
from piebald.cli import main
from piebald.core.errors import SettingError
from piebald.vertical.channel import InMemoryChannel
from piebald.vertical.encryption.backend import MessageLength
from piebald.vertical.key_matching import match_keys
from piebald.vertical.match_keys import keys_of
from piebald.vertical.party_messages import HEADER, TAG, MessageFault, MessageKind, pack_frame
from piebald.vertical.spelling import nearest, nearest_here, spellings

from .conftest import credentials, talk
from .tampered import Tampered
from .test_match import counted, folder, group, meet  # noqa: F401

KINDS = ["name", "date"]
ANY = [MessageLength(1 << 20, exact=False)]


def spelt(keys: list[str], kinds: list[str] | None = None) -> dict[str, list[str]]:
    return {key: spellings(key, kinds or ["name"]) for key in keys}


def different(keys: dict[str, list[str]]) -> list[str]:
    return list(dict.fromkeys(itertools.chain(*keys.values())))


def met(keys: dict[str, list[str]], ends=None) -> dict[str, dict[str, str]]:
    """What each party calls its keys after a match."""
    found: dict[str, dict[str, str]] = {}

    def act(role, session):
        session.handshake({})
        own = spelt(keys[role])
        both = match_keys(session, different(own), "both")
        found[role] = nearest(session, own, both.names)
        session.finish()

    for error in talk(act, ends).values():
        raise error
    return found


def changed(word: str, rng: random.Random) -> str:
    """A word with a letter more, fewer or other, or with two that have changed places."""
    place, letter = rng.randrange(len(word) - 1), rng.choice("abcdefgh")
    left, one, two, right = word[:place], word[place], word[place + 1], word[place + 2 :]
    return left + rng.choice([letter + two, two, letter + one + two, two + one]) + right


@settings(max_examples=40, deadline=None)
@given(st.text("abcdefgh", min_size=5, max_size=12), st.randoms(use_true_random=False))
def test_a_key_with_one_letter_changed_is_the_same(word, rng):
    other = changed(word, rng)
    ours, theirs = nearest_here([spelt([word]), spelt([other])])
    assert ours == {word: theirs[other]}


def edits(one: str, other: str) -> int:
    """Levenshtein's distance."""
    row = list(range(len(other) + 1))
    for number, letter in enumerate(one, 1):
        before, row[0] = row[0], number
        for place, with_ in enumerate(other, 1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (letter != with_))
    return row[-1]


@settings(max_examples=40, deadline=None)
@given(st.text("abc", min_size=1, max_size=7), st.text("abc", min_size=1, max_size=7))
def test_keys_that_differ_in_more_than_two_edits_are_not(one, other):
    if nearest_here([spelt([one]), spelt([other])])[0]:
        assert edits(one, other) <= 2
        assert one == other or max(len(one), len(other)) >= 4


def test_both_parties_pair_their_keys_alike_and_as_one_that_sees_both_does():
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(3, 8))) for _ in range(60)]
    bank, shop = sorted({*words[:40]}), sorted({changed(word, rng) for word in words[20:]})
    found = met({"source": bank, "target": shop})
    seen = nearest_here([spelt(bank), spelt(shop)])
    of_name = [{name: key for key, name in names.items()} for names in (found["source"], found["target"])]
    assert len(of_name[0]) == len(of_name[1]) == len(found["source"]) >= 15
    of_seen = [{name: key for key, name in names.items()} for names in seen]
    pairs = [{(one[name], other[name]) for name in one} for one, other in (of_name, of_seen)]
    assert pairs[0] == pairs[1]


@pytest.mark.parametrize(
    ("bank", "shop", "pairs"),
    [
        (["anna", "hanna"], ["anna"], {"anna": "anna"}),  # the same before the near
        (["johann"], ["johan", "johanna"], {}),  # as near to both
        (["johann", "peter"], ["johan", "johanna", "petar"], {"peter": "petar"}),
        (["johann"], ["johan", "bohann"], {"johann": "johan"}),  # a letter fewer is nearer than another one
        (["ian", "ana"], ["jan", "ann"], {}),  # too short for a letter to be left out
        (["anna", "anqna", "anzna"], ["anna"], {"anna": "anna"}),
        (["anna maria"], ["maria qnna"], {"anna maria": "maria qnna"}),  # where the order of words is another one
        (["anna", "berta"], ["anna", "anzna"], {"anna": "anna"}),  # nobody else is left for anzna
    ],
)
def test_who_is_nearest_is_the_same_and_who_is_as_near_to_several_is_nobody(bank, shop, pairs):
    for ours, theirs, expected in ((bank, shop, pairs), (shop, bank, {two: one for one, two in pairs.items()})):
        names = nearest_here([spelt(ours), spelt(theirs)])
        of_name = {name: key for key, name in names[1].items()}
        assert {key: of_name[name] for key, name in names[0].items()} == expected


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Müller, Jörg", "Joerg Mueller"),
        ("Anna-Maria O'Neil", "oneil maria anna"),
        ("Søren Łukasz", "Soren LUKASZ"),
        ("José  Núñez", "Nunez Jose\u0301"),
    ],
)
def test_names_are_written_alike(one, other):
    first, second = (keys_of(pandas.DataFrame({"k": [cell]}), ["k"], ["name"]) for cell in (one, other))
    assert first == second != [""]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("\u0930\u093e\u092e", "\u0930\u092e\u093e"),  # vowels of Devanagari are marks
        ("\u304b\u304d", "\u304c\u304d"),  # ka and ga of Hiragana
        ("anna", "ann a"),
    ],
)
def test_other_names_stay_apart(one, other):
    first, second = (keys_of(pandas.DataFrame({"k": [cell]}), ["k"], ["name"]) for cell in (one, other))
    assert first != second


def test_one_letter_may_differ_in_one_column_of_names_and_in_no_other():
    frame = pandas.DataFrame({"first": ["maria"], "last": ["smith"], "born": ["2001-02-03"]})
    (key,) = keys_of(frame, list(frame), ["name", "name", "date"])
    assert len(spellings(key, ["name", "name", "date"])) == 11
    assert spellings(key, ["name", "text", "date"])[1:] == [key.replace("maria", word) for word in
                                                            ("aria", "mria", "maia", "mara", "mari")]  # fmt: skip


def test_no_spelling_is_on_the_wire_and_all_of_them_are_under_a_scalar():
    ends = tuple(Tampered(end, 10**6, lambda frames: b"") for end in InMemoryChannel.pair())
    met({"source": ["johann", "bertha"], "target": ["johan", "emilia"]}, ends=ends)
    wire = b"".join(frame for end in ends for frame in end.frames)
    assert not any(one.encode() in wire for key in ("johann", "bertha", "emilia") for one in spellings(key, ["name"]))
    sent = {HEADER.unpack(frame[: HEADER.size])[1]: frame for frame in ends[0].frames}
    assert len(sent[MessageKind.POINTS][HEADER.size + 8 : -TAG]) == 32 * (6 + 7)  # nn is one letter to leave out
    # of bertha, which is near nobody, no link
    assert len(sent[MessageKind.NEAR][HEADER.size + 8 : -TAG]) % 12 == 0
    assert set(numpy.frombuffer(sent[MessageKind.NEAR][HEADER.size + 8 : -TAG], "<u4").reshape(-1, 3)[:, 0]) == {0}


BAD = {
    "cut": lambda data: data[:-1],
    "of no spelling": lambda data: data[:-8] + b"\xff\xff\xff\x00" + data[-4:],
    "of no key": lambda data: b"\xff" * 4 + data[4:],
    "neither whole nor not": lambda data: data[:-4] + b"\x02\0\0\0",
    "twice": lambda data: data + data,
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_link_ends_the_match_in_a_sentence(kind):
    one, other = InMemoryChannel.pair()

    def change(frames):
        head = HEADER.unpack(frames[-1][: HEADER.size])
        return pack_frame(MessageKind(head[1]), *head[2:5], [BAD[kind](frames[-1][HEADER.size + 8 : -TAG])])

    with pytest.raises(MessageFault, match="NEAR message holds"):
        met({"source": ["johann", "bertha"], "target": ["johan", "emilia"]}, ends=(Tampered(one, 3, change), other))


def test_a_party_that_sends_points_back_learns_how_long_keys_are_and_which_are_near_each_other():
    """The documented limit: it makes all spellings common, and is told which of them are of one key."""
    links: list[numpy.ndarray] = []
    bank = spelt(["johann", "johanna", "emilia"])

    def act(role, session):
        session.handshake({})
        if role == "source":
            nearest(session, bank, match_keys(session, different(bank), "both").names)
        else:
            send_back(session, len(different(bank)))
            session.send(MessageKind.NEAR, [b""])
            (data,) = session.receive(MessageKind.NEAR, ANY)
            links.append(numpy.frombuffer(data, "<u4").reshape(-1, 3))
        session.finish()

    assert not talk(act)
    assert [int((links[0][:, 0] == key).sum()) for key in range(3)] == [len(some) for some in bank.values()]


def send_back(session, count: int) -> None:
    """Send points, and as those under this party's scalar the ones that the other party sends for them."""
    session.send(MessageKind.POINTS, [b"".join(group.crypto_core_ristretto255_random() for _ in range(count))])
    session.receive(MessageKind.POINTS, ANY)
    session.send(MessageKind.RETURNED, session.receive(MessageKind.RETURNED, ANY))


# ------------------------------------------------------------------------------------------------ over the federation


@pytest.fixture
def tables(folder) -> Path:  # noqa: F811
    names = ["Müller, Jörg", "Maria Schneider", "Anna Ng", "Piet Jansen", "Bo"]
    others = ["Joerg Muler", "Maria Schnieder", "Anna Ng", "Wim de Vries", "By"]
    for name, some in (("bank", names), ("shop", others)):
        pandas.DataFrame({"name": some, "born": "2001-02-03"}).to_csv(f"{name}.csv", index=False)
    return folder


def test_two_commands_find_the_rows_that_are_spelt_differently(tables, capfd):
    credentials(Path("kit"))
    codes = []

    def act(name: str, party: str) -> None:
        words = ["--key", "name", "--kind", "name", "--key", "born", "--kind", "date", "--credentials", f"kit/{party}"]
        codes.append(main(["match", f"{name}.csv", *words, "--out", f"{name} matched.csv"]))

    threads = [threading.Thread(target=act, args=given) for given in (("bank", "bank"), ("shop", "server"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0, 0]
    assert "without each of its letters" in capfd.readouterr().err
    bank, shop = (pandas.read_csv(f"{name} matched.csv")["shared_id"] for name in ("bank", "shop"))
    assert bank.tolist()[:3] == shop.tolist()[:3]
    assert bank.nunique() == shop.nunique() == bank.notna().sum() == 3
    assert counted(tables) == 2


@pytest.mark.parametrize("life", range(5, 10))
def test_a_match_that_ends_at_any_message_goes_on_with_the_same_names(tables, monkeypatch, life):
    credentials(Path("kit"))
    monkeypatch.setattr(vertical, "match", spelling_match(vertical.match))
    ended = meet(monkeypatch, {"bank": life})
    written = {name: path.read_bytes() for name in ("bank", "shop") if (path := Path(f"{name} matched.csv")).exists()}
    if ended["server"] is not None:  # else all was done but for the bank's last message
        assert meet(monkeypatch, {}) == {"bank": None, "server": None}
    assert all(Path(f"{name} matched.csv").read_bytes() == data for name, data in written.items())
    bank, shop = (pandas.read_csv(f"{name} matched.csv")["shared_id"] for name in ("bank", "shop"))
    assert bank.tolist()[:3] == shop.tolist()[:3]
    assert bank.nunique() == 3
    assert counted(tables) == 2


def spelling_match(match):
    """`vertical.match` of the keys of these tables, whatever the test of plain keys asks for."""
    return lambda rows, columns, given, out, **more: match(
        rows, ["name", "born"], given, out, **(more | {"kinds": KINDS})
    )


@pytest.mark.parametrize("learns", ["source", "target", "size"])
def test_of_names_both_learn(tables, learns):
    with pytest.raises(SettingError, match=f"learnt by both, not by {learns}"):
        vertical.match("bank.csv", ["name"], credentials(tables / "kit")["bank"].folder, kinds=["name"], learns=learns)
