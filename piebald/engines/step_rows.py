"""The rows that a stack of clients trains on, step by step: their positions, copied to the device for many steps at
once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from piebald.engines.device_copies import BLOCK, Array, moved_together
from piebald.engines.row_loader import Places, RngKey

Ranges = Callable[[list[int]], Iterator[tuple[int, int]]]
StepKeys = Callable[[int, int, int], "list[int] | None"]


class PassRows(NamedTuple):
    """The rows of one pass, which some clients of the stack share.

    Attributes:
        lo, hi: these clients.
        places: positions [c, b] of their rows, arrays or tensors on the device; short batches are filled up with their
            first row.
        mask: [c, b], 1 for real rows and 0 for those that fill up; None where all are real.
        keys: their dropout keys [c], or None where the model has no dropout.
        batch, rng_keys: the positions and the rng key of each client, on the host.
    """

    lo: int
    hi: int
    places: Any
    mask: Any
    keys: Any
    batch: Sequence[Places]
    rng_keys: Sequence[RngKey]


def passes(
    plans: Sequence[Sequence[Places]],
    rng_keys: Sequence[RngKey],
    ranges: Ranges,
    keys: StepKeys,
    device: torch.device,
) -> Iterator[list[PassRows]]:
    """The passes of each step.

    Args:
        plans: each client's mini-batches, those with most steps first.
        rng_keys: each client's rng key.
        ranges: which clients can share a pass, by the lengths of their batches.
        keys: the dropout keys of clients lo to hi in a step, from (lo, hi, step).
        device: where the rows are.
    """
    steps, waiting = list[list[PassRows]](), 0
    for step in range(len(plans[0]) if plans else 0):
        active = sum(len(plan) > step for plan in plans)
        host_rows = list[PassRows]()
        for lo, hi in ranges([len(plan[step]) for plan in plans[:active]]):
            drawn_keys = keys(lo, hi, step)
            batch = [plan[step] for plan in plans[lo:hi]]
            drawn = None if drawn_keys is None else np.array(drawn_keys, dtype=np.int64)
            host_rows.append(PassRows(lo, hi, *pad_rows(batch), drawn, batch, rng_keys[lo:hi]))
            waiting += host_rows[-1].places.size
        steps.append(host_rows)
        if waiting >= BLOCK:
            yield from _moved(steps, device)
            steps, waiting = [], 0
    yield from _moved(steps, device)


def _moved(steps: list[list[PassRows]], device: torch.device) -> Iterator[list[PassRows]]:
    """Some steps' passes on the device, by a copy each of positions, masks and keys."""
    rows = [row for step in steps for row in step]
    places = iter(moved_together([row.places for row in rows], device))
    mask = iter(moved_together([row.mask for row in rows if row.mask is not None], device))
    keys = iter(moved_together([row.keys for row in rows if row.keys is not None], device))
    for step in steps:
        yield [
            row._replace(
                places=next(places),
                mask=None if row.mask is None else next(mask),
                keys=None if row.keys is None else next(keys),
            )
            for row in step
        ]


def pad_rows(vectors: list[Places]) -> tuple[Array, Array | None]:
    """Positions [c, b], short batches filled up with their first row, and a mask [c, b] of real rows (None: all)."""
    lengths = np.fromiter(map(len, vectors), np.int64, len(vectors))
    longest = max(1, int(lengths.max()))
    if bool((lengths == longest).all()):
        return np.stack(vectors), None
    real = np.arange(longest) < lengths[:, np.newaxis]
    firsts = np.array([part[0] if len(part) else 0 for part in vectors])
    index = np.repeat(firsts[:, np.newaxis], longest, axis=1)
    index[real] = np.concatenate(vectors)
    return index, real.astype(np.float32)


def lay_out_rows(plans: Sequence[Sequence[Places]]) -> tuple[Places, list[int]]:
    """Lay out the positions of all steps' rows side by side.

    Args:
        plans: each client's mini-batches, those with most steps first.

    Returns:
        The positions [c, r], filled up as in `pad_rows`, and where each step begins and ends.
    """
    widths = [max(len(plan[step]) for plan in plans if len(plan) > step) for step in range(len(plans[0]))]
    ends = [0, *itertools.accumulate(widths)]
    index = np.empty((len(plans), ends[-1]), dtype=np.int64)
    for row, plan in zip(index, plans, strict=True):
        row[:] = plan[0][0] if plan else plans[0][0][0]
        for batch, start in zip(plan, ends, strict=False):
            row[start : start + len(batch)] = batch
    return index, ends
