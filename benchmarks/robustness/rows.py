"""What a fuzzer reports: one row for each subject, and the inputs that were not refused as they should be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared.options import reader


@dataclass(frozen=True)
class Row:
    """What became of the mutations of one subject.

    Attributes:
        subject: what was mutated.
        tried: mutations.
        refused: those that ended with one sentence of the project's own errors.
        accepted: those that were allowed, rightly.
        raw: those that ended with any other exception, or were allowed wrongly.
        crashed: those that ended the process, or did not end.
        examples: a few of the raw and crashed ones, to find them again.
    """

    subject: str
    tried: int
    refused: int
    accepted: int
    raw: int
    crashed: int
    examples: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Whether nothing was raw, and nothing crashed."""
        return not self.raw and not self.crashed


def tallied(subject: str, verdicts: list[tuple[str, str]]) -> Row:
    """The row of (verdict, example) pairs; verdicts are "refused", "accepted", "raw" and "crashed"."""
    count = {
        word: sum(verdict == word for verdict, _ in verdicts) for word in ("refused", "accepted", "raw", "crashed")
    }
    examples = [example for verdict, example in verdicts if verdict in ("raw", "crashed")]
    return Row(subject, len(verdicts), **count, examples=tuple(examples[:3]))


def command(doc: str | None, run: Callable[..., list[Row]], **options: Any) -> int:
    """Carry out a fuzzer with these options, print its rows, and return the exit code: 1 where a row is not good."""
    rows = run(**vars(reader(doc, **options).parse_args()))
    for row in rows:
        print(row.subject, row.tried, row.refused, row.accepted, row.raw, row.crashed)
        print(*(f"    {example}\n" for example in row.examples), sep="", end="")
    return 0 if all(row.good for row in rows) else 1
