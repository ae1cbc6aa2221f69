"""The cluster models, and the state that the server keeps for each cluster."""

from __future__ import annotations

import copy
import dataclasses
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from piebald.contracts import Checkpoint, Cohort, Result, ServerContext, StepContext, Task, Update, infinite_reason
from piebald.core.cohort_matrix import divided, weighted_mean, weighted_sum
from piebald.core.parameters import Layout
from piebald.core.randomness import key
from piebald.core.tensor_store import TensorStore
from piebald.engines.sequential import LARGE
from piebald.methods.aggregation.base import Aggregator, aggregated
from piebald.methods.aggregation.linear import Linear
from piebald.methods.clustering.base import assigned
from piebald.methods.recipe import Recipe
from piebald.methods.transforms.base import Transform
from piebald.server.cluster_state import (
    STEPS,
    ClusterModel,
    Counted,
    Keep,
    ModelCache,
    ModelSnapshot,
    norm_of,
    where_it_is,
    with_capped_examples,
    with_capped_shares,
)

MakeContext = Callable[[str, int], ServerContext]  # the context of a component, by axis and cluster


def cohort_of(
    results: Sequence[Result], version: int, trained: int | None = None, held: Sequence[Tensor | None] = ()
) -> Cohort:
    """The updates of these results, which all have one, as a cohort; `trained` and `held` as in `contracts.Cohort`."""
    return Cohort(
        [result.task.client for result in results],
        [result.task.version for result in results],
        [dataclasses.replace(r.update, client=r.task.client) for r in results if r.update is not None],
        None,
        version,
        [result.task.vectors["model"] for result in results],
        trained,
        held=held,
    )


@dataclass(slots=True, eq=False)
class ClusterModels:
    """All clusters of a run.  Clusters appear when a client is first put into them and start from the run's first
    model.

    Attributes:
        layout: where the trained parameters end in the shared numbers; behind them lie running statistics, which
            are averaged, and moved by no server optimizer and no transform.
        max_weight: the largest share of one update in a step.
        cluster_of: the cluster of each client that was put into one; others are in cluster 0.
        kept: the state of components, by axis and cluster: tensors and JSON values.
        last: the last model of each client, where a cached step needs them.
        secret: noise on means is drawn from the operating system and not from the run's seed, which sites know.
        noise_key: it is drawn from this as well, see `ModelSpec`.
        keep: what becomes of models, and of vectors beside them, before they are kept.
    """

    recipe: Recipe
    initial: Tensor
    layout: Layout | None = None
    max_weight: float = 1.0
    clusters: dict[int, ClusterModel] = field(default_factory=dict)
    cluster_of: dict[int, int] = field(default_factory=dict)
    kept: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    secret: bool = False
    noise_key: str = ""
    keep: Keep = where_it_is
    last: TensorStore = field(init=False)
    _in_rounds: bool = field(init=False)
    _trained: int = field(init=False)
    _colluding: list[tuple[int, Transform]] = field(init=False)
    _side_by_side: bool = field(init=False)

    def __post_init__(self) -> None:
        optimizer = self.recipe.server_optimizer
        self.last = TensorStore(optimizer.model_memory or 0, prefix="last")
        transforms = enumerate(self.recipe.transforms)
        self._colluding = [(place, transform) for place, transform in transforms if transform.colludes()]
        self._trained = len(self.initial) if self.layout is None else self.layout.shared_trained
        self._in_rounds = self.recipe.scheduling.round_kind() is not None
        self._side_by_side = self.recipe.needs_matrix or self.max_weight < 1

    @property
    def main(self) -> ClusterModel:
        """The cluster whose model represents the run."""
        return self.cluster(self.main_number)

    @property
    def main_number(self) -> int:
        """The number of the main cluster."""
        return self.recipe.clustering.main_cluster(self.kept.get(("clustering", 0), {}))

    def of(self, client: int) -> ClusterModel:
        """The cluster that a client belongs to; the main one for a newcomer."""
        number = self.recipe.clustering.cluster(client)
        return self.cluster(self.cluster_of.get(client, self.main_number) if number is None else number)

    def missed(self, task: Task, version: int) -> int:
        """Return how many server steps the update of a task has missed by now.

        Where there are several clusters, those of its own; but a round is one step of them all.
        """
        if self.cluster_of and not self._in_rounds:
            return self.of(task.client).missed(task.version)
        return version - task.version

    @property
    def models(self) -> Mapping[int, Tensor]:
        """The model of each cluster."""
        return {number: cluster.model for number, cluster in self.clusters.items()}

    def snapshot(self) -> ModelSnapshot:
        """The models as they are now."""
        buffers = {number: dict(cluster.own_buffers) for number, cluster in self.clusters.items()}
        return ModelSnapshot(dict(self.models), dict(self.cluster_of), self.main_number, buffers)

    def cluster(self, number: int, model: Tensor | None = None) -> ClusterModel:
        """A cluster by number, created at its first use from the run's first model or from `model`."""
        if number not in self.clusters:
            recipe, model = self.recipe, self.initial if model is None else model
            optimizer = recipe.server_optimizer
            cluster = ClusterModel(model, {}, {}, norm_of(model), keep=self.keep)
            cluster.optimizer_state = cluster.kept(optimizer.initial_state(model[: self._trained]), {})
            cluster.server_vectors = cluster.kept(recipe.training.server_vectors(len(model)), {})
            cluster.cache = None if optimizer.model_memory is None else ModelCache(len(model), self.last)
            self.clusters[number] = cluster
        return self.clusters[number]

    def mark(self) -> Callable[[], None]:
        """Return a function that goes back to the models and the state of components as they are now."""
        clusters = {
            number: dataclasses.replace(
                cluster,
                optimizer_state=dict(cluster.optimizer_state),
                server_vectors=dict(cluster.server_vectors),
                steps=list(cluster.steps),
            )
            for number, cluster in self.clusters.items()
        }
        cluster_of, kept = dict(self.cluster_of), {axis: _copied(values) for axis, values in self.kept.items()}

        caches_back = [cluster.cache.mark() for cluster in self.clusters.values() if cluster.cache is not None]

        def go_back() -> None:
            for new in (True, False):
                for cache_back in caches_back:
                    cache_back(new)
            self.clusters, self.cluster_of = clusters, cluster_of
            for axis, values in self.kept.items():  # contexts hold these dictionaries
                values.clear()
                values.update(kept.get(axis, {}))

        return go_back

    def step(self, cohort: Cohort, make_context: MakeContext) -> list[Counted]:
        """Step each cluster's model; returns how each update counted, in the order of the cohort.

        Updates of clients without training rows take no part, unless noise hides who has some.
        """
        recipe = self.recipe
        if not recipe.noises_mean and any(update.is_idle for update in cohort.updates):
            return self._step_without_idle(cohort, make_context)
        if not cohort.updates:
            self._step_alone(cohort.version, make_context("aggregation", 0))
            return []
        context = make_context("clustering", 0)
        parts = any(positions is not None for positions in cohort.held)
        if cohort.updates[0].partial_sum is None and (self._side_by_side or parts):
            changes = [update.vectors["model"] for update in cohort.updates]
            # a single change needs no copy of the model
            matrix = torch.stack(changes) if len(changes) > 1 else changes[0].unsqueeze(0)
            cohort = self._collude(dataclasses.replace(cohort, matrix=matrix), matrix, context.spec.seed)
        labels = assigned(recipe.clustering, cohort, self.cluster_of, context)
        if any(labels) or self.cluster_of:
            self._regroup(cohort.clients, labels)
        counted = self._moved(labels, cohort, make_context)
        if recipe.clustering.clusters_to_join:
            self._join(counted, context)
        trained = {label: self.clusters[label].model for label in sorted(set(labels))}
        for label, model in recipe.clustering.mix(trained, context).items():
            self.cluster(label, model).settle(model)
        return counted

    def _step_without_idle(self, cohort: Cohort, make_context: MakeContext) -> list[Counted]:
        """Step with the updates of clients that have training rows; the others have no share."""
        active = [row for row, update in enumerate(cohort.updates) if not update.is_idle]
        counted = dict(zip(active, self.step(cohort.rows(active), make_context), strict=True))
        numbers = [self.cluster_of.get(client, self.main_number) for client in cohort.clients]
        return [
            counted.get(row, Counted(number, 0.0, 0.0, stale))
            for row, (number, stale) in enumerate(zip(numbers, cohort.staleness, strict=True))
        ]

    def _moved(self, labels: Sequence[int], cohort: Cohort, make_context: MakeContext) -> list[Counted]:
        """Step the clusters that updates belong to."""
        numbers = sorted(set(labels))
        if len(numbers) == 1:
            return self._move(numbers[0], cohort, make_context)
        counted: dict[int, Counted] = {}
        for label in numbers:
            rows = [row for row, number in enumerate(labels) if number == label]
            counted |= zip(rows, self._move(label, cohort.rows(rows), make_context), strict=True)
        return [counted[row] for row in range(len(labels))]

    def _join(self, counted: Sequence[Counted], context: ServerContext) -> None:
        """Let all clusters go on from the mean of their models, where that is due."""
        weights = dict[int, float]()
        for count in counted:  # without a weight of its own, each counts once
            weights[count.cluster] = weights.get(count.cluster, 0.0) + (1.0 if count.weight is None else count.weight)
        clustering = self.recipe.clustering
        shares = clustering.join(weights, context) or {}
        if not sum(shares.values()):
            return
        models = torch.stack([self.cluster(number).model for number in shares])
        model = (weighted_sum(models, list(shares.values())) / sum(shares.values())).float()
        for number in range(clustering.clusters_to_join):
            self.cluster(number).settle(model)

    def _step_alone(self, version: int, context: ServerContext) -> None:
        """Step where no update counts: a model that stays as it is would tell what noise on the mean hides."""
        if self.recipe.expected_updates(context.known) is not None:
            self._apply(0, self.cluster(0), torch.zeros_like(self.cluster(0).model), (), version, context)

    def _collude(self, cohort: Cohort, matrix: Tensor, seed: int) -> Cohort:
        """Let colluding attackers replace their updates."""
        for place, attack in self._colluding:
            matrix = attack.collude(matrix, cohort.clients, key("collude", place, seed, cohort.version))
        # nobody colluded, and honest updates are not copied
        if matrix is cohort.matrix:
            return cohort
        updates = [
            dataclasses.replace(update, vectors={**update.vectors, "model": row}, norm=norm_of(row[: cohort.trained]))
            for update, row in zip(cohort.updates, matrix, strict=True)
        ]
        return dataclasses.replace(cohort, updates=updates, matrix=matrix)

    def _regroup(self, clients: Sequence[int], labels: Sequence[int]) -> None:
        for client, label in zip(clients, labels, strict=True):
            former = self.clusters.get(self.cluster_of.get(client, 0))
            if former is not None and former.cache is not None and label != self.cluster_of.get(client, 0):
                model = torch.empty_like(former.model)
                former.cache.drop(client, model)
                # without a weight left there is no mean of last models, and nothing was written to `model`
                former.settle(model if former.cache.whole > 0 else former.model)
            self.cluster_of[client] = label

    def _move(self, label: int, members: Cohort, make_context: MakeContext) -> list[Counted]:
        # changes count from the models that were sent, so a new cluster begins at their mean
        fresh = None if label in self.clusters else torch.stack(list(members.sent)).mean(0)
        cluster, aggregator = self.cluster(label, fresh), self.recipe.aggregation
        context = make_context("aggregation", label)
        if self.cluster_of and not self._in_rounds:
            members = dataclasses.replace(members, missed=[cluster.missed(sent) for sent in members.versions])
        members = with_capped_examples(aggregator.prepare(members, context), self.max_weight)
        weights = _weights(aggregator, members)
        if cluster.cache is not None:
            shares = self._swap(cluster, cluster.cache, members, weights)
        else:
            shares = self._average(label, cluster, members, context)
        cluster.committed += sum(update.steps for update in members.updates)
        cluster.note_step(members.version)
        trainer = self.recipe.training
        if cluster.server_vectors:
            means = _plain_means(
                members.updates, [name for name in cluster.server_vectors if name in trainer.uploads()]
            )
            arrived = StepContext(len(members.updates), context.known, members.version, shares)
            vectors = trainer.update_server_vectors(cluster.server_vectors, means, arrived)
            cluster.server_vectors = cluster.kept(vectors, cluster.server_vectors)
        return [Counted(label, *numbers) for numbers in zip(shares, weights, members.staleness, strict=True)]

    def _average(self, label: int, cluster: ClusterModel, members: Cohort, context: ServerContext) -> list[float]:
        recipe, statistics = self.recipe, slice(self._trained, None)
        from_current = recipe.server_optimizer.from_current_model or recipe.clustering.from_current_model
        # a stale change counts from the model it will be added to, not from the one it started at; statistics always
        if members.matrix is not None and any(start is not cluster.model for start in members.sent):
            away = torch.stack([start if from_current else start[statistics] for start in members.sent])
            away = away - cluster.model[slice(None) if from_current else statistics]
            if away.shape[1]:
                matrix = members.matrix.clone()
                matrix[:, -away.shape[1] :] += away
                members = dataclasses.replace(members, matrix=matrix)
        average, shares = aggregated(recipe.aggregation, members, context)
        pool = members.updates[0].partial_sum
        if pool is not None and len(cluster.model) > LARGE:
            pool.vectors.pop("model", None)  # it would lie beside the new model, and is twice as large
        average, shares = with_capped_shares(average, shares, members, recipe.aggregation, self.max_weight)
        whole = sum(shares)
        if not math.isfinite(whole) or infinite_reason({"average": average}):
            raise ArithmeticError("an average, or shares of it, that are no finite numbers")
        if members.matrix is None and whole > 0:
            average[statistics] /= whole
            if members.updates[0].partial_sum is None:  # a sum is of changes from the model as it is
                _rebase(average, cluster.model, [share / whole for share in shares], members.sent, statistics)
                if from_current:
                    _rebase(average, cluster.model, shares, members.sent, slice(self._trained))
        self._apply(label, cluster, average, shares, members.version, context)
        return shares

    def _apply(
        self,
        label: int,
        cluster: ClusterModel,
        average: Tensor,
        shares: Sequence[float],
        version: int,
        context: ServerContext,
    ) -> None:
        """Move a cluster's model by an average, behind the transforms."""
        recipe, expected = self.recipe, self.recipe.expected_updates(context.known)
        step = StepContext(
            len(shares), context.known, version, shares, expected=expected, state=cluster.optimizer_state
        )
        # two-ended: what was done last on the client is undone or answered first here
        for index, transform in reversed(list(enumerate(recipe.transforms))):
            words = (index, context.spec.seed, label, version, *((self.noise_key,) if self.noise_key else ()))
            rng_key = secrets.randbits(256) if self.secret else key("receive", *words)
            count = None if transform.takes_statistics else self._trained
            changed = transform.on_server(average[:count], dataclasses.replace(step, rng_key=rng_key, state={}))
            average = changed if len(changed) == len(average) else torch.cat([changed, average[count:]])
        before, count = cluster.model, self._trained
        model, state = recipe.server_optimizer.step(before[:count], average[:count], step)
        cluster.optimizer_state = cluster.kept(state, cluster.optimizer_state)
        if count < len(before):
            weight = recipe.server_optimizer.statistics_weight(step)
            model = torch.cat([model, before[count:] + weight * average[count:]])
        cluster.settle(model if self.layout is None else self.layout.clamp_variances(model))

    def _swap(
        self, cluster: ClusterModel, cache: ModelCache, members: Cohort, weights: Sequence[float | None]
    ) -> list[float]:
        """Replace the last model of each client by its new one."""
        model, end = torch.empty_like(cluster.model), len(members.clients) - 1
        for row, (client, weight) in enumerate(zip(members.clients, weights, strict=True)):
            assert weight is not None  # a recipe with another aggregator was refused
            # the global model is written in the last pass alone
            cache.swap(client, weight, members.model(row), model if row == end else None)
        if cache.whole <= 0:
            return [0.0] * len(members.clients)
        cluster.settle(model)
        return [cache.weights[client] / cache.whole for client in members.clients]

    # -- state

    def state(self) -> Checkpoint:
        """The whole state, for a checkpoint."""
        # of clients' last models only those that changed since the last checkpoint; all else is complete
        tensors = self.last.changed()
        numbers: dict[int, dict[str, Any]] = {}
        for number, cluster in self.clusters.items():
            here = f"cluster/{number}"
            tensors[f"{here}/model"] = cluster.model
            tensors |= {f"{here}/optimizer_state/{name}": tensor for name, tensor in cluster.optimizer_state.items()}
            tensors |= {f"{here}/server_vectors/{name}": tensor for name, tensor in cluster.server_vectors.items()}
            tensors |= {f"{here}/own_buffers/{name}": tensor for name, tensor in cluster.own_buffers.items()}
            numbers[number] = {"committed": cluster.committed}
            if self.cluster_of:
                # with one cluster they are all versions, which `restore` fills in
                numbers[number]["steps"] = cluster.steps
            if cluster.cache is not None:
                tensors[f"{here}/cache/sums"], numbers[number]["cache"] = cluster.cache.state()
        component_states = []
        for (axis, number), values in self.kept.items():
            plain = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
            tensors |= {f"kept/{axis}/{number}/{n}": value for n, value in values.items() if isinstance(value, Tensor)}
            component_states.append([axis, number, plain])
        return Checkpoint(
            tensors,
            {
                "main": self.main_number,
                "cluster_of": sorted(self.cluster_of.items()),
                "clusters": numbers,
                "kept": component_states,
            },
        )

    def begin_with(self, taken: Checkpoint) -> None:
        """Begin with what a finished run left (`cluster_state.fitting_models`)."""
        self.restore(taken, 0)
        self.last.adopt(taken.tensors)
        self.initial = self.main.model  # of clusters that appear later

    def restore(self, checkpoint: Checkpoint, version: int) -> None:
        """Restore what `state` returned after so many server steps."""
        values, tensors = checkpoint.values, checkpoint.tensors
        self.cluster_of = {int(client): int(cluster) for client, cluster in values["cluster_of"]}
        self.kept = {(axis, int(number)): dict(plain) for axis, number, plain in values["kept"]}
        self.last.restore(tensors)
        for name, tensor in tensors.items():
            kind, _, rest = name.partition("/")
            if kind == "cluster":
                number, part, *names = rest.split("/")
                cluster = self.cluster(int(number), tensors[f"cluster/{number}/model"])
                if part == "model":
                    cluster.settle(tensor)
                elif part != "cache":
                    getattr(cluster, part)[names[0]] = cluster.keep(tensor)
            elif kind == "kept":
                axis, number, own_name = rest.split("/", 2)
                self.kept[axis, int(number)][own_name] = tensor
        for number, numbers in values["clusters"].items():
            cluster = self.cluster(int(number))
            cluster.committed = int(numbers["committed"])
            cluster.steps = list(numbers.get("steps", range(max(0, version - STEPS), version)))
            if cluster.cache is not None:
                cluster.cache.restore(tensors[f"cluster/{number}/cache/sums"], numbers["cache"])


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a component's state; its tensors, which components replace and do not write to, are shared."""
    return {name: value if isinstance(value, Tensor) else copy.deepcopy(value) for name, value in state.items()}


def _weights(aggregator: Aggregator, cohort: Cohort) -> Sequence[float | None]:
    pool = cohort.updates[0].partial_sum
    if not isinstance(aggregator, Linear) or (pool is not None and pool.masked):
        return [None] * len(cohort.updates)
    weights = [aggregator.weight(u, s) for u, s in zip(cohort.updates, cohort.staleness, strict=True)]
    if not all(map(math.isfinite, weights)):
        raise ArithmeticError("weights that are no finite numbers")
    return weights


def _rebase(average: Tensor, model: Tensor, shares: Sequence[float], sent: Sequence[Tensor], part: slice) -> None:
    """Make a part of the average change [s] of changes from the models that were sent one from `model`, in place."""
    counted: dict[int, tuple[Tensor, float]] = {}
    for start, share in zip(sent, shares, strict=True):
        if start is not model:  # most often all were sent this one, or few others
            counted[id(start)] = (start, counted.get(id(start), (start, 0.0))[1] + share)
    for start, share in counted.values():
        average[part] += share * (start[part] - model[part])


def _plain_means(updates: Sequence[Update], names: Sequence[str]) -> dict[str, Tensor]:
    pool = updates[0].partial_sum
    if pool is not None:
        return {name: divided(pool.vectors[name], len(updates)) for name in names}
    ones, means = [1.0] * len(updates), dict[str, Tensor]()
    for name in names:
        mean = weighted_mean([update.vectors for update in updates], name, ones, len(updates))
        means[name] = mean.view(updates[0].vectors[name].shape)
    return means
