"""Metis' adaptive update frequency: each client decides when to send its model."""

from __future__ import annotations

import dataclasses
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from piebald.contracts import ClientContext, SgdOutcome, TrainInput, TrainOutput
from piebald.training.sgd import Sgd

REMEMBERED = 20  # validation cycles that set a client's own measure of staleness (the paper's first 20)


class AdaptiveFrequency(Sgd):
    """Train in validation cycles of `epochs` epochs, and stop when further training no longer pays (Metis, section V).

    After each cycle the loss on the client's validation rows is compared with the one before (before the first cycle:
    that of the model received).  A cycle fails where it did not fall (C1), or fell by less than `vc_loss` percent (C2);
    training stops after more than `vc_tomb` failures (tombstones), or when the effective staleness exceeds the median
    of the client's own first 20 cycles (C3), or after `cycles` cycles.

    Effective staleness counts the optimiser steps that other clients have contributed since the model was fetched, and
    the client's own.  A client that is training cannot know the former without asking.  Each task therefore carries the
    number of steps behind its model, and the client assumes that the others go on at their speed since its last task.
    Before its second task it knows no speed, and C3 applies only once 20 cycles have been seen.

    Attributes:
        steps: not allowed here.
        cycles: validation cycles a task, at most.
        vc_loss: VC_loss, percent by which the validation loss must fall.  vc_tomb: VC_tomb, failures that are
            tolerated.
        limit_staleness: whether C3 applies; it is meant for asynchronous schedulers.
    """

    cycles: int = Field(default=20, ge=1)
    vc_loss: float = Field(default=0.0, ge=0, lt=100)
    vc_tomb: int = Field(default=0, ge=0)
    limit_staleness: bool = True

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        if self.steps is not None:
            raise ValueError(f"steps must be left out: training is in cycles of epochs, got {self.steps}")
        return self

    def needs_validation_rows(self) -> bool:
        return True

    def discloses(self) -> str | None:
        return "by the number of steps how their loss on validation rows went"

    def initial_state(self, model: Tensor, shared: int) -> dict[str, Tensor]:
        past = {"staleness": torch.zeros(REMEMBERED), "seen": torch.zeros(1), "met": torch.zeros(2).double()}
        return super().initial_state(model, shared) | past

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        tail = _Tail.of(inputs)
        end = SgdOutcome(inputs.model, tail.zeros(), tail.zeros(), inputs.state.get("velocity"))
        before = context.score(inputs.model, "validation")[0]["loss"]
        for _ in range(self.cycles):
            walked = context.run_sgd(end.model, self.sgd_config(inputs, self.epochs), velocity=end.velocity)
            end = _where(tail.active, end, walked)
            now = context.score(end.model, "validation")[0]["loss"]
            # written so that a loss that is not a number, as without validation rows, is a failure
            tail.failures += (tail.active & ~((now < before) & (now <= before * (1 - self.vc_loss / 100)))).float()
            stale = tail.note(end.steps)
            tail.active &= tail.failures <= self.vc_tomb
            if self.limit_staleness:
                tail.active &= ~stale
            before = now
            if not bool(tail.active.any()):
                break
        met = torch.cat([inputs.committed, end.steps.double().unsqueeze(1)], dim=1)
        return self.output(
            dataclasses.replace(end, loss=end.loss / end.steps.clamp(min=1)),
            state={"staleness": tail.past, "seen": tail.seen, "met": met},
        )

    def min_steps(self, examples: int) -> int:
        return self.epochs * self.epoch_steps(examples)

    def max_steps(self, examples: int) -> int:
        return self.cycles * super().max_steps(examples)


class _Tail:
    """The progress of a stack of clients from cycle to cycle; all [c] but `past` [c, 20] and `seen` [c, 1]."""

    def __init__(self, past: Tensor, seen: Tensor, rate: Tensor) -> None:
        self.past, self.seen, self.rate = past.clone(), seen.clone(), rate
        self.active = torch.ones(len(past), dtype=torch.bool, device=past.device)
        self.failures = self.zeros()

    @classmethod
    def of(cls, inputs: TrainInput) -> _Tail:
        """From what the clients remember: steps that others take for each of one's own, since the last task."""
        last, own = inputs.state["met"].unbind(1)
        others = (inputs.committed.squeeze(1) - last - own).clamp(min=0)
        rate = torch.where(own > 0, others / own.clamp(min=1), 0.0)
        return cls(inputs.state["staleness"], inputs.state["seen"], rate)

    def zeros(self) -> Tensor:
        return torch.zeros(len(self.past), device=self.past.device)

    def note(self, steps: Tensor) -> Tensor:
        """Take down the effective staleness of the cycles that have just ended, and say for which it is too large."""
        stale = (steps * (1 + self.rate)).float()
        known = self.seen.squeeze(1) >= REMEMBERED
        above = known & (stale > self.past.quantile(0.5, dim=1))
        place = self.seen.long().clamp(max=REMEMBERED - 1)
        fresh = (self.active & ~known).unsqueeze(1)
        old = self.past.gather(1, place)
        self.past.scatter_(1, place, torch.where(fresh, stale.unsqueeze(1), old))
        self.seen += fresh
        return above


def _where(active: Tensor, old: SgdOutcome, new: SgdOutcome) -> SgdOutcome:
    """The new end for those that still train, the old one for the others; losses are summed over steps."""
    rows = active.unsqueeze(1)
    velocity = new.velocity
    if velocity is not None and old.velocity is not None:
        velocity = torch.where(rows, velocity, old.velocity)
    return SgdOutcome(
        torch.where(rows, new.model, old.model),
        old.steps + torch.where(active, new.steps.float(), 0.0),
        old.loss + torch.where(active, (new.loss * new.steps).nan_to_num(), 0.0),
        velocity,
    )
