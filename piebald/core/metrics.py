"""Metrics by name: functions of (outputs, targets) with one value for each example, which is averaged, and objects with
`update`, `compute` and `reset` (as torchmetrics'), which see all examples of a client.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from piebald.core.arguments import checked_class
from piebald.core.errors import SettingError
from piebald.core.losses import by_example, on_logits, token_cross_entropy
from piebald.core.pytree import joined, logits
from piebald.core.targets import IGNORED, known, survival_pair

LOWER_IS_BETTER = frozenset({
    "loss", "absolute_error", "mae", "squared_error", "rmse", "perplexity", "brier", "calibration_error", "log_loss",
})  # fmt: skip
# those that are the mean of a share of each example, so that one changes them by one over their number at most
SHARES = ("accuracy", "token_accuracy", "next_token_accuracy", "label_accuracy")
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

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all examples."""
        self._batches: list[tuple[Tensor, Any]] = []

    def update(self, outputs: Any, targets: Any) -> None:
        """Add examples: what the model returned, and the targets."""
        # detached, or the graph of each batch would be kept until the metric is computed
        self._batches.append((logits(outputs).detach(), targets))

    def _all(self) -> tuple[Tensor, Any]:
        outputs, targets = zip(*self._batches, strict=True)
        return torch.cat(outputs), joined(targets)


class OfAllRows(_Accumulated):
    """A metric of all examples of a client together; NaN where it is undefined, as an area is with one class alone.

    Args:
        score: function of (outputs, targets) in float64 on the CPU, with one number.
        higher_is_better: whether a larger value is better.

    """

    def __init__(self, score: Callable[[Tensor, Tensor], float], higher_is_better: bool = True) -> None:
        super().__init__()
        self._score, self.higher_is_better = score, higher_is_better

    def compute(self) -> Tensor:
        """The metric of all examples."""
        outputs, targets = self._all()
        return torch.tensor(float(self._score(outputs.double().cpu(), targets.cpu())), dtype=torch.float64)


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


def _sides(outputs: Tensor, targets: Tensor, predicted: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Scores, or predictions, and the mask of positive examples [n] for each class against the rest, or each label.

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
    return [(scores[held, k], positive[held, k]) for k, held in enumerate(counted.T)]


def over_classes(name: str, outputs: Tensor, targets: Tensor) -> float:
    """The mean over classes or labels of which both sides occur, of a function of scikit-learn that ranks scores."""
    from sklearn import metrics

    sides = [(scores, positive) for scores, positive in _sides(outputs, targets) if 0 < positive.sum() < len(positive)]
    return _mean([getattr(metrics, name)(positive.numpy(), scores.numpy()) for scores, positive in sides])


def _mean(values: Sequence[float]) -> float:
    """The mean of the values that are numbers, NaN without any."""
    defined = [value for value in values if not math.isnan(value)]
    return sum(defined) / len(defined) if defined else math.nan


def recall(of_positive: bool, outputs: Tensor, targets: Tensor) -> float:
    """Sensitivity, or specificity: the share of (not) positive examples that are recognised, the mean over sides."""
    held = [(scores == of_positive, positive == of_positive) for scores, positive in _sides(outputs, targets, True)]
    return _mean([float(predicted[true].double().mean()) for predicted, true in held])


def balanced_accuracy(outputs: Tensor, targets: Tensor) -> float:
    """The mean over classes that occur of the share of their examples that are recognised."""
    sides = _sides(outputs, targets, True)
    if len(sides) > 1 and not targets.dtype.is_floating_point:
        return recall(True, outputs, targets)
    return _mean([_mean([float((s[p == v] == v).double().mean()) for v in (True, False)]) for s, p in sides])


def macro_f1(outputs: Tensor, targets: Tensor) -> float:
    """F1, the mean over classes, or over labels, each of them the harmonic mean of precision and recall."""
    from sklearn.metrics import f1_score

    if targets.dtype.is_floating_point:
        return _mean([f1_score(p.numpy(), s.numpy(), zero_division=0.0) for s, p in _sides(outputs, targets, True)])
    held = known(targets)
    return float(f1_score(targets[held], outputs[held].argmax(1), average="macro", zero_division=0.0))


def _probabilities(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities [n, classes] and the class [n] of known examples; a logit of its own is two classes."""
    if outputs.dim() < 2 or outputs.shape[1] == 1:
        outputs = torch.stack([torch.zeros_like(outputs.reshape(-1)), outputs.reshape(-1)], 1)
    held = known(targets.reshape(-1))
    return outputs[held].softmax(1), targets.reshape(-1)[held].long()


def brier(outputs: Tensor, targets: Tensor) -> float:
    """The mean squared error of probabilities: of the second of two classes, else the sum over classes (Brier 1950)."""
    shares, true = _probabilities(outputs, targets)
    squares = (shares - torch.nn.functional.one_hot(true, shares.shape[1])).square().sum(1)
    return float(squares.mean()) / (2 if shares.shape[1] == 2 else 1)


def calibration_error(outputs: Tensor, targets: Tensor, bins: int = 15) -> float:
    """The mean gap between confidence and accuracy over bins of confidence, by their examples (Naeini et al. 2015)."""
    shares, true = _probabilities(outputs, targets)
    confidence, predicted = shares.max(1)
    # a confidence on the boundary of two bins belongs to the lower one
    place = torch.bucketize(confidence, torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1])
    gaps = torch.zeros(bins, dtype=torch.float64).index_add(0, place, confidence - (predicted == true).double())
    return float(gaps.abs().sum() / len(true)) if len(true) else math.nan


def r2(outputs: Tensor, targets: Tensor) -> float:
    """The share of the variance that is explained; undefined below two examples."""
    from sklearn.metrics import r2_score

    held = known(targets)
    true, predicted = targets[held], outputs.reshape(targets.shape)[held]
    return float(r2_score(true, predicted)) if len(true) > 1 else math.nan


def rmse(outputs: Tensor, targets: Tensor) -> float:
    """The root of the mean squared error, in the unit of the target."""
    held = known(targets)
    return float((outputs.reshape(targets.shape) - targets)[held].square().mean().sqrt())


class Perplexity:
    """exp of the mean negative log-likelihood of a client's tokens, -100 left out.

    Every token counts once, so that long texts count for more, as is usual for perplexity.  It is NaN without tokens.

    Args:
        shifted: whether targets are the tokens of the inputs, so that those of the next place are predicted; if not,
            each place has its own target.
    """

    higher_is_better = False

    def __init__(self, shifted: bool = True) -> None:
        self._shifted = shifted
        self.reset()

    def reset(self) -> None:
        """Forget all examples."""
        self._total, self._tokens = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)

    def update(self, outputs: Any, targets: Tensor) -> None:
        """Add examples: logits [batch, length, vocabulary] and token ids [batch, length]."""
        scores = logits(outputs).detach()
        if self._shifted:
            scores, targets = scores[:, :-1], targets[:, 1:]
        counted = (targets != IGNORED).sum(1)
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
    targets those of `losses.survival_pair`.
    """

    def compute(self) -> Tensor:
        """The share over all pairs."""
        outputs, targets = self._all()
        time, event = survival_pair(targets)
        counted = known(time) & known(event)
        time, event, hazard = time[counted], event[counted], outputs.reshape(len(time))[counted]
        right = comparable = torch.zeros((), dtype=torch.int64)  # `right` in halves
        # all pairs at once would take memory with the square of the examples
        for block in torch.split(torch.arange(len(time), device=hazard.device), _BLOCK):
            end, sooner = time[block].unsqueeze(1), hazard[block].unsqueeze(1)
            pairs = (end < time) | ((end == time) & (event == 0))
            pairs &= event[block].unsqueeze(1) == 1
            comparable = comparable + pairs.sum()
            right = right + 2 * (pairs & (sooner > hazard)).sum() + (pairs & (sooner == hazard)).sum()
        return (right.double() / (2 * comparable)).float()


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
