"""Regions: clients are aggregated within their region, and the regions now and then with one another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator

from piebald.contracts import Cohort, ServerContext
from piebald.methods.clustering.base import Clustering


class Regions(Clustering):
    """Hierarchical aggregation: rounds within regions, then a step of all (Liu et al. 2020, HierFAVG, algorithm 1).

    Each region has a model, which moves in every round by the recipe's aggregator and server optimizer, from its own
    clients alone.  After `region_rounds` rounds (the paper's kappa_2; kappa_1 are the local steps) all regions go on
    from the mean of their models, in which a region counts as much as its updates since the last such step: the sum of
    their weights, or their number where the aggregator has no weight for each.  With one round, linear weights
    and the plain server optimizer this is FedAvg.

    The server aggregates for all regions, so it sees every update and the clients' bytes are those of FedAvg.  What
    regions with servers of their own would save between these and the central server is not counted.  A run whose
    number of rounds is no multiple of `region_rounds` ends with a model for each region.

    Attributes:
        regions: how many, among which clients are dealt in turn; or the clients of each region by number, where those
            who are not named form one more.
        region_rounds: rounds within regions before a step of all, at least 1.

    Examples:
        >>> regions = Regions(regions=[[0, 1], [2]])
        >>> [regions.cluster(client) for client in range(4)]
        [0, 0, 1, 2]
    """

    on_device: ClassVar[bool] = True
    compares_changes: ClassVar[bool] = False

    regions: int | tuple[tuple[int, ...], ...] = 2
    region_rounds: int = Field(default=2, ge=1)

    @field_validator("regions")
    @classmethod
    def _check_regions(cls, regions: int | tuple[tuple[int, ...], ...]) -> Any:
        if isinstance(regions, int):
            if regions < 1:
                raise ValueError(f"regions must be at least 1, got {regions}")
            return regions
        named = [client for members in regions for client in members]
        if not all(regions) or not named or min(named) < 0 or len(set(named)) < len(named):
            raise ValueError("regions must name each client once, from 0 up, and no region may be empty")
        return regions

    @property
    def clusters_to_join(self) -> int:
        return self.regions if isinstance(self.regions, int) else len(self.regions) + 1

    def cluster(self, client: int) -> int:
        if isinstance(self.regions, int):
            return client % self.regions
        return next((number for number, members in enumerate(self.regions) if client in members), len(self.regions))

    def assign(self, cohort: Cohort, known: Mapping[int, int], context: ServerContext) -> list[int]:
        return [self.cluster(client) for client in cohort.clients]

    def join(self, weights: Mapping[int, float], context: ServerContext) -> Mapping[int, float] | None:
        totals: dict[str, float] = context.state.setdefault("weights", {})  # JSON has text for keys
        for number, weight in weights.items():
            totals[str(number)] = totals.get(str(number), 0.0) + weight
        # versions count from 0, so the first step of all is that after `region_rounds` rounds
        if (context.version + 1) % self.region_rounds:
            return None
        # weights add up over the rounds of a region only, not over the whole run
        context.state["weights"] = {}
        return {int(number): weight for number, weight in sorted(totals.items())}
