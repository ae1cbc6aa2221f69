"""The reference engine: the plain loop that anyone would write, against which fast engines are tested."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from piebald import pytree
from piebald.contracts import Rows, SgdOutcome, Split
from piebald.parameters import copied
from piebald.runtimes.engines.keyed_dropout import KeyedDropout
from piebald.runtimes.engines.local_loss import LossEvaluator
from piebald.runtimes.engines.reference_optimizer import ReferenceOptimizer
from piebald.runtimes.engines.row_gradients import noised, row_keys
from piebald.runtimes.engines.row_loader import augmented, batches, planned_steps
from piebald.runtimes.engines.sequential import SequentialEngine, step_key
from piebald.runtimes.engines.sgd_step import SgdRun


class ReferenceEngine(SequentialEngine):
    """Train with a fresh copy of the module for every client, `backward`, and an update written tensor by tensor."""

    name = "reference"

    def run_sgd(self, run: SgdRun) -> SgdOutcome:
        ends = [self._train_plainly(run, row) for row in range(len(run.clients))]
        models, steps, losses, states = zip(*ends, strict=True)
        state = {name: torch.stack([one[name] for one in states]) for name in states[0]}
        return SgdOutcome(torch.stack(models), torch.tensor(steps), torch.tensor(losses), state)

    def _train_plainly(self, run: SgdRun, row: int) -> tuple[torch.Tensor, float, float, dict[str, torch.Tensor]]:
        layout, config = self.work.layout, run.config
        module = copied(self.work.model).train()
        layout.load(module, run.model[row])
        slots = layout.parameters(config.part)
        parameters = {slot.name: module.get_parameter(slot.name) for slot in slots}
        lr = float(config.lr[row]) if isinstance(config.lr, torch.Tensor) else config.lr
        velocity = run.state["velocity"][row].clone() if "velocity" in run.state else torch.zeros(layout.size)
        gathered = self.row_loader.gather([run.clients[row]], "train")
        rng_key = self.rng_key(run, row)
        planned = planned_steps(gathered.places[0], config, self.traits.mixes)
        rule = None if config.rule is None else ReferenceOptimizer(run, row, module, layout, planned)
        losses: list[float] = []
        first = config.only_step or 0
        with self._randomness(run, row) as dropout:
            for batch in batches(gathered.places[0], config, self.traits.mixes, *rng_key):
                if isinstance(dropout, KeyedDropout):
                    dropout.start(torch.tensor(step_key(rng_key, first + len(losses))))
                if config.privacy is None:
                    rows = augmented(gathered.take(batch), config, len(losses), rng_key)
                    losses.append(self._set_gradients(module, rows, row, run))
                    if run.config.sam_radius:
                        if isinstance(dropout, KeyedDropout):
                            dropout.start(torch.tensor(step_key(rng_key, len(losses) - 1)))
                        self._set_gradients_at_the_top(module, rows, row, run)
                else:
                    rows = augmented(gathered.take(batch), config, len(losses), rng_key)
                    held = len(gathered.places[0])
                    losses.append(self._set_private_gradients(module, rows, held, row, run, len(losses), dropout))
                with torch.no_grad():
                    for slot in slots:
                        if not run.prox or run.prox_center is None:
                            continue
                        away = parameters[slot.name] - run.prox_center[row][slot.start : slot.stop].view(slot.shape)
                        grad = parameters[slot.name].grad
                        parameters[slot.name].grad = run.prox * away if grad is None else grad + run.prox * away
                if config.clip is not None:
                    torch.nn.utils.clip_grad_norm_(list(parameters.values()), config.clip)
                with torch.no_grad():
                    for slot in slots:
                        here, w = slice(slot.start, slot.stop), parameters[slot.name]
                        g = torch.zeros_like(w) if w.grad is None else w.grad
                        if run.correction is not None:
                            g = g + run.correction[row][here].view(slot.shape)
                        if rule is not None:
                            w.grad = g
                            continue
                        g = g + config.weight_decay * w
                        velocity[here] = config.momentum * velocity[here] - lr * g.flatten()
                        w.add_(velocity[here].view(slot.shape))
                if rule is not None:
                    rule.step(len(losses) - 1)
        mean = sum(losses) / len(losses) if losses else float("nan")
        state = {"velocity": velocity} if run.keeps_velocity else {}
        state = state if rule is None else rule.ended(len(losses))
        return layout.flatten(module), float(len(losses)), mean, state

    def _loss(self, module: nn.Module, rows: Rows) -> Tensor:
        """The mean loss of a batch."""
        return self.loss(pytree.run(module, rows.x), rows.y).mean()

    def _set_gradients(self, module: nn.Module, rows: Rows, row: int, run: SgdRun) -> float:
        """Set the gradients of a batch, and return its mean loss."""
        if run.local_loss is None:
            loss = self._loss(module, rows)
        else:
            evaluator = LossEvaluator(run.local_loss, self.work, self.loss, module, self.device)
            loss = evaluator.mean_of_client(rows, run.own, row)
        module.zero_grad()
        torch.autograd.backward(loss)
        return loss.item()

    def _set_gradients_at_the_top(self, module: nn.Module, rows: Rows, row: int, run: SgdRun) -> None:
        """Replace the gradients by those at w + radius * g / |g|, tensor by tensor."""
        before = copy.deepcopy(module.state_dict())
        found = [(one, one.grad.clone()) for one in module.parameters() if one.grad is not None]
        length = torch.cat([gradient.flatten() for _, gradient in found]).norm()
        with torch.no_grad():
            for parameter, gradient in found:
                parameter.add_(run.config.sam_radius * gradient / (length + 1e-12))
        self._set_gradients(module, rows, row, run)
        module.load_state_dict(before)

    def _set_private_gradients(
        self,
        module: nn.Module,
        batch: Rows,
        held: int,
        row: int,
        run: SgdRun,
        step: int,
        dropout: KeyedDropout | None,
    ) -> float:
        """Set the gradients of DP-SGD, one row after another, and return the mean loss."""
        config, rng_key = run.config, self.rng_key(run, row)
        assert config.privacy is not None
        parameters = dict(module.named_parameters())
        summed, total = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}, 0.0
        for place in range(len(batch)):
            if dropout is not None:
                dropout.start(row_keys(torch.tensor([step_key(rng_key, step)]), len(batch))[0, place])
            loss = self._loss(module, batch[place : place + 1])
            module.zero_grad()
            torch.autograd.backward(loss)
            grads = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
            norm = sum(float(grad.square().sum()) for grad in grads.values()) ** 0.5
            for name, grad in grads.items():
                summed[name] += grad * min(1.0, config.privacy.clip / max(norm, 1e-12))
            total += loss.item()
        lot = min(config.batch, held)
        stacked = {name: gradient.unsqueeze(0) for name, gradient in summed.items()}
        hidden = noised(stacked, self.work.layout, config.privacy, [lot], step, [rng_key])
        for name, gradient in zip(summed, hidden, strict=True):
            parameters[name].grad = gradient[0]
        return total / max(1, len(batch))

    # -- scoring

    def score(self, clients: Sequence[int], model: Tensor, split: Split) -> tuple[dict[str, Tensor], Tensor]:
        """See `contracts.ClientContext.score`."""
        measures = {"loss": self.work.objective.loss, **self.work.objective.metrics}
        scores = {name: torch.full((len(clients),), torch.nan) for name in measures}
        rows = torch.zeros(len(clients), dtype=torch.int64)
        for place, (outputs, targets) in enumerate(self._evaluate_plainly(clients, model, split)):
            rows[place] = pytree.count(targets)
            if not rows[place]:
                continue
            for name, measure in measures.items():
                if hasattr(measure, "update"):  # a torchmetrics object
                    measure.reset()
                    for row in range(int(rows[place])):
                        one = slice(row, row + 1)
                        measure.update(pytree.logits(pytree.take(outputs, one)), pytree.take(targets, one))
                    scores[name][place] = measure.compute().mean()
                else:
                    scores[name][place] = measure(outputs, targets).float().mean()
        return scores, rows

    def confusion(self, clients: Sequence[int], model: Tensor, split: Split) -> Tensor:
        """See `contracts.ClientContext.confusion`."""
        matrices = []
        for outputs, targets in self._evaluate_plainly(clients, model, split):
            scores = pytree.logits(outputs)
            matrices.append(torch.zeros(scores.shape[1], scores.shape[1]) if len(targets) else torch.zeros(0, 0))
            for output, target in zip(scores, targets, strict=True):
                matrices[-1][int(target), int(output.argmax())] += 1
        classes = max((len(matrix) for matrix in matrices), default=0)
        none = torch.zeros(classes, classes)
        return torch.stack([matrix if len(matrix) else none for matrix in matrices])

    def _evaluate_plainly(self, clients: Sequence[int], model: Tensor, split: Split) -> Iterator[tuple[Any, Any]]:
        """Outputs and targets of each client, from a module of its own and one row at a time."""
        for place, client in enumerate(clients):
            module = copied(self.work.model).eval()
            self.work.layout.load(module, model[place])
            gathered = self.row_loader.gather([client], split)
            with torch.no_grad():
                rows = [pytree.take(gathered.x, [row]) for row in gathered.places[0].tolist()]
                outputs = [pytree.by_row(pytree.run(module, row), 1) for row in rows]
            yield pytree.joined(outputs) if outputs else torch.empty(0), pytree.take(gathered.y, gathered.places[0])
