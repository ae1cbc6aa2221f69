"""The method for each client: the recommendation, unless another one is better for it after shrinkage.

A client's rows are few, so what is measured at one client is drawn towards what is measured at all, the more the
noisier it is and the less clients differ.  Where clients are alike, nobody leaves the others by luck.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from piebald.advice.client_gains import shrunken
from piebald.report.paired import Scores
from piebald.report.row_noise import row_differences

FEWEST = 5  # clients that say how much clients differ


def own_methods(
    scores: Mapping[str, Scores], usual: str, higher_is_better: bool = True, errors: float = 0.0
) -> dict[str, str]:
    """Choose a method for each client: another than the usual one where its gain is above 0 after shrinkage.

    Args:
        scores: on validation rows, by label.
        usual: the label of the recommendation.
        higher_is_better: whether a larger value of the metric is better.
        errors: standard errors that the gain must be above 0.

    Returns:
        The label for each client: the usual one where clients are few, or the noise of single clients is not known.
    """
    sign = 1 if higher_is_better else -1
    clients = list(scores[usual].clients)
    best = {name: (0.0, usual) for name in clients}
    for label, table in scores.items():
        # without an error a gain cannot be shrunk, and the largest of many noisy gains is one by chance
        known = {name: gap for name, gap in row_differences(table, scores[usual]).items() if gap.error}
        if label == usual or len(known) < FEWEST:
            continue
        measured, noise = (np.array([getattr(gap, of) for gap in known.values()]) for of in ("mean", "error"))
        gains, deviations = shrunken(sign * measured, noise)
        for name, gain, deviation in zip(known, gains.tolist(), deviations.tolist(), strict=True):
            if gain > max(best[name][0], errors * deviation):
                best[name] = gain, label
    return {name: label for name, (_, label) in best.items()}
