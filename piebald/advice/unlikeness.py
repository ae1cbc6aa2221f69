"""Kinds of unlikeness among clients: size, label, feature, label given feature, speed.

Each is one number from 0 to 1 without a unit, so that federations with other inputs, classes and sizes can be compared:

- *size*: the Gini coefficient of the numbers of training rows; 0 if all are equal.
- *label*: the share of a client's rows that would have to change class to have the federation's shares, beyond what
  chance makes of so few rows: (TV - E) / (1 - E) with the total variation TV and its mean E over drawn labels.  Real
  targets are cut into five classes.
- *feature* and *label given feature*: by probes, see below.
- *speed*: the share of a round that the mean device waits for the slowest, if all train one epoch.

A word says how that compares with `references`: "none" where chance explains the number, otherwise "mild", "moderate"
or "strong" for the lowest, middle or highest third of the reference federations that have this kind of unlikeness.

Probes: small kernel models that say, without training any network, how a client's rows differ from the others'.

Each client is compared with as many rows of the other clients as it has itself, drawn with the same number of rows of
each class ("matched").  So neither the number of rows nor the shares of classes tell the two apart, and what is left
is in the inputs, or in the labels that belong to the same inputs.

Two measures are taken of each client, by kernel ridge regression with a Gaussian kernel whose width is the median
distance (Garreau, Jitkrittum, Kanagawa 2017), cross-validated over blocks of neighbouring rows:

- *Feature*: how well a row of the client is told from a matched one by its inputs, as twice the area under the ROC
  curve minus 1: 0 if not at all, 1 if always (a classifier two-sample test: Lopez-Paz, Oquab 2017; Ben-David et al.
  2007 call the like the proxy A-distance).
- *Label given feature*: the accuracy that a probe loses on the client's rows if it learned from the matched rows
  instead of the client's own.  Inputs of both sides are moved and scaled to the same mean and deviation first, so that
  a shift of the inputs alone costs little.

Limits.  A probe sees inputs as `inputs_of` makes them (few pixels, no learned features), so it may miss what a network
would see.  A shift of inputs that is not one of mean and scale raises the second number as well.  Classes that only one
client has cannot be matched, and are left out; with disjoint classes both numbers are unknown, because features and
labels then cannot be told apart.  Where rows of a client resemble each other (windows of one recording), blocks of
neighbours keep most of that out, not all.
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

from piebald.contracts import Clients, Fleet, InMemory
from piebald.core.randomness import generator
from piebald.data.measures.heterogeneity import Floats, gini, total_variation
from piebald.data.measures.pictures import flat
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


FOLDS = 3
MOST_ROWS = 200  # of one client in a probe; an inverse of 2 * 200 rows takes some milliseconds
FEWEST_ROWS = 6  # matched rows below which a client is not probed
BINS = 5  # that real targets are cut into
MOST_NUMBERS = 512  # of an input
MOST_TOKENS = 512  # different ones
_RIDGE = 0.1  # beside the kernel's own 1


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The results of the probes of one client.

    Attributes:
        feature: the separability of its inputs from those of others, 0 to 1 (below 0 by chance only).
        feature_error: the standard error of it if there is no difference.
        label_given_feature: accuracy that is lost by learning from others, -1 to 1.
        label_given_feature_error: the standard error of it.
    """

    feature: float
    feature_error: float
    label_given_feature: float
    label_given_feature_error: float


def inputs_of(x: Tensor) -> Floats | None:
    """Inputs as vectors [n, d] for probes; None where there are too many tokens.

    Images and signals are averaged as in `data.measures.pictures.flat`, and of very many numbers some are drawn.
    Tokens are counted, and a token weighs half as much as the next one.
    """
    if x.dtype.is_floating_point:
        inputs = flat(x).double().numpy()
        if inputs.shape[1] > MOST_NUMBERS:
            # the key has no client and no seed: the inputs of all rows must lose the same numbers
            inputs = inputs[:, generator("look", "columns").permutation(inputs.shape[1])[:MOST_NUMBERS]]
        return inputs
    tokens = x.long().flatten(1)
    most = int(tokens.max()) + 1
    # counts of a whole vocabulary would be wider than a probe of a few hundred rows can learn from
    if most > MOST_TOKENS or int(tokens.min()) < 0:
        return None
    # the last token has the largest weight: in next-token tasks it says most about the target
    weights = 0.5 ** torch.arange(tokens.shape[1] - 1, -1, -1, dtype=torch.float64)
    counts = torch.zeros(len(tokens), MOST_TOKENS, dtype=torch.float64)
    return counts.scatter_add_(1, tokens, weights.expand(tokens.shape)).numpy()


def probe(inputs: Floats, label: Ints, client: Ints, number: int, seed: int) -> ProbeResult | None:
    """Compare one client with matched rows of all others; None if there are too few.

    Args:
        inputs: of all clients' rows [n, d].
        label: class of each row [n].
        client: client of each row [n].
        number: the client.
        seed: of the choice of rows.
    """
    rng = generator(seed, "probe", number)
    ours, theirs, block = _matched(label, client == number, rng)
    if len(ours) < FEWEST_ROWS:
        return None
    pooled = np.concatenate([inputs[ours], inputs[theirs]])
    # each number counts the same in distances, whatever its unit
    feature = _separability(_standard(pooled), np.concatenate([block, block]))
    # each side by itself: a client whose pictures are brighter should not count as one with other labels
    centred = np.concatenate([_standard(inputs[ours]), _standard(inputs[theirs])])
    lost = _lost_accuracy(centred, label[ours], np.unique(label), block)
    n = len(ours)
    return ProbeResult(
        feature=feature,
        # the variance of the Mann-Whitney statistic of n and n rows if there is no difference
        feature_error=2 * float(np.sqrt((2 * n + 1) / (12 * n * n))),
        label_given_feature=float(lost.mean()),
        # one more row of variance: a loss of zero on few rows is not known without error
        label_given_feature_error=float(np.sqrt((lost.var() + 1 / n) / n)),
    )


def _matched(label: Ints, is_own: NDArray[np.bool_], rng: np.random.Generator) -> tuple[Ints, Ints, Ints]:
    """Rows of the client and of others, class by class the same number; the block of each (the same for both)."""
    # the same share of every class, so that the shares of classes stay
    share = min(1.0, MOST_ROWS / max(int(is_own.sum()), 1))
    ours: list[Ints] = []
    drawn_theirs: list[Ints] = []
    blocks: list[Ints] = []
    for value in np.unique(label[is_own]):
        of_client, of_rest = np.flatnonzero(is_own & (label == value)), np.flatnonzero(~is_own & (label == value))
        count = min(len(of_rest), max(1, round(len(of_client) * share)))
        if not count:
            continue
        # sorted, so that rows that lie beside each other fall into one block and are held out together
        ours.append(np.sort(rng.choice(of_client, min(count, len(of_client)), replace=False)))
        drawn_theirs.append(np.sort(rng.choice(of_rest, len(ours[-1]), replace=False)))
        # Classes with few rows start at different blocks, or the first block would have all of them.
        start = int(rng.integers(FOLDS))
        blocks.append((np.arange(len(ours[-1])) * FOLDS // len(ours[-1]) + start) % FOLDS)
    if not ours:
        nothing = np.zeros(0, dtype=np.int64)
        return nothing, nothing, nothing
    return np.concatenate(ours), np.concatenate(drawn_theirs), np.concatenate(blocks)


def _standard(inputs: Floats) -> Floats:
    """Return each column [n, d] about its mean, in its standard deviation; 0 where all rows have one value."""
    # in a unit of each column's own first: squares of very large or very small numbers are no numbers
    largest = np.abs(inputs).max(0)
    scaled = inputs / np.where(largest > 0, largest, 1.0)
    deviation = scaled.std(0)
    # rounding leaves a constant a deviation of about 1e-16, in whose unit it would be the largest number of all
    varies = deviation > 1e-12
    return np.where(varies, (scaled - scaled.mean(0)) / np.where(varies, deviation, 1.0), 0.0)


def _separability(inputs: Floats, block: Ints) -> float:
    """2 AUC - 1 of a probe that tells the first half of the rows from the second, held-out rows only."""
    n = len(inputs) // 2
    side = np.repeat([1.0, 0.0], n)
    # one kernel for all folds; each takes its rows and columns of it
    kernel = _kernel(inputs)
    parts = []
    for fold in np.unique(block):
        test = block == fold
        # all rows in one block leave nothing to learn from
        if test.all():
            return 0.0
        score = _scores(kernel, side[:, None], ~test, test)[:, 0]
        first, second = score[side[test] == 1], score[side[test] == 0]
        # the share of pairs in order, less the share of the others, is twice the AUC less one
        parts.append(np.sign(first[:, None] - second[None, :]).mean() * test.sum())
    return float(sum(parts) / len(block))


def _lost_accuracy(inputs: Floats, label: Ints, classes: Ints, block: Ints) -> Floats:
    """For each row of the first half: right by the client's own probe minus right by that of the second half [n]."""
    n = len(label)
    kernel = _kernel(inputs)
    target = (np.concatenate([label, label])[:, None] == classes[None, :]).astype(np.float64)
    right = np.zeros((2, n))
    for fold in np.unique(block):
        held = block == fold
        nothing = np.zeros(n, dtype=bool)
        if held.all():
            continue
        for half in (0, 1):
            train = np.concatenate([~held, nothing] if half == 0 else [nothing, ~held])
            guess = classes[_scores(kernel, target, train, np.concatenate([held, nothing])).argmax(1)]
            right[half, held] = guess == label[held]
    return np.asarray(right[0] - right[1], dtype=np.float64)


def _kernel(inputs: Floats) -> Floats:
    squares = (inputs**2).sum(1)
    # rounding of the expanded square may leave a distance below 0
    distance = np.maximum(squares[:, None] + squares[None, :] - 2 * inputs @ inputs.T, 0.0)
    # the median heuristic, without the zeros of the diagonal
    typical = float(np.median(distance[~np.eye(len(distance), dtype=bool)]))
    return np.asarray(np.exp(-distance / max(typical, 1e-12)), dtype=np.float64)


def _scores(kernel: Floats, target: Floats, train: NDArray[np.bool_], test: NDArray[np.bool_]) -> Floats:
    """Kernel ridge regression of the centred targets [test rows, targets]."""
    # centred, or the ridge would draw scores of a rare class to zero
    middle = target[train].mean(0)
    ridged = kernel[np.ix_(train, train)] + _RIDGE * np.eye(int(train.sum()))
    return np.asarray(
        kernel[np.ix_(test, train)] @ np.linalg.solve(ridged, target[train] - middle) + middle, dtype=np.float64
    )


def binned(y: Floats, bins: int = BINS) -> Ints:
    """Real targets [n] as classes of about the same size."""
    # ties make edges equal, and a class between equal edges would have no row
    edges = np.quantile(y, np.arange(1, bins) / bins)
    return np.searchsorted(np.unique(edges), y, side="right")


def together(results: Sequence[ProbeResult], what: str) -> tuple[float, float]:
    """The mean of one number over clients, and its standard error."""
    values = np.array([getattr(result, what) for result in results])
    errors = np.array([getattr(result, f"{what}_error") for result in results])
    # errors of clients are taken as independent, though the others' rows are partly the same
    return float(values.mean()), float(np.sqrt((errors**2).sum()) / len(errors))
