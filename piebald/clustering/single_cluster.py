"""All clients share one community model."""

from __future__ import annotations

from collections.abc import Mapping

from piebald.clustering.base import Group
from piebald.contracts import Centre, Cohort


class Together(Group):
    """One group for everybody (FedAvg)."""

    needs_each = False

    def assign(self, cohort: Cohort, known: Mapping[int, int], centre: Centre) -> list[int]:
        return [0] * len(cohort.clients)
