"""Digests of what a client was shown, over the very bytes that came."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from piebald.contracts.messages import MASKING, Task
from piebald.core.stored_vectors import raw

if TYPE_CHECKING:
    from torch import Tensor

SHOWN_BYTES = 32  # of a digest
_PRIVATE = "private"  # what a client begins with for itself: the run's terms hold a digest of it

_digests: dict[int, tuple[weakref.ref[Tensor], int, str]] = {}  # of tensors that are there, by their id


def shown_digest(values: Any, vectors: Mapping[str, Tensor]) -> bytes:
    """The digest [32] of JSON values and named tensors, each with its type, its shape and its bytes.

    It is the same on every machine for the same bytes, and in no other case.
    """
    parts = {name: [str(part.dtype), list(part.shape), _digest(part)] for name, part in vectors.items()}
    text = json.dumps([values, parts], sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=SHOWN_BYTES).digest()


def task_digest(task: Task) -> bytes:
    """The digest of all in a task that every member of a sum must have been shown alike.

    These are its version and attempt, from which randomness follows, its question with all arguments, the model and all
    other vectors.  Left out are its number, whose it is, the messages of the masking itself, which have digests of
    their own, and the first private numbers, which the terms of the run fix.
    """
    query = None if task.query is None else task.query.table()
    values = {"version": task.version, "attempt": task.attempt, "committed": task.committed, "query": query}
    vectors = task.vectors
    return shown_digest(values, {n: vectors[n] for n in vectors if n != _PRIVATE and not n.startswith(MASKING)})


def _digest(tensor: Tensor) -> str:
    """The digest of a tensor's bytes; that of a tensor which many clients are shown is computed once."""
    number, changes = id(tensor), -1 if tensor.is_inference() else tensor._version
    holder, changes_then, digest = _digests.get(number, (None, 0, ""))
    if holder is None or holder() is not tensor or changes_then != changes:
        digest = hashlib.blake2b(raw(tensor), digest_size=SHOWN_BYTES).hexdigest()
        _digests[number] = weakref.ref(tensor, lambda _: _digests.pop(number, None)), changes, digest
    return digest
