"""The questions that were answered about some rows, in all runs together, on the disk of whoever has the rows."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from piebald.core.errors import SettingError
from piebald.core.noise import NoiseSource
from piebald.core.private_files import held_alone, write_private
from piebald.core.reading.files import read_bytes

FILE = "questions.json"
FOLDER = ".piebald"  # beside rows, for the copy of the count that goes with them
Records = NDArray[np.uint64]  # digests of rows, each once, increasing
SAME = 0.9  # share of rows in common from which those of two names are one set: rows of few categories repeat elsewhere
MOST_RECORDS = 1 << 20  # of a set of rows that are compared with others: the smallest ones, the same in all sets

log = logging.getLogger("piebald.federation")


class OverLimit(SettingError):
    """A question that would be one more than is allowed about its rows."""


class CountedQuestion(NamedTuple):
    """A question that was counted.

    Attributes:
        kind: what the limit is of, such as "evaluate".
        question: digest of the question with all that its answer depends on besides the rows.
        rows: digest of the set of rows.
        most: how many of its kind were allowed.
        model: digest of the model that it brought, "" for none.
        updates: how many updates the client had sent by then.
        site: whose rows they were.
    """

    kind: str
    question: str
    rows: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]  # a part of the name of a file
    most: int
    model: str = ""
    updates: int = 0
    site: str = ""


class _Record(BaseModel):
    """The file of a ledger."""

    model_config = ConfigDict(extra="forbid", strict=True)

    secret: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    asked: list[CountedQuestion]


def records_of(columns: Sequence[NDArray[np.generic]]) -> Records:
    """The digests of rows, whose numbers are in several arrays [n, ...]."""
    # without rows NumPy cannot work out the -1
    tables = [np.ascontiguousarray(column).reshape(len(column), -1) if len(column) else column for column in columns]
    return as_records(b"".join(table[row].tobytes() for table in tables) for row in range(len(columns[0])))


def as_records(rows: Iterable[bytes]) -> Records:
    """The digests of rows, each given as bytes."""
    # 8 bytes each: among a million rows two collide with a chance of 2^-25, which would merely count them as one row
    digests = b"".join(hashlib.blake2b(row, digest_size=8).digest() for row in rows)
    return np.unique(np.frombuffer(digests, dtype="<u8"))


class QuestionLedger:
    """Counts questions about rows before they are answered, so that a crash counts one too many, never too few.

    Rows are known by what they hold: it is the same set under whatever name, at whatever site and in whatever run, and
    what was asked about a set counts for each set of the same site that shares a row with it, and for the same set, or
    nearly, of a site with another name.  The same question about the same rows has the same answer and counts once.

    Args:
        records: of the rows.
        folders: where the count is kept, each a whole copy: the first one must be there, the others where they can be
            written.  None keeps it in memory.
        site: name of whoever has the rows.
    """

    def __init__(self, records: Records, folders: Sequence[Path] = (), site: str = "") -> None:
        self._records, self._folders, self._site = records[:MOST_RECORDS], list(folders), site
        self._shared: dict[str, float] = {}  # the share of rows in common with other sets, of the smaller one
        self._secret, self._asked = secrets.token_hex(32), list[CountedQuestion]()
        self._read()

    @cached_property
    def rows(self) -> str:
        """The digest of the set of rows."""
        return hashlib.blake2b(self._records.astype("<u8").tobytes(), digest_size=16).hexdigest()

    @property
    def places(self) -> list[Path]:
        """The folders in which the count is kept."""
        return list(self._folders)

    @property
    def counts(self) -> dict[str, int]:
        """The number of questions of each kind that were answered about these rows, or some of them."""
        return dict(Counter(question.kind for question in self._about_these_rows()))

    @property
    def summary(self) -> str:
        """The same in words, with what was allowed when the last one of a kind was answered."""
        most = {question.kind: question.most for question in self._about_these_rows()}
        return ", ".join(f"{kind} {count:,} of {most[kind]:,}" for kind, count in self.counts.items())

    def spend(
        self, kind: str, question: str, most: int, model: str = "", updates: int = 0, most_models: int | None = None
    ) -> bool:
        """Count a question, before it is answered; returns whether it is a new one.

        Args:
            kind, question, model, updates: see `CountedQuestion`.
            most: questions of this kind.
            most_models: models that are told of between two updates of the client, None for any number.

        Raises:
            OverLimit: it would be one more than is allowed; it is not counted.
            SettingError: the count cannot be read or written.
        """
        if not len(self._records):
            raise OverLimit("nothing identifies this site's rows, so questions about them cannot be counted")
        with self._alone():
            earlier = self._about_these_rows()
            if any((answer.kind, answer.question, answer.rows) == (kind, question, self.rows) for answer in earlier):
                return False
            if (so_far := sum(answer.kind == kind for answer in earlier)) >= most:
                raise OverLimit(
                    f"this site has answered {so_far:,} questions {kind!r} about its rows, in all runs together, and "
                    f"answers at most {most:,}"
                )
            models = {answer.model for answer in earlier if answer.updates == updates and answer.model}
            if most_models is not None and model and len(models | {model}) > most_models:
                raise OverLimit(
                    f"this site examines {most_models:,} models between two updates of its own, and no more"
                )
            questions = [*self._asked, CountedQuestion(kind, question, self.rows, most, model, updates, self._site)]
            # before it counts in memory: an answer that cannot be counted must not be given
            self._write(questions)
            self._asked = questions
        return True

    def noise(self, question: str) -> NoiseSource:
        """The noise of an answer, which whoever asks the same again gets again, and nobody else can make."""
        key = hashlib.blake2b(question.encode(), key=bytes.fromhex(self._secret), digest_size=32)
        return NoiseSource(key.digest())

    def _about_these_rows(self) -> list[CountedQuestion]:
        """Return what was asked about these rows, or some of them."""
        return [
            question
            for question in self._asked
            if self._share(question.rows) >= (SAME if question.site != self._site else np.finfo(float).tiny)
        ]

    def _share(self, rows: str) -> float:
        """The share of a set's rows that are in this one, of the smaller one; all of one that is not known any more."""
        if rows == self.rows or not self._folders:
            return float(rows == self.rows)
        if rows not in self._shared:
            path = next(filter(Path.exists, (folder / f"rows-{rows}" for folder in self._folders)), None)
            data = b"" if path is None else read_bytes(path, 8 * MOST_RECORDS)
            # a set whose file is gone counts in full, so that deleting files gives no questions back
            copied = self._records if path is None else np.frombuffer(data[: len(data) // 8 * 8], dtype="<u8")
            common = np.isin(self._records, copied, assume_unique=True).sum()
            # of the smaller set, so that a few rows cut out of a large set still count as part of it
            self._shared[rows] = float(common / max(min(len(copied), len(self._records)), 1))
        return self._shared[rows]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The count as it is now, and nobody else's while this lasts: two questions at once are counted both."""
        with ExitStack() as held:
            for folder in sorted(self._folders):  # in one order, so that no two processes wait for each other
                try:
                    held.enter_context(held_alone(folder / FILE))
                except OSError as error:
                    self._give_up(folder, error)
            self._read()
            yield

    def _give_up(self, folder: Path, error: OSError) -> None:
        """Go on without a copy that cannot be written, if it is not the first one."""
        if folder == self._folders[0]:
            raise SettingError(
                f"{folder / FILE} cannot be written, so nothing is answered: {error.strerror or error}"
            ) from None
        self._folders.remove(folder)
        log.warning("%s cannot be written, so questions are counted in %s alone", folder, self._folders[0])

    def _read(self) -> None:
        """Take over what all copies hold."""
        records = [record for folder in self._folders if (record := _record(folder / FILE)) is not None]
        if records:
            # where copies differ, the secret of the first folder with a count holds, and `_write` gives it to all
            self._secret = records[0].secret
            self._asked = list(dict.fromkeys(question for record in records for question in record.asked))

    def _write(self, questions: Sequence[CountedQuestion]) -> None:
        text = json.dumps({"secret": self._secret, "asked": questions})
        for folder in list(self._folders):
            try:
                rows = folder / f"rows-{self.rows}"
                # before the count that names it: a set without its file would count for all other sets
                if not rows.exists():
                    write_private(rows, self._records.astype("<u8").tobytes())
                write_private(folder / FILE, text)  # what was answered stays answered after a power failure
            except OSError as error:
                self._give_up(folder, error)


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
            f"{path} is no ledger of questions that can be read: what it counted was answered, so keep it, and restore "
            f"it from a backup ({type(error).__name__})"
        ) from None
