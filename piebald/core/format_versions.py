"""Numbers of the forms in which things are kept, and how those of earlier versions become the present one.

Run folders, credentials, queues and backups carry such a number.  A change of what one of them holds is one step, which
is added to its form where that is defined: the number grows by it, what was kept before is brought through the steps
that it lacks when it is read, and an earlier Piebald refuses what has a later number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Kept = TypeVar("Kept")


class FormatVersions(Generic[Kept]):
    """The form of something that is kept, and the steps that lead to it.

    Args:
        first: number of the first form.
        steps: each brings what is kept, in place, from a form to the next.

    Examples:
        >>> form = FormatVersions[dict[str, int]](first=1, steps=(lambda kept: kept.update(port=8002),))
        >>> form.number, form.reads(1), form.reads(3)
        (2, True, False)
        >>> kept = {"sites": 3}
        >>> form.upgrade(kept, 1)
        >>> kept
        {'sites': 3, 'port': 8002}
    """

    def __init__(self, first: int, steps: tuple[Callable[[Kept], None], ...] = ()) -> None:
        self._first, self._steps = first, steps

    @property
    def number(self) -> int:
        """Number of the present form."""
        return self._first + len(self._steps)

    def reads(self, found: object) -> bool:
        """Return whether a number that was found is that of this form or of an earlier one."""
        return isinstance(found, int) and not isinstance(found, bool) and self._first <= found <= self.number

    def upgrade(self, kept: Kept, found: int) -> None:
        """Bring what is kept in an earlier form to the present one, in place.

        Args:
            kept: what is kept.
            found: number of its form, which this one `reads`.
        """
        for step in self._steps[found - self._first :]:
            step(kept)

    @contextmanager
    def with_step(self, step: Callable[[Kept], None]) -> Iterator[None]:
        """The form of the version after this one, in the block: with one step more, which a test brings."""
        before = self._steps
        self._steps = (*before, step)
        try:
            yield
        finally:
            self._steps = before
