"""Every result is checked before it counts: shape, type, finite, size of step."""

from __future__ import annotations

import math

import torch
from pydantic import Field

from piebald.component import Component
from piebald.contracts import ONE_WAY, Result
from piebald.parameters import Layout

LONGEST_STEP = 1000.0


class ResultChecks(Component):
    """What an update must be to count.

    Attributes:
        longest_step: refuse a change whose norm is above this many times that of the model (at least of a unit vector).
    """

    axis = "check"

    longest_step: float = Field(default=LONGEST_STEP, gt=0)

    def limit(self, norm: float) -> float:
        """The longest step allowed from a model of this length."""
        return self.longest_step * max(norm, 1.0)

    def reject_reason(self, result: Result, layout: Layout, limit: float) -> str | None:
        """Why a result may not count, or None.  A pooled update was checked where it was summed."""
        if result.failure is not None or result.update is None:
            return result.failure or "no answer"
        update = result.update
        if update.partial_sum is not None:
            return None
        change = update.vectors.get("model")
        if change is None or change.dtype != torch.float32 or change.shape != (layout.shared,):
            came = "nothing" if change is None else f"{change.dtype} {list(change.shape)}"
            return f"must send {layout.shared} float32 numbers, sent {came}"
        for name, sent in result.task.vectors.items():  # what a rule is sent beside the model, it answers in kind
            part = update.vectors.get(name)
            if name not in ONE_WAY and (part is None or part.dtype != sent.dtype or part.shape != sent.shape):
                came = "nothing" if part is None else f"{part.dtype} {list(part.shape)}"
                return f"must send {name} like the {sent.dtype} {list(sent.shape)} it got, sent {came}"
        norm = torch.linalg.vector_norm(change).item()
        if not math.isfinite(norm):
            return "not finite"
        for name, part in update.vectors.items():
            if name != "model" and not bool(torch.isfinite(part).all()):
                return f"{name} is not finite"
        return f"step of length {norm:.3g} is above the limit of {limit:.3g}" if norm > limit else None
