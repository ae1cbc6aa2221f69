"""IFCA, K-Cluster: a given number of clusters; each client joins the one with its lowest loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import Cohort, ModelSpec, ServerContext
from piebald.contracts.component import RecipeComponents
from piebald.core.cohort_matrix import coordinates
from piebald.core.parameters import copied
from piebald.core.randomness import key, torch_seed
from piebald.methods.clustering.base import Clustering
from piebald.methods.training.base import Trainer


class Ifca(Clustering):
    """Every client gets all models and trains the one with the lowest loss (Ghosh et al. 2020, IFCA; K-Cluster in
    DistFL).

    Needs the trainer `lowest_loss`.  The first `warm` server steps are plain FedAvg; then the models that clients came
    to are put into clusters by k-means on their trained parameters, and each cluster's mean begins as one of the K
    models.  With warm = 0 the K models are drawn like first models, as in the paper's experiments; clients may then all
    choose the same one.  The paper's mean is over clients, whatever rows they have (algorithm 1, line 15): the recipe
    `ifca` takes the aggregation `equal_weighted`.

    Attributes:
        k: number of models, at least 1.
        warm: server steps before the first clustering.
        restarts: of k-means from other centres, the best of which is taken.
    """

    on_device: ClassVar[bool] = True
    compares_changes: ClassVar[bool] = False
    from_current_model: ClassVar[bool] = True

    k: int = Field(default=5, ge=1)
    warm: int = Field(default=1, ge=0)
    restarts: int = Field(default=10, ge=1)

    def incompatible_with(self, recipe: RecipeComponents) -> str | None:
        trainer = recipe.training
        if isinstance(trainer, Trainer) and trainer.sends_choice:
            return None
        return f"ifca needs clients that choose: use training = {{ kind = 'lowest_loss', ... }}, not {trainer.kind!r}"

    def assign(self, cohort: Cohort, known: Mapping[int, int], context: ServerContext) -> list[int]:
        if cohort.version + 1 < self.warm:
            return [0] * len(cohort.clients)
        if cohort.version + 1 == self.warm:
            return self._first(cohort, context)
        chosen = [update.metrics.get("cluster", -1) for update in cohort.updates]  # NaN fails the comparison
        labels = [
            # a choice is what a client claims: one that is out of range leaves it where it was
            int(number) if 0 <= number < self.k else known.get(client, 0)
            for number, client in zip(chosen, cohort.clients, strict=True)
        ]
        everyone = [*{**known, **dict(zip(cohort.clients, labels, strict=True))}.values()]
        # sorted, so that of equally large clusters the smallest number wins
        context.state["main"] = max(sorted(set(everyone)), key=everyone.count)
        return labels

    def main_cluster(self, state: Mapping[str, Any]) -> int:
        return int(state.get("main", 0))

    def candidates(self, models: Mapping[int, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
        # before the warm rounds are over there is one model, and nothing to choose from
        if self.warm and len(models) < 2:
            return {}
        count = max(models) + 1 if self.warm else self.k  # k-means forms no more clusters than there are clients
        fresh = [models.get(number) for number in range(count)]
        drawn = [
            model if model is not None else self._drawn(number, models, spec) for number, model in enumerate(fresh)
        ]
        return {"candidates": torch.stack(drawn)}

    def _first(self, cohort: Cohort, context: ServerContext) -> list[int]:
        from sklearn.cluster import KMeans

        models = torch.stack([cohort.model_parameters(row) for row in range(len(cohort.clients))])
        # n models span at most n dimensions: k-means sees the same distances in n numbers
        points = coordinates(models).cpu().numpy()
        # KMeans warns and leaves clusters empty where there are fewer distinct points than clusters
        count = min(self.k, len({tuple(point) for point in points.round(12).tolist()}))
        # seeds of NumPy's legacy generator, which scikit-learn takes, have 32 bits
        state = key("ifca", context.spec.seed) % 2**32
        labels: list[Any] = KMeans(count, n_init=self.restarts, random_state=state).fit_predict(points).tolist()
        return [int(label) for label in labels]

    def _drawn(self, number: int, models: Mapping[int, Tensor], spec: ModelSpec) -> Tensor:
        """A first model like the run's own, from other random numbers; in a warm run one that k-means left empty."""
        shared = spec.layout.shared
        # beside trained models, nobody would choose random numbers
        if self.warm:
            return models[0]
        if number == 0:
            return spec.initial[:shared]
        module = copied(spec.model)
        # keys have 64 bits without a sign, and seeds of torch 63
        with torch_seed(key("ifca", spec.seed, number) >> 1):
            for layer in module.modules():
                if callable(reset := getattr(layer, "reset_parameters", None)):
                    reset()
        return spec.layout.flatten(module)[:shared]
