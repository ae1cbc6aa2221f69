"""The ledger of rows, and disclosure control: what may still leave a site, with noise and without.

A ledger has all that was spent on rows and asked about them, which never becomes less.  A site has one, of the class
`RowLedger`, in a folder `.piebald` beside its rows; a copy lies in its credentials, so that neither new credentials nor
a backup that was restored begin to count anew.  It is written before an update or an answer is computed, so that a
crash counts one too many, never too few:

    ledger.spend("noisy_sums", noise=4.0, limit=Limit(epsilon=3.0, delta=1e-6))     an answer with noise
    ledger.spend(TRAINING, noise=1.1, share=0.01, releases=500, limit=...)          a task of `dp_sgd`
    ledger.count("evaluate", digest, most=1000)                                     an answer without noise
    ledger.add_update(most=100)                                                     an update that may leave
    ledger.answer(digest), ledger.store(digest, body)                               an answer that was given already

A query whose `hiding` states noise is spent, counted and stored by the site's `TaskRunner`, and needs none of this.

`Ledger` is what a user of data on one machine has: a budget for the questions about them.

Disclosure control says which sums may leave a site without noise, by rules of official statistics.  A sum is told only
if enough rows contribute to it and few of them do not decide it, at the very numbers that are sent (Hundepool et al.
2012, "Statistical Disclosure Control", sections 5.2 and 4.2.2).  With rows in the order of their absolute
contributions, and n the least number of rows:

- the largest one has no more than a stated share, and the two largest no more than 3/2 of it.  At the share of a third,
  what two rows that know their own contributions leave of a sum is at least twice any third one (the p-percent rule
  with p = 100);
- the n - 1 largest ones have no more than (n - 1) / n, as of n equal ones, so that many rows that hardly matter do not
  hide a few.

Where a person has several rows, the rules are those of persons: as many of the largest contributions as one person has
at most count as one, whoever they belong to.

These rules protect from careless questions.  They are no proof against somebody who combines answers to many
questions of their own choice: only noise is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from piebald.core.arguments import Fraction, PathLike, Positive, checked, checked_class
from piebald.core.errors import Declined, SettingError
from piebald.core.files import read_bytes
from piebald.core.moments import Floats, Ints
from piebald.core.private_files import held_alone, write_private
from piebald.privacy import accounting
from piebald.privacy.accounting import PrivacyBudget

FILE, ANSWERS = "ledger.json", "answers"
FOLDER = ".piebald"  # beside rows
TRAINING, TRANSFER, UPDATE = "training", "transfer", "update"  # kinds of entries; all others are of answers
LARGEST = 50.0  # of an epsilon that noise is computed for; a larger one promises nothing
SAME = 0.9  # share of rows in common from which those of two names are one set: rows of few categories repeat elsewhere
MOST_RECORDS = 1 << 20  # of a set of rows that are compared with others: the smallest ones, the same in all sets
MOST_ANSWERS, MOST_BYTES = 4000, 256 << 20  # that are stored of the answers; the oldest make room
Records = NDArray[np.uint64]  # digests of rows, each once, increasing
_MEANING = (
    "Whoever sees these statistics learns little about whether one row is among those of the clients (record-level, "
    "{pair}; a person with k rows is protected k times less). {who} No secret are which clients there are, and the "
    "columns, bounds and categories that were stated."
)
_PAIR = {"site": "one row in place of another, since sites state how many rows they have"}
_WHO = {
    "site": "Nobody needs to be trusted but the site itself, which adds noise to its own sums and counts them.",
    "server": "Who sums must be trusted: the noise is added to the sum.",
    "client": "Nobody needs to be trusted but the client itself, which adds noise to its own sums.",
}
_DIGEST = re.compile(r"[0-9a-f]{32,128}")

log = logging.getLogger("piebald.federation")


class OverBudget(SettingError):
    """A question that would spend more than a ledger allows."""


class OverLimit(SettingError):
    """A question that would be one more than is allowed about its rows."""


class Entry(NamedTuple):
    """What a ledger counts; how often it was, is counted beside it.

    Attributes:
        kind: what it was, such as "evaluate", `TRAINING` or `UPDATE`.
        opening: number of the `RowLedger` or `Ledger` that counted it, at random: counts of one opening only grow, so
            of two copies the greater count is the later one.
        rows: digest of the set of rows.
        site: whose rows they were.
        digest: of the answer, see `TaskRunner`; "" for what is no answer.
        noise: standard deviation of Gaussian noise in units of what one row changes, 0 for none.
        share: the probability with which a row was in a release.
        most: how many of its kind were allowed, 0 for any number.
        model: digest of the model that a question brought, "" for none.
        updates: how many updates the client had sent by then.
    """

    kind: str
    opening: str
    rows: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""  # a part of the name of a file
    site: str = ""
    digest: str = ""
    noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    most: Annotated[int, Field(ge=0)] = 0
    model: str = ""
    updates: int = 0


Counts = dict[Entry, int]


@dataclass(frozen=True, slots=True)
class Limit:
    """What may be spent on rows, in all runs together, as differential privacy of one row."""

    epsilon: float
    delta: float


class Head(NamedTuple):
    """The end of an audit log: number and digest of its last line."""

    line: int
    digest: str


class _Record(BaseModel):
    """The file of a ledger."""

    model_config = ConfigDict(extra="forbid", strict=True)

    epsilon: float | None = Field(default=None, gt=0, le=LARGEST)
    delta: float | None = Field(default=None, gt=0, lt=1)
    entries: list[tuple[Entry, Annotated[int, Field(ge=1)]]]
    logs: dict[str, Head] = {}


class _Copies:
    """The entries of a ledger, in files that are each a whole copy: the first one must be there.

    Attributes:
        paths: the files; none keeps entries in memory.
        entries: how often each was.
        logs: the ends of audit logs, by the name of the log and the opening of the ledger.
        limit: what the file of a user's own ledger was made for.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths, self.limit = list(paths), Limit(math.inf, math.inf)
        self.entries, self.logs = Counts(), dict[str, Head]()
        self._lock = threading.RLock()
        self.read()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """The entries as they are now, and nobody else's while this lasts: two questions at once are counted both."""
        with self._lock, ExitStack() as held:
            for path in sorted(self.paths):  # in one order, so that no two processes wait for each other
                try:
                    held.enter_context(held_alone(path))
                except OSError as error:
                    self._give_up(path, error)
            self.read()
            yield

    def read(self) -> None:
        """Take over what all copies hold: of each entry the greater count."""
        records = [record for path in self.paths if (record := _record(path)) is not None]
        for record in records:
            for entry, count in record.entries:
                self.entries[entry] = max(count, self.entries.get(entry, 0))
            for name, head in record.logs.items():
                self.logs[name] = max(head, self.logs.get(name, head))
            if record.epsilon is not None and record.delta is not None:
                self.limit = Limit(record.epsilon, record.delta)

    def write(self, entries: Counts, limit: Limit | None = None) -> None:
        """Write entries to all copies, and take them over once they are there."""
        budget = {} if limit is None else {"epsilon": limit.epsilon, "delta": limit.delta}
        text = json.dumps({**budget, "entries": [*entries.items()], "logs": self.logs})
        for path in list(self.paths):
            try:
                write_private(path, text)  # what was spent stays spent after a power failure
            except OSError as error:
                self._give_up(path, error)
        # last: where it cannot be counted on disk, it is not done
        self.entries = entries

    def _give_up(self, path: Path, error: OSError) -> None:
        """Go on without a copy that cannot be written, if it is not the first one."""
        if path == self.paths[0]:
            raise error
        self.paths.remove(path)
        log.warning("%s cannot be written, so what is asked is counted in %s alone", path, self.paths[0])


class RowLedger:
    """The ledger of a site's rows, over all federations, credentials and runs.

    Rows are known by what they hold: it is the same set under whatever name, at whatever site and in whatever run, and
    what was spent on a set counts for each set of the same site that shares a row with it, and for the same set, or
    nearly, of a site with another name.

    Args:
        records: digests of the rows; none where nothing identifies them.
        folders: where the ledger lies, each a whole copy: the first one must be there, the others where they can be
            written.  None keeps it in memory.
        site: name of whoever has the rows.
        log, head: name of the audit log of whoever opens it, and its end, which it can never lack afterwards; None
            where it has no line.
    """

    def __init__(
        self, records: Records, folders: Sequence[Path] = (), site: str = "", log: str = "",
        head: Callable[[], Head | None] = lambda: None,
    ) -> None:  # fmt: skip
        self._all, self._records, self._site = records, records[:MOST_RECORDS], site
        self._log, self._head = log, head
        self._copies = _Copies(folder / FILE for folder in folders)
        self._opening = secrets.token_hex(8)
        self._answers: dict[str, bytes] = {}
        self._shared: dict[str, float] = {}  # the share of rows in common with other sets, of the smaller one

    @cached_property
    def rows(self) -> str:
        """The digest of the set of rows."""
        return hashlib.blake2b(self._all.astype("<u8").tobytes(), digest_size=16).hexdigest()

    @property
    def knows_rows(self) -> bool:
        """True if something identifies the rows."""
        return bool(len(self._all))

    @property
    def folders(self) -> list[Path]:
        """The folders in which the ledger lies."""
        return [path.parent for path in self._copies.paths]

    @property
    def counts(self) -> dict[str, int]:
        """The number of answers of each kind that were given about these rows, or some of them."""
        totals = Counter[str]()
        for entry, count in self._about_these_rows():
            totals[entry.kind] += count if entry.digest else 0
        return {kind: total for kind, total in totals.items() if total}

    @property
    def updates(self) -> int:
        """The number of updates that may have left."""
        return sum(count for entry, count in self._about_these_rows() if entry.kind == UPDATE)

    @property
    def summary(self) -> str:
        """The answers in words, with what was allowed when the last one of a kind was given."""
        most = {entry.kind: entry.most for entry, _ in self._about_these_rows() if entry.digest}
        numbers = [f"{kind} {count:,}{f' of {most[kind]:,}' * bool(most[kind])}" for kind, count in self.counts.items()]
        return ", ".join(numbers)

    def spent(self, delta: float, kind: str | None = None) -> float:
        """The epsilon that was spent on these rows.

        Args:
            delta: the probability left out.
            kind: `TRAINING` or `TRANSFER`, or anything else for answers of all kinds; None for all together.
        """
        return _epsilon([(entry.noise, entry.share, count) for entry, count in self._noisy(kind)], delta)

    def spend(
        self, kind: str, noise: float, share: float = 1.0, releases: int = 1, limit: Limit | None = None,
        digest: str = "", most: int = 0,
    ) -> None:  # fmt: skip
        """Count releases of a Gaussian mechanism, before the first one is made.

        Args:
            kind: what is released, such as `TRAINING` or the topic of a question.
            noise: standard deviation in units of what one row changes, in all numbers of a release together.
            share: the probability with which a row is in a release, in (0, 1].
            releases: how many.
            limit: what training, transfers or answers, whichever it is, may spend on these rows together.
            digest, most: see `count`.

        Raises:
            OverBudget: the limit does not suffice; then nothing is spent.
            OverLimit: see `count`.
            SettingError: the ledger cannot be read.
            OSError: it cannot be written.
        """
        with self._copies.alone():
            spent = [(entry.noise, entry.share, count) for entry, count in self._noisy(kind)]
            if limit is not None:
                _check([*spent, (noise, share, releases)], limit, _GROUPS.get(kind, "answers"))
            self._check_number(kind, most)
            self._add(Entry(kind, "", digest=digest, noise=noise, share=share, most=most), releases)

    def count(self, kind: str, digest: str, most: int = 0, model: str = "", most_models: int | None = None) -> None:
        """Count an answer without noise, before it is computed.

        Args:
            kind: the topic of the question.
            digest: of all that the answer follows from.
            most: how many answers of this kind are given, 0 for any number.
            model: digest of the model that the question brought, "" for none.
            most_models: models that are told of between two updates of the client, None for any number.

        Raises:
            OverLimit: it would be one more than is allowed; it is not counted.
            SettingError: the ledger cannot be read.
            OSError: it cannot be written.
        """
        with self._copies.alone():
            self._check_number(kind, most)
            updates = self.updates
            models = {entry.model for entry, _ in self._about_these_rows() if entry.updates == updates and entry.model}
            if most_models is not None and model and len(models | {model}) > most_models:
                raise OverLimit(
                    f"this site examines {most_models:,} models between two updates of its own, and no more"
                )
            self._add(Entry(kind, "", digest=digest, most=most, model=model, updates=updates), 1)

    def add_update(self, most: int | None = None) -> None:
        """Count an update, on disk before it can leave.

        The same update delivered again is no new one.  An update for the same version is, since it has noise of its
        own.

        Raises:
            OverLimit: it would be one more than `most`.
            SettingError: the ledger cannot be read.
            OSError: it cannot be written.
        """
        with self._copies.alone():
            if most is not None and self.updates >= most:
                raise OverLimit(f"this site has sent {self.updates} updates in all runs and sends at most {most}")
            self._add(Entry(UPDATE, ""), 1)

    def answer(self, digest: str) -> bytes | None:
        """Return the answer of this digest that was stored, None where there is none."""
        for path in self._answer_paths(digest):
            with suppress(FileNotFoundError):
                return read_bytes(path, MOST_BYTES)
        return self._answers.get(digest)

    def store(self, digest: str, body: bytes) -> None:
        """Store an answer before it is sent, so that the same question gets the same answer; the oldest make room.

        Raises:
            OSError: it cannot be written.
        """
        if len(body) > MOST_BYTES // 4:
            return  # it would push out all others, and costs again where it is asked again
        if not self._copies.paths:
            self._answers[digest] = body
        for path in self._answer_paths(digest):
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                _make_room(path.parent, len(body))
                write_private(path, body)
            except OSError:
                if path.parent.parent == self.folders[0]:
                    raise

    def _answer_paths(self, digest: str) -> list[Path]:
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"digest must be hexadecimal digits, got {digest!r}")
        return [folder / ANSWERS / digest for folder in self.folders]

    def _check_number(self, kind: str, most: int) -> None:
        so_far = self.counts.get(kind, 0)
        if most and so_far >= most:
            raise OverLimit(
                f"this site has answered {so_far:,} questions {kind!r} about its rows, in all runs together, and "
                f"answers at most {most:,}"
            )

    def _add(self, entry: Entry, count: int) -> None:
        """Count an entry; nobody else does meanwhile."""
        entry = entry._replace(opening=self._opening, rows=self.rows, site=self._site)
        if (head := self._head()) is not None:
            self._copies.logs[f"{self._log} {self._opening}"] = head
        for folder in self.folders:
            # before the count that names it: a set without its file would count for all other sets
            with suppress(OSError):  # that a copy cannot be written is found when it is
                if not (path := folder / f"rows-{self.rows}").exists():
                    write_private(path, self._records.astype("<u8").tobytes())
        self._copies.write({**self._copies.entries, entry: self._copies.entries.get(entry, 0) + count})

    def _noisy(self, kind: str | None) -> list[tuple[Entry, int]]:
        """Return what was spent on these rows, by training, transfers or answers, whichever a kind is of."""
        group = None if kind is None else _GROUPS.get(kind, "answers")
        return [
            (entry, count)
            for entry, count in self._about_these_rows()
            if entry.noise and group in (None, _GROUPS.get(entry.kind, "answers"))
        ]

    def _about_these_rows(self) -> list[tuple[Entry, int]]:
        """Return what was spent on these rows, or some of them."""
        return [
            (entry, count)
            for entry, count in self._copies.entries.items()
            if self._share(entry.rows) >= (SAME if entry.site != self._site else np.finfo(float).tiny)
        ]

    def _share(self, rows: str) -> float:
        """The share of a set's rows that are in this one, of the smaller one; all of one that is not known any more."""
        if rows == self.rows or not self._copies.paths:
            return float(rows == self.rows)
        if rows not in self._shared:
            path = next(filter(Path.exists, (folder / f"rows-{rows}" for folder in self.folders)), None)
            data = b"" if path is None else read_bytes(path, 8 * MOST_RECORDS)
            # a set whose file is gone counts in full, so that deleting files gives no questions back
            copied = self._records if path is None else np.frombuffer(data[: len(data) // 8 * 8], dtype="<u8")
            common = np.isin(self._records, copied, assume_unique=True).sum()
            # of the smaller set, so that a few rows cut out of a large set still count as part of it
            self._shared[rows] = float(common / max(min(len(copied), len(self._records)), 1))
        return self._shared[rows]


_GROUPS = {TRAINING: "training tasks", TRANSFER: "transfers"}  # what limits are of; all other kinds are answers


@checked_class
class Ledger:
    """The privacy budget of some rows: what may be spent on them, and what has been.

    Two questions about the same rows tell more than one, for instance by their difference, so each is counted.
    Gaussian mechanisms compose exactly: those with noise z_1, z_2, ... in units of a row's influence are together one
    with noise 1 / sqrt(1/z_1^2 + 1/z_2^2 + ...) (Dong, Roth, Su 2022, corollary 3.3).

    Args:
        epsilon, delta: what may be spent in all questions together.
        path: a file in which it is kept, made if it is not there; None keeps it in memory.

    Raises:
        SettingError: the file cannot be read, or was made for another budget.

    Examples:
        >>> ledger = Ledger(epsilon=1.0, delta=1e-6)
        >>> ledger.epsilon, ledger.questions  # none was asked so far
        (1.0, [])
    """

    def __init__(self, epsilon: Positive, delta: Fraction, path: PathLike | None = None) -> None:
        if epsilon > LARGEST or delta >= 1:
            raise SettingError(
                f"epsilon must be at most {LARGEST:g} and delta below 1, got {epsilon:g} and {delta:g}: "
                "more promises nothing"
            )
        self.epsilon, self.delta = float(epsilon), float(delta)
        self._opening = secrets.token_hex(8)
        self._copies = _Copies([] if path is None else [Path(path)])
        made_for = self._copies.limit
        if self._copies.entries and made_for != Limit(self.epsilon, self.delta):
            raise SettingError(
                f"{path} is a ledger of epsilon {made_for.epsilon:g} and delta {made_for.delta:g}, got "
                f"{self.epsilon:g} and {self.delta:g}: give the same"
            )

    @property
    def spent(self) -> PrivacyBudget:
        """The budget that has been spent."""
        return budget([noise for _, noise in self.questions], self.delta)

    @property
    def questions(self) -> list[tuple[str, float]]:
        """The questions that were asked, each with its noise in units of a row's influence."""
        return [(entry.kind, entry.noise) for entry, count in self._copies.entries.items() for _ in range(count)]

    @checked
    def spend(self, question: str, noise: Positive) -> None:
        """Count a question, before it is answered.

        Raises:
            SettingError: the budget does not suffice; then nothing is spent.
        """
        limit = Limit(self.epsilon, self.delta)
        try:
            with self._copies.alone():
                spent = [(noise, 1.0, 1) for _, noise in self.questions] + [(float(noise), 1.0, 1)]
                _check(spent, limit, "questions", ": ask with a smaller epsilon, or not at all")
                entry = Entry(question, self._opening, noise=float(noise))
                self._copies.write({**self._copies.entries, entry: self._copies.entries.get(entry, 0) + 1}, limit)
        except OSError as error:
            path = self._copies.paths[0]
            raise SettingError(f"{path} cannot be written, so nothing is asked: {error.strerror or error}") from None


def log_heads(folder: Path, log: str) -> list[Head]:
    """Return the ends that a ledger in a folder knows an audit log to have had.

    Raises:
        SettingError: the ledger cannot be read.
    """
    record = _record(folder / FILE)
    return [] if record is None else [head for name, head in record.logs.items() if name.startswith(f"{log} ")]


def budget(noises: list[float], delta: float, where: Literal["site", "server", "client"] = "server") -> PrivacyBudget:
    """Return what Gaussian mechanisms spend together, whose noises are given in units of a row's influence."""
    if not noises:
        return PrivacyBudget(0.0, 0.0, delta, 0, "Nothing has been asked.", "row")
    together = 1 / math.sqrt(sum(noise**-2 for noise in noises))
    spent = accounting.central(together, 1.0, 1, delta)
    meaning = _MEANING.format(who=_WHO[where], pair=_PAIR.get(where, "add or remove one row"))
    return replace(spent, releases=len(noises), meaning=meaning, unit="row")


@checked
def noise_for(epsilon: Positive, delta: Fraction) -> float:
    """The least noise, in units of a row's influence, with which one question spends at most this epsilon.

    Raises:
        SettingError: epsilon or delta promise nothing.
    """
    if epsilon > LARGEST or delta >= 1:
        raise SettingError(f"epsilon must be at most {LARGEST:g} and delta below 1, got {epsilon:g} and {delta:g}")
    return _noise_for(float(epsilon), float(delta))


@lru_cache(maxsize=64)
def _noise_for(epsilon: float, delta: float) -> float:
    """See `noise_for`; kept, since it takes a second."""

    def spent(noise: float) -> float:
        return budget([noise], delta).epsilon_pld

    low, high = 0.0, 1.0
    while spent(high) > epsilon:
        low, high = high, 2 * high
    # 30 halvings give the noise to nine digits; the upper end is returned, which never spends more than epsilon
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > epsilon else (low, middle)
    return high


def _check(mechanisms: Sequence[tuple[float, float, int]], limit: Limit, counted: str, advice: str = "") -> None:
    """Refuse mechanisms, each of so much noise, share and releases, that spend more than a limit together."""
    epsilon = _epsilon(mechanisms, limit.delta)
    # noise that `noise_for` computes for exactly this budget must not fail by a rounding error
    if epsilon > limit.epsilon * (1 + 1e-9):
        raise OverBudget(
            f"epsilon would be {epsilon:.4g} in all {len(mechanisms)} {counted} together, the ledger allows "
            f"{limit.epsilon:g}{advice}"
        )


def _epsilon(mechanisms: Iterable[tuple[float, float, int]], delta: float) -> float:
    """Return the epsilon of Gaussian mechanisms together, each of so much noise, share and releases."""
    releases, precision = Counter[tuple[float, float]](), 0.0
    for noise, share, count in mechanisms:
        # those that all rows are in are one, exactly; equal ones of the others are far cheaper to compose at once
        if share == 1:
            precision += count / noise**2
        else:
            releases[noise, share] += count
    if not releases:
        return accounting.gaussian_epsilon(precision**-0.5, delta) if precision else 0.0
    if precision:
        releases[precision**-0.5, 1.0] = 1
    return accounting.composed_epsilon(releases, delta)


def _record(path: Path) -> _Record | None:
    """Return what a copy holds, None where there is none.

    Raises:
        SettingError: it cannot be read.
    """
    try:
        return _Record.model_validate_json(read_bytes(path))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise SettingError(
            f"{path} is no ledger that can be read: what it counted is spent, so keep it, restore it from a backup, "
            f"and do not begin another one for the same rows ({type(error).__name__})"
        ) from None


def _make_room(folder: Path, size: int) -> None:
    """Delete the oldest answers in a folder, so that one of so many bytes finds room."""
    answers = sorted(
        (path.stat().st_mtime_ns, path.stat().st_size, path) for path in folder.iterdir() if path.is_file()
    )
    total = sum(length for _, length, _ in answers) + size
    for number, (_, length, path) in enumerate(answers):
        if len(answers) - number < MOST_ANSWERS and total <= MOST_BYTES:
            return
        path.unlink(missing_ok=True)
        total -= length


LEAST_ROWS, LARGEST_SHARE = 10, 1 / 3
_OF_TWO = 1.5  # largest shares that two rows may have together
_SLACK = 1e-9  # three equal rows have a third each, whatever rounding says


class Withheld(Declined):
    """Sums that a site does not tell, since few rows decide them."""

    # one sentence for all reasons: which rule a sum breaks may tell of the rows
    sentence: ClassVar = "too few rows contribute to a sum, or one of them has a large share of it"

    def __init__(self) -> None:
        super().__init__(self.sentence)


@dataclass(frozen=True, slots=True)
class DisclosureRules:
    """The rules that sums without noise obey at one site (`contracts.Disclosure`).

    Attributes:
        least: the least number of persons, and of units, that contribute to a sum.
        largest_share: the largest share of a person, or unit, in the sum of all absolute contributions.
        rows_per_person: the most rows that one person has.

    Examples:
        >>> rules = DisclosureRules(least=3, largest_share=0.5)
        >>> rules.allow(np.array([[1.0], [1.1], [0.9], [1.0]])), rules.allow(np.array([[9.0], [0.1], [0.1], [0.1]]))
        (True, False)
    """

    least: int = LEAST_ROWS
    largest_share: float = LARGEST_SHARE
    rows_per_person: int = 1

    @property
    def least_rows(self) -> int:
        """The least number of rows that are always of `least` persons."""
        return (self.least - 1) * self.rows_per_person + 1

    def allow(self, contributions: Floats, dominance_only: bool = False) -> bool:
        """Return whether the sums of contributions [n, k] may be told; one without any tells of nobody.

        Args:
            contributions: of rows, to some sums.
            dominance_only: whether only one or two rows with a large share count, and not how many rows have one.
        """
        sizes = np.abs(contributions)
        largest = sizes.max(axis=0, initial=0.0)
        if not np.isfinite(largest).all():
            return False
        # most sums of many rows are even enough by far, which is seen without an order of the rows
        with np.errstate(over="ignore"):
            bound = self.rows_per_person * (2 + self.least / self.largest_share)
            unclear = (largest > 0) & (largest * bound > sizes.sum(axis=0))
        # in units of the largest one, so that no total overflows
        return all(self._allow(sizes[:, index] / largest[index], dominance_only) for index in np.flatnonzero(unclear))

    def _allow(self, sizes: Floats, dominance_only: bool) -> bool:
        """Return whether a sum of contributions [n] of 0 to 1 may be told."""
        fewer, one, two = self.least_rows - 1, self.rows_per_person, 2 * self.rows_per_person
        if not dominance_only and np.count_nonzero(sizes) <= fewer:
            return False
        count = min(max(fewer, two), len(sizes))
        leading = np.sort(np.partition(sizes, len(sizes) - count)[len(sizes) - count :])[::-1]
        total = float(sizes.sum()) * (1 + _SLACK)
        even = bool(
            leading[:one].sum() <= total * self.largest_share
            and leading[:two].sum() <= total * min(_OF_TWO * self.largest_share, 1.0)
        )
        share = (self.least - 1) / self.least
        return even and (dominance_only or bool(leading[:fewer].sum() <= total * share))

    def allow_counts(self, counts: Floats | Ints) -> bool:
        """Return whether counts of rows may be told: each is of no row, or of enough of them."""
        return bool(((counts == 0) | (counts >= self.least_rows)).all())

    def check(
        self, contributions: Iterable[Floats], units: NDArray[np.object_] | None = None, dominance_only: bool = False
    ) -> None:
        """Refuse sums that the rules do not allow.

        Args:
            contributions: of rows, to some sums at a time [n, k].
            units: what each row belongs to [n], such as a ward; contributions of one unit count together as well.
            dominance_only: see `allow`.

        Raises:
            Withheld: a rule is broken.
        """
        numbers = None if units is None else np.unique(units, return_inverse=True)[1]
        of_units = replace(self, rows_per_person=1)
        for block in contributions:
            allowed = self.allow(block, dominance_only)
            if not allowed or not (numbers is None or of_units.allow(_summed(block, numbers), dominance_only)):
                raise Withheld

    def check_counts(self, counts: Floats | Ints) -> None:
        """Refuse counts of rows that the rules do not allow.

        Raises:
            Withheld: one is of few rows.
        """
        if not self.allow_counts(counts):
            raise Withheld


def _summed(contributions: Floats, units: Ints) -> Floats:
    """Return the sums of contributions [n, k] over the rows of each unit, whose numbers come [n]."""
    sums = np.zeros((int(units.max(initial=-1)) + 1, contributions.shape[1]))
    np.add.at(sums, units, contributions)
    return sums
