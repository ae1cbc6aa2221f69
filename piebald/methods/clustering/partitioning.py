"""Clusters from a matrix of distances, the evidence for them, and their identity from round to round.

Any cloud of points can be cut in two, and clients whose data come from one distribution are such a cloud: each differs
from the others by the rows that it happens to hold, in the same way in every round.  So it is no evidence that the same
cut is found again in other rounds.  What one cloud does not have is clusters that explain as much of its spread.
"""

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
        threshold: members of a cluster are, in the sense of the method, nearer to one another than this; None for
            one cluster, and where nothing was compared.
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
    # no checks: they reject matrices that rounding has left asymmetric in the last bit
    tree = linkage(squareform(distances, checks=False), method="average")
    if threshold is not None:
        labels = dissolved(distances, fcluster(tree, threshold, criterion="distance"), least)
        return ClusterSearch(labels, threshold, silhouette(distances, labels))
    cuts: dict[int, ClusterSearch] = {}
    # more cuts than clusters are wanted, since small clusters of a cut are dissolved again
    for size in range(2, min(_MOST + count // least, count) + 1):
        labels = dissolved(distances, fcluster(tree, size, criterion="maxclust"), least)
        found_count = int(labels.max()) + 1
        # the first cut into so many large clusters has dissolved the fewest
        if 2 <= found_count <= _MOST and found_count not in cuts:
            # halfway between the last merge below this cut and the first above it
            height = float(tree[count - size - 1, 2] + tree[count - size, 2]) / 2 if size < count else 0.0
            cuts[found_count] = ClusterSearch(labels, height, silhouette(distances, labels))
    tried = {number: cut.score for number, cut in sorted(cuts.items())}
    best = max(tried.values(), default=0.0)
    good = [number for number, score in tried.items() if score >= best - _MARGIN]
    # `tried` is sorted by number, so the first good cut has the fewest clusters
    chosen = cuts.get(clusters, alone) if clusters is not None else cuts[good[0]] if good and best >= accept else alone
    return ClusterSearch(chosen.labels, chosen.threshold, chosen.score or best, tried)


def by_gap(divergence: Matrix) -> ClusterSearch:
    """The plain reading of DistFL: the largest gap between sorted divergences is the threshold, and clients belong
    together that are linked by pairs below it.
    """
    count = len(divergence)
    pairs = np.sort(divergence[~np.eye(count, dtype=bool)])
    # fewer than two values have no gap
    if len(pairs) < 2:
        return ClusterSearch(np.zeros(count, dtype=np.int64))
    gaps = np.diff(pairs)
    index = int(gaps.argmax())
    threshold = float((pairs[index] + pairs[index + 1]) / 2)
    # where all divergences are equal, their range is 0
    score = float(gaps[index] / max(pairs[-1] - pairs[0], 1e-30))
    return dataclasses.replace(by_links(divergence, threshold), score=score)


def by_links(divergence: Matrix, threshold: float) -> ClusterSearch:
    """Clients belong together that are linked by pairs whose divergence, in either direction, is below a threshold."""
    # infinity links everybody, whatever their divergence: there was no comparison, and JSON has no infinity
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
        # shifted past every label inside, of which there are at most that many
        labels[outside] = len(inside) + _linked(near)
    return dataclasses.replace(found, labels=renumbered(labels))


def _linked(near: np.ndarray[Any, np.dtype[np.bool_]]) -> Labels:
    from scipy.sparse.csgraph import connected_components

    # either direction links: KL divergences are not symmetric
    return renumbered(connected_components(near | near.T, directed=False)[1])


def silhouette(distances: Matrix, labels: Labels) -> float:
    """The mean silhouette (Rousseeuw 1987) of two clusters or more; a client alone in its cluster counts 0."""
    from sklearn.metrics import silhouette_score

    if not 0 < labels.max() < len(labels) - 1:  # one cluster, or as many as clients
        return 0.0
    apart = np.where(np.eye(len(labels), dtype=bool), 0.0, distances)  # rounding may leave a distance from oneself
    return float(silhouette_score(apart, labels, metric="precomputed"))


def dissolved(distances: Matrix, labels: Labels, least: int) -> Labels:
    """Labels without clusters of fewer than `least`: their clients go to the cluster that is nearest on average."""
    labels = renumbered(labels)
    sizes = np.bincount(labels)
    large = np.flatnonzero(sizes >= least)
    # nobody to go to: all clusters are too small, so they are one
    if len(large) == 0:
        return np.zeros_like(labels)
    if len(large) == len(sizes):
        return labels
    few, many = np.flatnonzero(sizes[labels] < least), np.flatnonzero(sizes[labels] >= least)
    many = many[np.argsort(labels[many], kind="stable")]
    # only their distances, summed over each large cluster at once: a search asks this of one cut for every other client
    totals = np.add.reduceat(distances[np.ix_(few, many)], np.searchsorted(labels[many], large), axis=1)
    labels[few] = large[(totals / sizes[large]).argmin(1)]
    return renumbered(labels)


def agree(one: Labels, two: Labels) -> float:
    """The adjusted Rand index of two ways to cluster the same clients (Hubert and Arabie 1985); 0 if one is one
    cluster.
    """
    from sklearn.metrics import adjusted_rand_score

    return float(adjusted_rand_score(one, two)) if one.any() and two.any() else 0.0


def renumbered(labels: Sequence[int] | Labels) -> Labels:
    """The same clusters with numbers from 0 up in order of first appearance."""
    # by first appearance, so that numbers do not depend on how a library happens to number clusters
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
    index = {number: column for column, number in enumerate(old)}
    shared = np.zeros((int(labels.max()) + 1, len(old)))
    for label, number in zip(labels.tolist(), known, strict=True):
        if number is not None:
            shared[label, index[number]] += 1
    fresh = max([-1, *taken, *old]) + 1
    names: dict[int, int] = {}
    # the assignment also pairs clusters without a client in common, which is no identity
    for row, column in zip(*linear_sum_assignment(shared, maximize=True), strict=True):
        if shared[row, column] > 0:
            names[int(row)] = old[int(column)]
    for label in range(len(shared)):
        if label not in names:
            names[label] = fresh
            fresh += 1
    return [names[label] for label in labels.tolist()]


_ROTATIONS = 40  # clouds that are drawn
_POINTS = 400  # clients that are tested, a seeded choice of more
_REFINEMENTS = 20


def gram_of(divergence: Matrix) -> Matrix:
    """Inner products [n, n] about the middle, from divergences taken for squared distances (classical scaling); their
    trace is n.
    """
    pairs = (divergence + divergence.T) / 2
    inner = -(pairs - pairs.mean(0) - pairs.mean(1, keepdims=True) + pairs.mean()) / 2
    # a trace of n makes rounds comparable, as divergences grow while models train apart
    scaled: Matrix = inner * len(inner) / max(float(np.trace(inner)), 1e-30)
    return scaled


def evidence(gram: Matrix, labels: Labels, rng: np.random.Generator) -> float:
    """Return how many standard deviations more of the spread the clusters explain than as many clusters of one cloud
    do.

    The share explained is the squared distances of clusters' means from the common one, weighted by size, over those of
    the points (SigClust, Liu et al. 2008, has its complement).  For one cloud it is that of points with the same
    principal axes and lengths whose directions are turned at random, cut in the same way: where points are Gaussian,
    this is their exact distribution given the axes, for any covariance (rotation tests, Langsrud 2005).

    Args:
        gram: [n, n], inner products of the points; rows are centred here.
        labels: [n], two clusters or more.
        rng: for the turning.
    """
    if len(gram) > _POINTS:
        # each of the clouds costs O(n^3) for its QR factorisation and its product
        places = np.sort(rng.choice(len(gram), _POINTS, replace=False))
        gram, labels = gram[places][:, places], renumbered(labels[places])
    clusters = int(labels.max()) + 1
    # a cluster for each point explains everything, in a cloud as well
    if clusters < 2 or clusters >= len(gram):
        return 0.0
    gram = gram - gram.mean(0) - gram.mean(1, keepdims=True) + gram.mean()
    # centred points span n - 1 dimensions; KL divergences are no squared distances, so some values may be negative
    lengths = np.linalg.eigvalsh(gram)[1:].clip(min=0)
    if lengths.sum() <= 0:
        return 0.0
    # the clouds get the best cut of their own, so the points must have the choice of theirs as well
    explained = max(_explained(gram, labels), _explained(gram, _cut(gram, clusters)))
    clouds = [_turned(lengths, rng) for _ in range(_ROTATIONS)]
    alone = [_explained(cloud, _cut(cloud, clusters)) for cloud in clouds]
    return float((explained - np.mean(alone)) / max(float(np.std(alone)), 1e-12))


def _turned(lengths: Matrix, rng: np.random.Generator) -> Matrix:
    """Inner products of centred points with these squared lengths along their axes, in random directions."""
    count = len(lengths) + 1
    draw = rng.normal(size=(count, count - 1))
    # centred columns are orthogonal to the vector of ones, so points that are turned stay centred
    directions: Matrix = np.linalg.qr(draw - draw.mean(0))[0]
    turned: Matrix = (directions * lengths) @ directions.T
    return turned


def _cut(gram: Matrix, clusters: int) -> Labels:
    """Average linkage by correlations, cut into so many clusters."""
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    lengths = np.sqrt(gram.diagonal().clip(min=1e-12))
    away = (1 - gram / lengths / lengths[:, None]).clip(0, 2)
    np.fill_diagonal(away, 0)
    tree = linkage(squareform((away + away.T) / 2, checks=False), method="average")
    return renumbered(fcluster(tree, clusters, criterion="maxclust"))


def _explained(gram: Matrix, labels: Labels) -> float:
    """The share of the spread that clusters explain after a few steps of k-means from these labels."""
    count = int(labels.max()) + 1
    for _ in range(_REFINEMENTS):
        shares = np.eye(count)[labels]
        shares = shares / shares.sum(0)
        crossed = gram @ shares
        # squared distances to means but for |x|^2, which is the same for all clusters
        moved = ((shares * crossed).sum(0) - 2 * crossed).argmin(1)
        # a cluster that runs empty would leave fewer than the clouds are compared with
        if len(np.unique(moved)) < count or (moved == labels).all():
            break
        labels = moved
    member = np.eye(count)[labels]
    total: Any = (member * (gram @ member)).sum(0) / member.sum(0)
    return float(total.sum() / gram.trace())


def isolation(divergence: Matrix) -> Matrix:
    """Return how far each client's nearest other is, over the median of that [n]: about 1, and large for a far outlier.

    The nearest one, since members of a small cluster are far from most others, too, but not from one another.  A client
    whose nearest is by half nearer than most, so that it has a cluster to belong to, counts 1 at most.

    Args:
        divergence: [n, n], at least four clients.
    """
    pairs = (divergence + divergence.T) / 2
    count = len(pairs)
    distances = pairs[~np.eye(count, dtype=bool)].reshape(count, count - 1)
    nearest, middle = distances.min(1), np.median(distances, axis=1)
    isolations: Matrix = nearest / max(float(np.median(nearest)), 1e-12)
    return np.where(nearest >= middle / 2, isolations, np.minimum(isolations, 1.0))
