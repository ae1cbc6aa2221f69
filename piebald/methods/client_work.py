"""Everything a client needs to take part in a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from piebald import contracts
from piebald.contracts.data import ModelSpec
from piebald.core.client_models import ClientModels
from piebald.methods.training.base import Trainer
from piebald.methods.transforms.base import MaskingTransform, Transform
from piebald.methods.transforms.bit_fields import Whole
from piebald.methods.transforms.compression import Compressor, SendsSameNumbers, WireContext

_NO_ROWS: Mapping[contracts.Split, int] = {"train": 0, "validation": 0, "test": 0}


@dataclass(frozen=True, slots=True)
class ClientWork(ModelSpec):
    """The model of a run with the components that work at the clients.

    A site rebuilds it from what it has installed; it is never pickled.

    Attributes:
        trainer: how clients train.
        transforms: what is done to their updates, in this order.
        own_query: a query that a client answers about the model it has just trained, with its update, so that this
            model need not be sent back to it; or None.
        choice: how each client chooses its model when the run has ended, or None where it takes what it is given.
        own_models: the models of clients that have another one than the run's, or None where nobody has.
        questions: what clients are asked besides training, as far as it is known before (`Query.stated`).
        trains: whether clients train at all.
        own_trainers: the trainers of clients that have settings of their own, by client number.
        weighted: whether rows may have weights, False where the run's settings say that none have.
    """

    trainer: Trainer
    transforms: tuple[Transform, ...]
    own_query: contracts.Query | None = None
    choice: contracts.OwnChoice | None = None
    own_models: ClientModels | None = None
    questions: tuple[Mapping[str, Any], ...] = ()
    trains: bool = True
    own_trainers: Mapping[int, Trainer] = field(default_factory=dict)
    weighted: bool = True

    def trainer_of(self, client: int) -> Trainer:
        """Return how a client trains."""
        return self.own_trainers.get(client, self.trainer)

    def number(self, client: int) -> int | None:
        """The number of a client's model among those that clients have, None for the run's."""
        return None if self.own_models is None else self.own_models.number(client)

    def number_of(self, client: int, version: int, query: contracts.Query | None) -> int | None:
        """The number of the model that a task is about: to train at this version, or to answer a query."""
        if self.own_models is None:
            return None
        models = self.own_models
        return models.trained(client, version) if query is None else query.model_number(models.number(client))

    def numbered(self, number: int | None) -> Self:
        """The work with the model of this number."""
        if number is None or self.own_models is None:
            return self
        client_model = self.own_models.models[number]
        return replace(
            self,
            model=client_model.model,
            layout=client_model.layout,
            initial=client_model.initial,
            outputs=client_model.outputs,
            own_models=None,
        )

    def of(self, client: int) -> Self:
        """The work of one client: this one, with the client's own model where it has one."""
        return self if self.own_models is None else self.numbered(self.number(client))

    def of_task(self, task: contracts.Task) -> Self:
        """The work of one task, with the model that it is about."""
        return self.numbered(self.number_of(task.client, task.version, task.query))

    def different(self) -> list[Self]:
        """The work with each of the models that clients have."""
        owns = self.own_models
        if owns is None:
            return [self]
        return [self, *(self.numbered(number) for number in range(len(owns.models)))]

    @property
    def largest(self) -> int:
        """Numbers of the largest model of all clients."""
        return max(work.layout.size for work in self.different())

    def held(self, number: int | None) -> Tensor | None:
        """Return which of the shared numbers the model of this number has, see `ClientModel.held`."""
        return None if number is None or self.own_models is None else self.own_models.models[number].held

    def lacked(self, number: int | None) -> frozenset[str]:
        """Return the names of the inputs that the clients of the model of this number lack."""
        return frozenset() if number is None or self.own_models is None else self.own_models.models[number].lacks

    def held_of(self, task: contracts.Task) -> Tensor | None:
        """Return which of the shared numbers the model of a task has."""
        return None if self.own_models is None else self.held(self.number_of(task.client, task.version, task.query))

    def counted_of(self, task: contracts.Task) -> Tensor | None:
        """Return for which of the shared numbers the update of a task counts, None for all."""
        held, silent = self.held_of(task), self._silent_of(task)
        if silent is None:
            return held
        # in places of the whole model first: `silent` counts in these, not in those of the client's part
        counts = torch.ones(self.layout.shared, dtype=torch.bool)
        counts[silent] = False
        places = counts.nonzero().flatten()
        return places if held is None else held[counts[held]]

    def _silent_of(self, task: contracts.Task) -> Tensor | None:
        number = self.number_of(task.client, task.version, task.query)
        return None if number is None or self.own_models is None else self.own_models.models[number].silent

    def with_buffers(self, number: int, model: Tensor, buffers: Tensor) -> Tensor:
        """A model [s] with other buffers in the places where the model of this number has its own shared ones."""
        held, completed = self.held(number), model.clone()
        places = slice(self.numbered(number).layout.shared_trained, None)
        completed[places if held is None else held[places]] = buffers
        return completed

    def cut(self, task: contracts.Task) -> contracts.Task:
        """A task as it travels: with those numbers of the model that the one it is about has."""
        held = self.held_of(task)
        if held is None or "model" not in task.vectors:
            return task
        return replace(task, vectors={**task.vectors, "model": task.vectors["model"][held]})

    def expanded(self, update: contracts.Update, task: contracts.Task) -> contracts.Update:
        """An update that has come, with no change of the numbers that the task's model has not, or has no say for."""
        held, silent = self.held_of(task), self._silent_of(task)
        if (held is None and silent is None) or "model" not in update.vectors:
            return update
        # 0 is no change, so numbers that a client does not have leave the mean's sum as it is
        change = update.vectors["model"].new_zeros(self.layout.shared)
        change[slice(None) if held is None else held] = update.vectors["model"]
        if silent is not None:
            change[silent] = 0.0
        return replace(update, vectors={**update.vectors, "model": change})

    def uploads(self) -> tuple[str, ...]:
        """Names of the vectors that updates carry besides the model."""
        vectors = self.own_query.answer_form(self, _NO_ROWS).vectors if self.own_query is not None else None
        return (*self.trainer.uploads(), *(vectors or ()))

    @property
    def masking(self) -> MaskingTransform | None:
        """The transform that masks updates, which is the last one, or None."""
        last = self.transforms[-1] if self.transforms else None
        return last if isinstance(last, MaskingTransform) else None

    def is_masked(self, query: contracts.Query | None) -> bool:
        """Return whether an update, or the answer to a query, leaves under masks."""
        hidden = None if query is None else query.hiding()
        return self.masking is not None and (query is None or (hidden is not None and hidden.masked))

    @property
    def digest(self) -> str:
        """The digest of what a client does in training, which must be the same for all members of a masked sum."""
        # through JSON, as a site reads them
        tables = [json.dumps(part.table(), sort_keys=True, default=str) for part in (self.trainer, *self.transforms)]
        layout = [[slot.name, list(slot.shape)] for slot in self.layout.slots]
        what = [tables, layout, self.layout.shared, list(self.outputs), self.objective.name]
        return contracts.shown_digest(what, {}).hex()

    def counted(self, rows: contracts.Rows) -> float:
        """Return how much training on some rows counts, as `Update.counts` says it."""
        objective = self.objective
        if not len(rows) or self.row_privacy is not None:
            return len(rows)
        if objective.domain is not None:
            rows = replace(rows, y=objective.domain.prepared(rows.y, self.outputs))
        weight = objective.weight(rows.targets) if self.tells_weight else None
        if weight is None:
            return len(rows) if objective.domain is None else int(objective.domain.known_rows(rows.y).sum())
        return weight

    def shown_numbers(self, clients: Sequence[int], query: contracts.Query | None = None) -> Sequence[int]:
        """The numbers of clients as trainers, transforms and queries see them, under masks one for all."""
        return [0] * len(clients) if self.is_masked(query) else clients

    @property
    def compressor(self) -> Compressor | None:
        """The transform that packs updates, or None."""
        return next((transform for transform in self.transforms if isinstance(transform, Compressor)), None)

    def wire_context(self, client: int, rng_version: int | str) -> WireContext:
        """Return what both ends know of the update of a client's task."""
        return WireContext(self.layout, self.seed, client, rng_version)

    def decompress(self, packed: Tensor, task: contracts.Task) -> Tensor:
        """The change [s] that a packed update of a task stands for.

        Raises:
            ValueError: it stands for none.
        """
        assert self.compressor is not None
        return self.compressor.decompress(packed, self.of_task(task).wire_context(task.client, task.rng_version))

    def masked_places(self, client: int, version: int) -> Whole | None:
        """Return which of the shared numbers of an update are masked and sent, None for all."""
        compressor = self.compressor if self.masking is not None else None
        if not isinstance(compressor, SendsSameNumbers):
            return None
        return compressor.sent_places(self.wire_context(client, version))

    @property
    def row_privacy(self) -> contracts.RowPrivacy | None:
        """The way in which training hides single rows, or None."""
        return self.trainer.row_privacy()

    @property
    def tells_weight(self) -> bool:
        """Whether an update says how much its rows count: noise at the client covers no number beside it."""
        return self.row_privacy is None and not any(transform.noises_update() for transform in self.transforms)

    @property
    def protection(self) -> str | None:
        """The kind of the component that hides rows or updates, or None."""
        return next((component.kind for component in (self.trainer, *self.transforms) if component.protects), None)

    @property
    def noise(self) -> str | None:
        """The kind of the component that hides rows or updates by noise, which a budget counts, or None."""
        hiding = (self.trainer, *self.transforms)
        return next(
            (
                component.kind
                for component in hiding
                if component.protects and not isinstance(component, MaskingTransform)
            ),
            None,
        )

    @property
    def needs_protected_state(self) -> bool:
        """True if a client's state must come from work that is protected as this one is, for what leaves to be so.

        Rows are hidden in what is computed beside private layers only if they are hidden in those layers; and a
        compressor sends now what it did not send before.  Members of a masked sum must begin alike: private layers that
        a server has spoiled in an earlier run, at all members but one, would leave that one alone in the sum.
        """
        if self.masking is not None:
            return True
        noised = any(transform.protects for transform in self.transforms)
        return self.row_privacy is not None or (self.compressor is not None and noised)

    def initial_state(self) -> dict[str, Tensor]:
        """A client's state before its first task."""
        memory = self.compressor.initial_state(self) if self.compressor is not None else {}
        return self.trainer.initial_state(self.initial, self.layout.shared) | memory

    def server_vectors(self) -> dict[str, Tensor]:
        """Return what the server sends with a training task besides the model, before the first step."""
        return self.trainer.server_vectors(self.layout.shared)

    def result_form(self, task: contracts.Task, rows: Mapping[contracts.Split, int]) -> contracts.ResultForm:
        """Return what the result of a task may hold, from a client that has so many rows of each split."""
        # lengths are those of the model that the task is about, so its work answers
        if (task_work := self.of_task(task)) is not self:
            return task_work.result_form(task, rows)
        if task.query is not None:
            return replace(task.query.answer_form(self, rows), own_metrics=self.objective.own_metrics,
                           weighted=self.weighted)  # fmt: skip
        if self.masking is not None:  # no number of a single update is sent
            return contracts.ResultForm(None, (), 0, 0)
        trainer, count = self.trainer_of(task.client), rows["train"]
        declared = trainer.upload_shapes(self)
        shapes: dict[str, tuple[int, ...] | None] = {"model": (self.layout.shared,)}
        for name in trainer.uploads():
            sent = task.vectors.get(name)
            # a vector that the server sends comes back in the same form, others have the form that the trainer declares
            shapes[name] = declared.get(name) if sent is None else tuple(sent.shape)
        counts: dict[str, int] = {}
        if self.own_query is not None:
            form = self.own_query.answer_form(self, rows)
            shapes |= form.vectors or {}
            counts = dict.fromkeys(form.vectors or {}, form.examples)
        steps = trainer.max_steps(count)
        # a trainer that knows no limit of steps is still bounded: a client may claim any number
        return contracts.ResultForm(shapes, None, count, contracts.MOST_ROWS if steps is None else steps, counts,
                          own_metrics=self.objective.own_metrics, weighted=self.weighted)  # fmt: skip
