"""The reference engine: the plain loop that anyone would write, against which fast engines are tested."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from piebald.contracts import PassSettings, Rows, SgdOutcome, Split
from piebald.core import pytree
from piebald.core.parameters import copied
from piebald.engines.keyed_dropout import KeyedDropout
from piebald.engines.local_loss import LossEvaluator
from piebald.engines.reference_client import ReferenceClient
from piebald.engines.row_gradients import noised, row_keys
from piebald.engines.row_loader import augmented, batches, pass_slices, planned_steps
from piebald.engines.sequential import SequentialEngine, step_key
from piebald.engines.sgd_step import SgdRun


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
        gathered = self.row_loader.for_training([run.clients[row]], config)
        rng_key, held = self.rng_key(run, row), len(gathered.places[0])
        planned = planned_steps(gathered.places[0], config, self.traits.mixes)
        client = ReferenceClient(run, row, module, layout, planned)
        losses, made = list[float](), 0
        first = config.only_step or 0
        with self._randomness(run, row) as dropout:
            for taken, batch in enumerate(batches(gathered.places[0], config, self.traits.mixes, *rng_key)):
                key = torch.tensor(step_key(rng_key, first + taken))
                rows = augmented(gathered.take(batch), config, taken, rng_key)
                if config.privacy is None:
                    draw = functools.partial(self._start, dropout, key)
                    losses.append(self._set_gradients(client, rows, draw))
                    if config.sam_radius:
                        self._set_gradients_at_the_top(client, rows, draw)
                else:
                    losses.append(self._set_private_gradients(client, rows, held, taken, dropout))
                made += client.step(taken)
        mean = sum(losses) / len(losses) if losses else float("nan")
        return layout.flatten(module), float(made), mean, client.ended(made)

    def _loss(self, module: nn.Module, rows: Rows, passes: PassSettings) -> Tensor:
        """The mean loss of a batch."""
        with self.precision(passes):
            return self.loss(pytree.run(module, rows.x), rows.y).mean()

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
                    loss = evaluator.mean_of_client(here, run.own, client.row)
            loss = loss * len(here) / len(rows)
            client.backward(loss)
            total += loss.item()
        return total

    def _set_gradients_at_the_top(self, client: ReferenceClient, rows: Rows, draw: Callable[[int], None]) -> None:
        """Replace the gradients by those at w + radius * g / |g|, tensor by tensor."""
        module, radius, scale = client.module, client.run.config.sam_radius, client.scaler.get_scale()
        before = copy.deepcopy(module.state_dict())
        found = [(one, one.grad / scale) for one in module.parameters() if one.grad is not None]
        length = torch.cat([gradient.flatten() for _, gradient in found]).norm()
        with torch.no_grad():
            for parameter, gradient in found:
                parameter.add_(radius * gradient / (length + 1e-12))
        self._set_gradients(client, rows, draw)
        module.load_state_dict(before)

    def _set_private_gradients(
        self, client: ReferenceClient, batch: Rows, held: int, step: int, dropout: KeyedDropout | None
    ) -> float:
        """Set the gradients of DP-SGD, one row after another, and return the mean loss."""
        run, module = client.run, client.module
        config, rng_key = run.config, self.rng_key(run, client.row)
        assert config.privacy is not None
        parameters = dict(module.named_parameters())
        summed, total = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}, 0.0
        for place in range(len(batch)):
            if dropout is not None:
                dropout.start(row_keys(torch.tensor([step_key(rng_key, step)]), len(batch))[0, place])
            loss = self._loss(module, batch[place : place + 1], config.passes)
            module.zero_grad()
            torch.autograd.backward(loss)
            grads = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
            norm = sum(float(grad.square().sum()) for grad in grads.values()) ** 0.5
            for name, grad in grads.items():
                summed[name] += grad * min(1.0, config.privacy.clip / max(norm, 1e-12))
            total += loss.item()
        lot = min(config.step_rows, held)
        stacked = {name: gradient.unsqueeze(0) for name, gradient in summed.items()}
        hidden = noised(stacked, self.work.layout, config.privacy, [lot], step, [rng_key])
        for name, gradient in zip(summed, hidden, strict=True):
            parameters[name].grad = gradient[0]
        return total / max(1, len(batch))

    # -- scoring

    def score(
        self, clients: Sequence[int], model: Tensor, split: Split, metrics: bool = True
    ) -> tuple[dict[str, Tensor], Tensor]:
        """See `contracts.ClientContext.score`."""
        measures = {"loss": self.work.objective.loss, **(self.work.objective.metrics if metrics else {})}
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

    def losses(self, clients: Sequence[int], models: Sequence[Tensor], split: Split) -> Tensor:
        """See `contracts.ClientContext.losses`."""
        scores = [self.score(clients, model, split, metrics=False)[0] for model in models]
        return torch.stack([one["loss"] for one in scores], dim=1)

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
