"""The reference engine: the plain loop anyone would write, kept as the definition the fast engines are compared
with.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from piebald.contracts import SgdOutcome
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
