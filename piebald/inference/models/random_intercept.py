"""Sums of one client for models with a random intercept of each client: its own share of the marginal likelihood.

Whose intercept is random is the client itself, so its share is an integral over one number.  For normal targets it has
a closed form (Laird and Ware 1982), for others it is computed by adaptive Gauss-Hermite quadrature (Pinheiro and Bates
1995, section 2.4).
"""

from __future__ import annotations

import math

import numpy as np

from piebald.core.moments import Floats
from piebald.inference.models.likelihood import Likelihood, likelihood, row_terms
from piebald.inference.models.rows import Family

_NODES = 40  # of the quadrature: its error is below 1e-10 for smooth likelihoods


def normal_sums(x: Floats, y: Floats, weight: Floats, ratio: float) -> Floats:
    """Return a client's sums for a ratio of variances, flat [4 + 3 (p + 1)^2].

    With z = (x, y), weights W, s = z'W1 and m = 1'W1: the rows, log(1 + ratio m) and its first two derivatives, then
    z'Wz - ratio / (1 + ratio m) s s' and its first two derivatives by the ratio.

    Args:
        x, y, weight: the client's rows [n, p], [n] and [n].
        ratio: the variance of intercepts over that of residuals.
    """
    columns = np.column_stack([x, y])
    weighted = columns * weight[:, None]
    total, sums = float(weight.sum()), weighted.sum(0)
    # V^-1 by the Woodbury identity: its determinant and its quadratic forms need only sums of the client's rows
    shrunk = 1 + ratio * total
    outer = np.outer(sums, sums)
    heads = [float(len(y)), math.log(shrunk), total / shrunk, -((total / shrunk) ** 2)]
    matrices = columns.T @ weighted - ratio / shrunk * outer, -outer / shrunk**2, 2 * total / shrunk**3 * outer
    return np.concatenate([heads, *(matrix.ravel() for matrix in matrices)])


def marginal_likelihood(
    family: Family, x: Floats, y: Floats, offset: Floats, weight: Floats, point: Floats
) -> Likelihood:
    """Return a client's marginal log-likelihood and its derivatives, exact for the integral.

    Args:
        family: "binomial" or "poisson".
        x, y, offset, weight: the client's rows [n, p], and [n] each.
        point: coefficients and the standard deviation of intercepts [p + 1].
    """
    eta, deviation = x @ point[:-1] + offset, float(point[-1])
    mode, curvature = mode_of(family, y, eta, weight, deviation)
    nodes, node_weights = np.polynomial.hermite.hermgauss(_NODES)
    spread = math.sqrt(2 / curvature)
    # nodes are placed around this client's mode (adaptive): around 0 they would miss a peak of many rows
    places = mode + spread * nodes
    shares, scores, informations = np.zeros(_NODES), [], []
    for node, place in enumerate(places):
        sums = likelihood(
            row_terms(family, y, eta + deviation * place), np.column_stack([x, np.full(len(y), place)]), weight
        )
        # on the log scale, since the likelihood of thousands of rows underflows, and so may weights of outer nodes
        shares[node] = sums.value - place**2 / 2 + nodes[node] ** 2 + math.log(max(node_weights[node], 1e-300))
        scores.append(sums.score)
        informations.append(sums.information)
    # the largest share is factored out before exp, so that at least one term is 1
    largest = float(shares.max())
    shares = np.exp(shares - largest)
    value = largest + math.log(float(shares.sum())) + math.log(spread) - math.log(2 * math.pi) / 2
    shares /= shares.sum()
    score = shares @ np.array(scores)
    # Louis 1982: information of the rows, less what varies with the intercept that is not seen
    apart = np.array(scores) - score
    information = np.tensordot(shares, np.array(informations), 1) - (apart * shares[:, None]).T @ apart
    return Likelihood(value, -2 * value, score, information)


def mode_of(family: Family, y: Floats, eta: Floats, weight: Floats, deviation: float) -> tuple[float, float]:
    """Return the most likely intercept of a client in units of its deviation, and the curvature there."""
    place = 0.0
    for _ in range(100):
        terms = row_terms(family, y, eta + deviation * place)
        slope = deviation * float(weight @ terms.score) - place
        curvature = 1 + deviation**2 * float(weight @ terms.weight)
        step = slope / curvature
        place += min(max(step, -1.0), 1.0)  # a full step may overflow a Poisson mean
        # an inexact mode costs accuracy of the quadrature and no correctness: nodes are only placed by it
        if abs(step) < 1e-10:
            break
    return place, curvature
