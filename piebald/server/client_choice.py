"""The choice of clients by what is known of them: losses, speed, and numbers of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piebald.contracts import Result
from piebald.core.randomness import generator

Floats = NDArray[np.float64]


# of Lai et al. 2021: the share of clients that were never asked, at first, in each round and at least; the exponent of
# the penalty for slow ones; and the share of the lowest utility chosen that others need to be drawn as well
_EXPLORE, _DECAY, _LEAST, _ALPHA, _CUTOFF = 0.9, 0.98, 0.2, 2.0, 0.95


class ClientRecords:
    """The last training result of each client, and the choice of clients by these.

    Nobody is asked for it: losses and numbers of rows came with updates, and times are those of the runtime's clock.

    Args:
        rows: the training rows of a client, None where they are not known before it has sent something.
    """

    def __init__(self, rows: Callable[[int], int | None] = lambda client: None) -> None:
        self._rows = rows
        self._last: dict[int, tuple[float, int, float, int]] = {}  # loss, rows, seconds and version

    def note(self, result: Result, version: int) -> None:
        """Take note of a training result that counts."""
        update = result.update
        if update is not None:
            loss = update.metrics.get("loss", 0.0)
            seconds = max(result.time - result.sent, 0.0)
            self._last[result.task.client] = (loss if math.isfinite(loss) else 0.0, update.examples, seconds, version)

    def by_size(self, clients: Sequence[int], count: int, *words: int | str) -> list[int]:
        """Return `count` of these clients, drawn without replacement with chances as their rows."""
        return self._drawn(clients, self._sizes(clients), count, generator("choose", *words))

    def by_loss(self, clients: Sequence[int], count: int, candidates: float, *words: int | str) -> list[int]:
        """Return those with the largest last training losses of some candidates, which are drawn by their rows.

        A client that has not trained yet has an infinite loss (Cho, Wang, Joshi 2022, "Towards understanding biased
        client selection in federated learning", power-of-choice in the form rpow-d, which asks nobody).

        Args:
            clients: that can be asked.
            count: how many are chosen.
            candidates: d / m of the paper: so many times the count are drawn first.
            words: of the random key.
        """
        drawn = self._drawn(clients, self._sizes(clients), math.ceil(candidates * count), generator("choose", *words))
        losses = {client: self._last[client][0] if client in self._last else math.inf for client in drawn}
        return sorted(sorted(drawn, key=lambda client: -losses[client])[:count])

    def by_utility(self, clients: Sequence[int], count: int, version: int, *words: int | str) -> list[int]:
        """Return clients that are useful and quick, and some that were never asked.

        The utility is the loss times the number of rows, less for clients that are slower than half of all, and more
        the longer a client was not asked (Lai et al. 2021, "Oort: efficient federated learning via guided participant
        selection", algorithm 1, with mean losses in place of the roots of mean squares, and the median as pace).
        """
        rng = generator("choose", *words)
        scored = [client for client in clients if client in self._last]
        fresh = [client for client in clients if client not in self._last]
        explored = min(len(fresh), round(count * max(_LEAST, _EXPLORE * _DECAY**version)))
        explored = max(explored, min(len(fresh), count - len(scored)))
        chosen = rng.choice(fresh, explored, replace=False).tolist() if explored else []
        count -= explored
        if not count or not scored:
            return sorted(chosen)
        loss, rows, seconds, asked = np.array([self._last[client] for client in scored], dtype=np.float64).T
        utility = loss * rows
        utility = utility + utility.max() * np.sqrt(0.1 * math.log(version + 1) / np.maximum(asked, 1))
        pace = np.median(seconds)
        utility = utility * np.where(seconds > pace, (pace / np.maximum(seconds, 1e-12)) ** _ALPHA, 1.0)
        cutoff = _CUTOFF * np.sort(utility)[-min(count, len(scored))]
        good = [place for place, value in enumerate(utility.tolist()) if value >= cutoff]
        return sorted([*chosen, *self._drawn([scored[place] for place in good], utility[good].tolist(), count, rng)])

    def _sizes(self, clients: Sequence[int]) -> list[float]:
        """Return the rows of clients; the mean of the others where a client's are not known."""
        rows = [self._last[client][1] if client in self._last else self._rows(client) for client in clients]
        sizes = [size for size in rows if size is not None]
        mean = sum(sizes) / len(sizes) if sizes else 1.0
        return [mean if size is None else float(size) for size in rows]

    @staticmethod
    def _drawn(clients: Sequence[int], weights: Sequence[float], count: int, rng: np.random.Generator) -> list[int]:
        """Return clients that are drawn without replacement, each time with chances as the weights of those left."""
        # the order of exponential times with these rates is that of such draws, and those without weight come last
        times = rng.exponential(size=len(clients)) / np.maximum(np.array(weights, dtype=np.float64), 1e-300)
        return [clients[place] for place in np.argsort(times, kind="stable")[:count].tolist()]

    def state(self) -> list[list[float]]:
        """Return the records as JSON values."""
        return [[client, *record] for client, record in sorted(self._last.items())]

    def restore(self, values: Sequence[Sequence[Any]] | None) -> None:
        """Restore what `state` returned; None of a checkpoint that has nothing."""
        for client, loss, rows, seconds, version in values or ():
            self._last[int(client)] = (float(loss), int(rows), float(seconds), int(version))
