"""The community models, one for each group, and what the centre keeps beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from piebald.aggregation.base import Weigh
from piebald.contracts import Centre, Checkpoint, Cohort, Update
from piebald.randomness import key
from piebald.recipe import Recipe
from piebald.server.model_cache import Cache
from piebald.server_optimizer.cached_average import CachedSwap
from piebald.tensor_store import Memory

Lend = Callable[[str, int], Centre]  # what a part on an axis is lent for a group


@dataclass(slots=True, eq=False)
class Community:
    """One group's state.

    Attributes:
        model: [s], never written to: whoever it was sent to still holds it.
        step: the step's memory.
        common: what is sent besides the model.
        norm: Euclidean length of the model.
        committed: optimiser steps behind its commits so far.
        cache: where the step keeps the sums over all learners' last models, else None.
    """

    model: Tensor
    step: dict[str, Tensor]
    common: dict[str, Tensor]
    norm: float
    committed: int = 0
    cache: Cache | None = None


class Counted(NamedTuple):  # made for every update, and a tuple is made four times as fast as a frozen dataclass
    """How an update counted: its group, its share of the average, and its weight before shares were made of them."""

    group: int
    share: float
    weight: float | None


@dataclass(slots=True, eq=False)
class Communities:
    """All groups of a run.  Groups appear when a client is first put into them and start from the run's first model.

    Attributes:
        variances: shared slices of running variances (batch norm), which noise or an adaptive step must not make
            negative.
        group_of: the group of each client that was put into one; others are in group 0.
        kept: what parts keep from commit to commit, by axis and group: tensors and JSON values.
        last: the last model of each learner, where a cached step needs them.
    """

    recipe: Recipe
    initial: Tensor
    variances: Sequence[slice] = ()
    groups: dict[int, Community] = field(default_factory=dict)
    group_of: dict[int, int] = field(default_factory=dict)
    kept: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    last: Memory = field(init=False)

    def __post_init__(self) -> None:
        step = self.recipe.step
        self.last = Memory(step.memory if isinstance(step, CachedSwap) else 0, prefix="last")

    @property
    def main(self) -> Community:
        """The community whose model stands for the run."""
        return self.group(self.chief)

    @property
    def chief(self) -> int:
        """The number of the main community."""
        return self.recipe.group.main(self.kept.get(("group", 0), {}))

    def of(self, client: int) -> Community:
        """The community that a client belongs to; the main one for a newcomer."""
        return self.group(self.group_of[client]) if client in self.group_of else self.main

    @property
    def models(self) -> Mapping[int, Tensor]:
        """The model of each group that there is."""
        return {number: community.model for number, community in self.groups.items()}

    def group(self, number: int, model: Tensor | None = None) -> Community:
        """A group by number, made when first asked for, from the run's first model or from `model`."""
        if number not in self.groups:
            recipe, model = self.recipe, self.initial if model is None else model
            made = Community(model, recipe.step.start(model), recipe.learn.common(len(model)), _norm(model))
            made.cache = Cache(len(model), self.last) if recipe.step.cached else None
            self.groups[number] = made
        return self.groups[number]

    def commit(self, cohort: Cohort, lend: Lend) -> list[Counted]:
        """Average inside groups and move their models; how each update counted, in the order of the cohort."""
        recipe = self.recipe
        centre = lend("group", 0)
        if cohort.updates[0].pool is None and (recipe.group.needs_each or not recipe.step.cached):
            changes = [update.parts["model"] for update in cohort.updates]
            matrix = torch.stack(changes) if len(changes) > 1 else changes[0].unsqueeze(0)
            cohort = self._collude(dataclasses.replace(cohort, matrix=matrix), matrix, centre.work.seed)
        labels = recipe.group.assign(cohort, self.group_of, centre)
        if any(labels) or self.group_of:
            self._regroup(cohort.clients, labels)
        found = sorted(set(labels))
        if len(found) == 1:
            return self._move(found[0], cohort, lend)
        counted: dict[int, Counted] = {}
        for label in found:
            rows = [row for row, own in enumerate(labels) if own == label]
            counted |= zip(rows, self._move(label, cohort.rows(rows), lend), strict=True)
        return [counted[row] for row in range(len(labels))]

    def _collude(self, cohort: Cohort, matrix: Tensor, seed: int) -> Cohort:
        """Let attackers who have agreed replace their updates."""
        for place, stage in enumerate(self.recipe.update):
            if stage.colludes:
                matrix = stage.collude(matrix, cohort.clients, key("collude", place, seed, cohort.version))
        if matrix is cohort.matrix:
            return cohort
        updates = [
            dataclasses.replace(update, parts={**update.parts, "model": row}, norm=_norm(row))
            for update, row in zip(cohort.updates, matrix, strict=True)
        ]
        return dataclasses.replace(cohort, updates=updates, matrix=matrix)

    def _regroup(self, clients: Sequence[int], labels: Sequence[int]) -> None:
        for client, label in zip(clients, labels, strict=True):
            left = self.groups.get(self.group_of.get(client, 0))
            if left is not None and left.cache is not None and label != self.group_of.get(client, 0):
                model = torch.empty_like(left.model)
                left.cache.drop(client, model)
                _settle(left, model if left.cache.whole > 0 else left.model)
            self.group_of[client] = label

    def _move(self, label: int, members: Cohort, lend: Lend) -> list[Counted]:
        fresh = None if label in self.groups else torch.stack(list(members.sent)).mean(0)
        community, weigh = self.group(label, fresh), self.recipe.weigh
        centre = lend("weigh", label)
        members = weigh.prepare(members, centre)
        weights = _weights(weigh, members)
        if community.cache is not None:
            shares = self._swap(community, community.cache, members, weights)
        else:
            shares = self._average(label, community, members, centre)
        community.committed += sum(update.steps for update in members.updates)
        if community.common:
            means = _plain_means(members.updates, community.common)
            community.common = self.recipe.learn.fold(community.common, means, len(members.updates), centre.known)
        return [Counted(label, share, weight) for share, weight in zip(shares, weights, strict=True)]

    def _average(self, label: int, community: Community, members: Cohort, centre: Centre) -> list[float]:
        recipe = self.recipe
        if (recipe.step.from_now or recipe.group.from_now) and members.matrix is not None:
            away = torch.stack(list(members.sent)) - community.model
            members = dataclasses.replace(members, matrix=members.matrix + away)
        pool = members.updates[0].pool
        if pool is not None and pool.sealed:  # who counted how much is not known: shares are their mean
            average, shares = pool.parts["model"] / pool.weight, [1 / len(members.updates)] * len(members.updates)
        else:
            average, shares = recipe.weigh.combine(members, centre)
        for place, stage in reversed(list(enumerate(recipe.update))):
            words = key("receive", place, centre.work.seed, label, members.version)
            average = stage.receive(average, len(members.updates), shares, words)
        model, community.step = recipe.step.move(community.model, average, community.step)
        for variance in self.variances:
            model[variance].clamp_(min=0.0)
        _settle(community, model)
        return shares

    def _swap(
        self, community: Community, cache: Cache, members: Cohort, weights: Sequence[float | None]
    ) -> list[float]:
        """Each update takes the place of its learner's last one."""
        model, end = torch.empty_like(community.model), len(members.clients) - 1
        for row, (client, weight) in enumerate(zip(members.clients, weights, strict=True)):
            assert weight is not None  # a recipe with another weighing was refused
            cache.swap(client, weight, members.model(row), model if row == end else None)
        if cache.whole <= 0:
            return [0.0] * len(members.clients)
        _settle(community, model)
        return [cache.weights[client] / cache.whole for client in members.clients]

    # -- state

    def state(self) -> Checkpoint:
        """Everything, for a checkpoint."""
        tensors = self.last.changed()
        numbers: dict[int, dict[str, Any]] = {}
        for number, community in self.groups.items():
            here = f"group/{number}"
            tensors[f"{here}/model"] = community.model
            tensors |= {f"{here}/step/{name}": tensor for name, tensor in community.step.items()}
            tensors |= {f"{here}/common/{name}": tensor for name, tensor in community.common.items()}
            numbers[number] = {"committed": community.committed}
            if community.cache is not None:
                tensors[f"{here}/cache/sums"], numbers[number]["cache"] = community.cache.state()
        kept = []
        for (axis, number), values in self.kept.items():
            plain = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
            tensors |= {f"kept/{axis}/{number}/{n}": value for n, value in values.items() if isinstance(value, Tensor)}
            kept.append([axis, number, plain])
        return Checkpoint(
            tensors, {"main": self.chief, "group_of": sorted(self.group_of.items()), "groups": numbers, "kept": kept}
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take up what `state` gave."""
        values, tensors = checkpoint.values, checkpoint.tensors
        self.group_of = {int(client): int(group) for client, group in values["group_of"]}
        self.kept = {(axis, int(number)): dict(plain) for axis, number, plain in values["kept"]}
        self.last.restore(tensors)
        for name, tensor in tensors.items():
            kind, _, rest = name.partition("/")
            if kind == "group":
                number, what, *own = rest.split("/")
                community = self.group(int(number), tensors[f"group/{number}/model"])
                if what == "model":
                    _settle(community, tensor)
                elif what != "cache":
                    getattr(community, what)[own[0]] = tensor
            elif kind == "kept":
                axis, number, own_name = rest.split("/", 2)
                self.kept[axis, int(number)][own_name] = tensor
        for number, numbers in values["groups"].items():
            community = self.group(int(number))
            community.committed = int(numbers["committed"])
            if community.cache is not None:
                community.cache.restore(tensors[f"group/{number}/cache/sums"], numbers["cache"])


def _weights(weigh: Weigh, cohort: Cohort) -> Sequence[float | None]:
    pool = cohort.updates[0].pool
    if not weigh.singly() or (pool is not None and pool.sealed):
        return [None] * len(cohort.updates)
    return [weigh.weight(u, s) for u, s in zip(cohort.updates, cohort.staleness, strict=True)]


def _settle(community: Community, model: Tensor) -> None:
    community.model, community.norm = model, _norm(model)


def _norm(model: Tensor) -> float:
    return float(torch.linalg.vector_norm(model).item())  # twice as fast as float alone


def _plain_means(updates: Sequence[Update], names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    pool = updates[0].pool
    if pool is not None:
        return {name: pool.parts[name] / len(updates) for name in names}
    return {name: torch.stack([update.parts[name] for update in updates]).mean(0) for name in names}
