"""Rows that all clients of a run have in common."""

from __future__ import annotations

import hashlib

import torch

from piebald.contracts import Clients, HasPublicRows, Rows
from piebald.core import pytree


def public_rows_of(clients: Clients) -> Rows | None:
    """The rows that all of these clients have, or None."""
    return clients.public_rows if isinstance(clients, HasPublicRows) else None


def rows_digest(rows: Rows | None) -> str:
    """A digest of the form and the numbers of some rows, in their order; "" for none.

    Clients compare their models' outputs row by row, so all must have the same rows in the same order.
    """
    if rows is None:
        return ""
    digest = hashlib.sha256()
    for what, tree in (("x", rows.x), ("y", rows.y)):
        for name, leaf in pytree.named_leaves(tree):
            digest.update(f"{what} {name} {leaf.dtype} {list(leaf.shape)}\n".encode())
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
