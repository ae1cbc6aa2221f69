"""All clients share one global model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from piebald.contracts import Cohort, ServerContext
from piebald.methods.clustering.base import Clustering


class SingleCluster(Clustering):
    """A single cluster of all clients (FedAvg)."""

    on_device: ClassVar[bool] = True

    requires_individual_updates = False

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        if cls.overrides(SingleCluster.assign) and "requires_individual_updates" not in vars(cls):
            cls.requires_individual_updates = True  # its clusters cannot be told from one sum of all updates

    def is_single(self) -> bool:
        return not self.overrides(SingleCluster.assign)

    def assign(self, cohort: Cohort, known: Mapping[int, int], context: ServerContext) -> list[int]:
        return [0] * len(cohort.clients)
