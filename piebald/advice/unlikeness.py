"""Kinds of unlikeness among clients: size, label, feature, label given feature, speed.

Each is one number from 0 to 1 without a unit, so that federations with other inputs, classes and sizes can be compared:

- *size*: the Gini coefficient of the numbers of training rows; 0 if all are equal.
- *label*: the share of a client's rows that would have to change class to have the federation's shares, beyond what
  chance makes of so few rows: (TV - E) / (1 - E) with the total variation TV and its mean E over drawn labels.  Real
  targets are cut into five classes.
- *feature* and *label given feature*: see `probe`.
- *speed*: the share of a round that the mean device waits for the slowest, if all train one epoch.

A word says how that compares with `references`: "none" where chance explains the number, otherwise "mild", "moderate"
or "strong" for the lowest, middle or highest third of the reference federations that have this kind of unlikeness.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from piebald.advice.probe import ProbeResult, binned, inputs_of, probe, together
from piebald.contracts import Clients, Fleet, InMemory
from piebald.core.randomness import generator
from piebald.data.measures.heterogeneity import Floats, gini, total_variation
from piebald.data.partition.split import Ints

KINDS = {
    "size": "sizes",
    "label": "labels",
    "feature": "features",
    "label_given_feature": "labels given features",
    "speed": "speeds",
}
MOST_PROBED = 60  # clients; spread evenly over all
MOST_COUNTED = 5_000  # clients whose labels are counted, and that the probed ones are compared with
MOST_KEPT = 400  # rows of each client that is probed
MOST_OTHERS = 20_000  # rows of all others together
_DRAWS = 40
_SLIGHT = 0.05  # sizes and speeds below this are called alike
_ERRORS = 2.0  # standard errors below which a number is chance


@dataclass(frozen=True, slots=True)
class Unlikeness:
    """One kind of unlikeness.

    Attributes:
        kind: one of `KINDS`.
        value: from 0 (alike) to 1; None where it is not known.
        chance: the largest value that chance explains.
        word: "none", "mild", "moderate", "strong" or "unknown".
        like: the reference federation that is nearest, or None.
        why: why it is unknown, or None.
        clients: the number of each client [c], nan where it is not known, or None.
    """

    kind: str
    value: float | None
    chance: float = 0.0
    word: str = "unknown"
    like: str | None = None
    why: str | None = None
    clients: Floats | None = None

    def sentence(self) -> str:
        """One line of plain text."""
        name = KINDS[self.kind]
        if self.value is None:
            return f"{name}: not known, {self.why}"
        return f"{name}: {self.word} ({self.value:.2f}" + (f", like {self.like})" if self.like else ")")

    def row(self) -> dict[str, Any]:
        """Plain values for a page."""
        return {"kind": self.kind, "value": self.value, "chance": self.chance, "word": self.word, "like": self.like,
                "why": self.why}  # fmt: skip


@cache
def references() -> tuple[Mapping[str, Any], ...]:
    """Reference federations: name, and the value of each kind (None if unknown).

    Their data are those of `benchmarks/advise`; ``python -m benchmarks.advise.references`` makes the file.
    """
    text = files("piebald.advice").joinpath("references.json").read_text(encoding="utf-8")
    return tuple(json.loads(text)["federations"])


def unlikeness(clients: Clients, fleet: Fleet | None = None, seed: int = 0) -> list[Unlikeness]:
    """Measure every kind of unlikeness of clients, in the order of `KINDS`."""
    sizes = [clients.size(client, "train") for client in range(len(clients))]
    counted = [size for size in sizes if size is not None]
    if len(counted) < len(sizes):
        return [_unknown(kind, "rows are where this machine cannot count them") for kind in KINDS]
    if len(sizes) < 2:
        return [_unknown(kind, "there is one client") for kind in KINDS]
    measures = [_judged("size", gini(counted), _SLIGHT)]
    pool = _drawn(clients, seed)
    measures.append(_labels(clients, pool, seed))
    measures += _probed(pool, len(clients), seed)
    measures.append(_speed(counted, fleet))
    return measures


@dataclass(frozen=True, slots=True)
class _Pool:
    """Some rows of some clients.  `label` is None where targets are neither classes nor single numbers."""

    inputs: Floats | None
    label: Ints | None
    client: Ints
    probed: list[int]


def _drawn(clients: Clients, seed: int) -> _Pool | None:
    """Rows of the clients to probe and a few of the others', in their order; None where rows are not in memory."""
    if not isinstance(clients, InMemory) or not clients.in_memory():
        return None
    probed = _spread(len(clients), MOST_PROBED)
    # all others together are compared with one client, so each gives a few rows
    rows_each = max(2, MOST_OTHERS // len(clients))
    x: list[Floats | None] = []
    y: list[Tensor] = []
    owner: list[Ints] = []
    for client in sorted({*probed, *_spread(len(clients), MOST_COUNTED)}):
        rows, most = clients.rows(client, "train"), MOST_KEPT if client in probed else min(rows_each, MOST_KEPT)
        if len(rows) > most:
            # sorted, so that neighbours stay neighbours: probes hold out blocks of them
            drawn = np.sort(generator(seed, "look", client).choice(len(rows), most, replace=False))
            rows = rows[drawn]
        if len(rows):
            if not isinstance(rows.y, Tensor):
                return None
            x.append(inputs_of(rows.x) if isinstance(rows.x, Tensor) else None)
            y.append(rows.y)
            owner.append(np.full(len(rows), client))
    target = torch.cat(y).numpy()
    target = target[:, 0] if target.ndim == 2 and target.shape[1] == 1 else target
    label = None
    if target.ndim == 1:
        label = target.astype(np.int64) if clients.classes is not None else binned(target.astype(np.float64))
    usable = [part for part in x if part is not None]
    inputs = np.concatenate(usable) if len(usable) == len(x) else None
    # a gap in one row would make every distance NaN
    if inputs is not None and not np.isfinite(inputs).all():
        inputs = None
    return _Pool(inputs, label, np.concatenate(owner), probed)


def _spread(count: int, most: int) -> list[int]:
    """Up to `most` numbers below `count`, evenly spread."""
    return sorted(set(np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()))


def _labels(clients: Clients, pool: _Pool | None, seed: int) -> Unlikeness:
    numbers = _spread(len(clients), MOST_COUNTED)
    counted = [clients.counts(client, "train") for client in numbers] if clients.classes is not None else [None]
    if all(counts is not None for counts in counted):
        table = np.array(counted, dtype=np.int64)
    elif pool is not None and pool.label is not None:
        table = np.zeros((len(clients), int(pool.label.max()) + 1), dtype=np.int64)
        np.add.at(table, (pool.client, pool.label), 1)
    else:
        return _unknown("label", "targets are neither classes nor single numbers that can be counted here")
    # clients without rows have no shares
    table = table[table.sum(1) > 0]
    overall = table.sum(0)
    shares = overall / overall.sum()
    rng = generator(seed, "look", "labels")
    rows = table.sum(1)
    # chance: clients of the same sizes whose rows are dealt from all rows
    drawn = np.stack([rng.multivariate_hypergeometric(overall, size, size=_DRAWS) / size for size in rows])
    chance = np.abs(drawn - shares).sum(2) / 2  # [clients, draws]
    distance = np.array([total_variation(counts / counts.sum(), shares) for counts in table])
    usual = chance.mean(1)
    # 0 for a client as far off as chance makes it, 1 for one with nothing in common
    each = (distance - usual) / np.maximum(1 - usual, 1e-9)
    by_chance = ((chance - usual[:, None]) / np.maximum(1 - usual[:, None], 1e-9)).mean(0)
    # only where each client has a number: places would shift where some were left out
    by_client = each if len(each) == len(clients) else None
    return _judged("label", float(each.mean()), float(np.quantile(by_chance, 0.95)), by_client)


def _probed(pool: _Pool | None, count: int, seed: int) -> list[Unlikeness]:
    kinds = ("feature", "label_given_feature")
    if pool is None:
        return [_unknown(kind, "rows are fetched only when asked for") for kind in kinds]
    if pool.inputs is None or pool.label is None:
        return [_unknown(kind, "inputs or targets have no simple form, or gaps") for kind in kinds]
    results: dict[int, ProbeResult] = {}
    for client in pool.probed:
        if (result := probe(pool.inputs, pool.label, pool.client, client, seed)) is not None:
            results[client] = result
    if not results:
        return [_unknown(kind, "no client has enough rows of classes that others have, too") for kind in kinds]
    measures = []
    for kind in kinds:
        each = np.full(count, np.nan)
        each[list(results)] = [getattr(result, kind) for result in results.values()]
        # a mean over clients is less noisy than any of them, so it is judged and not the largest
        value, error = together(list(results.values()), kind)
        measures.append(_judged(kind, value, _ERRORS * error, each))
    return measures


def _speed(sizes: Sequence[int], fleet: Fleet | None) -> Unlikeness:
    if fleet is None:
        return _unknown("speed", "no devices are described")
    times = np.array([fleet.device(client).seconds_per_step * size for client, size in enumerate(sizes)])
    slowest = float(times.max())
    if slowest == 0:
        return _judged("speed", 0.0, _SLIGHT, times)
    return _judged("speed", 1 - float(times.mean()) / slowest, _SLIGHT, 1 - times / slowest)


def _judged(kind: str, value: float, chance: float, clients: NDArray[np.float64] | None = None) -> Unlikeness:
    # a difference of estimates may be slightly below zero
    value = min(max(value, 0.0), 1.0)
    if value <= chance:
        return Unlikeness(kind, value, chance, "none", None, None, clients)
    references_of_kind = [
        (float(federation[kind]), str(federation["name"]))
        for federation in references()
        if federation.get(kind) is not None
    ]
    present = sorted(level for level, _ in references_of_kind if level > 0)
    # thirds of the reference federations: words say where these clients stand among known data
    below = sum(level < value for level in present) / max(len(present), 1)
    word = "mild" if below < 1 / 3 else "moderate" if below < 2 / 3 else "strong"
    like = min(references_of_kind, key=lambda reference: abs(reference[0] - value))[1] if references_of_kind else None
    return Unlikeness(kind, value, chance, word, like, None, clients)


def _unknown(kind: str, reason: str) -> Unlikeness:
    return Unlikeness(kind, None, why=reason)
