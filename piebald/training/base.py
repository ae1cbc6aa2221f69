"""The base class of trainers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from piebald.component import Part
from piebald.contracts import Learned, Local, Privacy, Start

if TYPE_CHECKING:
    from torch import Tensor


class Rule(Part):
    """How a client learns, and what the centre keeps for it.  Pure: no state but what goes in and out."""

    axis = "learn"

    def remember(self, model: Tensor, shared: int) -> dict[str, Tensor]:
        """A client's memory before its first assignment; `model` [p] is the one the run starts from, `shared` is
        `s`.
        """
        return {}

    def learn(self, start: Start, local: Local) -> Learned:
        """One training assignment."""
        raise NotImplementedError

    def validates(self) -> bool:
        """Whether clients need validation rows."""
        return False

    def privacy(self) -> Privacy | None:
        """How its steps hide single rows, or None; noise must then come from numbers that only the client knows."""
        return None

    def uploads(self) -> tuple[str, ...]:
        """Names of the vectors that an update carries besides the model, as far as the rule sends any."""
        return tuple(sorted(self.common(0)))

    def least_steps(self, examples: int) -> int:
        """Steps that an assignment takes at least: a simulator need not compute before so many could be done."""
        return 0

    def personal(self, start: Start, local: Local) -> Tensor:
        """The model [c, p] that clients would use for themselves, given what the centre last sent."""
        return start.model

    def tailors(self) -> bool:
        """Whether `personal` differs from the model sent (beyond private layers)."""
        return type(self).personal is not Rule.personal

    def common(self, shared: int) -> dict[str, Tensor]:
        """What the centre sends besides the model, before the first commit, by name."""
        return {}

    def fold(
        self, common: Mapping[str, Tensor], mean: Mapping[str, Tensor], arrived: int, known: int
    ) -> dict[str, Tensor]:
        """The new common parts, from the plain means of the named parts of `arrived` updates out of `known` clients."""
        return dict(common)
