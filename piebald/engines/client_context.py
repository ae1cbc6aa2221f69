"""The tools of trainers and queries: an engine behind `contracts.ClientContext`, and steps along several gradients.

A gradient is the velocity of one step of SGD with learning rate 1 and no momentum, exactly: u = 0 * 0 - 1 * g.  So an
engine needs nothing more than `run_sgd`, and its batches, dropout and batch norm are those of all other training.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from piebald import contracts
from piebald.contracts.data import HasTables, column_names
from piebald.core import pytree
from piebald.core.errors import RuntimeFault, SettingError
from piebald.core.machine import moved
from piebald.core.parameters import matching
from piebald.core.randomness import long_key
from piebald.core.targets import parted
from piebald.engines.factored.vectors import to_dense
from piebald.engines.row_loader import planned_steps
from piebald.engines.row_statistics import batch_statistics, class_features, input_moments, measure, row_outputs
from piebald.engines.sequential import SequentialEngine as Engine
from piebald.engines.sgd_step import SgdRun
from piebald.engines.stack import ClientStack

T = TypeVar("T")


@dataclass(slots=True)
class EngineContext:
    """`contracts.ClientContext` for one stack."""

    engine: Engine
    stack: ClientStack
    phase: int = 0

    @property
    def initial(self) -> Tensor:
        return self.engine.work.initial.to(self.engine.device)

    @property
    def disclosure(self) -> contracts.Disclosure | None:
        return self.stack.disclosure

    def with_rng(self, rng_version: int | str | None = None) -> EngineContext:
        # whatever runs aside draws nothing that the task would have drawn
        aside = [f"{version}.aside" for version in self.stack.rng_versions]
        rng_versions = aside if rng_version is None else [rng_version] * len(aside)
        return EngineContext(self.engine, replace(self.stack, rng_versions=rng_versions))

    def run_sgd(
        self,
        model: Tensor,
        config: contracts.SgdConfig,
        *,
        prox: float = 0.0,
        prox_center: Tensor | None = None,
        correction: Tensor | None = None,
        state: Mapping[str, Tensor] | None = None,
        local_loss: contracts.LocalLoss | None = None,
        own: Mapping[str, Tensor] | None = None,
    ) -> contracts.SgdOutcome:
        if prox and prox_center is None:
            raise RuntimeFault(f"run_sgd was given prox = {prox:g} without what it draws to: give prox_center as well")
        clients, rng_versions, secret = self.stack.clients, self.stack.rng_versions, self.stack.secret
        start_state = dict(state or {})
        if not self.engine.takes_factored:
            start_state = {name: to_dense(vector) for name, vector in start_state.items()}
        tensors = {name: to_dense(tensor) for name, tensor in (own or {}).items()}
        run = SgdRun(
            clients, rng_versions, self.phase, model, config, prox, prox_center, correction, start_state,
            secret, local_loss, tensors,
        )  # fmt: skip
        # the number of the run is part of its rng key: a second run of a task draws other batches
        self.phase += 1
        with torch.enable_grad():  # also where the caller only wants a model to use, inside torch.no_grad
            return replace(self.engine.run_sgd(run), shared=self.engine.work.layout.shared)

    def run_steps(
        self, start: Mapping[str, Tensor], config: contracts.SgdConfig, step: contracts.VectorStep, *, batches: int = 1
    ) -> contracts.StepsOutcome:
        phase, self.phase = self.phase, self.phase + batches
        with torch.enable_grad():
            return run_steps(self.engine, self.stack, phase, start, config, step)

    def score(self, model: Tensor, split: contracts.Split, metrics: bool = True) -> tuple[dict[str, Tensor], Tensor]:
        return self.engine.score(self.stack.clients, model, split, metrics)

    def losses(self, models: Sequence[Tensor], split: contracts.Split) -> Tensor:
        return self.engine.losses(self.stack.clients, models, split)

    def row_losses(self, model: Tensor, split: contracts.Split) -> tuple[Tensor, Tensor]:
        return self.engine.row_losses(self.stack.clients, model, split)

    def row_scores(self, model: Tensor, split: contracts.Split) -> tuple[Tensor, Tensor]:
        return self.engine.row_scores(self.stack.clients, model, split)

    def row_values(
        self, model: Tensor, split: contracts.Split, measure: Callable[[Any, Any], Tensor]
    ) -> tuple[Tensor, Tensor]:
        return self.engine.row_values(self.stack.clients, model, split, measure)

    def constant_scores(self, constants: Tensor, split: contracts.Split) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        return self.engine.constant_scores(self.stack.clients, constants, split)

    def moments(self, model: Tensor, layers: Sequence[str]) -> Tensor:
        return input_moments(self.engine, self.stack.clients, model, layers)

    def batch_statistics(self, model: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        return batch_statistics(self.engine, self.stack.clients, self.stack.rng_versions, model, batch)

    def belongs(self, layers: Sequence[str] | None = None) -> Tensor:
        work = self.engine.work
        names = None if layers is None else matching(work.model, layers)
        mask = torch.zeros(work.layout.size, dtype=torch.bool)
        for slot in work.layout.parameters():
            mask[slot.start : slot.stop] = names is None or slot.name in names
        return mask.to(self.engine.device)

    def rows(self, split: contracts.Split) -> list[contracts.Rows]:
        return [self.engine.row_loader.rows(client, split) for client in self.stack.clients]

    def cached(self, split: contracts.Split, key: Hashable, function: Callable[[contracts.Rows, str], T]) -> list[T]:
        loader, hides = self.engine.row_loader, self.engine.work.is_masked(self.stack.query)
        return [
            # under masks no client is told which one it is
            loader.cached(client, split, key, function, "this client" if hides else str(loader.clients.names[client]))
            for client in self.stack.clients
        ]

    def weights(self, split: contracts.Split) -> Tensor | None:
        weights = [self.engine.row_loader.weight(client, split) for client in self.stack.clients]
        if all(weight is None for weight in weights):
            return None
        known = [len(self.engine.row_loader.rows(client, split)) if weight is None else weight
                 for client, weight in zip(self.stack.clients, weights, strict=True)]  # fmt: skip
        return torch.tensor(known, dtype=torch.float64)

    @property
    def features(self) -> Sequence[str]:
        return column_names(self.engine.row_loader.clients)[0] or ()

    def tables(self, split: contracts.Split) -> list[Any]:
        clients = self.engine.row_loader.clients
        if not isinstance(clients, HasTables):
            raise SettingError("these rows are no tables that are to be prepared")
        return [clients.table(client, split) for client in self.stack.clients]

    def noise_keys(self) -> list[int]:
        stack, rng_key = self.stack, self.engine.row_loader.rng_key
        seed = stack.secret or self.engine.work.noise_seed
        keys = [
            rng_key(seed, client, version, 0) for client, version in zip(stack.clients, stack.rng_versions, strict=True)
        ]
        return [long_key("answer", *rng_key_of_task) for rng_key_of_task in keys]

    def label_counts(self, weighted: bool = False) -> Tensor:
        (classes,), gathered = self.engine.work.outputs, self.engine.row_loader.gather(self.stack.clients, "train")
        sizes = [len(positions) for positions in gathered.positions]
        rows = moved(torch.from_numpy(np.concatenate(gathered.positions)), self.engine.device)
        targets, weights = parted(gathered.take(rows).y)
        labels = pytree.single(targets, "counting labels").long()
        owners = moved(torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)), self.engine.device)
        # an unknown class, -100, adds 0 in its client's first place: a mask would make the host wait
        each = (labels >= 0).long() if weights is None or not weighted else (labels >= 0) * weights.double()
        counts = torch.zeros(len(sizes) * classes, dtype=each.dtype, device=self.engine.device)
        counts.scatter_add_(0, owners * classes + labels.clamp_min(0), each)
        return counts.view(len(sizes), classes)

    def class_features(self, model: Tensor) -> tuple[Tensor, Tensor]:
        return class_features(self.engine, self.stack.clients, model)

    def row_outputs(self, model: Tensor, split: contracts.Split) -> list[contracts.RowOutputs]:
        return row_outputs(self.engine, self.stack.clients, model, split)

    def measure(self, outputs: Sequence[Tensor], split: contracts.Split) -> tuple[dict[str, Tensor], Tensor]:
        return measure(self.engine, self.stack.clients, outputs, split)

    def public_outputs(self, model: Tensor) -> Tensor:
        return self.engine.public_outputs(to_dense(model))

    def public_targets(self) -> Tensor:
        targets = pytree.single(self.engine.row_loader.public_targets(), "public rows")
        return targets.expand(len(self.stack.clients), *targets.shape)

    def confusion(self, model: Tensor, split: contracts.Split) -> Tensor:
        return self.engine.confusion(self.stack.clients, model, split)


def run_steps(
    engine: Engine,
    stack: ClientStack,
    phase: int,
    start: Mapping[str, Tensor],
    config: contracts.SgdConfig,
    step: contracts.VectorStep,
) -> contracts.StepsOutcome:
    """See `contracts.ClientContext.run_steps`; `phase` is how many runs there were before in the same task.

    The clients with most steps come first, so that those that have finished leave at the end.
    """
    plain = replace(config, lr=1.0, momentum=0.0, rule=None, schedule=None, groups=())
    with engine.row_loader.holding():
        positions = engine.row_loader.for_training(stack.clients, config).positions
        planned = [planned_steps(client_positions, config, engine.traits.mixes) for client_positions in positions]
        order = sorted(range(len(planned)), key=lambda row: -planned[row])
        at = {name: to_dense(part).to(engine.device)[order] for name, part in start.items()}
        finished: list[dict[str, Tensor]] = []  # what finished clients ended with, the last ones first
        total = torch.zeros(len(order), device=engine.device)
        for number in range(max(planned, default=0)):
            active = sum(steps > number for steps in planned)
            finished.append({name: part[active:] for name, part in at.items()})
            at = {name: part[:active] for name, part in at.items()}
            slopes = _StepSlopes(engine, stack, order[:active], phase, plain, number)
            at |= step({**at, "step": torch.full((active, 1), float(number), device=engine.device)}, slopes)
            total[:active] += slopes.loss
    ended = {name: torch.cat([part, *(vectors[name] for vectors in reversed(finished))]) for name, part in at.items()}
    back = moved(torch.tensor(order), engine.device).argsort()
    steps = moved(torch.tensor([float(count) for count in planned]), engine.device)
    return contracts.StepsOutcome({name: part[back] for name, part in ended.items()}, steps, total[back] / steps)


class _StepSlopes:
    """The gradients of one step of some clients of a stack.

    Attributes:
        loss: [c], at the first point that was asked about.
        trained: see `contracts.Slopes`.
    """

    def __init__(
        self,
        engine: Engine,
        stack: ClientStack,
        rows: Sequence[int],
        phase: int,
        config: contracts.SgdConfig,
        step: int,
    ) -> None:
        self._engine, self._phase, self._config, self._secret = engine, phase, config, stack.secret
        self._step = step
        self._clients = [stack.clients[row] for row in rows]
        self._rng_versions = [stack.rng_versions[row] for row in rows]
        self.loss: Tensor | float = 0.0
        self._has_gradients = False
        self.trained = torch.zeros(engine.work.layout.size, dtype=torch.bool, device=engine.device)
        for span in engine.work.layout.trained:
            self.trained[span] = True

    def __call__(self, model: Tensor, batch: int = 0) -> contracts.Slope:
        state, phase = {"velocity": torch.zeros_like(model)}, self._phase + batch
        run = SgdRun(
            self._clients, self._rng_versions, phase, model, self._config, state=state, secret=self._secret,
            only_step=self._step,
        )  # fmt: skip
        with torch.enable_grad():
            end = self._engine.run_sgd(run)
        if not self._has_gradients:
            self.loss, self._has_gradients = end.loss, True
        # parameters as they were at the point that was asked about, statistics as the batch has moved them
        return contracts.Slope(-to_dense(end.state["velocity"]), torch.where(self.trained, model, to_dense(end.model)))
