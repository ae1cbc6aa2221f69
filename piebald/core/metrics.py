"""Metrics by name: functions of (outputs, targets) with one value for each example, which is averaged, and objects with
`update`, `compute` and `reset` (as torchmetrics'), which see all examples of a client.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from piebald.core.losses import by_example, on_logits, token_cross_entropy
from piebald.core.pytree import joined, logits
from piebald.core.targets import IGNORED, known, survival_pair

LOWER_IS_BETTER = frozenset({"loss", "absolute_error", "squared_error", "perplexity"})
# those that are the mean of a share of each example, so that one changes them by one over their number at most
SHARES = ("accuracy", "token_accuracy", "next_token_accuracy", "label_accuracy")
_OBJECT = "give torchmetrics' object of it (extra metrics), or a function of (outputs, targets)"
ELSEWHERE = {  # names of scikit-learn, without "_", and what is the same here
    "accuracyscore": "accuracy",
    "meanabsoluteerror": "absolute_error",
    "mae": "absolute_error",
    "meansquarederror": "squared_error",
    "mse": "squared_error",
    "rocauc": "auc",
    "rocaucscore": "auc",
    "concordanceindex": "concordance",
    **dict.fromkeys(("f1", "f1score", "f1macro", "f1micro", "balancedaccuracy", "precision", "recall", "r2", "r2score",
                     "matthewscorrcoef", "averageprecision"), _OBJECT),
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
        self._batches.append((logits(outputs).detach(), targets))

    def _all(self) -> tuple[Tensor, Any]:
        outputs, targets = zip(*self._batches, strict=True)
        return torch.cat(outputs), joined(targets)


class Auc(_Accumulated):
    """Area under the ROC curve: the probability that a positive example scores above a negative one; ties count half.

    For classes it is the mean of one class against the rest over all classes that occur, which for two classes is the
    usual definition; for independent labels [batch, labels] or one logit [batch] it is the mean over labels.  It is
    undefined if only one class occurs, and NaN then.  Computed from ranks (Mann, Whitney 1947).

    Examples:
        >>> auc = Auc()
        >>> auc.update(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
        >>> round(float(auc.compute()), 2)
        0.75
    """

    def compute(self) -> Tensor:
        """The area over all examples."""
        outputs, targets = self._all()
        counted = known(targets).reshape(len(targets), -1)
        if targets.dtype.is_floating_point or outputs.dim() < 2 or outputs.shape[1] == 1:
            scores = outputs.reshape(len(targets), -1)
            positive = (targets > 0.5).reshape(len(targets), -1)
        elif outputs.shape[1] == 2:
            scores, positive = (outputs[:, 1] - outputs[:, 0]).unsqueeze(1), (targets == 1).unsqueeze(1)
        else:
            scores = outputs.double().softmax(1)
            positive = targets.long().unsqueeze(1) == torch.arange(outputs.shape[1], device=targets.device)
        counted = counted.expand(positive.shape)
        # labels of which one class occurs only are NaN and left out of the mean
        areas = [_area(*(side[counted[:, k], k] for side in (scores, positive))) for k in range(scores.shape[1])]
        return torch.stack(areas).nanmean()


def _area(scores: Tensor, positive: Tensor) -> Tensor:
    """The area for one label: scores [batch], mask of positive examples [batch]."""
    _, place, count = torch.unique(scores, return_inverse=True, return_counts=True)
    # float64: sums of ranks exceed the 24 bits of float32 at some thousands of examples
    last = count.cumsum(0).double()
    rank = (last - (count - 1) / 2)[place]  # ties share the mean of their ranks
    many = positive.sum().double()
    area: Tensor = (rank[positive].sum() - many * (many + 1) / 2) / (many * (len(scores) - many))
    return area  # 0 / 0 is NaN


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
        for block in torch.split(torch.arange(len(time), device=hazard.device), _BLOCK):
            end, sooner = time[block].unsqueeze(1), hazard[block].unsqueeze(1)
            pairs = (end < time) | ((end == time) & (event == 0))
            pairs &= event[block].unsqueeze(1) == 1
            comparable = comparable + pairs.sum()
            right = right + 2 * (pairs & (sooner > hazard)).sum() + (pairs & (sooner == hazard)).sum()
        return (right.double() / (2 * comparable)).float()
