"""Sites whose rows are at odds with those of the others, by name, so that somebody looks at them before any training.

Two kinds can be told by scores: where one model for all is far worse than a site's own, its labels or inputs mean
something else there; where neither is better than one answer for every row, its labels follow from nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from piebald.advice.differences import SHARES, in_points
from piebald.contracts import Clients, Split
from piebald.report.page.wording import names, plural
from piebald.report.paired import Difference, Scores
from piebald.report.row_noise import row_differences

FAR = 20  # times as far from the median as 95 % of the rows
_MOST_READ = 1 << 20  # rows whose targets are looked at
SPLITS: tuple[Split, ...] = get_args(Split)
_SUSPECTED = 1.645  # standard errors beyond which a site may be odd, one by one
_MOST = 0.34  # share of the clients that may be odd: where more are, they are many kinds and nobody is


def far_amounts(amounts: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which amounts [n] are so far from all others that a model would learn little else.

    Examples:
        >>> far_amounts(np.array([*range(50), 99_999.0])).nonzero()[0].tolist()
        [50]
    """
    if not np.isfinite(amounts).any():
        return np.zeros(len(amounts), bool)
    away = np.abs(amounts - np.nanmedian(amounts))
    usual = float(np.nanquantile(away, 0.95))  # of 95 % of the rows, whatever the others are
    return np.asarray((np.nan_to_num(away) > FAR * usual) & (usual > 0))


def far_targets(clients: Clients, names_of_clients: Sequence[str]) -> list[str]:
    """Return a sentence about amounts to predict that are far from all others, by site; none where there are none."""
    sizes = [[clients.size(client, split) for split in SPLITS] for client in range(len(clients))]
    if any(None in row for row in sizes) or sum(map(sum, sizes)) > _MOST_READ:  # type: ignore[arg-type]
        return []
    targets, sites = [], []
    for client in range(len(clients)):
        for split in SPLITS:
            y = clients.rows(client, split).y
            if not isinstance(y, Tensor) or not y.is_floating_point() or y.numel() != len(y):
                return []  # classes, labels, and times
            targets.append(y.double().flatten().numpy())
            sites += [client] * len(y)
    far = far_amounts(np.concatenate(targets))
    counts = np.bincount(np.array(sites)[far], minlength=len(clients))
    if not far.any():
        return []
    places = [
        f"{plural(int(counts[client]), 'row')} at {names_of_clients[client]}"
        for client in np.flatnonzero(counts).tolist()
    ]
    return [
        f"Targets over {FAR} times as far from the median as 95 % of all: {names(places, 12)}: if they are errors, "
        "correct them."
    ]


def odd_sites(
    alone: Scores | None,
    together: Scores | None,
    naive: Mapping[str, Scores],
    metric: str,
    higher_is_better: bool = True,
) -> list[str]:
    """Return a sentence for each kind of odd sites that there is.

    A site is named only beyond the chance of its rows, with all sites looked at together (Bonferroni), and where most
    others are not like it.

    Args:
        alone, together: the scores of Local and of one model for all on the same rows.
        naive: those of answers that need no model, by name.
        metric, higher_is_better: of the scores.
    """
    if alone is None:
        return []
    sentences = []
    sign = 1 if higher_is_better else -1
    worse = {} if together is None else _gaps(together, alone, sign)
    contradicting = [name for name, gap in worse.items() if gap.high < 0]
    # few rows hide that others are like them, as in a federation of two kinds of sites
    suspected = [name for name, gap in worse.items() if gap.mean < -_SUSPECTED * (gap.error or 0.0)]
    if contradicting and len(suspected) <= _MOST * len(worse):
        largest = min(worse[name].mean for name in contradicting)
        sentences.append(
            f"At odds with the others: {names(contradicting, 12)}, where one model for all is up to "
            f"{in_points(metric, -largest, False)} worse than a model of its own: do labels or inputs mean the same?"
        )
    for constant in naive.values():
        over = [_gaps(scores, constant, sign) for scores in (alone, together) if scores is not None]
        clear = [name for name in over[0] if any(name in gaps and gaps[name].low > 0 for gaps in over)]
        usual = sorted(max(gaps[name].mean for gaps in over if name in gaps) for name in clear)
        half = usual[len(usual) // 2] / 2 if usual else 0.0
        # the site must be shown to be unlike the others: little beyond the constant answer, by any method
        blank = [
            name for name in over[0]
            if name not in clear
            and _room(float(constant.of_client(name).mean), metric, sign) > 2 * half
            and all(name in gaps and gaps[name].high < half for gaps in over)
        ]  # fmt: skip
        if blank and len(blank) <= _MOST * len(over[0]):
            sentences.append(
                f"Not better than one answer for every row by any method: {names(blank, 12)}: are the labels right?"
            )
            break
    return sentences


def _room(constant: float, metric: str, sign: int) -> float:
    """Return what is left to gain beyond a constant answer: little where one class has nearly all rows."""
    if sign < 0:
        return constant
    return 1 - constant if metric in SHARES else math.inf


def _gaps(a: Scores, b: Scores, sign: int) -> dict[str, Difference]:
    """The gain of each client by `a` over `b`, where the noise of its rows is known.

    Each end of the intervals holds for all sites together (Bonferroni), by Student's t for what few rows say of noise.
    """
    gaps = row_differences(a, b, comparisons=math.ceil(len(a.clients) / 2))
    ends = {name: sorted((sign * gap.low, sign * gap.high)) for name, gap in gaps.items() if gap.error}
    return {
        name: replace(gaps[name], mean=sign * gaps[name].mean, low=low, high=high) for name, (low, high) in ends.items()
    }
