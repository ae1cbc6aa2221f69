"""Clusters from a matrix of distances with an unknown number of clusters, and their identity from round to round."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Matrix = np.ndarray[Any, np.dtype[np.float64]]
Labels = np.ndarray[Any, np.dtype[np.int64]]

_MOST = 32  # clusters tried
_MARGIN = 0.05  # silhouettes so near to the best count as equal: the fewest clusters of them are taken


@dataclass(frozen=True, slots=True)
class ClusterSearch:
    """Clusters that were found.

    Attributes:
        labels: [n], from 0 up in order of first appearance.
        threshold: members of a cluster are, in the sense of the method, nearer to one another than this; infinite for
            one cluster, None where nothing was compared.
        score: mean silhouette, or how much the gap is of the whole range; 0 for one cluster.
        tried: score by number of clusters.
        agreement: of two halves of the rounds about the clusters, where it was asked for.
        surplus: how many standard deviations more the clusters explain than those of one cloud, where it was tested.
    """

    labels: Labels
    threshold: float | None = None
    score: float = 0.0
    tried: Mapping[int, float] = field(default_factory=dict)
    agreement: float | None = None
    surplus: float | None = None


def by_silhouette(
    distances: Matrix, accept: float = 0.35, least: int = 2, clusters: int | None = None, threshold: float | None = None
) -> ClusterSearch:
    """Average linkage, cut where the mean silhouette is best; one cluster where even that is below `accept`.

    Of cuts that are hardly worse than the best (by 0.05) the one into the fewest clusters is taken: in the first rounds
    the silhouette likes to cut true clusters up once more.

    A cut may leave clusters of fewer than `least` clients, e.g. one odd client high up in the tree.  Those are
    dissolved into the cluster that is nearest on average before the silhouette is taken, so that they neither make a
    good cut nor spoil one.

    Args:
        distances: [n, n], symmetric, 0 on the diagonal.
        accept: the least silhouette at which several clusters are believed, in [-1, 1].
        least: the fewest clients of a cluster.
        clusters: exactly so many clusters instead, if there are so many that are large enough.
        threshold: cut the tree at this average distance instead.

    Examples:
        >>> points = np.array([0.0, 0.1, 0.2, 5.0, 5.1, 5.2])
        >>> by_silhouette(np.abs(points[:, None] - points[None, :])).labels
        array([0, 0, 0, 1, 1, 1])
    """
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    count = len(distances)
    alone = ClusterSearch(np.zeros(count, dtype=np.int64))
    if count < 2 or clusters == 1:
        return alone
    tree = linkage(squareform(distances, checks=False), method="average")
    if threshold is not None:
        labels = dissolved(distances, fcluster(tree, threshold, criterion="distance"), least)
        return ClusterSearch(labels, threshold, silhouette(distances, labels))
    cuts: dict[int, ClusterSearch] = {}
    for size in range(2, min(_MOST + count // least, count) + 1):
        labels = dissolved(distances, fcluster(tree, size, criterion="maxclust"), least)
        found_count = int(labels.max()) + 1
        if (
            2 <= found_count <= _MOST and found_count not in cuts
        ):  # the first cut into so many large clusters has dissolved the fewest
            height = float(tree[count - size - 1, 2] + tree[count - size, 2]) / 2 if size < count else 0.0
            cuts[found_count] = ClusterSearch(labels, height, silhouette(distances, labels))
    tried = {number: cut.score for number, cut in sorted(cuts.items())}
    best = max(tried.values(), default=0.0)
    good = [number for number, score in tried.items() if score >= best - _MARGIN]
    chosen = cuts.get(clusters, alone) if clusters is not None else cuts[good[0]] if good and best >= accept else alone
    return ClusterSearch(chosen.labels, chosen.threshold, chosen.score or best, tried)


def by_gap(divergence: Matrix) -> ClusterSearch:
    """The plain reading of DistFL: the largest gap between sorted divergences is the threshold, and clients belong
    together that are linked by pairs below it.
    """
    count = len(divergence)
    pairs = np.sort(divergence[~np.eye(count, dtype=bool)])
    if len(pairs) < 2:
        return ClusterSearch(np.zeros(count, dtype=np.int64))
    gaps = np.diff(pairs)
    place = int(gaps.argmax())
    threshold = float((pairs[place] + pairs[place + 1]) / 2)
    score = float(gaps[place] / max(pairs[-1] - pairs[0], 1e-30))
    return dataclasses.replace(by_links(divergence, threshold), score=score)


def by_links(divergence: Matrix, threshold: float) -> ClusterSearch:
    """Clients belong together that are linked by pairs whose divergence, in either direction, is below a threshold."""
    return ClusterSearch(_linked(divergence < threshold), None if math.isinf(threshold) else threshold)


def with_outliers(found: ClusterSearch, inside: Labels, divergence: Matrix) -> ClusterSearch:
    """Clusters of some clients, whose places are `inside`, and of the others, who are far from all of these.

    Each of the others is a cluster of its own, but two of them that are nearer to one another, by half, than either to
    those inside belong together.

    Args:
        found: clusters of those inside.
        inside: their places, increasing.
        divergence: [n, n], of all.
    """
    outside = np.setdiff1d(np.arange(len(divergence)), inside)
    labels = np.zeros(len(divergence), dtype=np.int64)
    labels[inside] = found.labels
    if len(outside):
        pairs = (divergence + divergence.T) / 2
        away = pairs[np.ix_(outside, inside)].min(1)
        near = pairs[np.ix_(outside, outside)] < np.minimum(away[:, None], away[None, :]) / 2
        labels[outside] = len(inside) + _linked(near)
    return dataclasses.replace(found, labels=renumbered(labels))


def _linked(near: np.ndarray[Any, np.dtype[np.bool_]]) -> Labels:
    from scipy.sparse.csgraph import connected_components

    return renumbered(connected_components(near | near.T, directed=False)[1])


def silhouette(distances: Matrix, labels: Labels) -> float:
    """The mean silhouette (Rousseeuw 1987) of two clusters or more; a client alone in its cluster counts 0."""
    member = np.eye(int(labels.max()) + 1)[labels]
    sizes = member.sum(0)
    if len(sizes) < 2:
        return 0.0
    sums = distances @ member
    inner_sums = sums[np.arange(len(labels)), labels]
    inside = inner_sums / np.maximum(sizes[labels] - 1, 1)
    outside = np.where(member > 0, np.inf, sums / sizes).min(1)
    widest = np.maximum(inside, outside)
    each = np.divide(outside - inside, widest, out=np.zeros(len(labels)), where=widest > 0)
    return float(np.where(sizes[labels] > 1, each, 0.0).mean())


def dissolved(distances: Matrix, labels: Labels, least: int) -> Labels:
    """Labels without clusters of fewer than `least`: their clients go to the cluster that is nearest on average."""
    labels = renumbered(labels)
    sizes = np.bincount(labels)
    large = np.flatnonzero(sizes >= least)
    if len(large) == 0:
        return np.zeros_like(labels)
    if len(large) == len(sizes):
        return labels
    member = np.eye(len(sizes))[labels][:, large]
    nearest = large[(distances @ member / sizes[large]).argmin(1)]
    return renumbered(np.where(sizes[labels] >= least, labels, nearest))


def agree(one: Labels, two: Labels) -> float:
    """The adjusted Rand index of two ways to cluster the same clients (Hubert and Arabie 1985); 0 if one is one
    cluster.
    """
    from sklearn.metrics import adjusted_rand_score

    return float(adjusted_rand_score(one, two)) if one.any() and two.any() else 0.0


def renumbered(labels: Sequence[int] | Labels) -> Labels:
    """The same clusters with numbers from 0 up in order of first appearance."""
    names, first, inverse = np.unique(np.asarray(labels), return_index=True, return_inverse=True)
    rank = np.empty(len(names), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(names))
    return rank[inverse]


def tracked(labels: Labels, known: Sequence[int | None], taken: Sequence[int]) -> list[int]:
    """Give clusters the numbers they had: those that share the most clients with an old cluster take its number.

    The pairing with the most shared clients in all is taken (Kuhn 1955).  A cluster that shares no client with any is
    new and gets a number that was never used.

    Args:
        labels: [n], new clusters.
        known: the old number of each client, None for newcomers.
        taken: all numbers that were ever used.

    Examples:
        >>> tracked(np.array([0, 0, 1, 1]), known=[7, 7, 7, 2], taken=[2, 7])
        [7, 7, 2, 2]
    """
    from scipy.optimize import linear_sum_assignment

    old = sorted({number for number in known if number is not None})
    place = {number: column for column, number in enumerate(old)}
    shared = np.zeros((int(labels.max()) + 1, len(old)))
    for label, number in zip(labels.tolist(), known, strict=True):
        if number is not None:
            shared[label, place[number]] += 1
    fresh = max([-1, *taken, *old]) + 1
    names: dict[int, int] = {}
    for row, column in zip(*linear_sum_assignment(shared, maximize=True), strict=True):
        if shared[row, column] > 0:
            names[int(row)] = old[int(column)]
    for label in range(len(shared)):
        if label not in names:
            names[label] = fresh
            fresh += 1
    return [names[label] for label in labels.tolist()]
