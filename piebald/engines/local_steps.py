"""Local training by steps that ask for gradients at several points, on any engine.

A gradient is the velocity of one step of SGD with learning rate 1 and no momentum, exactly: u = 0 * 0 - 1 * g.  So an
engine needs nothing more than `run_sgd`, and its batches, dropout and batch norm are those of all other training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from piebald.contracts import SgdConfig, Slope, StepsOutcome, VectorStep
from piebald.core.machine import moved
from piebald.engines.factored.vectors import to_dense
from piebald.engines.row_loader import planned_steps
from piebald.engines.sequential import SequentialEngine as Engine
from piebald.engines.sgd_step import SgdRun
from piebald.engines.stack import ClientStack


def run_steps(
    engine: Engine,
    stack: ClientStack,
    phase: int,
    start: Mapping[str, Tensor],
    config: SgdConfig,
    step: VectorStep,
) -> StepsOutcome:
    """See `contracts.ClientContext.run_steps`; `phase` is how many runs there were before in the same task.

    The clients with most steps come first, so that those that have finished leave at the end.
    """
    plain = replace(config, lr=1.0, momentum=0.0, rule=None, schedule=None, groups=())
    with engine.row_loader.holding():
        places = engine.row_loader.for_training(stack.clients, config).places
        planned = [planned_steps(client_places, config, engine.traits.mixes) for client_places in places]
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
    return StepsOutcome({name: part[back] for name, part in ended.items()}, steps, total[back] / steps)


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
        config: SgdConfig,
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

    def __call__(self, model: Tensor, batch: int = 0) -> Slope:
        state, phase = {"velocity": torch.zeros_like(model)}, self._phase + batch
        run = SgdRun(
            self._clients, self._rng_versions, phase, model, self._config, state=state, secret=self._secret,
            only_step=self._step,
        )  # fmt: skip
        with torch.enable_grad():
            end = self._engine.run_sgd(run)
        if not self._has_gradients:
            self.loss, self._has_gradients = end.loss, True
        return Slope(-to_dense(end.state["velocity"]), torch.where(self.trained, model, to_dense(end.model)))
