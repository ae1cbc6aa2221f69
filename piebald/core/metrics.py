"""Metrics and losses by name, and thresholds of two classes.

Metrics are functions of (outputs, targets) with one value for each example, which is averaged, and objects with
`update`, `compute` and `reset` (as torchmetrics'), which see all examples of a client.  Losses are functions of
(outputs, targets) with one value for each example, [batch], so that engines can mask and batch them; `survival_loss`
and `model_loss` have one value for a whole batch.  Outputs are whatever a model returns; the losses take its scores
(`pytree.logits`), called outputs below.

A threshold says from which probability of the second class on a row is taken for it.  A half is right where both
mistakes cost the same and probabilities are right.  Where one class is rare, a model that is right on most rows may
recognise none of it; a threshold that is chosen on validation rows mends that without training.  One threshold for all
clients is one of 99 (`GRID`), so that counts of rows between them are all that is needed for it.

Source: Lipton, Elkan and Naryanaswamy, *Optimal thresholding of classifiers to maximize F1 measure*, ECML PKDD 2014.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from piebald.core.arguments import checked_class
from piebald.core.errors import SettingError, shown
from piebald.core.machine import moved
from piebald.core.pytree import joined, leaves, logits
from piebald.core.targets import IGNORED, counts_and_exposures, filled, known, parted, survival_pair

Loss = Callable[..., Tensor]

_LOSS_BLOCK = 1024  # events whose risk sets are summed at a time


def on_logits(function: Callable[..., Tensor]) -> Loss:
    """A loss or metric of scores, for any output of a model that has them (`pytree.logits`)."""

    @functools.wraps(function)
    def of_outputs(outputs: Any, targets: Any, *weights: Tensor, **settings: Any) -> Tensor:
        return function(logits(outputs), targets, *weights, **settings)

    return of_outputs


class MixedTargets(NamedTuple):
    """Targets of mix-up: two for each row, and the share of the first one [batch]."""

    first: Any
    second: Any
    share: Tensor


def for_training(loss: Loss) -> Loss:
    """A loss that takes `MixedTargets` and `Weighted` ones as well.

    Of the first it is the mean of both targets' losses by their shares; the weights of rows are left to the mean over
    rows, but for a loss that is one value for all of them.
    """

    def of_targets(outputs: Any, targets: Any) -> Tensor:
        if not isinstance(targets, MixedTargets):
            return weighed(loss, outputs, targets)
        first, second = of_targets(outputs, targets.first), of_targets(outputs, targets.second)
        # a loss that is one mean already has room for one share only
        share = targets.share if first.dim() else targets.share.mean()
        return share * first + (1 - share) * second

    return of_targets


def weighed(loss: Loss, outputs: Any, targets: Any) -> Tensor:
    """Return the loss of each row, which are still to be weighed, or one value for all that takes account of weights.

    Raises:
        SettingError: rows have weights, and the loss is a mean that does not know them.
    """
    plain, weights = parted(targets)
    if weights is not None and loss is survival_loss:
        return loss(outputs, plain, weights)
    values = loss(outputs, plain)
    if weights is not None and not values.dim():
        raise SettingError(
            "weights of rows need a loss with a value for each row, and this one returns a mean: return one value for "
            "each row, or leave out weights"
        )
    return values


def nonzero(total: Tensor) -> Tensor:
    """Return what a sum over rows is divided by: the sum of their weights, and 1 where that is 0."""
    return torch.where(total > 0, total, 1)


def by_example(value: Tensor, counted: Tensor) -> Tensor:
    """The mean of each example [batch, ...] over what is `counted` [batch, ...], 0 where nothing is."""
    value = value * counted
    return value if value.dim() == 1 else value.flatten(1).sum(1) / counted.flatten(1).sum(1).clamp(min=1)


def mean_over_rows(values: Tensor, counted: Tensor | None = None) -> Tensor:
    """The mean of rows' values [..., b] over those that are `counted` [..., b] or by these weights, 0 where none is.

    Examples:
        >>> mean_over_rows(torch.tensor([1.0, 3.0, 8.0]), torch.tensor([True, True, False]))
        tensor(2.)
        >>> mean_over_rows(torch.tensor([1.0, 3.0]), torch.tensor([0.75, 0.25]))
        tensor(1.5000)
    """
    if counted is None:
        return values.mean(-1)
    return (values * counted).sum(-1) / nonzero(counted.sum(-1))


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
def ordinal_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Loss of ordered classes from logits [batch, classes]: the log losses of "is it above k?", one for each k but the
    last, summed.

    A class far from the right one costs more than a neighbour.  It is the logarithmic ranked probability score (Tödter
    and Ahrens 2012), as CORAL's sum (Cao, Mirjalili and Raschka 2020) with cumulative sums of the softmax in place of
    logits of their own, so that these are in order and outputs mean probabilities of classes as elsewhere.

    Args:
        outputs: as above.
        targets: class numbers [batch], lowest first; -100 is unknown.
    """
    mask, classes = known(targets), torch.arange(outputs.shape[1], device=outputs.device)
    above = classes[None, :] > classes[:-1, None]  # [thresholds, classes]
    chances, nothing = functional.log_softmax(outputs, 1)[:, None], outputs.new_tensor(-torch.inf)
    more, less = (torch.where(part, chances, nothing).logsumexp(2) for part in (above, ~above))
    right = torch.where(filled(targets, mask)[:, None] > classes[:-1], more, less)
    return by_example(-right.sum(1), mask)


@on_logits
def rank_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """How many classes the most likely one is away from that of the target, in their order."""
    return by_example((outputs.argmax(1) - targets).abs().float(), known(targets))


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
        delta: the error above 0 at which the square becomes a line (Huber 1964): in the unit of a table's target where
            it is given, else one standard deviation of the target.
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


def count_events(targets: Any) -> float:
    """Return the number of events among those targets of `survival_pair` that are known, or the sum of their weights.

    A client's loss is by event, so an average by events is of the stratified partial likelihood of all clients.

    Examples:
        >>> count_events(torch.tensor([[2.0, 1.0], [3.0, 0.0]]))
        1
    """
    targets, weights = parted(targets)
    time, event = survival_pair(targets)
    events = known(time) & known(event) & (event > 0)
    return int(events.sum()) if weights is None else float(weights[events].double().sum())


@on_logits
def survival_loss(outputs: Tensor, targets: Any, weights: Tensor | None = None) -> Tensor:
    """Negative logarithm of Cox's partial likelihood over a batch, by event; tied times after Breslow (1974).

    -1/E sum over events i of (h_i - log sum over j with t_j >= t_i of exp h_j), with log hazards h = outputs [batch] or
    [batch, 1], and E events (Cox 1972).  A batch without events has the loss 0.  The risk sets are those of the batch:
    no client's rows are compared with those of another one, and larger batches come closer to the likelihood of all of
    a client's rows.  A row of weight w counts as w rows: in the sum over events, in risk sets and in E.
    """
    event, terms = _survival_terms(outputs, targets, weights)
    # a batch without events has the loss 0 and still a gradient, so that every engine can take its step
    total = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).sum() * 0.0
    for block in terms:
        total = total + block.sum()
    return total / nonzero(event.sum())


@on_logits
def count_loss(outputs: Tensor, targets: Any) -> Tensor:
    """Half the Poisson deviance of counts, mu - y + y log(y / mu), with the gradient of the negative log-likelihood.

    The mean mu is the exposure times exp(output), so that outputs are logarithms of rates for one unit of exposure.

    Args:
        outputs: [batch] or [batch, 1].
        targets: counts y [batch], or counts and exposures [batch, 2].

    Examples:
        >>> count_loss(torch.zeros(2, 1), torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
        tensor([0., 0.])
    """
    count, exposure = counts_and_exposures(targets)
    counted = known(count) & known(exposure)
    count, exposure = torch.where(counted, count, 0), torch.where(counted, exposure, 1)
    # under autocast outputs are of 16 bits, in which exponentials overflow
    rate = _as_targets(outputs, count).to(torch.promote_types(outputs.dtype, torch.float32))
    logarithm = rate + exposure.log()
    return (logarithm.exp() - count - count * logarithm + torch.xlogy(count, count)) * counted


def poisson_deviance(outputs: Any, targets: Any) -> Tensor:
    """The Poisson deviance of counts [batch], as `mean_poisson_deviance` of scikit-learn; see `count_loss`."""
    return 2 * count_loss(outputs, targets)


def survival_terms(outputs: Tensor, targets: Any, weights: Tensor | None = None) -> Tensor:
    """Return what each row's event adds to the numerator of `survival_loss` [batch], 0 of one without an event."""
    return torch.cat([*_survival_terms(outputs, targets, weights)[1]])


def _survival_terms(outputs: Tensor, targets: Any, weights: Tensor | None = None) -> tuple[Tensor, Iterator[Tensor]]:
    """Return how much each row's event counts [batch], and the terms of all rows in blocks."""
    time, event = survival_pair(targets)
    counted = known(time) & known(event)
    event = event * counted
    # under autocast outputs are of 16 bits, in which sums over risk sets would overflow
    hazard = outputs.reshape(len(time)).to(torch.promote_types(outputs.dtype, torch.float32))
    risk = hazard
    if weights is not None:
        event, risk = event * weights, hazard + weights.clamp(min=1e-30).log()  # a weight of 0 is in no risk set

    def blocks() -> Iterator[Tensor]:
        for block in torch.split(torch.arange(len(time), device=hazard.device), _LOSS_BLOCK):
            # all pairs of a batch at once would take its square in memory
            at_risk = (time.unsqueeze(0) >= time[block].unsqueeze(1)) & counted
            at_risk |= ~counted[block].unsqueeze(1)  # of an unknown row, which counts nowhere: no empty risk set
            rest = torch.where(at_risk, risk.unsqueeze(0), -torch.inf).logsumexp(1)
            yield event[block] * (rest - hazard[block])

    return event, blocks()


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


LOWER_IS_BETTER = frozenset({
    "loss", "absolute_error", "mae", "squared_error", "rmse", "perplexity", "brier", "calibration_error", "log_loss",
})  # fmt: skip
# those that are the mean of a share of each example, so that one changes them by one over their number at most
SHARES = ("accuracy", "token_accuracy", "next_token_accuracy", "label_accuracy")
# values between which a metric lies by its meaning; others are finite
_BOUNDS = {
    **dict.fromkeys((*SHARES, "auc", "average_precision", "f1", "sensitivity", "specificity", "balanced_accuracy",
                     "concordance", "calibration_error", "attack_success"), (0.0, 1.0)),
    "brier": (0.0, 2.0),
    "r2": (-math.inf, 1.0),
    **dict.fromkeys(("absolute_error", "mae", "squared_error", "rmse", "weight"), (0.0, math.inf)),
    "perplexity": (1.0, math.inf),
}  # fmt: skip
_ROUNDING = 1e-4  # by which a value that was computed in float32 may miss its bounds
REPLICATES = 30  # of a jackknife: a metric is computed once without each of so many groups of rows
_OBJECT = "give torchmetrics' object of it (extra metrics), or a function of (outputs, targets)"
ELSEWHERE = {  # names of scikit-learn, without "_", and what is the same here
    "accuracyscore": "accuracy",
    "meanabsoluteerror": "absolute_error",
    "rootmeansquarederror": "rmse",
    "f1macro": "f1",
    "f1score": "f1",
    "recall": "sensitivity",
    "r2score": "r2",
    "averageprecisionscore": "average_precision",
    "brierscore": "brier",
    "ece": "calibration_error",
    "meansquarederror": "squared_error",
    "mse": "squared_error",
    "rocauc": "auc",
    "rocaucscore": "auc",
    "concordanceindex": "concordance",
    **dict.fromkeys(("f1micro", "precision", "matthewscorrcoef"), _OBJECT),
}  # fmt: skip
_BLOCK = 1024  # examples that are compared with all others at a time


def impossible_reason(name: str, value: float, own: Collection[str] = ()) -> str | None:
    """Return why a number that a client tells cannot be the value of a metric, or None.

    Args:
        name: of the metric, with or without the model that it is about, like "global/accuracy".
        value: what the client says.
        own: names of metrics of the user's own, who may mean a share in percent by "accuracy".

    Examples:
        >>> impossible_reason("global/accuracy", 7.0), impossible_reason("loss", 7.0)
        ('sent 7 as accuracy, which lies between 0 and 1', None)
    """
    name = name.rpartition("/")[2]
    low, high = (-math.inf, math.inf) if name in own else _BOUNDS.get(name, (-math.inf, math.inf))
    if math.isnan(value) or low - _ROUNDING <= value <= high + _ROUNDING:
        return None
    return f"sent {value:.4g} as {name}, which " + (
        f"is {low:g} or more" if high == math.inf else f"is at most {high:g}" if low == -math.inf
        else f"lies between {low:g} and {high:g}"
    )  # fmt: skip


@on_logits
def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 if the largest logit is that of the target, else 0; one value per example, targets of -100 left out.

    Examples:
        >>> accuracy(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]))
        tensor([1., 0.])
    """
    return by_example((outputs.argmax(1) == targets).float(), known(targets))


@on_logits
def token_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of an example's places [batch, length] whose largest logit is that of the target, -100 left out."""
    return accuracy(outputs.movedim(-1, 1), targets)


@on_logits
def next_token_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of an example's tokens that are the most likely ones after those before them, -100 left out."""
    return token_accuracy(outputs[:, :-1], targets[:, 1:])


@on_logits
def label_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of an example's known labels that are predicted correctly with a logit threshold of 0."""
    return by_example(((outputs.reshape(targets.shape) > 0) == (targets > 0.5)).float(), known(targets))


class _Accumulated:
    """A metric of all examples of a client."""

    higher_is_better = True
    takes_weights = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all examples."""
        self._batches: list[tuple[Tensor, Any]] = []

    def update(self, outputs: Any, targets: Any) -> None:
        """Add examples: what the model returned, and the targets, which may be `Weighted`."""
        # detached, or the graph of each batch would be kept until the metric is computed
        self._batches.append((logits(outputs).detach(), targets))

    def _all(self) -> tuple[Tensor, Any, Tensor]:
        """Outputs, targets and the weights of all examples."""
        outputs, batches = zip(*self._batches, strict=True)
        targets, weights = parted(joined(batches))
        return torch.cat(outputs), targets, torch.ones(len(leaves(targets)[0])) if weights is None else weights


class OfAllRows(_Accumulated):
    """A metric of all examples of a client together; NaN where it is undefined, as an area is with one class alone.

    Args:
        score: function of (outputs, targets, weights of examples) in float64 on the CPU, with one number.
        higher_is_better: whether a larger value is better.

    """

    def __init__(self, score: Callable[[Tensor, Tensor, Tensor], float], higher_is_better: bool = True) -> None:
        super().__init__()
        self._score, self.higher_is_better = score, higher_is_better

    def compute(self) -> Tensor:
        """The metric of all examples."""
        outputs, targets, weights = self._all()
        score = self._score(outputs.double().cpu(), targets.cpu(), weights.double().cpu())
        return torch.tensor(float(score), dtype=torch.float64)


class Auc(OfAllRows):
    """Area under the ROC curve: the probability that a positive example scores above a negative one; ties count half.

    For classes it is the mean of one class against the rest over all classes that occur, which for two classes is the
    usual definition; for independent labels [batch, labels] or one logit [batch] it is the mean over labels.

    Examples:
        >>> auc = Auc()
        >>> auc.update(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
        >>> round(float(auc.compute()), 2)
        0.75
    """

    def __init__(self) -> None:
        super().__init__(functools.partial(over_classes, "roc_auc_score"))


def _sides(
    outputs: Tensor, targets: Tensor, weights: Tensor, predicted: bool = False
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Scores, or predictions, the mask of positive examples and weights [n] for each class against the rest, or each
    label.

    Two classes are one side, the second class; so are one logit [n] and independent labels [n, labels] for each label.
    """
    counted = known(targets).reshape(len(targets), -1)
    if targets.dtype.is_floating_point or outputs.dim() < 2 or outputs.shape[1] == 1:
        scores, positive = outputs.reshape(len(targets), -1), (targets > 0.5).reshape(len(targets), -1)
        scores = scores > 0 if predicted else scores
    else:
        classes = torch.arange(outputs.shape[1])[-1:] if outputs.shape[1] == 2 else torch.arange(outputs.shape[1])
        positive = targets.long().unsqueeze(1) == classes
        scores = outputs.argmax(1, keepdim=True) == classes if predicted else outputs.softmax(1)[:, classes]
        if outputs.shape[1] == 2 and not predicted:  # probabilities near 1 would tie
            scores = outputs[:, 1:] - outputs[:, :1]
    counted = counted.expand(positive.shape)
    return [(scores[held, k], positive[held, k], weights[held]) for k, held in enumerate(counted.T)]


def over_classes(name: str, outputs: Tensor, targets: Tensor, weights: Tensor) -> float:
    """The mean over classes or labels of which both sides occur, of a function of scikit-learn that ranks scores."""
    from sklearn import metrics

    sides = [side for side in _sides(outputs, targets, weights) if 0 < side[1].sum() < len(side[1])]
    score = getattr(metrics, name)
    return _mean([score(true.numpy(), scores.numpy(), sample_weight=held.numpy()) for scores, true, held in sides])


def _mean(values: Sequence[float]) -> float:
    """The mean of the values that are numbers, NaN without any."""
    defined = [value for value in values if not math.isnan(value)]
    return sum(defined) / len(defined) if defined else math.nan


def _share(right: Tensor, weights: Tensor) -> float:
    """The share of examples that are right by their weights, NaN without any."""
    return float((right * weights).sum() / weights.sum())


def recall(of_positive: bool, outputs: Tensor, targets: Tensor, weights: Tensor) -> float:
    """Sensitivity, or specificity: the share of (not) positive examples that are recognised, the mean over sides."""
    sides = [(s == of_positive, p == of_positive, w) for s, p, w in _sides(outputs, targets, weights, True)]
    return _mean([_share(predicted[true], held[true]) for predicted, true, held in sides])


def balanced_accuracy(outputs: Tensor, targets: Tensor, weights: Tensor) -> float:
    """The mean over classes that occur of the share of their examples that are recognised."""
    sides = _sides(outputs, targets, weights, True)
    if len(sides) > 1 and not targets.dtype.is_floating_point:
        return recall(True, outputs, targets, weights)
    return _mean([_mean([_share(s[p == v] == v, w[p == v]) for v in (True, False)]) for s, p, w in sides])


def macro_f1(outputs: Tensor, targets: Tensor, weights: Tensor) -> float:
    """F1, the mean over classes, or over labels, each of them the harmonic mean of precision and recall."""
    from sklearn.metrics import f1_score

    f1 = functools.partial(f1_score, zero_division=0.0)
    if targets.dtype.is_floating_point:
        sides = _sides(outputs, targets, weights, True)
        return _mean([f1(p.numpy(), s.numpy(), sample_weight=w.numpy()) for s, p, w in sides])
    held = known(targets)
    return float(f1(targets[held], outputs[held].argmax(1), average="macro", sample_weight=weights[held]))


def _probabilities(outputs: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities [n, classes], the class and the weight [n] of known examples; a logit of its own is two classes."""
    if outputs.dim() < 2 or outputs.shape[1] == 1:
        outputs = torch.stack([torch.zeros_like(outputs.reshape(-1)), outputs.reshape(-1)], 1)
    held = known(targets.reshape(-1))
    return outputs[held].softmax(1), targets.reshape(-1)[held].long(), weights[held]


def brier(outputs: Tensor, targets: Tensor, weights: Tensor) -> float:
    """The mean squared error of probabilities: of the second of two classes, else the sum over classes (Brier 1950)."""
    shares, true, held = _probabilities(outputs, targets, weights)
    squares = (shares - torch.nn.functional.one_hot(true, shares.shape[1])).square().sum(1)
    return _share(squares, held) / (2 if shares.shape[1] == 2 else 1)


def calibration_error(outputs: Tensor, targets: Tensor, weights: Tensor, bins: int = 15) -> float:
    """The mean gap between confidence and accuracy over bins of confidence, by their examples (Naeini et al. 2015)."""
    shares, true, held = _probabilities(outputs, targets, weights)
    confidence, predicted = shares.max(1)
    # a confidence on the boundary of two bins belongs to the lower one
    place = torch.bucketize(confidence, torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1])
    gaps = held * (confidence - (predicted == true).double())
    gaps = torch.zeros(bins, dtype=torch.float64).index_add(0, place, gaps)
    return float(gaps.abs().sum() / held.sum()) if len(true) else math.nan


def r2(outputs: Tensor, targets: Tensor, weights: Tensor) -> float:
    """The share of the variance that is explained; undefined below two examples."""
    from sklearn.metrics import r2_score

    held = known(targets)
    true, predicted = targets[held], outputs.reshape(targets.shape)[held]
    return float(r2_score(true, predicted, sample_weight=_each(weights, held))) if len(true) > 1 else math.nan


def rmse(outputs: Tensor, targets: Tensor, weights: Tensor) -> float:
    """The root of the mean squared error, in the unit of the target."""
    held = known(targets)
    return math.sqrt(_share((outputs.reshape(targets.shape) - targets)[held].square(), _each(weights, held)))


def _each(weights: Tensor, held: Tensor) -> Tensor:
    """The weight of each known number [n, ...] of examples."""
    return weights.view(-1, *[1] * (held.dim() - 1)).expand(held.shape)[held]


class Perplexity:
    """exp of the mean negative log-likelihood of a client's tokens, -100 left out.

    Every token counts once, so that long texts count for more, as is usual for perplexity.  It is NaN without tokens.

    Args:
        shifted: whether targets are the tokens of the inputs, so that those of the next place are predicted; if not,
            each place has its own target.
    """

    higher_is_better = False
    takes_weights = True

    def __init__(self, shifted: bool = True) -> None:
        self._shifted = shifted
        self.reset()

    def reset(self) -> None:
        """Forget all examples."""
        self._total, self._tokens = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)

    def update(self, outputs: Any, targets: Tensor) -> None:
        """Add examples: logits [batch, length, vocabulary] and token ids [batch, length]."""
        scores, (targets, weights) = logits(outputs).detach(), parted(targets)
        if self._shifted:
            scores, targets = scores[:, :-1], targets[:, 1:]
        counted = (targets != IGNORED).sum(1) * (1 if weights is None else weights.double())
        self._total = self._total + (token_cross_entropy(scores, targets).double() * counted).sum()  # on their device
        self._tokens = self._tokens + counted.sum()

    def compute(self) -> Tensor:
        """The perplexity of all tokens."""
        return (self._total / self._tokens).exp()  # without tokens 0 / 0, not a number


class Concordance(_Accumulated):
    """Harrell's C: of the pairs of which one is known to live longer, the share in which the other has the higher
    score; equal scores count half (Harrell et al. 1982).

    A pair is known if the shorter time ends with an event, or if both times are equal and one of them ends with an
    event and the other is censored.  It is NaN where no pair is known.  Outputs are log hazards [batch] or [batch, 1],
    targets those of `survival_pair`.  A pair counts by the product of its examples' weights.
    """

    def compute(self) -> Tensor:
        """The share over all pairs."""
        outputs, targets, weights = self._all()
        time, event = survival_pair(targets)
        counted = known(time) & known(event)
        weight = weights.to(time.device)[counted].double()
        time, event, hazard = time[counted], event[counted], outputs.reshape(len(time))[counted]
        right = comparable = torch.zeros((), dtype=torch.float64)  # `right` in halves
        # all pairs at once would take memory with the square of the examples
        for block in torch.split(torch.arange(len(time), device=hazard.device), _BLOCK):
            end, sooner = time[block].unsqueeze(1), hazard[block].unsqueeze(1)
            pairs = (end < time) | ((end == time) & (event == 0))
            pairs &= event[block].unsqueeze(1) == 1
            halves = 2 * (pairs & (sooner > hazard)) + (pairs & (sooner == hazard)).int()
            comparable = comparable + weight[block] @ (pairs.double() @ weight)
            right = right + weight[block] @ (halves.double() @ weight)
        return (right / (2 * comparable)).float()


@checked_class
class AttackSuccess:
    """Attack success rate of flipped labels: a metric of runs (DistFL, eq. 9, averaged over the flipped classes).

    Of the test rows of class a, the share that the model takes for b, where a was flipped to b; then the mean over the
    flipped classes that have rows.  NaN where none has.  Its name needs the pairs of classes that were swapped:
    ``metrics=["accuracy", {"name": "attack_success", "pairs": [[0, 4]]}]``.

    Args:
        flips: what each flipped class became.
    """

    higher_is_better = False

    def __init__(self, flips: Mapping[int, int]) -> None:
        if not flips or any(a == b for a, b in flips.items()):
            raise SettingError(f"flips must say what each flipped class became, like {{0: 4, 4: 0}}, got {flips!r}")
        self.flips = dict(flips)
        self.reset()

    @classmethod
    def of_pairs(cls, pairs: Sequence[Sequence[int]]) -> AttackSuccess:
        """For classes swapped in pairs, as the change `flip_pairs` does it."""
        return cls({a: b for first, second in pairs for a, b in ((first, second), (second, first))})

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The rate of these rows alone."""
        self.reset()
        self.update(outputs, targets)
        return self.compute()

    def reset(self) -> None:
        """Forget all rows."""
        self._rows = dict.fromkeys(self.flips, 0)
        self._hits = dict.fromkeys(self.flips, 0)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count rows: logits [n, classes] and true classes [n]."""
        predicted = outputs.argmax(1)
        for source, goal in self.flips.items():
            of_source = targets == source
            self._rows[source] += int(of_source.sum())
            self._hits[source] += int((predicted[of_source] == goal).sum())

    def compute(self) -> Tensor:
        """The rate so far."""
        rates = [self._hits[source] / rows for source, rows in self._rows.items() if rows]
        return torch.tensor(sum(rates) / len(rates) if rates else math.nan)


Floats = NDArray[np.float64]
CRITERIA = ("accuracy", "balanced_accuracy", "f1")
LEAST = ("sensitivity", "specificity")  # of which the other one is the best that leaves this one at least a share
METRICS = (*CRITERIA, *LEAST)
GRID = np.log(np.arange(1, 100) / np.arange(99, 0, -1))  # the logits of 0.01, 0.02 ... 0.99
_POOLED = "pooled "


def best_threshold(leads: Floats, positive: NDArray[np.bool_], criterion: str) -> float | None:
    """Return the threshold that is best by a criterion, the one nearest to a half where several are.

    Args:
        leads: the second class's scores less those of the first [n], the logits of its probability.
        positive: whether rows are of the second class [n].
        criterion: one of `CRITERIA`, or, as "sensitivity=0.9", the least value of one of `LEAST`; after "pooled ", of
            the thresholds of the grid.

    Returns:
        A probability; None without rows of both classes, or where scores are no numbers.

    Raises:
        SettingError: there is no such criterion.

    Examples:
        The third row is ill, and is recognised from a threshold of 0.3 down.

        >>> leads = np.log(np.array([0.1, 0.2, 0.4, 0.9]) / np.array([0.9, 0.8, 0.6, 0.1]))
        >>> round(best_threshold(leads, np.array([False, False, True, True]), "f1"), 2)
        0.29
    """
    name, least = parsed(criterion)
    if positive.all() or not positive.any() or not np.isfinite(leads).all():
        return None
    cuts = GRID
    if not criterion.startswith(_POOLED):
        values = np.unique(leads)
        # one cut between each two neighbours and one beyond either end: every way to divide the rows occurs once
        cuts = np.concatenate([[values[0] - 1], (values[1:] + values[:-1]) / 2, [values[-1] + 1]])
    shares = rates(cuts, leads, positive)
    if least is None:
        goodness = shares[name]
    else:
        other = shares[LEAST[1 - LEAST.index(name)]]
        # below any share, so that a cut without the least share loses to each one that has it
        goodness = np.where(shares[name] >= least, other, -1.0)
    # shares that are equal but for rounding tie, or the choice among them would be the processor's
    best = cuts[goodness >= goodness.max() - 1e-12]
    return 1 / (1 + math.exp(-float(best[np.abs(best).argmin()])))


def rates(cuts: Floats, leads: Floats, positive: NDArray[np.bool_]) -> Mapping[str, Floats]:
    """The metrics of two classes where rows with a lead above a cut are taken for the second, each [cuts]."""
    ill, well = np.sort(leads[positive]), np.sort(leads[~positive])
    # "right": a row whose lead is the cut itself is not above it
    missed, spared = (np.searchsorted(scores, cuts, side="right").astype(float) for scores in (ill, well))
    hit, wrong = len(ill) - missed, len(well) - spared
    mistakes = missed + wrong
    with np.errstate(invalid="ignore"):  # without rows of a class its share is undefined
        sensitivity, specificity = hit / len(ill) if len(ill) else hit * np.nan, (
            spared / len(well) if len(well) else spared * np.nan)  # fmt: skip
        f1 = (2 * hit / (2 * hit + mistakes) + 2 * spared / (2 * spared + mistakes)) / 2
    return {
        "accuracy": (hit + spared) / max(1, len(leads)),
        "balanced_accuracy": np.nanmean([sensitivity, specificity], axis=0),
        "f1": f1,
        "sensitivity": sensitivity,
        "specificity": specificity,
    }


def parsed(criterion: str) -> tuple[str, float | None]:
    """Return the name of a criterion and its least value, None for one that is to be the largest."""
    name, _, text = criterion.strip().removeprefix(_POOLED).replace(" ", "").partition("=")
    try:
        least = float(text) if text else None
    except ValueError:
        least = math.nan
    if (name in CRITERIA and not text) or (name in LEAST and least is not None and 0 < least <= 1):
        return name, least
    raise SettingError(
        f"threshold must be one of {', '.join(CRITERIA)}, or a least share such as sensitivity=0.9 or "
        f"specificity=0.9, with 'pooled ' before it for one threshold for all clients, got {shown(criterion)}"
    )


def checked_criterion(criterion: str, pooled: bool = False) -> str:
    """Return a criterion as it is written everywhere, for all clients if `pooled` or it says so.

    Raises:
        SettingError: there is no such criterion.

    Examples:
        >>> checked_criterion("sensitivity = 0.9"), checked_criterion("f1", pooled=True)
        ('sensitivity=0.9', 'pooled f1')
    """
    parsed(criterion)
    plain = criterion.strip().removeprefix(_POOLED)
    prefix = _POOLED if pooled or plain != criterion.strip() else ""
    return prefix + plain.replace(" ", "")


def is_pooled(criterion: str) -> bool:
    """Return whether a criterion is for one threshold for all clients."""
    return criterion.startswith(_POOLED)


def best_on_validation(criterion: str, owner: str) -> str:
    """Return in words how a threshold was chosen.

    Examples:
        >>> best_on_validation("f1", "the site"), best_on_validation("pooled f1", "the site")
        ('the best for f1 on the validation rows of the site', 'the best for f1 on the validation rows of all clients')
    """
    whose = "all clients" if is_pooled(criterion) else owner
    return f"the best for {criterion.removeprefix(_POOLED)} on the validation rows of {whose}"
