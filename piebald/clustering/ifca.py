"""K-Cluster: as many groups as one says, and each client goes where its loss is least."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from piebald.aggregation.coordinates import places
from piebald.client_work import Work
from piebald.clustering.base import Group
from piebald.contracts import Centre, Cohort
from piebald.randomness import key


class Ifca(Group):
    """Every client gets all models and trains the one of least loss (Ghosh et al. 2020, IFCA; K-Cluster in DistFL).

    Needs the rule `lowest_loss`.  The first `warm` commits are plain FedAvg; then the models that clients came to are
    put into groups by k-means, and each group's mean begins as one of the K models.  With warm = 0 the K models are
    drawn like first models, as in the paper's experiments; clients may then all choose the same one.

    Attributes:
        k: number of models, at least 1.
        warm: commits before the clients are first told apart.
        restarts: of k-means from other centres, the best of which is taken.
    """

    from_now: ClassVar[bool] = True

    k: int = Field(default=5, ge=1)
    warm: int = Field(default=1, ge=0)
    restarts: int = Field(default=10, ge=1)

    def misfit(self, work: Work) -> str | None:
        if work.rule.kind == "lowest_loss":
            return None
        return f"ifca needs clients that choose: use learn = {{ kind = 'lowest_loss', ... }}, not {work.rule.kind!r}"

    def assign(self, cohort: Cohort, known: Mapping[int, int], centre: Centre) -> list[int]:
        if cohort.version + 1 < self.warm:
            return [0] * len(cohort.clients)
        if cohort.version + 1 == self.warm:
            return self._first(cohort, centre)
        chosen = [int(update.metrics.get("group", -1)) for update in cohort.updates]
        labels = [
            number if 0 <= number < self.k else known.get(client, 0)
            for number, client in zip(chosen, cohort.clients, strict=True)
        ]
        everyone = [*{**known, **dict(zip(cohort.clients, labels, strict=True))}.values()]
        centre.memory["main"] = max(sorted(set(everyone)), key=everyone.count)
        return labels

    def main(self, memory: Mapping[str, Any]) -> int:
        return int(memory.get("main", 0))

    def offer(self, models: Mapping[int, Tensor], work: Work) -> dict[str, Tensor]:
        if self.warm and len(models) < 2:
            return {}
        fresh = [models.get(number) for number in range(self.k)]
        drawn = [one if one is not None else self._drawn(number, models, work) for number, one in enumerate(fresh)]
        return {"candidates": torch.stack(drawn)}

    def _first(self, cohort: Cohort, centre: Centre) -> list[int]:
        from sklearn.cluster import KMeans

        models = torch.stack([cohort.model(row) for row in range(len(cohort.clients))])
        points = places(models).cpu().numpy()
        wanted = min(self.k, len({tuple(point) for point in points.round(12).tolist()}))
        state = key("ifca", centre.work.seed) % 2**32
        found: list[Any] = KMeans(wanted, n_init=self.restarts, random_state=state).fit_predict(points).tolist()
        return [int(label) for label in found]

    def _drawn(self, number: int, models: Mapping[int, Tensor], work: Work) -> Tensor:
        """A first model like the run's own, from other random numbers; in a warm run one that k-means left empty."""
        shared = work.layout.shared
        if self.warm:
            return models[0]
        if number == 0:
            return work.initial[:shared]
        module = copy.deepcopy(work.model)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key("ifca", work.seed, number) >> 1)
            for layer in module.modules():
                if callable(reset := getattr(layer, "reset_parameters", None)):
                    reset()
        return work.layout.flatten(module)[:shared]
