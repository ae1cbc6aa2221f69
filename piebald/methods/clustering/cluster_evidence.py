"""A test of found clusters against a single Gaussian cloud of the same shape, and of far outliers.

Any cloud of points can be cut in two, and clients whose data come from one distribution are such a cloud: each differs
from the others by the rows that it happens to hold, in the same way in every round.  So it is no evidence that the same
cut is found again in other rounds.  What one cloud does not have is clusters that explain as much of its spread.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from piebald.methods.clustering.partitioning import Labels, Matrix, renumbered

_ROTATIONS = 40  # clouds that are drawn
_POINTS = 400  # clients that are tested, a seeded choice of more
_REFINEMENTS = 20


def gram_of(divergence: Matrix) -> Matrix:
    """Inner products [n, n] about the middle, from divergences taken for squared distances (classical scaling); their
    trace is n.
    """
    pairs = (divergence + divergence.T) / 2
    inner = -(pairs - pairs.mean(0) - pairs.mean(1, keepdims=True) + pairs.mean()) / 2
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
        places = np.sort(rng.choice(len(gram), _POINTS, replace=False))
        gram, labels = gram[places][:, places], renumbered(labels[places])
    clusters = int(labels.max()) + 1
    if clusters < 2 or clusters >= len(gram):
        return 0.0
    gram = gram - gram.mean(0) - gram.mean(1, keepdims=True) + gram.mean()
    lengths = np.linalg.eigvalsh(gram)[1:].clip(min=0)
    if lengths.sum() <= 0:
        return 0.0
    explained = max(_explained(gram, labels), _explained(gram, _cut(gram, clusters)))
    clouds = [_turned(lengths, rng) for _ in range(_ROTATIONS)]
    alone = [_explained(cloud, _cut(cloud, clusters)) for cloud in clouds]
    return float((explained - np.mean(alone)) / max(float(np.std(alone)), 1e-12))


def _turned(lengths: Matrix, rng: np.random.Generator) -> Matrix:
    """Inner products of centred points with these squared lengths along their axes, in random directions."""
    count = len(lengths) + 1
    draw = rng.normal(size=(count, count - 1))
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
        moved = ((shares * crossed).sum(0) - 2 * crossed).argmin(1)
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
