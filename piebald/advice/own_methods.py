"""The method for each client: the recommendation, unless another one is better for it after shrinkage.

A client's rows are few, so what is measured at one client is drawn towards what is measured at all, the more the
noisier it is and the less clients differ.  Where clients are alike, nobody leaves the others by luck.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from piebald.report.paired import Scores
from piebald.report.row_noise import row_difference

Floats = NDArray[np.float64]
FEWEST = 5  # clients that say how much clients differ


def own_methods(scores: Mapping[str, Scores], usual: str, higher_is_better: bool = True) -> dict[str, str]:
    """Choose a method for each client: another than the usual one where its gain is above 0 after shrinkage.

    Args:
        scores: on validation rows, by label.
        usual: the label of the recommendation.
        higher_is_better: whether a larger value of the metric is better.

    Returns:
        The label for each client: the usual one where clients are few, or the noise of single clients is not known.
    """
    sign = 1 if higher_is_better else -1
    clients = list(scores[usual].clients)
    best = {name: (0.0, usual) for name in clients}
    for label, table in scores.items():
        gaps = {name: row_difference(table.of_client(name), scores[usual].of_client(name)) for name in clients}
        known = {name: gap for name, gap in gaps.items() if gap is not None and gap.error}
        if label == usual or len(known) < FEWEST:
            continue
        means = shrunk([sign * gap.mean for gap in known.values()], [gap.error or 0.0 for gap in known.values()])
        for name, mean in zip(known, means.tolist(), strict=True):
            best[name] = max(best[name], (mean, label), key=lambda gain: gain[0])
    return {name: label for name, (_, label) in best.items()}


def shrunk(gains: Sequence[float], errors: Sequence[float]) -> Floats:
    """Estimate the gains of clients together: each is drawn towards their mean, the more the noisier it is.

    Gains are taken for normal around a common mean, with a variance of their own; both are estimated from all clients.

    Args:
        gains: of each client [c], as measured.
        errors: their standard errors [c], above 0.

    Source: DerSimonian and Laird, *Meta-analysis in clinical trials*, Controlled Clinical Trials 1986 (the variance);
    Morris, *Parametric empirical Bayes inference: theory and applications*, JASA 1983.

    Examples:
        >>> shrunk([0.3, 0.0, 0.0, -0.3], [0.1, 0.1, 0.1, 0.3]).round(2).tolist()
        [0.2, 0.04, 0.04, 0.0]
    """
    measured, noise = np.asarray(gains, np.float64), np.asarray(errors, np.float64) ** 2
    precision = 1 / noise
    scatter = (precision * (measured - np.average(measured, weights=precision)) ** 2).sum() - (len(measured) - 1)
    spread = precision.sum() - (precision**2).sum() / precision.sum()
    variance = max(0.0, float(scatter / spread))
    centre = np.average(measured, weights=1 / (noise + variance))
    return np.asarray(centre + variance / (noise + variance) * (measured - centre))
