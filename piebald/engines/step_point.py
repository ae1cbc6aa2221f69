"""The gradients that a `contracts.LocalStep` may ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from piebald.contracts.local_step import Gradients, LocalStep
from piebald.core.errors import RuntimeFault

Hidden = Callable[[float, float], Gradients]  # from clip and deviation, see `contracts.StepPoint.hidden`


def no_hidden(clip: float, deviation: float) -> Gradients:
    """Refuse to hide rows whose batches and random numbers are no secret of the client."""
    raise RuntimeFault("only a step with hides_rows = True may ask for hidden gradients: set that of its class")


class StackPoint:
    """A `contracts.StepPoint` of a stack.

    Args:
        w: the models [c, p] that the parameters are views of, perhaps with their buffers.
        parameters: those that are trained, [c, ...] each.
        first: losses and gradients at w; buffers take in the batch.
        again: likewise, but for buffers that no view of w holds, which stay as they are.
        hidden: noisy sums of clipped gradients, where single rows are hidden.
    """

    def __init__(
        self,
        w: Tensor,
        parameters: Sequence[Tensor],
        first: Callable[[], Gradients],
        again: Callable[[], Gradients],
        hidden: Hidden | None = None,
    ) -> None:
        self._w, self._parameters, self._first, self._again = w, parameters, first, again
        self._asked, self.hidden = False, hidden or no_hidden

    def gradients(self, away: Iterable[Tensor] | None = None) -> Gradients:
        """See `contracts.StepPoint`."""
        if away is None and not self._asked:
            self._asked = True
            return self._first()
        # buffers that lie in w are put back below; those that do not are left alone by `again`
        compute, self._asked = self._again if self._asked else self._first, True
        before = self._w.detach().clone()
        with torch.no_grad():
            for parameter, distance in zip(self._parameters, away or (), strict=away is not None):
                parameter.detach().add_(distance)
        result = compute()
        with torch.no_grad():
            self._w.copy_(before)
        return result


def gradients_of_one(
    step: LocalStep,
    w: Tensor,
    parameters: Sequence[Tensor],
    compute: Callable[[], tuple[Tensor, Sequence[Tensor]]],
    hidden: Hidden | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return the mean loss and the gradients of a step of one model [p], whose tensors have no axis of clients."""

    def stacked() -> Gradients:
        loss, gradients = compute()
        return loss.unsqueeze(0), [gradient.unsqueeze(0) for gradient in gradients]

    views = [parameter.unsqueeze(0) for parameter in parameters]
    losses, gradients = step.gradients(StackPoint(w.unsqueeze(0), views, stacked, stacked, hidden))
    return losses[0], [gradient[0] for gradient in gradients]
