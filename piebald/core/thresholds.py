"""Thresholds of two classes: from which probability of the second class on a row is taken for it.

A half is right where both mistakes cost the same and probabilities are right.  Where one class is rare, a model that is
right on most rows may recognise none of it; a threshold that is chosen on validation rows mends that without training.

One threshold for all clients is one of 99 (`GRID`), so that counts of rows between them are all that is needed for it.

Source: Lipton, Elkan and Naryanaswamy, *Optimal thresholding of classifiers to maximize F1 measure*, ECML PKDD 2014.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from piebald.core.errors import SettingError

Floats = NDArray[np.float64]
CRITERIA = ("accuracy", "balanced_accuracy", "f1")
LEAST = ("sensitivity", "specificity")  # of which the other one is the best that leaves this one at least a share
METRICS = (*CRITERIA, *LEAST)
GRID = np.log(np.arange(1, 100) / np.arange(99, 0, -1))  # the logits of 0.01, 0.02 ... 0.99
_POOLED = "pooled "


def best_threshold(leads: Floats, positive: NDArray[np.bool_], criterion: str) -> float | None:
    """Return the threshold that is best by a criterion, the one nearest to a half where several are.

    Args:
        leads: the second class's scores less those of the first [n], the logits of its probability.
        positive: whether rows are of the second class [n].
        criterion: one of `CRITERIA`, or, as "sensitivity=0.9", the least value of one of `LEAST`; after "pooled ", of
            the thresholds of the grid.

    Returns:
        A probability; None without rows of both classes, or where scores are no numbers.

    Raises:
        SettingError: there is no such criterion.

    Examples:
        The third row is ill, and is recognised from a threshold of 0.3 down.

        >>> leads = np.log(np.array([0.1, 0.2, 0.4, 0.9]) / np.array([0.9, 0.8, 0.6, 0.1]))
        >>> round(best_threshold(leads, np.array([False, False, True, True]), "f1"), 2)
        0.29
    """
    name, least = parsed(criterion)
    if positive.all() or not positive.any() or not np.isfinite(leads).all():
        return None
    cuts = GRID
    if not criterion.startswith(_POOLED):
        values = np.unique(leads)
        # one cut between each two neighbours and one beyond either end: every way to divide the rows occurs once
        cuts = np.concatenate([[values[0] - 1], (values[1:] + values[:-1]) / 2, [values[-1] + 1]])
    shares = rates(cuts, leads, positive)
    if least is None:
        goodness = shares[name]
    else:
        other = shares[LEAST[1 - LEAST.index(name)]]
        # below any share, so that a cut without the least share loses to each one that has it
        goodness = np.where(shares[name] >= least, other, -1.0)
    # shares that are equal but for rounding tie, or the choice among them would be the processor's
    best = cuts[goodness >= goodness.max() - 1e-12]
    return 1 / (1 + math.exp(-float(best[np.abs(best).argmin()])))


def rates(cuts: Floats, leads: Floats, positive: NDArray[np.bool_]) -> Mapping[str, Floats]:
    """The metrics of two classes where rows with a lead above a cut are taken for the second, each [cuts]."""
    ill, well = np.sort(leads[positive]), np.sort(leads[~positive])
    # "right": a row whose lead is the cut itself is not above it
    missed, spared = (np.searchsorted(scores, cuts, side="right").astype(float) for scores in (ill, well))
    hit, wrong = len(ill) - missed, len(well) - spared
    mistakes = missed + wrong
    with np.errstate(invalid="ignore"):  # without rows of a class its share is undefined
        sensitivity, specificity = hit / len(ill) if len(ill) else hit * np.nan, (
            spared / len(well) if len(well) else spared * np.nan)  # fmt: skip
        f1 = (2 * hit / (2 * hit + mistakes) + 2 * spared / (2 * spared + mistakes)) / 2
    return {
        "accuracy": (hit + spared) / max(1, len(leads)),
        "balanced_accuracy": np.nanmean([sensitivity, specificity], axis=0),
        "f1": f1,
        "sensitivity": sensitivity,
        "specificity": specificity,
    }


def parsed(criterion: str) -> tuple[str, float | None]:
    """Return the name of a criterion and its least value, None for one that is to be the largest."""
    name, _, text = criterion.strip().removeprefix(_POOLED).replace(" ", "").partition("=")
    try:
        least = float(text) if text else None
    except ValueError:
        least = math.nan
    if (name in CRITERIA and not text) or (name in LEAST and least is not None and 0 < least <= 1):
        return name, least
    raise SettingError(
        f"threshold must be one of {', '.join(CRITERIA)}, or a least share such as sensitivity=0.9 or "
        f"specificity=0.9, with 'pooled ' before it for one threshold for all clients, got {criterion!r}"
    )


def checked_criterion(criterion: str, pooled: bool = False) -> str:
    """Return a criterion as it is written everywhere, for all clients if `pooled` or it says so.

    Raises:
        SettingError: there is no such criterion.

    Examples:
        >>> checked_criterion("sensitivity = 0.9"), checked_criterion("f1", pooled=True)
        ('sensitivity=0.9', 'pooled f1')
    """
    parsed(criterion)
    plain = criterion.strip().removeprefix(_POOLED)
    prefix = _POOLED if pooled or plain != criterion.strip() else ""
    return prefix + plain.replace(" ", "")


def is_pooled(criterion: str) -> bool:
    """Return whether a criterion is for one threshold for all clients."""
    return criterion.startswith(_POOLED)


def best_on_validation(criterion: str, owner: str) -> str:
    """Return in words how a threshold was chosen.

    Examples:
        >>> best_on_validation("f1", "the site"), best_on_validation("pooled f1", "the site")
        ('the best for f1 on the validation rows of the site', 'the best for f1 on the validation rows of all clients')
    """
    whose = "all clients" if is_pooled(criterion) else owner
    return f"the best for {criterion.removeprefix(_POOLED)} on the validation rows of {whose}"
