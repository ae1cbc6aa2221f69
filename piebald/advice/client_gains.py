"""Gains of single clients by joining, on the test rows that are opened once, after the choice.

The largest of many gains is large by luck, too, so each is shrunk towards the mean of all, the more the noisier it is
and the less clients differ (empirical Bayes).  Its interval counts that the mean and the spread of clients are
estimated as well, so with fewer than four clients nothing is shrunk.

Source: Morris, *Parametric empirical Bayes inference: theory and applications*, JASA 1983.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from piebald.advice.evidence import Checked
from piebald.advice.tuning.trial_runs import TrialRuns
from piebald.core.result_table import ResultTable
from piebald.report.paired import Scores, difference
from piebald.report.row_noise import row_differences

Floats = NDArray[np.float64]
_QUANTILE = 1.96  # of the normal distribution, for intervals of 95 %
FEWEST = 5  # clients that say how much clients differ
_ROUNDS = 20  # of the iteration for the variance between clients, which settles within a few


@dataclass(frozen=True)
class ClientGain:
    """The gain of one client by the recommendation.

    Attributes:
        client: its name.
        rows: its test rows, None where that is not known.
        scores: of each method that was checked, by label, the mean over seeds; None where it has none.
        gain: of the recommendation against the client alone, positive where it is better off; None where the
            recommendation is to train alone, or one of the two has no score.
        error: the standard error of the gain, for other rows of this client; None where it is not known.
        shrunk: the gain, shrunk towards that of all clients.
        low, high: the 95 % interval of the true gain around `shrunk`, None where the error is not known.
        train: its training rows, None where that is not known.
    """

    client: str
    rows: int | None
    scores: Mapping[str, float | None]
    gain: float | None
    error: float | None
    shrunk: float | None = None
    low: float | None = None
    high: float | None = None
    train: int | None = None

    @property
    def sign(self) -> int:
        """1 if the client gains beyond chance, -1 if it loses, 0 if neither can be said."""
        return 0 if self.low is None or self.high is None else int(self.low > 0) - int(self.high < 0)


def client_gains(tested: Sequence[Checked], chosen: str, alone: str | None, runs: TrialRuns) -> list[ClientGain]:
    """Return the gain of each client, in the order of the clients.

    Args:
        tested: scores on test rows, of the recommendation and Local among others; empty where there are no such rows.
        chosen: the label of the recommendation.
        alone: the label of Local, None if it was not checked.
        runs: the settings by which they were scored.
    """
    sign = 1 if runs.higher_is_better else -1
    by_label = {checked.label: checked.scores for checked in tested}
    together, by_itself = by_label.get(chosen), None if alone in (None, chosen) else by_label.get(alone or "")
    noises = {} if together is None or by_itself is None else row_differences(together, by_itself)
    gains = []
    for place, name in enumerate(runs.names):
        means = {label: float(scores.client_means()[place]) for label, scores in by_label.items()}
        known = {label: None if np.isnan(mean) else mean for label, mean in means.items()}
        pair = None if together is None or by_itself is None else (together.of_client(name), by_itself.of_client(name))
        gap = None if pair is None else difference(*pair)
        gain, error = None if gap is None else sign * gap.mean, noises[name].error if name in noises else None
        sizes = runs.clients.size(place, "test"), runs.choosing.size(place, "train")
        gains.append(ClientGain(name, sizes[0], known, gain, error, train=sizes[1]))
    return with_shrunk(gains)


def with_shrunk(gains: Sequence[ClientGain]) -> list[ClientGain]:
    """Return gains with their shrunk values and intervals, where the errors are known."""
    # a gain of error 0 or without error cannot be weighed against the spread between clients
    known = [gain for gain in gains if gain.gain is not None and gain.error]
    values, errors = shrunken(*(np.array([getattr(gain, name) for gain in known]) for name in ("gain", "error")))
    halves = _QUANTILE * errors
    ends = {
        gain.client: {"shrunk": float(value), "low": float(value - half), "high": float(value + half)}
        for gain, value, half in zip(known, values, halves, strict=True)
    }
    return [replace(gain, **ends.get(gain.client, {"shrunk": gain.gain})) for gain in gains]


def shrunken(gains: Floats, errors: Floats) -> tuple[Floats, Floats]:
    """Shrink measured gains towards their mean.

    Args:
        gains: measured gains of clients [c].
        errors: their standard errors [c], above 0.

    Returns:
        The shrunk gains [c], and their standard errors [c].

    Examples:
        Clients that differ no more than their noise says are taken for nearly alike.

        >>> values, errors = shrunken(np.array([0.1, 0.0, 0.05, 0.08, 0.02, 0.05]), np.full(6, 0.1))
        >>> values.round(3).tolist()
        [0.07, 0.03, 0.05, 0.062, 0.038, 0.05]
    """
    count, variances = len(gains), np.square(errors)
    # the factor (count - 3) / (count - 1) would be 0 or negative: nothing can be shrunk
    if count < 4:
        return gains, errors
    # starts from the raw variance, which contains the noise and is too large; the iteration takes it out
    between = float(np.var(gains, ddof=1))
    for _ in range(_ROUNDS):
        weights = 1 / (variances + between)
        mean = float(np.average(gains, weights=weights))
        # what a squared distance from the mean exceeds the client's own noise by, with Bessel's correction
        spread = count / (count - 1) * np.square(gains - mean) - variances
        between = max(0.0, float(np.average(spread, weights=weights)))
    weights = 1 / (variances + between)
    mean = float(np.average(gains, weights=weights))
    # the factor: a ratio of estimated variances is too large in the mean, as in the estimator of James and Stein
    factors = (count - 3) / (count - 1) * variances * weights
    typical = float(np.average(variances, weights=weights))
    # the spread between clients is estimated, too: what was shrunk far may have been shrunk too far
    doubt = 2 / (count - 3) * factors**2 * (typical + between) * weights * np.square(gains - mean)
    # the mean is estimated as well: a client with a large weight in it is shrunk towards itself
    squares = variances * (1 - (1 - weights / weights.sum()) * factors) + doubt
    return gains - factors * (gains - mean), np.sqrt(squares)


def table(clients: Sequence[ClientGain]) -> ResultTable:
    """Return the scores of each client; gains only where there are any."""
    labels = list(clients[0].scores) if clients else []
    gained = any(client.gain is not None for client in clients)
    rows = [
        [client.client, client.rows, *client.scores.values()]
        + ([client.gain, client.low, client.high] if gained else [])
        for client in clients
    ]
    return ResultTable(rows, ["client", "test rows", *labels, *(["gain", "from", "to"] if gained else [])])


def own_methods(
    scores: Mapping[str, Scores], usual: str, higher_is_better: bool = True, errors: float = 0.0
) -> dict[str, str]:
    """Choose a method for each client: another than the usual one where its gain is above 0 after shrinkage.

    Where clients are alike, nobody leaves the others by luck.

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
