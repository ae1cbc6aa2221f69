"""A party's ledger of what it has told about its rows: counted when it leaves, on disk before it is sent.

    RUN/source/told.jsonl    one line for each thing that was told: what, of which chunk, at which step, and its digest

What a run may tell is what its steps tell if nothing interrupts it (`ToldLedger.plan`).  After an interruption both
parties repeat some steps.  A repeated step that computes the same numbers tells nothing new: noise is a function of the
party's secret and of what it hides, so the numbers that leave are the very same ones, and they are not counted again.
If the other party came back with other messages, this party's weights move elsewhere, and what it tells is new: it is
counted, and at the end of the plan the run ends.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from piebald.core.errors import RunFolderError
from piebald.core.reading.files import read_bytes

LEDGER = "told.jsonl"
What = Literal["own", "common", "gradient", "whole"]


class _Line(BaseModel):
    """A line of the file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    what: What
    chunk: int
    step: int
    digest: str


def plan(steps: int, own: int, common: int) -> dict[tuple[What, int], int]:
    """How often an undisturbed run tells something, by what it is and the number of the chunk.

    Args:
        steps: of the run.
        own, common: how many chunks there are of own and of co-occurring rows.
    """
    chunks: list[tuple[What, int]] = [("own", own), ("gradient", own), ("common", common)]
    found = {(what, chunk): len(range(chunk, steps, count)) for what, count in chunks for chunk in range(count)}
    return found | {("whole", 0): 2}  # the share of positives, and the final translator


class ToldLedger:
    """What one party has told about its rows.

    Args:
        plan: how often something may be told, by what it is and the number of the chunk.
            "own": what one step tells about a chunk of own rows; "common": about one of co-occurring rows;
            "gradient": a chunk's gradient with noise; "whole": about all own rows at once.
        path: the file; None keeps the ledger in memory.

    Raises:
        RunFolderError: the file cannot be read, or is damaged.
    """

    def __init__(self, plan: Mapping[tuple[What, int], int], path: Path | None = None) -> None:
        self.plan, self._path, self._size = dict(plan), path, 0
        self._told: dict[tuple[What, int], set[str]] = {}
        for line in self._lines():
            self._told.setdefault((line.what, line.chunk), set()).add(line.digest)

    def count(self, what: What, chunk: int, step: int, content: bytes) -> None:
        """Count something that is about to leave, unless the very same has left before.

        Raises:
            RunFolderError: the plan allows no more, or the ledger cannot be written; nothing may be sent then.
        """
        digest = hashlib.blake2b(content, digest_size=16, person=b"piebald told").hexdigest()
        told = self._told.setdefault((what, chunk), set())
        if digest in told:
            return
        most = self.plan.get((what, chunk), 0)
        if len(told) >= most:
            raise RunFolderError(
                f"step {step + 1} would tell about the same rows once more than the {most} times that this run's "
                "settings allow: it was interrupted, and what came after was not the same as before; a new run in a "
                "new folder tells more about these rows"
            )
        self._append(_Line(what=what, chunk=chunk, step=step, digest=digest))
        told.add(digest)

    def uses(self, *whats: What) -> int:
        """How often a row was in what was told: that of the chunk that was used most, in all these together."""
        chunks = {chunk for _, chunk in self._told}
        return max((sum(len(self._told.get((what, chunk), ())) for what in whats) for chunk in chunks), default=0)

    def _lines(self) -> list[_Line]:
        if self._path is None or not self._path.exists():
            return []
        try:
            data = read_bytes(self._path, None, links=False)
            # A line that a killed process left incomplete was not followed by what it counts: the next one replaces it.
            self._size = data.rfind(b"\n") + 1
            return [_Line.model_validate_json(line) for line in data[: self._size].splitlines()]
        except (OSError, ValueError):
            raise RunFolderError(
                f"{self._path} is damaged, so nobody knows what this run has told: start it in a new folder"
            ) from None

    def _append(self, line: _Line) -> None:
        if self._path is None:
            return
        try:
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.truncate(self._size)
                file.seek(self._size)
                self._size += file.write(line.model_dump_json().encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunFolderError(
                f"{self._path} cannot be written, so nothing is sent: {(error.strerror or str(error)).lower()}"
            ) from None
