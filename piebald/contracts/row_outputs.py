"""Contracts of what client code sees of single rows: the outputs of a model, and the features under its classifier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RowOutputs:
    """What a model makes of one client's rows.

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
        """Whether it is given features.  The model then needs a linear layer, see `parameters.head`."""

    @property
    def anchors(self) -> tuple[str, ...]:
        """Names of the client's own tensors that are models [p]: their features go along, in evaluation mode."""

    def batch_loss(self, batch: LossBatch) -> Tensor:
        """The loss of each row [b], written for one client, or one value for all of them."""
