"""Baselines for vertical transfer.  All of them have all data in one place, and none of them encrypts.

`train_jointly`  the same losses and networks, MMD without encryption: exact kernels, autograd
`source_only`    the source's model on the features that the target has in common with it
`overlap_only`   the target's network trained on the co-occurring rows, with the source's labels
`pooled`         an upper bound: both parties' features and all labels
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from piebald.core.errors import SettingError
from piebald.core.randomness import generator
from piebald.vertical.kernels import Kernel, mmd2
from piebald.vertical.party import Party
from piebald.vertical.party_data import PartyHolding
from piebald.vertical.party_network import PartyNetwork, taylor_loss
from piebald.vertical.party_secret import PartySecret
from piebald.vertical.protocol import ROLES, Role
from piebald.vertical.transfer_methods import Smmd
from piebald.vertical.transfer_results import TransferScore, transfer_score
from piebald.vertical.transfer_settings import TransferSettings


def train_jointly(
    data: Mapping[Role, PartyHolding], settings: TransferSettings, kernels: Sequence[Kernel] = (), exact: bool = True
) -> tuple[Party, Party]:
    """Train both parties in one place, with gradients by autograd through both networks.

    Args:
        data: the data of both parties.
        settings: settings with method smmd; the backend is not used.
        kernels: kernels whose mean is used instead of the settings' kernel.
        exact: use the exact kernels; otherwise their moment forms, which the protocol computes.

    Returns:
        The source and the target; the target can predict on its own.
    """
    if not isinstance(settings.method, Smmd):
        raise SettingError(f"method must be smmd to be trained in one place, got {settings.method.kind}")
    source, target = (Party(role, data[role], settings, PartySecret.simulated(settings.seed, role)) for role in ROLES)
    kernels = kernels or (settings.method.kernel,)
    for step in range(settings.steps):
        source.done = target.done = step
        views = source.view(), target.view()
        phi, labels = views[0].phi, views[0].labels
        assert phi is not None, "the source has labels"
        assert labels is not None, "the source has labels"
        loss = taylor_loss(views[1].common @ phi, labels)
        for x, y in zip(views[0].layers, views[1].layers, strict=True):
            discrepancies = [mmd2(kernel, x, y, exact) for kernel in kernels]  # the mean kernel's is their mean
            loss = loss + settings.method.alpha * torch.stack(discrepancies).mean()
        if views[0].own_loss is not None:
            loss = loss + views[0].own_loss
        for party in (source, target):
            party.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for party in (source, target):
            party.optimizer.step()
    source.done = target.done = settings.steps
    target.phi, target.rate = source.summary()
    return source, target


def source_only(data: Mapping[Role, PartyHolding], settings: TransferSettings) -> TransferScore:
    """Score the source's model on the target's test rows, with the source's mean for features that the target lacks."""
    source, target = data["source"], data["target"]
    assert source.y is not None
    model = supervised(source.x, source.y, settings, "source only")
    return transfer_score(model(as_seen(source, target)), target.test_y, float((source.y > 0).double().mean()))


def as_seen(source: PartyHolding, target: PartyHolding) -> Tensor:
    """Return the target's test rows with the source's features, at its mean where the target lacks one."""
    rows = source.x.mean(0).repeat(len(target.test), 1)
    for place, name in enumerate(source.features):
        if name in target.features:
            rows[:, place] = target.test[:, target.features.index(name)]
    return rows


def overlap_only(data: Mapping[Role, PartyHolding], settings: TransferSettings) -> TransferScore:
    """Score the target's network, trained on the co-occurring rows with the source's labels and on no other rows."""
    source, target = data["source"], data["target"]
    assert source.y is not None
    labels = source.y[source.overlap]
    model = supervised(target.x[target.overlap], labels, settings, "overlap only")
    return transfer_score(model(target.test), target.test_y, float((labels > 0).double().mean()))


def pooled(x: Tensor, y: Tensor, test: Tensor, test_y: Tensor, settings: TransferSettings) -> TransferScore:
    """Score one network trained on all features of both parties and all training labels."""
    model = supervised(x, y, settings, "pooled")
    return transfer_score(model(test), test_y, float((y > 0).double().mean()))


def supervised(x: Tensor, y: Tensor, settings: TransferSettings, name: str) -> Callable[[Tensor], Tensor]:
    """Train a party's network with a logistic classifier on top, by cross-entropy.

    Args:
        x: rows [n, f].
        y: labels, -1 or 1 [n].
        settings: settings of the transfer that is compared; their steps, batch size and learning rate are used.
        name: name of the baseline, part of its rng keys.

    Returns:
        A function from rows to probabilities of the positive class.
    """
    secret = PartySecret.simulated(settings.seed, name)
    network = PartyNetwork(x.shape[1], settings.network.hidden, settings.network.aligned, secret)
    head = nn.Linear(settings.network.aligned[-1], 1, dtype=torch.float64)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    parameters = [*network.parameters(), *head.parameters()]
    make = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.SGD
    optimizer = make(parameters, lr=settings.lr, weight_decay=settings.beta)
    rows = min(settings.batch, len(x))
    for step in range(settings.steps):
        batch = generator(settings.seed, name, step).choice(len(x), rows, replace=False)
        scores = head(network(x[batch])[-1])[:, 0]
        loss = nn.functional.softplus(-y[batch] * scores).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def predict(inputs: Tensor) -> Tensor:
        with torch.no_grad():
            probabilities: Tensor = torch.sigmoid(head(network(inputs)[-1])[:, 0])
        return probabilities

    return predict
