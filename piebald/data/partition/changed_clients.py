"""Apply data changes to clients whose rows are in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from piebald.core.pytree import single
from piebald.data.clients.convert import floats
from piebald.data.clients.pooled_clients import PooledClients
from piebald.data.partition.data_change import DataChange
from piebald.data.partition.three_way_split import SPLITS
from piebald.data.sets.decoded import Decoded


def changed(clients: PooledClients, changes: Sequence[DataChange], x: Tensor | Decoded) -> PooledClients:
    """A copy of these clients with changed rows; `common` stays clean.

    Labels, and inputs that change with them, change in training and validation rows only, so test rows stay correct.
    Other changes of inputs, such as a worse camera, apply to all rows of the client.

    Args:
        clients: the clients.
        changes: changes, applied in this order.
        x: the inputs as stored.

    Raises:
        SettingError: a change that does not fit these rows or clients.
    """
    y = single(clients.y, "a change of rows").clone()
    moved = x[:].clone() if any(not change.of_labels for change in changes) else None
    for change in changes:
        for client in change.chosen(len(clients)).tolist():
            poisons = change.of_labels or change.of_both
            splits = SPLITS[:2] if poisons else SPLITS
            rows = torch.from_numpy(np.concatenate([clients.indices(client, split) for split in splits]))
            if poisons and (clients.classes is None or y.dim() != 1):
                raise change.refuse("rows do not have one class each, so labels cannot be flipped")
            classes = len(clients.classes or ())
            if change.of_labels:
                y[rows] = torch.from_numpy(change.labels(y[rows].numpy(), classes, client))
            elif moved is not None and change.of_both:
                inputs, labels = change.rows(floats(moved[rows]), y[rows].numpy(), classes, client)
                moved[rows], y[rows] = _stored(inputs, moved), torch.from_numpy(labels)
            elif moved is not None:
                moved[rows] = _stored(change.inputs(floats(moved[rows]), client), moved)
    parts = {split: clients.lists(split) for split in SPLITS}
    x = x if moved is None else moved
    return PooledClients(
        x,
        y,
        parts,
        names=clients.names,
        classes=clients.classes,
        common=clients.common,
        server_rows=clients.server_rows,
        public_rows=clients.public_rows,
    )


def _stored(values: Tensor, like: Tensor) -> Tensor:
    """Convert float inputs to the stored type; images stay in their range."""
    if like.dtype == torch.uint8:
        return (values * 255).round().clamp(0, 255).to(torch.uint8)
    if like.dim() == 4:
        values = values.clamp(0, 1)
    return values.to(like.dtype)
