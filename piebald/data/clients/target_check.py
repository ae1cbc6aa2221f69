"""Checks of every client's targets against what the loss takes, before anything is trained."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from piebald.contracts import Clients, InMemory, ModelSpec, Rows, RowsAtSites, Split
from piebald.core.errors import SettingError
from piebald.core.metrics import Auc
from piebald.core.objective import Objective, in_no_order
from piebald.core.targets import IGNORED, ClassNumbers, is_one_hot, known
from piebald.data.clients.pooled_clients import PooledClients
from piebald.data.clients.prepared import gathered_bytes

_MOST_NAMED = 10_000  # clients that are looked through

_SAID: WeakKeyDictionary[Clients, set[str]] = WeakKeyDictionary()  # what was logged about clients

_log = logging.getLogger(__name__)


def check_targets(clients: Clients, spec: ModelSpec, column: str | None = None) -> None:
    """Refuse targets that the loss cannot take, and log what is odd about those that it takes.

    Args:
        clients: the clients whose rows are here.
        spec: the model, and the loss that it is trained for.
        column: the name of the column of targets, where it is known.

    Raises:
        SettingError: a target is outside of the loss's domain; the message names client, column and row.
    """
    if isinstance(clients, RowsAtSites) and clients.elsewhere:
        return
    targets, named = list[Tensor](), f", column {column!r}" if column else ""
    for who, rows in _rows_of(clients, spec):
        spec.objective.check_targets(rows.y, spec.outputs, who + named)
        if isinstance(rows.y, Tensor) and len(rows):
            targets.append(rows.y)
    if targets and spec.objective.domain is not None:
        for text in _oddities(targets, spec, clients.classes):
            _say(clients, text)


def tell_of_lacking_rows(
    clients: Clients,
    objective: Objective,
    judged: Split | None,
    batch_of: Callable[[int], int],
    mixes: Callable[[int], bool],
) -> None:
    """Log, before anything is trained, which clients will train nothing or have no score, and why.

    Args:
        clients: the clients, whose numbers of rows may not be known.
        objective: by which models are judged.
        judged: the rows that models are judged by, None where they are not.
        batch_of: returns the rows in each step of a client.
        mixes: returns whether a client's model has a batch norm, see `trains_batch_norm`.

    Raises:
        SettingError: nobody can train.
    """
    auc = judged is not None and any(isinstance(metric, Auc) for metric in objective.metrics.values())
    lacking, lone = dict[str, list[str]](), list[str]()
    gathered = gathered_bytes(clients) is not None
    for client in range(min(len(clients), _MOST_NAMED)):
        name, size = str(clients.names[client]), clients.size(client, "train")
        if size == 0 and not gathered:
            lacking.setdefault("no training rows, which train nothing", []).append(name)
        elif (size == 1 or batch_of(client) == 1) and mixes(client):
            lone.append(name)
            what = "one training row" if size == 1 else "batches of one row"
            reason = f"{what}, which train nothing, since batch norm cannot train on a single one"
            lacking.setdefault(reason, []).append(name)
        if judged is None:
            continue
        counts = clients.counts(client, judged) if auc and clients.size(client, judged) is not None else None
        if clients.size(client, judged) == 0:
            lacking.setdefault(f"no {judged} rows, which have no score", []).append(name)
        elif counts is not None and sum(count > 0 for count in counts) < 2:
            lacking.setdefault(f"{judged} rows of one class, which have no auc", []).append(name)
    if len(lone) == len(clients):
        raise SettingError("batch norm cannot train on a single row: give clients two rows or more and a batch above 1")
    for reason, names in lacking.items():
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        _say(clients, f"clients with {reason}: {shown}")


def trains_batch_norm(spec: ModelSpec) -> bool:
    """Return whether a batch norm takes part in training, and not with the statistics that it has."""
    # a part of a model has the layers of the whole, and not all of their tensors
    in_layout = {slot.name.rpartition(".")[0] for slot in spec.layout.slots}
    # a copy, since `train()` changes the mode of all layers
    layers = copy.deepcopy(spec.model).train().named_modules()
    norms = ((name, layer) for name, layer in layers if isinstance(layer, nn.modules.batchnorm._BatchNorm))
    return any(norm.training and (name in in_layout or not norm.state_dict()) for name, norm in norms)


def _are_labels(targets: Tensor) -> bool:
    """Return whether targets are rows of several numbers, each 0, 1 or unknown."""
    return (
        targets.dim() == 2
        and targets.shape[1] > 1
        and bool(torch.isin(targets[known(targets)], torch.tensor([0.0, 1.0])).all())
    )


def _say(clients: Clients, text: str) -> None:
    """Log a sentence about clients once, however many runs they take part in."""
    try:
        said = _SAID.setdefault(clients, set())
    except TypeError:  # of a class whose objects cannot be remembered so
        said = set()
    if text not in said:
        said.add(text)
        _log.warning("%s", text)


def _rows_of(clients: Clients, spec: ModelSpec) -> Iterator[tuple[str, Rows]]:
    """Yield rows whose targets are to be checked, with their owner: all of a pool, or those of each client in turn.

    Rows that are loaded on demand are checked when they are first used.
    """
    # all rows at once are quick to check; client by client only where one is wrong, so that the error names it
    pool = _targets_of_pool(clients)
    if pool is not None and spec.objective.misfit(pool.y, spec.outputs) is None:
        yield "the clients", pool
    elif pool is not None and isinstance(clients, InMemory):
        for client in range(len(clients)):
            for split in get_args(Split):
                rows = pool[torch.from_numpy(clients.indices(client, split))]
                yield f"client {clients.names[client]!r}, {split} rows", rows
    if clients.common is not None:
        yield "the common test set", clients.common


def _targets_of_pool(clients: Clients) -> Rows | None:
    """Return the targets of all clients where they are in one pool; the inputs, which may be in files, are not read."""
    y = clients.y if isinstance(clients, PooledClients) else None
    if y is None and isinstance(clients, InMemory) and clients.in_memory():
        y = clients.pool().y
    return None if y is None else Rows(y, y)


def _oddities(targets: Sequence[Tensor], spec: ModelSpec, classes: Sequence[str] | None) -> Iterator[str]:
    """Yield sentences about what is odd of targets that are within the domain of a loss."""
    objective, outputs = spec.objective, spec.outputs
    if not isinstance(objective.domain, ClassNumbers):
        unknown = sum(int((~known(part)).sum()) for part in targets)
        if unknown and objective.name != "multilabel":
            yield (
                f"{unknown} targets of {IGNORED} or NaN count as unknown, in no loss and no metric: shift the scale if "
                f"{IGNORED} is a measurement"
            )
        if objective.name == "regression" and all(_are_labels(part) for part in targets):
            yield "targets are rows of 0 and 1, predicted as amounts: if they are labels, pass loss='multilabel'"
        return
    if objective.domain.last or not outputs:
        return
    if all(part.dim() == 2 and part.shape[1] == outputs[0] and is_one_hot(part) for part in targets):
        yield f"targets are one-hot rows of {outputs[0]} numbers: they are taken as classes"
        return
    if objective.name == "ordinal" and (words := in_no_order(classes or ())):
        yield f"{words}: give clients_from(..., classes=[...]) from low to high if it is another"
    held = torch.unique(torch.cat([torch.unique(part[known(part)]) for part in targets]))
    names = len(classes) if classes is not None else int(held.max()) + 1 if len(held) else 0
    if len(held) and int(held.min()) > 0 and int(held.max()) + 1 == outputs[0]:
        yield (
            f"no row has class 0 of the model's {outputs[0]} outputs: if classes are numbered from 1, subtract 1 or "
            "give their names as text"
        )
    elif outputs[0] > names:
        yield f"the model has {outputs[0]} outputs, and targets have {names} classes (0 to {names - 1})"
