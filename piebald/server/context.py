"""What the loop lends to the parts that work at the centre."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from piebald.contracts import Question, Update

if TYPE_CHECKING:
    from piebald.server.loop import Controller


class Lent:
    """`contracts.Centre` for the part on one axis and one group."""

    def __init__(self, controller: Controller, axis: str, group: int) -> None:
        self._controller, self._axis, self._group = controller, axis, group
        self.work, self.known = controller.work, controller.known
        self.memory = controller.communities.kept.setdefault((axis, group), {})

    @property
    def version(self) -> int:
        return self._controller.version

    @property
    def model(self) -> Tensor:
        return self._controller.communities.group(self._group).model

    @property
    def models(self) -> Mapping[int, Tensor]:
        return self._controller.communities.models

    @property
    def members(self) -> Sequence[int]:
        here, aside = self._controller.runtime.clients(), self._controller.roster.aside
        group_of = self._controller.communities.group_of
        return [c for c in here if c not in aside and (not group_of or group_of.get(c, 0) == self._group)]

    def ask(self, questions: Sequence[Question]) -> list[Update | None]:
        return self._controller.exchange(questions)

    def leave_out(self, client: int, reason: str) -> None:
        self._controller.leave_out(client, reason)

    def remark(self, name: str, value: Any) -> None:
        self._controller.remark(self._axis, self._group, name, value)
