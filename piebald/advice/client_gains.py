"""Gains of single clients by joining, on the test rows that are opened once, after the choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from piebald.advice.evidence import Checked
from piebald.advice.tuning.trial_runs import TrialRuns
from piebald.report.paired import difference
from piebald.report.row_noise import row_difference

MOST = 12  # clients that are named in a list


@dataclass(frozen=True)
class ClientGain:
    """The gain of one client by the recommendation.

    Attributes:
        client: its name.
        rows: its test rows, None where that is not known.
        scores: of each method that was checked, by label, the mean over seeds; None where it has none.
        gain: of the recommendation against the client alone, positive where it is better off; None where the
            recommendation is to train alone, or one of the two has no score.
        error: the standard error of the gain, for other rows of this client; None where the metric has no value for
            each row.
    """

    client: str
    rows: int | None
    scores: Mapping[str, float | None]
    gain: float | None
    error: float | None

    @property
    def clear(self) -> bool:
        """True if the client gains or loses by more than two standard errors."""
        return self.gain is not None and self.error is not None and abs(self.gain) > 2 * self.error


def client_gains(tested: Sequence[Checked], chosen: str, alone: str | None, runs: TrialRuns) -> list[ClientGain]:
    """Return the gain of each client, in the order of the clients; empty where no test rows were opened.

    Args:
        tested: scores on test rows, of the recommendation and Local among others.
        chosen: the label of the recommendation.
        alone: the label of Local, None if it was not checked.
        runs: the settings by which they were scored.
    """
    if not tested:
        return []
    sign = 1 if runs.higher_is_better else -1
    by_label = {checked.label: checked.scores for checked in tested}
    together, by_itself = by_label.get(chosen), None if alone in (None, chosen) else by_label.get(alone or "")
    gains = []
    for place, name in enumerate(runs.names):
        means = {label: float(scores.client_means()[place]) for label, scores in by_label.items()}
        known = {label: None if np.isnan(mean) else mean for label, mean in means.items()}
        pair = None if together is None or by_itself is None else (together.of_client(name), by_itself.of_client(name))
        gap = None if pair is None else difference(*pair)
        # only of metrics with a value for each row is the noise of one client known
        noise = None if pair is None else row_difference(*pair)
        gain, error = None if gap is None else sign * gap.mean, None if noise is None else noise.error
        gains.append(ClientGain(name, runs.clients.size(place, "test"), known, gain, error))
    return gains


def sentences(clients: Sequence[ClientGain], chosen: str, points: Callable[[float, bool], str]) -> list[str]:
    """Return the gains in words; of many clients only those whose gain or loss is beyond noise.

    Args:
        clients: from `client_gains`.
        chosen: the label of the recommendation.
        points: a difference of the metric in words, with its sign if asked for.
    """
    scored = [client for client in clients if client.gain is not None]
    if not scored:
        return []

    def sentence_of(client: ClientGain) -> str:
        notes = [] if client.rows is None else [f"{client.rows:,} test rows"]
        notes += [] if client.error is None else [f"standard error {points(client.error, False)}"]
        return f"{client.client} {points(client.gain or 0.0, True)}" + (f" ({', '.join(notes)})" if notes else "")

    if len(scored) <= MOST:
        lines = [f"Each client on its own test rows, {chosen} against the client alone:"]
        lines += [f"  {sentence_of(client)}" for client in scored]
    else:
        lines = [f"{len(scored):,} clients on their own test rows, {chosen} against each client alone:"]
        better = sum((client.gain or 0.0) > 0 for client in scored)
        lines.append(f"  {better:,} do better, {sum((client.gain or 0.0) < 0 for client in scored):,} do worse.")
    if any(client.error is not None for client in scored):
        gains = [client for client in scored if client.clear and (client.gain or 0.0) > 0]
        loses = [client for client in scored if client.clear and (client.gain or 0.0) < 0]
        lines += [f"  {_beyond_noise(gains, 'gain')}", f"  {_beyond_noise(loses, 'lose')}"]
    return lines


def table(clients: Sequence[ClientGain]) -> tuple[list[str], list[list[Any]]]:
    """Heading and rows of the table of clients, empty where no test rows were opened."""
    if not clients:
        return [], []
    heading = ["client", "test rows", *clients[0].scores, "gain", "standard error"]
    return heading, [
        [client.client, client.rows, *client.scores.values(), client.gain, client.error] for client in clients
    ]


def _beyond_noise(clients: Sequence[ClientGain], verb: str) -> str:
    """Return the clients that gain or lose beyond noise in words, the largest difference first."""
    if not clients:
        return f"Nobody {verb}s beyond two standard errors."
    order = sorted(clients, key=lambda client: -abs(client.gain or 0.0))
    named = ", ".join(client.client for client in order[:MOST])
    rest = f" and {len(order) - MOST:,} more" if len(order) > MOST else ""
    return f"Beyond two standard errors {verb}{'s' if len(order) == 1 else ''}: {named}{rest}."
