"""The reference engine: the plain loop anyone would write, kept as the definition the fast engines are compared
with.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from piebald.contracts import SgdOutcome, Split
from piebald.randomness import torch_generator
from piebald.runtimes.engines.keyed_dropout import KeyedDropout
from piebald.runtimes.engines.row_gradients import row_keys
from piebald.runtimes.engines.row_loader import Gathered, Places, batches
from piebald.runtimes.engines.sequential import SequentialEngine, step_key
from piebald.runtimes.engines.sgd_step import SgdRun


class ReferenceEngine(SequentialEngine):
    """A fresh copy of the module for every client, `backward`, and an update written out tensor by tensor."""

    name = "reference"

    def walk(self, walk: SgdRun) -> SgdOutcome:
        ends = [self._walk_plainly(walk, row) for row in range(len(walk.clients))]
        models, steps, losses, velocities = zip(*ends, strict=True)
        velocity = torch.stack(velocities) if walk.velocity is not None or walk.descent.momentum else None
        return SgdOutcome(torch.stack(models), torch.tensor(steps), torch.tensor(losses), velocity)

    def _walk_plainly(self, walk: SgdRun, row: int) -> tuple[torch.Tensor, float, float, torch.Tensor]:
        layout, descent = self.work.layout, walk.descent
        module = copy.deepcopy(self.work.model).train()
        layout.load(module, walk.model[row])
        parameters = dict(module.named_parameters())
        lr = float(descent.lr[row]) if isinstance(descent.lr, torch.Tensor) else descent.lr
        velocity = torch.zeros(layout.size) if walk.velocity is None else walk.velocity[row].clone()
        pool = self.feed.gather([walk.clients[row]], "train")
        words = self.feed.words(self.work.seed, walk.clients[row], walk.moments[row], walk.phase)
        losses: list[float] = []
        with self._randomness(walk, row) as dropout:
            for batch in batches(pool.places[0], descent, self.traits.mixes, *words):
                if isinstance(dropout, KeyedDropout):
                    dropout.start(torch.tensor(step_key(words, len(losses))))
                if descent.privacy is None:
                    loss = self.work.objective.loss(module(pool.x[batch]), pool.y[batch]).mean()
                    module.zero_grad()
                    torch.autograd.backward(loss)
                    losses.append(loss.item())
                else:
                    losses.append(self._hide_plainly(module, pool, batch, row, walk, len(losses), dropout))
                with torch.no_grad():
                    for slot in layout.slots:
                        if slot.buffer or not walk.prox or walk.prox_center is None:
                            continue
                        away = parameters[slot.name] - walk.prox_center[row][slot.start : slot.stop].view(slot.shape)
                        grad = parameters[slot.name].grad
                        parameters[slot.name].grad = walk.prox * away if grad is None else grad + walk.prox * away
                if descent.clip is not None:
                    torch.nn.utils.clip_grad_norm_(list(parameters.values()), descent.clip)
                with torch.no_grad():
                    for slot in layout.slots:
                        if slot.buffer:
                            continue
                        here, w = slice(slot.start, slot.stop), parameters[slot.name]
                        g = torch.zeros_like(w) if w.grad is None else w.grad
                        g = g + descent.weight_decay * w
                        if walk.correction is not None:
                            g = g + walk.correction[row][here].view(slot.shape)
                        velocity[here] = descent.momentum * velocity[here] - lr * g.flatten()
                        w.add_(velocity[here].view(slot.shape))
        mean = sum(losses) / len(losses) if losses else float("nan")
        return layout.flatten(module), float(len(losses)), mean, velocity

    def _hide_plainly(
        self,
        module: nn.Module,
        pool: Gathered,
        batch: Places,
        row: int,
        walk: SgdRun,
        step: int,
        dropout: KeyedDropout | None,
    ) -> float:
        """Gradients by DP-SGD, one row after another; the mean loss."""
        descent, words = walk.descent, self.feed.words(self.work.seed, walk.clients[row], walk.moments[row], walk.phase)
        assert descent.privacy is not None
        parameters = dict(module.named_parameters())
        summed, total = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}, 0.0
        for place, one in enumerate(batch):
            if dropout is not None:
                dropout.start(row_keys(torch.tensor([step_key(words, step)]), len(batch))[0, place])
            loss = self.work.objective.loss(module(pool.x[one : one + 1]), pool.y[one : one + 1]).mean()
            module.zero_grad()
            torch.autograd.backward(loss)
            grads = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
            norm = sum(float(grad.square().sum()) for grad in grads.values()) ** 0.5
            for name, grad in grads.items():
                summed[name] += grad * min(1.0, descent.privacy.clip / max(norm, 1e-12))
            total += loss.item()
        noise = torch.randn(self.work.layout.size, generator=torch_generator("hide", step, *words))
        lot = min(descent.batch, len(pool.places[0]))
        for name, view in self.work.layout.views(noise * descent.privacy.noise * descent.privacy.clip).items():
            if name in parameters:
                parameters[name].grad = (summed[name] + view) / lot
        return total / max(1, len(batch))

    # -- scoring

    def score(self, clients: Sequence[int], model: Tensor, split: Split) -> tuple[dict[str, Tensor], Tensor]:
        """See `contracts.ClientContext.score`."""
        measures = {"loss": self.work.objective.loss, **self.work.objective.metrics}
        scores = {name: torch.full((len(clients),), torch.nan) for name in measures}
        rows = torch.zeros(len(clients), dtype=torch.int64)
        for place, (outputs, targets) in enumerate(self._evaluate_plainly(clients, model, split)):
            rows[place] = len(targets)
            if not len(targets):
                continue
            for name, measure in measures.items():
                if hasattr(measure, "update"):  # a torchmetrics object
                    measure.reset()
                    for row in range(len(targets)):
                        measure.update(outputs[row : row + 1], targets[row : row + 1])
                    scores[name][place] = measure.compute().mean()
                else:
                    scores[name][place] = measure(outputs, targets).float().mean()
        return scores, rows

    def confusion(self, clients: Sequence[int], model: Tensor, split: Split) -> Tensor:
        """See `contracts.ClientContext.confusion`."""
        matrices = []
        for outputs, targets in self._evaluate_plainly(clients, model, split):
            matrices.append(torch.zeros(outputs.shape[1], outputs.shape[1]) if len(targets) else torch.zeros(0, 0))
            for output, target in zip(outputs, targets, strict=True):
                matrices[-1][int(target), int(output.argmax())] += 1
        classes = max((len(matrix) for matrix in matrices), default=0)
        none = torch.zeros(classes, classes)
        return torch.stack([matrix if len(matrix) else none for matrix in matrices])

    def _evaluate_plainly(self, clients: Sequence[int], model: Tensor, split: Split) -> Iterator[tuple[Tensor, Tensor]]:
        """Outputs and targets of each client, from a module of its own and one row at a time."""
        for place, client in enumerate(clients):
            module = copy.deepcopy(self.work.model).eval()
            self.work.layout.load(module, model[place])
            gathered = self.feed.gather([client], split)
            with torch.no_grad():
                outputs = [module(gathered.x[row : row + 1]) for row in gathered.places[0].tolist()]
            yield torch.cat(outputs) if outputs else torch.empty(0), gathered.y[gathered.places[0]]
