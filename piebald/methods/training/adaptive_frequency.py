"""Metis' adaptive update frequency: each client decides when to send its model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from piebald.contracts import ClientContext, SgdOutcome, TrainInput, TrainOutput
from piebald.contracts.component import Settings, from_tables
from piebald.methods.training.schedules import ConstantStepSchedule
from piebald.methods.training.sgd import Sgd

REMEMBERED = 20  # validation cycles that set a client's own measure of staleness (the paper's first 20)
_EXAMPLE = "{ clients = [1, 3], vc_loss = 1.0, vc_tomb = 1 }"


class LearnerGroup(Settings):
    """Clients with thresholds of their own, such as the slow ones of Metis' figure 3 (1 and 1; the fast ones 0 and 4).

    Attributes:
        clients: their numbers.
        vc_loss: their VC_loss.  vc_tomb: their VC_tomb.
    """

    clients: tuple[int, ...] = Field(min_length=1)
    vc_loss: float = Field(ge=0, lt=100)
    vc_tomb: int = Field(ge=0)


def _built(groups: Any) -> tuple[LearnerGroup, ...]:
    return from_tables(LearnerGroup, groups, _EXAMPLE)


class AdaptiveFrequency(Sgd):
    """Train until the validation loss no longer falls; the training for one request is a validation cycle (Metis,
    section V).

    After every `epochs` epochs (1 in the paper) the loss on the client's validation rows is compared with the one
    before.  It fails where it did not fall (C1), or fell by `vc_loss` percent or less (C2).  Training stops after more
    than `vc_tomb` failures (tombstones), or when the effective staleness exceeds the median over the client's own first
    20 validation cycles (C3).  The staleness of a cycle is noted once, when the next task comes and tells it.

    Effective staleness counts the optimiser steps that other clients have contributed since the model was fetched, and
    the client's own.  A client that is training cannot know the former without asking.  Each task therefore carries the
    number of steps behind its model, and the client assumes that the others go on at their speed since its last task.
    Before its second task it knows no speed, and C3 applies only once 20 cycles have been noted, with the numbers that
    came and not with what was assumed.

    The paper leaves two things open.  The loss before the first epoch is that of the model received.  A loss that keeps
    falling, or a large `vc_tomb`, would let a cycle go on without end: `cycles` ends it.

    Attributes:
        steps: not allowed here.
        epochs: passes over the client's rows between two evaluations of the validation loss.
        cycles: evaluations of the validation loss in one validation cycle, at most.  Ours: the paper has no limit.
        vc_loss: VC_loss, in percent: a fall by no more than this is a failure.  vc_tomb: VC_tomb, failures that are
            tolerated.
        groups: clients with other thresholds, like [{ clients = [1, 3], vc_loss = 1.0, vc_tomb = 1 }].
        limit_staleness: whether C3 applies; it is meant for asynchronous schedulers.
    """

    follows_others: ClassVar[bool] = True

    cycles: int = Field(default=20, ge=1)
    vc_loss: float = Field(default=0.0, ge=0, lt=100)
    vc_tomb: int = Field(default=0, ge=0)
    groups: Annotated[tuple[LearnerGroup, ...], BeforeValidator(_built)] = ()
    limit_staleness: bool = True

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        if self.steps is not None:
            raise ValueError(f"steps must be left out: training is in cycles of epochs, got {self.steps}")
        if self.step_limit is not None:
            raise ValueError(f"step_limit must be left out: cycles end by themselves, got {self.step_limit}")
        schedule = self.step_schedule
        if not isinstance(schedule, ConstantStepSchedule) or schedule.overrides(ConstantStepSchedule.factor):
            raise ValueError(
                f"step_schedule must be left out: a cycle's number of steps is open, got {schedule.kind!r}"
            )
        named = [client for group in self.groups for client in group.clients]
        if twice := sorted({client for client in named if named.count(client) > 1}):
            raise ValueError(f"groups must name each client once, got client {twice[0]} twice")
        return self

    def needs_validation_rows(self) -> bool:
        return True

    def discloses(self) -> str | None:
        return "by the number of steps how their loss on validation rows went"

    def initial_state(self, model: Tensor, shared: int) -> dict[str, Tensor]:
        # float64, as the steps of all clients together may exceed the whole numbers of float32
        past = {"staleness": torch.zeros(REMEMBERED), "seen": torch.zeros(1), "met": torch.zeros(2).double()}
        return super().initial_state(model, shared) | past

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        tail = _Tail.of(inputs)
        least, tolerated = self._thresholds(inputs.clients, tail)
        end = SgdOutcome(inputs.model, tail.zeros(), tail.zeros(), self.start_state(inputs))
        before = context.score(inputs.model, "validation", metrics=False)[0]["loss"]
        for _ in range(self.cycles):
            walked = context.run_sgd(end.model, self.sgd_config(inputs, self.epochs), state=end.state)
            # clients that have stopped compute along in the stack, without effect
            end = _merged_outcome(tail.active, end, walked)
            now = context.score(end.model, "validation", metrics=False)[0]["loss"]
            # written so that a loss that is not a number, as without validation rows, is a failure
            fell = (now < before) & (100 * (before - now) / before > least)
            tail.failures += (tail.active & ~fell).float()
            # more than VC_tomb failures end the cycle, not as many
            tail.active &= tail.failures <= tolerated
            if self.limit_staleness:
                tail.active &= ~tail.is_stale(end.steps)
            before = now
            if not bool(tail.active.any()):
                break
        met = torch.cat([inputs.committed, end.steps.to(inputs.committed.dtype).unsqueeze(1)], dim=1)
        return self.output(
            # losses were summed over steps; without a step there is none to divide by
            dataclasses.replace(end, loss=end.loss / end.steps.clamp(min=1)),
            state={"staleness": tail.past, "seen": tail.seen, "met": met},
        )

    def _thresholds(self, clients: Sequence[int], tail: _Tail) -> tuple[Tensor, Tensor]:
        """VC_loss and VC_tomb of each client of a stack, [c] each."""
        group_of_client = {client: group for group in self.groups for client in group.clients}
        groups = [group_of_client.get(client, self) for client in clients] or [self] * len(tail.past)
        loss, tomb = [group.vc_loss for group in groups], [float(group.vc_tomb) for group in groups]
        return tail.past.new_tensor(loss), tail.past.new_tensor(tomb)

    def min_steps(self, examples: int) -> int:
        return 0 if self.precision == "float16" else self.epochs * self.epoch_steps(examples)

    def max_steps(self, examples: int) -> int:
        return self.cycles * super().max_steps(examples)


class _Tail:
    """The progress of a stack of clients in a validation cycle; all [c] but `past` [c, 20] and `seen` [c, 1]."""

    def __init__(self, past: Tensor, seen: Tensor, rate: Tensor) -> None:
        self.past, self.seen, self.rate = past.clone(), seen.clone(), rate
        self.active = torch.ones(len(past), dtype=torch.bool, device=past.device)
        self.failures = self.zeros()

    @classmethod
    def of(cls, inputs: TrainInput) -> _Tail:
        """From what the clients remember: steps that others take for each of one's own, since the last task."""
        last, own_steps = inputs.state["met"].unbind(1)
        other_steps = (inputs.committed.squeeze(1) - last - own_steps).clamp(min=0)
        # before its second task a client has taken no steps of which the pace of others could be told
        rate = torch.where(own_steps > 0, other_steps / own_steps.clamp(min=1), 0.0)
        tail = cls(inputs.state["staleness"], inputs.state["seen"], rate)
        tail._note(own_steps)
        return tail

    def zeros(self) -> Tensor:
        return torch.zeros(len(self.past), device=self.past.device)

    def is_stale(self, steps: Tensor) -> Tensor:
        """Return which clients' staleness is above the median of the first cycles, once these are known (C3)."""
        is_settled = self.seen.squeeze(1) >= REMEMBERED
        return is_settled & (self._staleness(steps) > self.past.quantile(0.5, dim=1))

    def _note(self, steps: Tensor) -> None:
        """Take down the effective staleness of the validation cycles before this task, of clients that had one."""
        # an index in range also for clients whose 20 cycles are full: what they gather is written back unchanged
        place = self.seen.long().clamp(max=REMEMBERED - 1)
        fresh = (self.seen < REMEMBERED) & (steps > 0).unsqueeze(1)
        old = self.past.gather(1, place)
        self.past.scatter_(1, place, torch.where(fresh, self._staleness(steps).unsqueeze(1), old))
        self.seen += fresh

    def _staleness(self, steps: Tensor) -> Tensor:
        return (steps * (1 + self.rate)).float()


def _merged_outcome(active: Tensor, old: SgdOutcome, new: SgdOutcome) -> SgdOutcome:
    """The new end for those that still train, the old one for the others; losses are summed over steps."""
    rows = active.unsqueeze(1)
    state = {name: torch.where(rows, now, old.state.get(name, now)) for name, now in new.state.items()}
    return SgdOutcome(
        torch.where(rows, new.model, old.model),
        old.steps + torch.where(active, new.steps.float(), 0.0),
        old.loss + torch.where(active, (new.loss * new.steps).nan_to_num(), 0.0),
        state,
        new.shared,
    )
