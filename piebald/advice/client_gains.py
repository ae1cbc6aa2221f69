"""What each client gains by joining, on the test rows that are opened once, after the choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from piebald.advice.check import Checked
from piebald.advice.evidence import rows_of
from piebald.advice.tuning.trial_runs import TrialRuns
from piebald.report.row_noise import COUNTED, row_errors

MOST = 12  # clients that are named in a list


@dataclass(frozen=True)
class ClientGain:
    """What one client gains by the recommendation.

    Attributes:
        client: its name.
        rows: its test rows, None where that is not known.
        scores: of each method that was checked, by label, the mean over seeds; None where it has none.
        gain: of the recommendation against the client alone, positive where it is better off; None where the
            recommendation is to train alone, or one of the two has no score.
        error: the largest standard error of the gain, for other rows of this client; None where the metric is not the
            accuracy, whose noise follows from the number of rows.
    """

    client: str
    rows: int | None
    scores: Mapping[str, float | None]
    gain: float | None
    error: float | None

    @property
    def clear(self) -> bool:
        """Whether the client gains or loses by more than two standard errors."""
        return self.gain is not None and self.error is not None and abs(self.gain) > 2 * self.error


def client_gains(tested: Sequence[Checked], chosen: str, alone: str | None, runs: TrialRuns) -> list[ClientGain]:
    """What each client gains, in the order of the clients; empty where no test rows were opened.

    Args:
        tested: scores on test rows, of the recommendation and Local among others.
        chosen: the label of the recommendation.
        alone: the label of Local, None if it was not checked.
        runs: how they were scored.
    """
    if not tested:
        return []
    sizes = rows_of(runs, "test")
    sign = 1 if runs.higher_is_better else -1
    known = {one.label: one.scores.client_means() for one in tested}
    found = []
    for place, name in enumerate(runs.names):
        scores = {label: None if np.isnan(means[place]) else float(means[place]) for label, means in known.items()}
        mine, own = scores.get(chosen), None if alone in (None, chosen) else scores.get(alone or "")
        rows, gain, error = sizes.get(name), None, None
        if mine is not None and own is not None:
            gain = sign * (mine - own)
            if runs.metric == COUNTED and rows:
                error = float(row_errors(np.array([mine]), np.array([own]), np.array([float(rows)]))[0])
        found.append(ClientGain(name, rows, scores, gain, error))
    return found


def sentences(clients: Sequence[ClientGain], chosen: str, points: Callable[[float, bool], str]) -> list[str]:
    """What each client gains, in words; of many clients only those whose gain or loss is beyond noise.

    Args:
        clients: from `client_gains`.
        chosen: the label of the recommendation.
        points: a difference of the metric in words, with its sign if asked for.
    """
    known = [one for one in clients if one.gain is not None]
    if not known:
        return []

    def said(one: ClientGain) -> str:
        about = [] if one.rows is None else [f"{one.rows:,} test rows"]
        about += [] if one.error is None else [f"standard error {points(one.error, False)}"]
        return f"{one.client} {points(one.gain or 0.0, True)}" + (f" ({', '.join(about)})" if about else "")

    if len(known) <= MOST:
        lines = [f"Each client on its own test rows, {chosen} against the client alone:"]
        lines += [f"  {said(one)}" for one in known]
    else:
        lines = [f"{len(known):,} clients on their own test rows, {chosen} against each client alone:"]
        better = sum((one.gain or 0.0) > 0 for one in known)
        lines.append(f"  {better:,} do better, {sum((one.gain or 0.0) < 0 for one in known):,} do worse.")
    if any(one.error is not None for one in known):
        gains = [one for one in known if one.clear and (one.gain or 0.0) > 0]
        loses = [one for one in known if one.clear and (one.gain or 0.0) < 0]
        lines += [f"  {_beyond(gains, 'gain')}", f"  {_beyond(loses, 'lose')}"]
    return lines


def table(clients: Sequence[ClientGain]) -> tuple[list[str], list[list[Any]]]:
    """Heading and rows of the table of clients, empty where no test rows were opened."""
    if not clients:
        return [], []
    heading = ["client", "test rows", *clients[0].scores, "gain", "standard error"]
    return heading, [[one.client, one.rows, *one.scores.values(), one.gain, one.error] for one in clients]


def _beyond(clients: Sequence[ClientGain], verb: str) -> str:
    """Who gains or loses beyond noise, the largest difference first."""
    if not clients:
        return f"Nobody {verb}s beyond two standard errors."
    order = sorted(clients, key=lambda one: -abs(one.gain or 0.0))
    named = ", ".join(one.client for one in order[:MOST])
    more = f" and {len(order) - MOST:,} more" if len(order) > MOST else ""
    return f"Beyond two standard errors {verb}{'s' if len(order) == 1 else ''}: {named}{more}."
