"""A party's ledger of the numbers about its rows that it has disclosed, written to disk before they are sent.

A disclosure is a note in the party's run folder: its kind, chunk, digest and step.

An error with which this party ends a run is one, too: whether the other party's messages lead to it may depend on rows.
Each is counted in the ledger of the party's rows as well, which adds up all runs and partners, with noise or without.

A run may disclose as much as its steps do if nothing interrupts them (`plan`).  After an interruption both parties
repeat some steps.  A repeated step that computes the same numbers discloses nothing new: noise is a function of the
party's secret and of the numbers that it hides, so the messages are the same, and they are not counted again.  If the
other party came back with other messages, this party's weights move elsewhere, and its numbers are new: they are
counted, and when the plan is used up the run ends.

How much that is follows from chunks of rows that are always together, see `vertical.chunks`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from piebald.core.errors import PiebaldError, RunFolderError
from piebald.core.files import os_reason
from piebald.data.clients.row_identity import Digests
from piebald.federation.credentials.provisioning import Credentials
from piebald.privacy.ledger import FOLDER, RowLedger
from piebald.storage.store import RunStore

TOLD = -1  # version of the notes, which no step that is repeated replaces
DisclosureKind = Literal["own", "common", "gradient", "whole", "shares", "abort"]
Spend = Callable[[DisclosureKind, float], None]
MOST_ABORTS = 10  # of one run


def plan(steps: int, own_chunks: int, common_chunks: int) -> dict[tuple[DisclosureKind, int], int]:
    """Return how often an undisturbed run makes a disclosure, by its kind and the number of the chunk.

    Args:
        steps: of the run.
        own_chunks, common_chunks: numbers of chunks of own and of co-occurring rows.
    """
    chunks: list[tuple[DisclosureKind, int]] = [
        ("own", own_chunks), ("gradient", own_chunks), ("common", common_chunks)
    ]  # fmt: skip
    # chunk k is used at the steps k, k + count, k + 2 count, ...
    counts = {(kind, chunk): len(range(chunk, steps, count)) for kind, count in chunks for chunk in range(count)}
    # "whole": the share of positives, and the final translator
    return counts | {("whole", 0): 2, ("shares", 0): 1, ("abort", 0): MOST_ABORTS}


def ledger_of(records: Digests, credentials: Credentials, folder: Path | None) -> RowLedger:
    """Return the ledger of a party's rows, by their digests, with copies in its credentials and in the rows' folder."""
    folders = [credentials.folder / "state", *([] if folder is None else [folder / FOLDER])]
    return RowLedger(records, folders, credentials.party)


@contextmanager
def counting(ledger: RowLedger) -> Iterator[None]:
    """Turn an error in writing the ledger of a party's rows into a sentence.

    Raises:
        RunFolderError: it cannot be written, so what was to be counted must not be sent.
    """
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"the ledger of this party's rows in {ledger.folders[0]} cannot be written, so nothing is sent: "
            f"{os_reason(error)}"
        ) from None


class DisclosureLedger:
    """The disclosures of one party about its rows.

    Args:
        plan: the most disclosures of each kind and chunk.  "own" is a step's disclosure about a chunk of own rows,
            "common" about one of co-occurring rows, "gradient" a chunk's gradient with noise, "whole" is about all own
            rows at once, and so is "abort", an error with which this party ended the run; "shares" are those of the
            scores of held-out rows.
        store: the party's run folder; None keeps the ledger in memory.
        spend: called with the kind and the noise of a disclosure before it is counted, where it is one more about one
            row: it counts in the ledger of the party's rows.

    Raises:
        RunFolderError: the folder cannot be read, or is damaged.

    Examples:
        >>> ledger = DisclosureLedger(plan(steps=10, own_chunks=5, common_chunks=5))
        >>> ledger.count("own", 0, step=0, content=b"sums of a chunk")
        >>> ledger.count("own", 0, step=0, content=b"sums of a chunk")  # repeated after an interruption
        >>> ledger.uses("own")
        1
    """

    def __init__(
        self, plan: Mapping[tuple[DisclosureKind, int], int], store: RunStore | None = None,
        spend: Spend = lambda kind, noise: None,
    ) -> None:  # fmt: skip
        self.plan, self._store, self._spend = dict(plan), store, spend
        self._digests: dict[tuple[DisclosureKind, int], set[str]] = {}
        for note in [] if store is None else store.rows("note"):
            if note["version"] == TOLD:
                self._digests.setdefault((note["axis"], note["cluster"]), set()).add(note["name"])

    @property
    def releases(self) -> int:
        """The largest number of releases about one own row."""
        return self.uses("own", "gradient") + self.uses("whole") + self.uses("abort")

    def count_abort(self, step: int, noise: float = 0.0) -> None:
        """Count an error with which this party ends the run, before the other party hears of it; see `count`."""
        self.count("abort", 0, step, self.uses("abort").to_bytes(8, "little"), noise)

    def check_aborts(self) -> None:
        """Refuse to go on with a run that ended with an error too often.

        Raises:
            RunFolderError: it did.
        """
        if self.uses("abort") >= MOST_ABORTS:
            raise RunFolderError(
                f"this run has ended {MOST_ABORTS} times with an error about the other party's messages, and each may "
                "tell something about this party's rows: start both parties in new folders"
            )

    def count(self, kind: DisclosureKind, chunk: int, step: int, content: bytes, noise: float = 0.0) -> None:
        """Count a disclosure that is about to be made, unless the same content was disclosed before.

        Args:
            kind: its kind.
            chunk: number of the chunk.
            step: number of the step.
            content: the bytes on which the disclosure depends.
            noise: standard deviation of its noise in units of what one row changes, 0 for none.

        Raises:
            RunFolderError: the plan allows no more, or the ledger cannot be written; nothing may be sent then.
        """
        digest = hashlib.blake2b(content, digest_size=16, person=b"piebald told").hexdigest()
        digests = self._digests.setdefault((kind, chunk), set())
        if digest in digests:
            return
        most = self.plan.get((kind, chunk), 0)
        if len(digests) >= most:
            raise RunFolderError(
                f"step {step + 1} would tell about the same rows once more than the {most} times that this run's "
                "settings allow: it was interrupted, and its steps afterwards were not the same as before; a new run "
                "in a new folder tells more about these rows"
            )
        before = self.releases if noise else self.uses(kind)
        digests.add(digest)
        try:
            # before: a crash between the two spends once too often, never too rarely
            if (self.releases if noise else self.uses(kind)) > before:
                self._spend(kind, noise)
            if self._store is not None:  # before anything is sent, also if the machine loses power
                note = {"version": TOLD, "axis": kind, "cluster": chunk, "name": digest, "value": step}
                self._store.add_notes([note], durable=True)
        except PiebaldError:
            digests.discard(digest)
            raise

    def uses(self, *kinds: DisclosureKind) -> int:
        """Return the number of disclosures of these kinds about one row: those of the chunk that was used most."""
        chunks = {chunk for _, chunk in self._digests}
        return max((sum(len(self._digests.get((kind, chunk), ())) for kind in kinds) for chunk in chunks), default=0)
