"""Private set intersection: two parties find the keys that both have, and tell each other no other key.

    H(k)                 an element of ristretto255 (RFC 9496), uniform, from the hash of the session and the key
    a H(k)               sent by each party for its own keys in random order; a is drawn for this match alone
    b a H(k)             sent back for the other party's points, in their order; sorted where only the size is learnt

Two keys are the same if their points under both scalars are (Meadows 1986; Huberman, Franklin, Hogg 1999).  Who knows
neither scalar cannot tell the points from random ones (decisional Diffie-Hellman), so nobody can try guesses of keys
on what was sent.  This is of parties that follow the protocol: one that sends multiples of its points finds out by
them which ones came back, although they are sorted.  The order of the group is prime and each element is written in one
way, so nothing but the identity must be looked for among points.  All operations are libsodium's, through rbcl.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import itertools
import json
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from piebald.core.arguments import PathLike, checked, checked_class
from piebald.core.errors import SettingError, import_extra
from piebald.core.files import read_text
from piebald.core.machine import count_cores
from piebald.core.private_files import write_private
from piebald.data.clients.owner import read_owners, records_of
from piebald.federation.credentials.provisioning import Credentials
from piebald.federation.credentials.provisioning import read as read_credentials
from piebald.federation.link.messaging import SERVER
from piebald.privacy.ledger import RowLedger
from piebald.storage.schema import explained
from piebald.vertical.channel import open_channel
from piebald.vertical.disclosure_ledger import counting, ledger_of
from piebald.vertical.encryption.backend import MessageLength
from piebald.vertical.match_keys import NAME, keys_of
from piebald.vertical.party_messages import MessageFault, MessageKind
from piebald.vertical.protocol import ROLES, PartySession
from piebald.vertical.spelling import nearest, spellings

if TYPE_CHECKING:
    from numpy import typing as npt
    from pandas import DataFrame

Learns = Literal["both", "source", "target", "size"]
POINT = SEED = 32  # bytes
MOST_KEYS = 1 << 22  # of a party
_NO_TEXT = bytes([*range(9), *range(14, 32)])  # characters that the reader of tables refuses
MATCH = "match"  # kind of entry in the ledger of the rows
MOST_MATCHES = 20  # of the same rows, in all runs: other keys each time find out a set key by key


@checked_class
@dataclass(frozen=True, slots=True)
class Matched:
    """What a party has learnt.

    Attributes:
        size: keys that both parties have; None where this party does not learn it, or it is below the floor.
        names: a name of each own key that the other party has, too, which is the same at both parties and tells nothing
            of the key; none where this party does not learn them.
    """

    size: int | None
    names: dict[str, str]


def ristretto() -> Any:
    """Return rbcl's bindings of libsodium's ristretto255.

    Raises:
        SettingError: rbcl is not installed, or cannot load its library.
    """
    try:
        group = import_extra("rbcl", "match", "piebald match needs rbcl, which is not installed")
    except OSError as error:
        raise SettingError(
            f"rbcl writes its library to the folder of temporary files and loads it there, which failed ({error}): let "
            "TMPDIR name a folder with 3 MB of space, from which programs may be loaded"
        ) from None
    with suppress(OSError):  # rbcl leaves that file behind; Windows removes no file that is loaded
        Path(group._sodium._name).unlink()
    return group


def match_keys(
    session: PartySession, keys: Sequence[str], learns: Learns, floor: int = 1, seed: bytes | None = None,
    count: Callable[[str], None] = lambda points: None,
) -> Matched:  # fmt: skip
    """Match the keys of this party with those of the other one.

    Args:
        session: a session after its handshake.
        keys: different keys, none of them empty.
        learns: who learns the keys in common: "both", the "source", the "target", or nobody, but both their "size".
        floor: the least size that is shown, where nobody learns the keys.
        seed: what the scalar and the order are drawn from; fresh by default.
        count: called with a digest of the other party's points before anything is told about them.

    Raises:
        MessageFault: the other party sent what is no point but the identity of the group, or a point twice.
    """
    group, seed = ristretto(), secrets.token_bytes(SEED) if seed is None else seed
    own = sorted(keys, key=lambda key: _drawn(seed, f"place {key}", 16))  # in random order
    scalar = group.crypto_core_ristretto255_scalar_reduce(_drawn(seed, "scalar"))
    times = functools.partial(group.crypto_scalarmult_ristretto255, scalar)

    def blinded(key: str) -> bytes:
        digest = hashlib.blake2b(key.encode(), key=session.id, person=b"piebald match").digest()
        return cast("bytes", times(group.crypto_core_ristretto255_from_hash(digest)))

    session.send(MessageKind.POINTS, [_joined(lambda place: blinded(own[place]), len(own))])
    theirs = _points(session, MessageKind.POINTS, MOST_KEYS, exact=False)
    try:
        # all, before anything is told; the check of points that libsodium has beside it lets the identity pass
        twice = _joined(lambda place: times(_point(theirs, place)), len(theirs) // POINT)
    except RuntimeError:
        raise MessageFault("the other party's POINTS message holds what is no point of the group") from None
    count(hashlib.blake2b(theirs, digest_size=16).hexdigest())
    if learns in ("both", "size") or learns != session.role:
        session.send(MessageKind.RETURNED, [np.sort(_array(twice)).tobytes() if learns == "size" else twice])
    if learns not in ("both", "size", session.role):
        return Matched(None, {})
    returned = _points(session, MessageKind.RETURNED, len(own), exact=True)
    common = np.isin(_array(returned), _array(twice))
    size = int(common.sum())
    if learns == "size":
        return Matched(size if size >= floor else None, {})
    return Matched(size, {own[place]: _name(_point(returned, place)) for place in np.flatnonzero(common).tolist()})


def _drawn(seed: bytes, purpose: str, count: int = 64) -> bytes:
    """Return so many uniform bytes, others for each purpose."""
    return hashlib.blake2b(purpose.encode(), key=seed, digest_size=count, person=b"piebald drawn").digest()


class _Begun:
    """A match that has begun: it goes on as the same after an interruption, and tells nothing more.

    Args:
        path: a file beside the result, until both parties have theirs; None keeps it in memory.
        of: digest of all that the match is of: with other keys or terms it is another one.

    Attributes:
        seed: what the match is drawn from.
        done: whether this party has its result.
    """

    def __init__(self, path: Path | None, of: str) -> None:
        self.path, self._told, self.done = path, list[str](), False
        self._of, self.seed = of, secrets.token_bytes(SEED)
        with suppress(OSError, ValueError, TypeError, KeyError):  # none there, or a damaged one: another match begins
            kept = json.loads("" if path is None else read_text(path))
            seed, told, done = bytes.fromhex(kept["seed"]), list(kept["told"]), kept["done"]
            if kept["of"] == of and len(seed) == SEED and done in (True, False):
                self.seed, self._told, self.done = seed, told, done

    def count(self, points: str, ledger: RowLedger | None) -> None:
        """Count what is about to be told of the other party's points, unless it was told before."""
        if ledger is not None and points not in self._told:
            with counting(ledger):
                ledger.count(MATCH, "match", MOST_MATCHES)
        self._told.append(points)
        self.keep()

    def keep(self, done: bool = False) -> None:
        """Write it, before anything is sent."""
        self.done = done
        if self.path is not None:
            kept = {"of": self._of, "seed": self.seed.hex(), "told": self._told, "done": done}
            with explained(f"{self.path} cannot be written"):
                write_private(self.path, json.dumps(kept))


def begun(out: Path) -> Path:
    """Return the file beside a result that is there while its match has not ended."""
    return out.with_name(f"{out.name}.match")


def _name(point: bytes) -> str:
    return hashlib.blake2b(point, digest_size=12, person=b"piebald name").hexdigest()


def _points(session: PartySession, kind: MessageKind, most: int, exact: bool) -> bytes:
    """Receive points, one after the other: as objects they would take three times the memory."""
    (data,) = session.receive(kind, [MessageLength(POINT * most, exact)])
    if len(data) % POINT or len(np.unique(_array(data))) < len(data) // POINT:
        raise MessageFault(f"the other party's {kind.name} message holds a point twice, or a part of one")
    # libsodium 1.0.18, which rbcl has, overlooks the highest bit, so that each point could be written in two ways
    if max(data[POINT - 1 :: POINT], default=0) > 127:
        raise MessageFault(f"the other party's {kind.name} message holds what is no point of the group")
    return data


def _point(points: bytes, place: int) -> bytes:
    return points[POINT * place : POINT * place + POINT]


def _array(points: bytes) -> npt.NDArray[np.bytes_]:
    """Return points as an array in which they are compared; NumPy takes zeros off the end of what is read from it."""
    return np.frombuffer(points, f"S{POINT}")


def _joined(step: Callable[[int], bytes], count: int) -> bytes:
    """Return what a step of libsodium, which leaves other threads their turn, gives for each place, joined."""
    with ThreadPoolExecutor(count_cores()) as pool:
        pieces = (range(start, min(start + 1000, count)) for start in range(0, count, 1000))
        return b"".join(pool.map(lambda piece: b"".join(map(step, piece)), pieces))


class KeyMatch:
    """The match of one party's table, which goes on as the same one after an interruption; arguments as of `match`.

    Attributes:
        role: of this party.
        out: the file for the rows with their names, None for none.
    """

    def __init__(
        self, rows: Any, columns: Sequence[str], kinds: Sequence[str], given: Credentials, out: Path | None,
        learns: Learns = "both", floor: int = 1, country: str = "", tell: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        owners = read_owners(Path(rows) if isinstance(rows, str) else rows)
        if len(owners) != 1 or not owners[0].is_table:
            raise SettingError("rows must be one table: a pandas DataFrame, or the path of a CSV or Parquet file")
        self._frame, self.role, self.out = owners[0].frame, ROLES[given.party == SERVER], out
        self._keys = keys_of(self._frame, list(columns), list(kinds), country)
        counts = Counter(key for key in self._keys if key)
        self._spelt = {key: spellings(key, kinds) for key in counts} if NAME in kinds else {}
        self._different = list(dict.fromkeys(itertools.chain(*self._spelt.values())) if self._spelt else counts)
        if not 0 < len(self._different) <= MOST_KEYS:
            raise SettingError(f"there must be 1 to {MOST_KEYS:,} different keys, got {len(self._different):,}")
        if self._spelt and learns != "both":
            raise SettingError(f"keys with a name, which may be spelt differently, are learnt by both, not by {learns}")
        if empty := len(self._keys) - counts.total():
            tell(f"{empty:,} of {len(self._keys):,} rows have no key: they are matched with nobody")
        if repeated := sum(count > 1 for count in counts.values()):
            tell(
                f"{repeated:,} keys are in several rows, which all get the same shared_id: a transfer needs one row a "
                "key"
            )
        if self._spelt:
            tell(
                f"each name is matched without each of its letters, {len(self._different):,} keys in all: the other "
                "party learns in which letter one that is near one of its own may differ"
            )
        ristretto()
        self._ledger, records = None, records_of(owners, self.role)
        if isinstance(rows, str | Path):
            self._ledger = ledger_of(records, given, Path(rows).resolve().parent)
        self._terms = {"kinds": list(kinds), "learns": learns, "floor": floor, "country": country}
        self._learns, self._floor = learns, floor
        content = json.dumps([self.role, self._terms, sorted(counts)]).encode() + records.tobytes()
        self._kept = _Begun(out and begun(out), hashlib.blake2b(content, digest_size=16).hexdigest())

    @property
    def steps(self) -> tuple[int, int]:
        """What this party can go on from, as of `PartySession.handshake`: 0 is the match, and 1 its result."""
        if self.out is None or not self.out.exists() or (begun(self.out).exists() and not self._kept.done):
            return 0, 0
        return 1, int(not begun(self.out).exists())

    def run(self, session: PartySession) -> Matched:
        """Match the keys over a session; both parties have their results when it returns."""
        self._kept.keep()
        session.handshake({"match": self._terms}, nonce=_drawn(self._kept.seed, "nonce", 16))
        count = functools.partial(self._kept.count, ledger=self._ledger)
        seed = self._kept.seed
        matched = match_keys(session, self._different, self._learns, self._floor, seed, count)
        if self._spelt:
            order = sorted(self._spelt, key=lambda key: _drawn(seed, f"near {key}", 16))
            names = nearest(session, {key: self._spelt[key] for key in order}, matched.names)
            matched = Matched(len(names), names)
        # before the other party may forget the match
        if self.out is not None and self._learns in ("both", self.role):
            write_named(self._frame, [matched.names.get(key, "") for key in self._keys], self.out)
        self._kept.keep(done=True)
        session.finish()
        return matched

    def end(self) -> None:
        """Forget what the match is drawn from, once both parties have their results."""
        if self._kept.path is not None:
            self._kept.path.unlink(missing_ok=True)


@checked
def match(
    rows: Any, columns: Sequence[str], credentials: PathLike, out: PathLike | None = None, *,
    kinds: Sequence[str] = ("exact",), learns: Learns = "both", floor: int = 1, country: str = "",
    partner: str | None = None, timeout: float = 600.0, tell: Callable[[str], None] = print,
) -> Matched:  # fmt: skip
    """Find the rows whose keys the other party has, too, over the federation's link.

    Args:
        rows: a pandas DataFrame, or the path of a table, whose ledger then counts the match.
        columns: the columns of the key, in the order that both parties have agreed on.
        credentials: the folder of this party's credentials; the party that has the server's listens, and is the target.
        out: a CSV file for the rows with one more column, `shared_id`: the same name at both parties for rows of the
            same key, and empty in all others.  A file beside it is there until both parties have theirs, so
            that a match that was interrupted goes on where both start it again.
        kinds: of the columns, as of `match_keys.keys_of`; both parties must give the same.
        learns: who learns which keys both have: "both", the "source", the "target", or nobody, but both their "size".
        floor: the least size that is shown, where nobody learns the keys.
        country: the digits that stand for the leading 0 of a phone number.
        partner: the name in the other party's certificate; by default the one that is listed or connects first.
        timeout: seconds to wait for the other party.
        tell: called with a sentence about empty and repeated keys.

    Raises:
        SettingError: the table or the settings cannot be used.
        RuntimeFault: the other party ended, or has other settings; both can start again, and the match goes on.
    """
    given = read_credentials(Path(credentials))
    made = KeyMatch(rows, columns, kinds, given, None if out is None else Path(out), learns, floor, country, tell)
    session = PartySession(open_channel(given, timeout, partner), made.role, timeout)
    with session.closing():
        matched = made.run(session)
    made.end()
    return matched


def write_named(frame: DataFrame, names: list[str], out: Path) -> None:
    """Write rows with the names that they share with the other party's, "" for none.

    All values are read back as they are here, for what is trained on and for ledgers: so numbers have the digits of
    float64, whatever they were stored in, and text that a spreadsheet would take for a formula is left alone.  Only
    control characters, which no CSV file has, are left out.
    """
    exact = {name: "float64" for name, kind in frame.dtypes.items() if kind in ("float16", "float32")}
    table, text = frame.astype(exact).assign(shared_id=names), io.BytesIO()
    # quoted, since a lone carriage return in a text would end its row
    table.to_csv(text, index=False, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    with explained(f"{out} cannot be written"):
        write_private(out, text.getvalue().translate(None, _NO_TEXT))
