"""Losses by name: functions of (outputs, targets) with one value for each example, [batch], so that engines can mask
and batch them.  `survival_loss` and `model_loss` have one value for a whole batch.

Outputs are whatever a model returns; the losses take its scores (`pytree.logits`), called outputs below.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from piebald.core.errors import SettingError
from piebald.core.machine import moved
from piebald.core.pytree import logits
from piebald.core.targets import IGNORED, filled, known, survival_pair

Loss = Callable[..., Tensor]

_BLOCK = 1024  # events whose risk sets are summed at a time


def on_logits(function: Callable[..., Tensor]) -> Loss:
    """A loss or metric of scores, for any output of a model that has them (`pytree.logits`)."""

    @functools.wraps(function)
    def of_outputs(outputs: Any, targets: Any, **settings: Any) -> Tensor:
        return function(logits(outputs), targets, **settings)

    return of_outputs


class MixedTargets(NamedTuple):
    """Targets of mix-up: two for each row, and the share of the first one [batch]."""

    first: Any
    second: Any
    share: Tensor


def for_training(loss: Loss) -> Loss:
    """A loss that takes `MixedTargets` as well: then it is the mean of both targets' losses by their shares."""

    def of_targets(outputs: Any, targets: Any) -> Tensor:
        if not isinstance(targets, MixedTargets):
            return loss(outputs, targets)
        first, second = loss(outputs, targets.first), loss(outputs, targets.second)
        # a loss that is one mean already has room for one share only
        share = targets.share if first.dim() else targets.share.mean()
        return share * first + (1 - share) * second

    return of_targets


def by_example(value: Tensor, counted: Tensor) -> Tensor:
    """The mean of each example [batch, ...] over what is `counted` [batch, ...], 0 where nothing is."""
    value = value * counted
    return value if value.dim() == 1 else value.flatten(1).sum(1) / counted.flatten(1).sum(1).clamp(min=1)


def mean_over_rows(values: Tensor, counted: Tensor | None = None) -> Tensor:
    """The mean of rows' values [..., b] over those that are `counted` [..., b], 0 where none is.

    Examples:
        >>> mean_over_rows(torch.tensor([1.0, 3.0, 8.0]), torch.tensor([True, True, False]))
        tensor(2.)
    """
    if counted is None:
        return values.mean(-1)
    return (values * counted).sum(-1) / counted.sum(-1).clamp(min=1)


# -- classes and labels


@on_logits
def cross_entropy(
    outputs: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, class_weights: Sequence[float] | None = None
) -> Tensor:
    """Cross-entropy of logits [batch, classes, ...] with class numbers [batch, ...], one value per example.

    -100 is unknown: an example's value is the mean over its known targets, and 0 where it has none.

    Args:
        outputs, targets: as above.
        label_smoothing: share of the target that is spread over all classes, in [0, 1) (Szegedy et al. 2016).
        class_weights: a factor for the examples of each class [classes].  The mean over a batch divides by the number
            of examples, not by the sum of their weights as torch's "mean" does, so that batches of all engines agree.
    """
    weight = None if class_weights is None else _on_device(class_weights, outputs)
    value = functional.cross_entropy(
        outputs, targets.long(), weight=weight, label_smoothing=label_smoothing, ignore_index=IGNORED, reduction="none"
    )
    return by_example(value, known(targets))


@on_logits
def binary_cross_entropy(
    outputs: Tensor, targets: Tensor, *, positive_weights: Sequence[float] | None = None
) -> Tensor:
    """Cross-entropy of independent labels: logits and 0/1 targets of one shape, the mean over an example's labels.

    Args:
        outputs, targets: as above.
        positive_weights: a factor for the 1s of each label [labels].
    """
    weight, mask = None if positive_weights is None else _on_device(positive_weights, outputs), known(targets)
    value = functional.binary_cross_entropy_with_logits(
        _as_targets(outputs, targets), filled(targets, mask).float(), pos_weight=weight, reduction="none"
    )
    return by_example(value, mask)


def _on_device(weights: Sequence[float], outputs: Tensor) -> Tensor:
    """Weights beside the outputs, without making the host wait at every step."""
    return moved(torch.tensor(weights, dtype=outputs.dtype), outputs.device)


def _as_targets(outputs: Tensor, targets: Tensor) -> Tensor:
    """Outputs in the shape of the targets."""
    if outputs.numel() != targets.numel():
        raise SettingError(
            f"outputs {list(outputs.shape)} must be as many numbers as targets {list(targets.shape)}: give the model "
            "an output for each number to predict, or classes as whole numbers"
        )
    return outputs.reshape(targets.shape)


# -- numbers


@on_logits
def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error, the mean over an example's outputs.

    Examples:
        >>> squared_error(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 1.0]))
        tensor([0., 4.])
    """
    mask = known(targets)
    return by_example((_as_targets(outputs, targets) - filled(targets, mask)).square(), mask)


@on_logits
def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Absolute error, the mean over an example's outputs."""
    mask = known(targets)
    return by_example((_as_targets(outputs, targets) - filled(targets, mask)).abs(), mask)


@on_logits
def huber_loss(outputs: Tensor, targets: Tensor, *, delta: float = 1.0) -> Tensor:
    """Huber loss, the mean over an example's outputs: e^2 / 2 up to an error e of delta, delta (e - delta / 2) beyond.

    Args:
        outputs, targets: of one shape.
        delta: the error above 0 at which the square becomes a line (Huber 1964).
    """
    mask = known(targets)
    value = functional.huber_loss(_as_targets(outputs, targets), filled(targets, mask), delta=delta, reduction="none")
    return by_example(value, mask)


# -- sequences


@on_logits
def token_cross_entropy(
    outputs: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, class_weights: Sequence[float] | None = None
) -> Tensor:
    """Cross-entropy of logits [batch, length, classes] with a class for each place [batch, length], -100 ignored.

    The value of an example is the mean over its places, so that a long text counts as much as a short one.
    """
    return cross_entropy(outputs.movedim(-1, 1), targets, label_smoothing=label_smoothing, class_weights=class_weights)


@on_logits
def next_token_loss(outputs: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of each place's logits [batch, length, vocabulary] with the token at the next one.

    Targets [batch, length] are the token ids of the inputs themselves, as the `labels` of a Hugging Face model: they
    are shifted here.  -100 is ignored, e.g. where texts are padded.
    """
    return token_cross_entropy(outputs[:, :-1], targets[:, 1:], label_smoothing=label_smoothing)


# -- survival


def count_events(targets: Any) -> int:
    """Return the number of events among those targets of `survival_pair` that are known.

    A client's loss is by event, so an average by events is of the stratified partial likelihood of all clients.

    Examples:
        >>> count_events(torch.tensor([[2.0, 1.0], [3.0, 0.0]]))
        1
    """
    time, event = survival_pair(targets)
    return int((event[known(time) & known(event)] > 0).sum())


@on_logits
def survival_loss(outputs: Tensor, targets: Any) -> Tensor:
    """Negative logarithm of Cox's partial likelihood over a batch, by event; tied times after Breslow (1974).

    -1/E sum over events i of (h_i - log sum over j with t_j >= t_i of exp h_j), with log hazards h = outputs [batch] or
    [batch, 1], and E events (Cox 1972).  A batch without events has the loss 0.  The risk sets are those of the batch:
    no client's rows are compared with those of another one, and larger batches come closer to the likelihood of all of
    a client's rows.
    """
    time, event = survival_pair(targets)
    counted = known(time) & known(event)
    event = event * counted
    # under autocast outputs are of 16 bits, in which sums over risk sets would overflow
    hazard = outputs.reshape(len(time)).to(torch.promote_types(outputs.dtype, torch.float32))
    # a batch without events has the loss 0 and still a gradient, so that every engine can take its step
    total = hazard.sum() * 0.0
    for block in torch.split(torch.arange(len(time), device=hazard.device), _BLOCK):
        # all pairs of a batch at once would take its square in memory
        at_risk = (time.unsqueeze(0) >= time[block].unsqueeze(1)) & counted
        at_risk |= ~counted[block].unsqueeze(1)  # of an unknown row, which counts nowhere: no empty risk set
        rest = torch.where(at_risk, hazard.unsqueeze(0), -torch.inf).logsumexp(1)
        total = total + (event[block] * (rest - hazard[block])).sum()
    return total / event.sum().clamp(min=1)


# -- whatever the model says


def model_loss(outputs: Any, targets: Any) -> Tensor:
    """The loss that the model itself returns as "loss", as Hugging Face models do with `labels` among their inputs.

    Raises:
        SettingError: it returns none.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if not isinstance(loss, Tensor):
        raise SettingError(
            "loss 'model' takes the loss that the model returns, and it returns none: put 'labels' among its inputs, "
            "or name another loss"
        )
    return loss
