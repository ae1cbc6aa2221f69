"""The community models, one for each group, and what the centre keeps beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from piebald.contracts import Checkpoint, Update
from piebald.parts import Cohort, Recipe
from piebald.randomness import key


@dataclass(slots=True, eq=False)
class Community:
    """One group's state: the model [s], the step's memory, and what is sent besides the model."""

    model: Tensor
    step: dict[str, Tensor]
    common: dict[str, Tensor]


@dataclass(slots=True, eq=False)
class Communities:
    """All groups of a run.  Groups appear when a client is first put into them and start from the run's first model."""

    recipe: Recipe
    initial: Tensor
    seed: int
    groups: dict[int, Community] = field(default_factory=dict)
    group_of: dict[int, int] = field(default_factory=dict)

    def of(self, client: int) -> Community:
        """The community that a client belongs to; group 0 for a newcomer."""
        return self.group(self.group_of.get(client, 0))

    def group(self, number: int) -> Community:
        """A group by number, made when first asked for."""
        if number not in self.groups:
            recipe, model = self.recipe, self.initial
            self.groups[number] = Community(model, recipe.step.start(model), recipe.learn.common(len(model)))
        return self.groups[number]

    def commit(self, cohort: Cohort, known: int) -> tuple[list[int], list[float]]:
        """Average inside groups and move their models.

        Args:
            cohort: the updates of this commit, in client order.
            known: clients in the federation.

        Returns:
            The group and the weight (they sum to one in a group) of each update.
        """
        labels = self.recipe.group.assign(cohort, self.group_of)
        if any(labels) or self.group_of:
            self.group_of.update(zip(cohort.clients, labels, strict=True))
        weights = [0.0] * len(labels)
        for label in sorted(set(labels)):
            rows = [row for row, own in enumerate(labels) if own == label]
            for row, weight in zip(rows, self._move(label, _members(cohort, rows), known), strict=True):
                weights[row] = weight
        return labels, weights

    def _move(self, label: int, members: Cohort, known: int) -> list[float]:
        community = self.group(label)
        average, weights = self.recipe.weigh.combine(members)
        for place, stage in reversed(list(enumerate(self.recipe.update))):
            words = key("receive", place, self.seed, label, members.version)
            average = stage.receive(average, len(members.updates), weights, words)
        community.model, community.step = self.recipe.step.move(community.model, average, community.step)
        if community.common:
            means = _plain_means(members.updates, community.common)
            community.common = self.recipe.learn.fold(community.common, means, len(members.updates), known)
        return weights

    def state(self) -> Checkpoint:
        """Everything, for a checkpoint."""
        tensors = {}
        for number, community in self.groups.items():
            tensors[f"group/{number}/model"] = community.model
            tensors |= {f"group/{number}/step/{name}": tensor for name, tensor in community.step.items()}
            tensors |= {f"group/{number}/common/{name}": tensor for name, tensor in community.common.items()}
        return Checkpoint(tensors, {"group_of": sorted(self.group_of.items())})

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take up what `state` gave."""
        self.group_of = {int(client): int(group) for client, group in checkpoint.values["group_of"]}
        for name, tensor in checkpoint.tensors.items():
            kind, _, rest = name.partition("/")
            if kind != "group":
                continue
            number, what, *own = rest.split("/")
            community = self.group(int(number))
            if what == "model":
                community.model = tensor
            else:
                getattr(community, what)[own[0]] = tensor


def _members(cohort: Cohort, rows: Sequence[int]) -> Cohort:
    """The part of a cohort that is in one group."""
    if len(rows) == len(cohort.clients):
        return cohort
    matrix = None if cohort.matrix is None else cohort.matrix[list(rows)]
    pick = (
        [cohort.clients[row] for row in rows],
        [cohort.versions[row] for row in rows],
        [cohort.updates[row] for row in rows],
    )
    return Cohort(*pick, matrix, cohort.version)


def _plain_means(updates: Sequence[Update], names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    pool = updates[0].pool
    if pool is not None:
        return {name: pool.parts[name] / len(updates) for name in names}
    return {name: torch.stack([update.parts[name] for update in updates]).mean(0) for name in names}
