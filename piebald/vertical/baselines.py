"""What a transfer is compared with.  All of them see everything in one place, and none of them encrypts.

`together`     the same losses and networks, MMD without encryption: exact kernels, autograd
`source_only`  the source's model on what the target has in common with it
`overlap_only` the target's network trained on the co-occurring rows, with the source's labels
`pooled`       an upper bound: both parties' features and all labels
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from piebald.errors import SettingError
from piebald.randomness import generator
from piebald.vertical.holdings import PartyHolding
from piebald.vertical.kernels import Kernel, mmd2
from piebald.vertical.networks import Network, taylor_loss
from piebald.vertical.party import Party
from piebald.vertical.protocol import Role
from piebald.vertical.transfer_methods import Smmd
from piebald.vertical.transfer_settings import TransferSettings


@dataclass(frozen=True, slots=True)
class TransferScore:
    """How well rows nobody trained on are told apart.

    Attributes:
        auc: area under the ROC curve.
        f1: of the positives, when the share of rows called positive is the source's share of positives.
        precision: likewise.
    """

    auc: float
    f1: float
    precision: float


def judge(scores: Tensor, labels: Tensor, rate: float) -> TransferScore:
    """Judge scores [n] by labels -1 or 1 [n]; the highest `rate` of them are called positive."""
    from sklearn.metrics import f1_score, precision_score, roc_auc_score

    called = np.zeros(len(scores), dtype=bool)
    called[np.argsort(-scores.numpy(), kind="stable")[: round(rate * len(scores))]] = True
    true = (labels > 0).numpy()
    return TransferScore(
        auc=float(roc_auc_score(true, scores.numpy())),
        f1=float(f1_score(true, called, zero_division=0)),
        precision=float(precision_score(true, called, zero_division=0)),
    )


def together(
    holdings: Mapping[Role, PartyHolding], settings: TransferSettings, kernel: Kernel | None = None, exact: bool = True
) -> tuple[Party, Party]:
    """Train both parties in one place, with gradients by autograd through both networks.

    Args:
        holdings: of both.
        settings: with method smmd; the backend plays no part.
        kernel: another one than the settings', for instance `MultiGaussianKernel`.
        exact: take kernels as they are; otherwise as their moment forms have them, which the protocol computes.

    Returns:
        The source and the target, which can predict alone.
    """
    if not isinstance(settings.method, Smmd):
        raise SettingError(f"method must be smmd to be trained in one place, got {settings.method.kind}")
    source, target = (Party(role, holdings[role], settings) for role in ("source", "target"))
    chosen = kernel or settings.method.kernel
    for step in range(settings.steps):
        source.done = target.done = step
        views = source.view(), target.view()
        phi, labels = views[0].phi, views[0].labels
        assert phi is not None, "the source has labels"
        assert labels is not None, "the source has labels"
        loss = taylor_loss(views[1].common @ phi, labels)
        for x, y in zip(views[0].layers, views[1].layers, strict=True):
            loss = loss + settings.method.alpha * mmd2(chosen, x, y, exact)
        if views[0].own is not None:
            loss = loss + views[0].own
        for party in (source, target):
            party.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for party in (source, target):
            party.optimiser.step()
    source.done = target.done = settings.steps
    target.phi, target.rate = source.summary()
    return source, target


def source_only(holdings: Mapping[Role, PartyHolding], settings: TransferSettings) -> TransferScore:
    """The source's model on the target's test rows: features that the target has not are put at the source's mean."""
    source, target = holdings["source"], holdings["target"]
    assert source.y is not None
    model = supervised(source.x, source.y, settings, "source only")
    mean = source.x.mean(0)
    rows = mean.repeat(len(target.test), 1)
    for place, name in enumerate(source.features):
        if name in target.features:
            rows[:, place] = target.test[:, target.features.index(name)]
    return judge(model(rows), target.test_y, float((source.y > 0).double().mean()))


def overlap_only(holdings: Mapping[Role, PartyHolding], settings: TransferSettings) -> TransferScore:
    """The target's network with the source's labels of the co-occurring rows, and no other rows."""
    source, target = holdings["source"], holdings["target"]
    assert source.y is not None
    labels = source.y[source.overlap]
    model = supervised(target.x[target.overlap], labels, settings, "overlap only")
    return judge(model(target.test), target.test_y, float((labels > 0).double().mean()))


def pooled(x: Tensor, y: Tensor, test: Tensor, test_y: Tensor, settings: TransferSettings) -> TransferScore:
    """One network on all features of both parties and all training labels, for rows of which all features are known."""
    model = supervised(x, y, settings, "pooled")
    return judge(model(test), test_y, float((y > 0).double().mean()))


def supervised(x: Tensor, y: Tensor, settings: TransferSettings, name: str) -> Callable[[Tensor], Tensor]:
    """A party's network with a logistic classifier on top, trained by cross-entropy with the settings' steps and rates.

    Args:
        x: rows [n, f].
        y: labels, -1 or 1 [n].
        settings: of the transfer that it is compared with.
        name: for the seeds.

    Returns:
        A function from rows to probabilities of the positive class.
    """
    network = Network(x.shape[1], settings.network.hidden, settings.network.aligned, seed=(settings.seed, name))
    head = nn.Linear(settings.network.aligned[-1], 1, dtype=torch.float64)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    parameters = [*network.parameters(), *head.parameters()]
    optimiser = torch.optim.Adam(parameters, lr=settings.lr, weight_decay=settings.beta)
    rows = min(settings.batch, len(x))
    for step in range(settings.steps):
        batch = generator(settings.seed, name, step).choice(len(x), rows, replace=False)
        scores = head(network(x[batch])[-1])[:, 0]
        loss = nn.functional.softplus(-y[batch] * scores).mean()
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    def predict(given: Tensor) -> Tensor:
        with torch.no_grad():
            scored: Tensor = torch.sigmoid(head(network(given)[-1])[:, 0])
        return scored

    return predict


def interval(values: list[float]) -> tuple[float, float]:
    """The mean and half the width of its 95% interval over seeds (Student's t); nan for a single value."""
    from scipy.stats import t

    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, math.nan
    return mean, float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
