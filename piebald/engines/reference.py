"""The reference engine: the plain loop that anyone would write, against which fast engines are tested."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from piebald.contracts import PassSettings, Rows, SgdOutcome, Split, UpdateRule
from piebald.contracts.training import Gradients
from piebald.core import pytree
from piebald.core.metrics import mean_over_rows, weighed
from piebald.core.parameters import Layout, Slot, copied
from piebald.core.targets import IGNORED, parted
from piebald.engines.batched_layers import KeyedDropout
from piebald.engines.row_gradients import LossEvaluator, noised, row_keys, state_restored, surviving
from piebald.engines.row_loader import augmented, pass_slices, planned_steps
from piebald.engines.sequential import SequentialEngine, step_key
from piebald.engines.sgd_step import Hidden, SgdRun, group_settings, no_hidden
from piebald.methods.training.optimizers import Optimizer, RuleOptimizer


class ReferenceEngine(SequentialEngine):
    """Train with a fresh copy of the module for every client, `backward`, and an update written tensor by tensor."""

    name = "reference"

    def run_sgd(self, run: SgdRun) -> SgdOutcome:
        ends = [self._train_plainly(run, row) for row in range(len(run.clients))]
        models, steps, losses, states = zip(*ends, strict=True)
        state = {name: torch.stack([client_state[name] for client_state in states]) for name in states[0]}
        return SgdOutcome(torch.stack(models), torch.tensor(steps), torch.tensor(losses), state)

    def _train_plainly(self, run: SgdRun, row: int) -> tuple[torch.Tensor, float, float, dict[str, torch.Tensor]]:
        layout, config = self.work.layout, run.config
        module = copied(self.work.model).train()
        layout.load(module, run.model[row])
        gathered = self.row_loader.for_training([run.clients[row]], config)
        rng_key, held = self.rng_key(run, row), len(gathered.positions[0])
        planned = planned_steps(gathered.positions[0], config, self.traits.mixes, run.only_step)
        client = ReferenceClient(run, row, module, layout, planned)
        losses, steps_made = list[float](), 0
        with self._randomness(run, row) as dropout:
            for number, batch in enumerate(self.batches_of(run, row, gathered.positions[0])):
                key = torch.tensor(step_key(rng_key, step := run.first_step + number))
                rows = augmented(gathered.take(batch), config, step, rng_key)
                draw = functools.partial(self._start, dropout, key)
                if config.step.changes_gradients:
                    hidden: Hidden = no_hidden
                    if config.step.hides_rows:
                        lot = min(config.step_rows, held)
                        hidden = functools.partial(self._gradients_hidden_by_row, client, rows, lot, step, dropout)
                    losses.append(self._set_changed_gradients(client, rows, draw, hidden))
                else:
                    losses.append(self._set_gradients(client, rows, draw))
                steps_made += client.step(number)
        mean = sum(losses) / len(losses) if losses else float("nan")
        return layout.flatten(module), float(steps_made), mean, client.ended(steps_made)

    def _loss(self, module: nn.Module, rows: Rows, passes: PassSettings) -> Tensor:
        """The mean loss of a batch."""
        with self.precision(passes):
            losses = self.loss(pytree.run(module, rows.x), rows.y)
        return mean_over_rows(losses, self.row_loader.counted(rows.y)) if losses.dim() == 1 else losses.mean()

    def _set_gradients(self, client: ReferenceClient, rows: Rows, draw: Callable[[int], None]) -> float:
        """Set the gradients of a step, and return the mean loss of its rows."""
        run, module, total = client.run, client.module, 0.0
        module.zero_grad()
        for number, part in enumerate(pass_slices(len(rows), run.config, self.traits.mixes)):
            draw(number)
            here = rows[part]
            if run.local_loss is None:
                loss = self._loss(module, here, run.config.passes)
            else:
                evaluator = LossEvaluator(run.local_loss, self.work, self.loss, module, self.device)
                with self.precision(run.config.passes):
                    loss = evaluator.mean_of_client(here, run.own, client.row, self.row_loader.counted(here.y))
            loss = loss * self.share_of(here, rows)
            client.backward(loss)
            total += loss.item()
        return total

    def _set_changed_gradients(
        self, client: ReferenceClient, rows: Rows, draw: Callable[[int], None], hidden: Hidden
    ) -> float:
        """Set the gradients that the run's `LocalStep` makes, and return the mean loss."""
        point = _PlainPoint(client, functools.partial(self._set_gradients, client, rows, draw), hidden)
        losses, gradients = client.run.config.step.gradients(point)
        for parameter, gradient in zip(client.parameters.values(), gradients, strict=True):
            # the scaler divides by its scale before it steps
            parameter.grad = gradient[0] * client.scaler.get_scale()
        return losses.item()

    def _gradients_hidden_by_row(
        self,
        client: ReferenceClient,
        batch: Rows,
        lot: float,
        step: int,
        dropout: KeyedDropout | None,
        clip: float,
        deviation: float,
    ) -> Gradients:
        """The mean loss [1] of a batch and its hidden gradients, [1, ...] each, one row after another."""
        run, module = client.run, client.module
        rng_key = self.rng_key(run, client.row)
        parameters = client.parameters
        summed, total = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}, 0.0
        for index in range(len(batch)):
            if dropout is not None:
                dropout.start(row_keys(torch.tensor([step_key(rng_key, step)]), len(batch))[0, index])
            module.zero_grad()
            with surviving(self.device) as survived, state_restored(module):
                loss = self._loss(module, batch[index : index + 1], run.config.passes)
                torch.autograd.backward(loss)
                survived.append(loss)
            found = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
            norm = sum(float(gradient.square().sum()) for gradient in found.values()) ** 0.5
            if survived and math.isfinite(norm):
                for name, gradient in found.items():
                    summed[name] += gradient * min(1.0, clip / max(norm, 1e-12))
                total += loss.item() if math.isfinite(loss.item()) else 0.0
        stacked = {name: total_of_rows.unsqueeze(0) for name, total_of_rows in summed.items()}
        hidden = noised(stacked, self.work.layout, deviation, [lot], step, [rng_key])
        counted = self.row_loader.counted(batch.y)
        count = max(1, len(batch) if counted is None else int(counted.sum()))
        return torch.tensor([total / count]), hidden

    # -- scoring

    def score(
        self, clients: Sequence[int], model: Tensor, split: Split, metrics: bool = True
    ) -> tuple[dict[str, Tensor], Tensor]:
        """See `contracts.ClientContext.score`."""
        measures = {"loss": self.work.objective.loss, **(self.work.objective.metrics if metrics else {})}
        scores = {name: torch.full((len(clients),), torch.nan) for name in measures}
        rows = torch.zeros(len(clients), dtype=torch.int64)
        for index, (outputs, targets) in enumerate(self._evaluate_plainly(clients, model, split)):
            outputs, targets = self.with_targets(outputs, targets)
            rows[index] = pytree.count(targets)
            if not rows[index]:
                continue
            for name, measure in measures.items():
                if hasattr(measure, "update"):  # a torchmetrics object
                    measure.reset()
                    for row in range(int(rows[index])):
                        single = slice(row, row + 1)
                        known = targets if getattr(measure, "takes_weights", False) else parted(targets)[0]
                        measure.update(pytree.logits(pytree.take(outputs, single)), pytree.take(known, single))
                    scores[name][index] = measure.compute().mean()
                else:
                    values, (_, weights) = weighed(measure, outputs, targets).float(), parted(targets)
                    weights = weights if weights is not None and values.dim() else torch.ones(values.shape)
                    scores[name][index] = (values * weights).sum() / weights.sum()
        return scores, rows

    def losses(self, clients: Sequence[int], models: Sequence[Tensor], split: Split) -> Tensor:
        """See `contracts.ClientContext.losses`."""
        scores = [self.score(clients, model, split, metrics=False)[0] for model in models]
        return torch.stack([scores_of_model["loss"] for scores_of_model in scores], dim=1)

    def confusion(self, clients: Sequence[int], model: Tensor, split: Split) -> Tensor:
        """See `contracts.ClientContext.confusion`."""
        matrices = []
        for outputs, targets in self._evaluate_plainly(clients, model, split):
            scores = pytree.logits(outputs)
            matrices.append(torch.zeros(scores.shape[1], scores.shape[1]) if len(scores) else torch.zeros(0, 0))
            for output, target in zip(scores, parted(targets)[0], strict=True):
                if int(target) != IGNORED:
                    matrices[-1][int(target), int(output.argmax())] += 1
        classes = max((len(matrix) for matrix in matrices), default=0)
        none = torch.zeros(classes, classes)
        return torch.stack([matrix if len(matrix) else none for matrix in matrices])

    def _evaluate_plainly(self, clients: Sequence[int], model: Tensor, split: Split) -> Iterator[tuple[Any, Any]]:
        """Outputs and targets of each client, from a module of its own and one row at a time."""
        for index, client in enumerate(clients):
            module = copied(self.work.model).eval()
            self.work.layout.load(module, model[index])
            gathered = self.row_loader.gather([client], split)
            with torch.no_grad():
                rows = [pytree.take(gathered.x, [row]) for row in gathered.positions[0].tolist()]
                outputs = [pytree.by_row(pytree.run(module, row), 1) for row in rows]
            yield pytree.joined(outputs) if outputs else torch.empty(0), pytree.take(gathered.y, gathered.positions[0])


class _PlainPoint:
    """A `contracts.StepPoint` of one client, whose module is put back as it was, tensor by tensor."""

    def __init__(self, client: ReferenceClient, set_gradients: Callable[[], float], hidden: Hidden) -> None:
        self._client, self._set_gradients, self.hidden = client, set_gradients, hidden
        self._has_gradients = False

    def gradients(self, away: Iterable[Tensor] | None = None) -> Gradients:
        """See `contracts.StepPoint`."""
        module, parameters = self._client.module, list(self._client.parameters.values())
        # deep, since state_dict refers to the module's own tensors
        before = copy.deepcopy(module.state_dict())
        with torch.no_grad():
            for parameter, distance in zip(parameters, away or (), strict=away is not None):
                parameter.add_(distance[0])
        loss = self._set_gradients()
        if self._has_gradients or away is not None:
            module.load_state_dict(before)
        self._has_gradients, scale = True, self._client.scaler.get_scale()
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / scale
            for parameter in parameters
        ]
        return torch.tensor([loss]), [gradient.unsqueeze(0) for gradient in gradients]


class ReferenceClient:
    """The steps of one client in a run, along the gradients that its module holds.

    Args:
        run: the run.
        row: which of its clients this is.
        module: the client's module.
        layout: layout of the module.
        planned: steps that the client will come to.

    Attributes:
        scaler: torch's own scaler of the loss, which does nothing unless passes are in float16.
    """

    def __init__(self, run: SgdRun, row: int, module: nn.Module, layout: Layout, planned: int) -> None:
        config = run.config
        self.run, self.row, self.module = run, row, module
        self.slots = layout.parameters(config.part)
        self.parameters = {slot.name: module.get_parameter(slot.name) for slot in self.slots}
        self.lr = float(config.lr[row]) if isinstance(config.lr, Tensor) else config.lr
        has_velocity = "velocity" in run.state
        self.velocity = run.state["velocity"][row].clone() if has_velocity else torch.zeros(layout.size)
        self.rule = None if config.rule is None else ReferenceOptimizer(run, row, module, layout, planned)
        passes = config.passes
        self.scaler = torch.amp.GradScaler("cpu", passes.loss_scale, enabled=passes.precision == "float16")
        self._optimizer = _Steps(list(self.parameters.values()), self._update)
        self._taken, self._made = 0, False

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss to those of the module."""
        torch.autograd.backward(self.scaler.scale(loss))

    def step(self, taken: int) -> bool:
        """The step after `taken` others, or none where the scaler skips it; whether it was made."""
        self._taken, self._made = taken, False
        self.scaler.step(self._optimizer)
        self.scaler.update()
        return self._made

    def _update(self) -> None:
        self._made = True
        run, config = self.run, self.run.config
        with torch.no_grad():
            for slot in self.slots:
                if not run.prox or run.prox_center is None:
                    continue
                away = self.parameters[slot.name] - run.prox_center[self.row][slot.start : slot.stop].view(slot.shape)
                grad = self.parameters[slot.name].grad
                self.parameters[slot.name].grad = run.prox * away if grad is None else grad + run.prox * away
        if config.clip is not None:
            torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), config.clip)
        with torch.no_grad():
            for slot in self.slots:
                here, w = slice(slot.start, slot.stop), self.parameters[slot.name]
                g = torch.zeros_like(w) if w.grad is None else w.grad
                if run.correction is not None:
                    g = g + run.correction[self.row][here].view(slot.shape)
                if self.rule is not None:
                    w.grad = g
                    continue
                g = g + config.weight_decay * w
                self.velocity[here] = config.momentum * self.velocity[here] - self.lr * g.flatten()
                w.add_(self.velocity[here].view(slot.shape))
        if self.rule is not None:
            self.rule.step(self._taken)

    def ended(self, made: int) -> dict[str, Tensor]:
        """The optimizer's state [p] after so many steps."""
        if self.rule is not None:
            return self.rule.ended(made)
        return {"velocity": self.velocity} if self.run.keeps_velocity else {}


class _Steps(torch.optim.Optimizer):
    """The optimizer that a `GradScaler` steps, with a function in place of an optimizer's update."""

    def __init__(self, parameters: list[nn.Parameter], update: Callable[[], None]) -> None:
        super().__init__(parameters, {})
        self._update = update

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._update()


class ReferenceOptimizer:
    """The optimizer of one client in a run with a rule.

    Args:
        run: the run.
        row: which of its clients this is.
        module: the client's module; its parameters are stepped along their gradients.
        layout: layout of the module.
        planned: steps that the client will take.
    """

    def __init__(self, run: SgdRun, row: int, module: nn.Module, layout: Layout, planned: int) -> None:
        config, rule = run.config, run.config.rule
        assert rule is not None
        self.run, self.planned = run, planned
        parameters, settings = dict(module.named_parameters()), group_settings(config, module)
        self.slots = layout.parameters(config.part)
        self.parameters = [parameters[slot.name] for slot in self.slots]
        self.settings = [settings.get(slot.name, (1.0, config.weight_decay)) for slot in self.slots]
        self.lr = float(config.lr[row]) if isinstance(config.lr, Tensor) else config.lr
        self.behind = float(run.state["step"][row]) if "step" in run.state else 0.0
        self.names = [vector.name for vector in rule.state_vectors(config.momentum)]
        self.vectors = {
            vector.name: torch.full((layout.size,), vector.start) for vector in rule.state_vectors(config.momentum)
        }
        self.vectors |= {name: run.state[name][row].clone() for name in self.names if run.state}
        self.torch = self._torch(rule, config.momentum)

    def _torch(self, rule: UpdateRule, momentum: float) -> torch.optim.Optimizer:
        pairs = zip(self.parameters, self.settings, strict=True)
        groups = [
            {"params": [parameter], "lr": self.lr * share, "weight_decay": decay} for parameter, (share, decay) in pairs
        ]
        if isinstance(rule, Optimizer):
            optimizer = rule.as_torch(groups, self.lr, 0.0, momentum)
        else:
            optimizer = RuleOptimizer(groups, rule, self.lr, 0.0, momentum)
        if self.behind or not isinstance(rule, Optimizer):
            for slot, parameter in zip(self.slots, self.parameters, strict=True):
                state = {name: _part(vector, slot).clone() for name, vector in self.vectors.items()}
                optimizer.state[parameter] = {"step": torch.tensor(self.behind), **state}
        return optimizer

    def step(self, taken: int) -> None:
        """One step after `taken` others, along the parameters' `grad`."""
        schedule = self.run.config.schedule
        factor = 1.0 if schedule is None else schedule.factor(taken, self.planned)
        for group, (share, _) in zip(self.torch.param_groups, self.settings, strict=True):
            group["lr"] = self.lr * share * factor
        self.torch.step()

    def ended(self, steps: int) -> dict[str, Tensor]:
        """The client's state [p] after so many steps in this run, and "step" [1]."""
        if not self.names:
            return {}
        for slot, parameter in zip(self.slots, self.parameters, strict=True):
            state = self.torch.state[parameter]
            for name in self.names:
                if state.get(name) is not None:
                    _part(self.vectors[name], slot).copy_(state[name])
        return self.vectors | {"step": torch.tensor([self.behind + steps])}


def _part(vector: Tensor, slot: Slot) -> Tensor:
    return vector[slot.start : slot.stop].view(slot.shape)
