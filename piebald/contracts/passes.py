"""Contract of how a client computes the gradient of one step: in which precision, and with how much memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class PassSettings:
    """The forward and backward passes of a step of `SgdConfig`.  Parameters, updates and an optimizer's state are
    float32 whatever is chosen here.

    Attributes:
        precision: of the passes; other than float32 under `torch.autocast`.
        loss_scale: with float16, what the loss is multiplied by at the beginning of a run, see `torch.amp.GradScaler`.
        accumulate: passes of which a step sums the gradients; it has as many times the rows of a batch.
        checkpointing: layers that keep no activations for the backward pass and compute them again, as in
            `training.checkpointing`.
    """

    precision: Precision = "float32"
    loss_scale: float = 65536.0
    accumulate: int = 1
    checkpointing: tuple[str, ...] = ()

    @property
    def alone(self) -> bool:
        """Whether clients train one after another, as none may be skipped with others, or memory is short."""
        return self.precision == "float16" or self.accumulate > 1 or bool(self.checkpointing)


PLAIN_PASSES = PassSettings()
