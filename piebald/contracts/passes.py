"""Contracts of a forward and a backward pass at a client: its precision and memory, the outputs of rows, and losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

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
        """True if clients train one after another, as none may be skipped with others, or memory is short."""
        return self.precision == "float16" or self.accumulate > 1 or bool(self.checkpointing)


PLAIN_PASSES = PassSettings()


@dataclass(frozen=True, slots=True, eq=False)
class RowOutputs:
    """A model's features and outputs for one client's rows.

    Attributes:
        features: what goes into the last linear layer [n, d].
        outputs: what comes out of the model [n, classes].
        labels: the rows' classes [n], below 0 for those that do not count.
    """

    features: Tensor
    outputs: Tensor
    labels: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LossBatch:
    """One client's batch, as a `LocalLoss` sees it.

    Attributes:
        losses: the objective's loss, (outputs, targets) to one value for each row or to their mean.
        outputs, targets: [b, ...]; targets may be several tensors, and those of mixed rows.
        mask: [b], 1 for rows and 0 for those that only fill a batch up: a loss for each row need not look at it.
        own: the tensors that were given for this client, by name.
        features: what goes into the last linear layer [b, d], under "model" for the model that is trained and under
            their names for the `LocalLoss.anchors`.
    """

    losses: Callable[[Any, Any], Tensor]
    outputs: Tensor
    targets: Any
    mask: Tensor
    own: Mapping[str, Tensor]
    features: Mapping[str, Tensor]


class LocalLoss(Protocol):
    """A loss in place of the objective's while a client trains, for `ClientContext.run_sgd`."""

    @property
    def reads_features(self) -> bool:
        """True if it is given features.  The model then needs a linear layer, see `parameters.head`."""

    @property
    def anchors(self) -> tuple[str, ...]:
        """Names of the client's own tensors that are models [p]: their features go along, in evaluation mode."""

    def batch_loss(self, batch: LossBatch) -> Tensor:
        """The loss of each row [b], written for one client, or one value for all of them."""
