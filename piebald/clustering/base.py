"""The base class of clusterings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from piebald.component import Part
from piebald.contracts import Centre, Cohort

if TYPE_CHECKING:
    from torch import Tensor


class Group(Part):
    """Who is averaged with whom."""

    axis = "group"
    needs_each: ClassVar[bool] = True  # False: one group only, so that updates may be summed before they are grouped
    from_now: ClassVar[bool] = False  # True: members' models are averaged: changes count from their group's model

    def assign(self, cohort: Cohort, known: Mapping[int, int], centre: Centre) -> list[int]:
        """A group number for each update; `known` are the groups of clients seen before (others start in group 0).

        A number that is new begins with the mean of the models that its first members were sent.
        """
        raise NotImplementedError

    def validates(self) -> bool:
        """Whether clients need validation rows."""
        return False

    def main(self, memory: Mapping[str, Any]) -> int:
        """The group whose model stands for the run and that newcomers are in; `memory` is what the part keeps."""
        return 0

    def offer(self, models: Mapping[int, Tensor], work: Work) -> dict[str, Tensor]:
        """What a training assignment brings besides the client's own community model, e.g. "candidates" [K, s]."""
        return {}
