"""ComBat: differences of place and scale between clients are taken out of columns of numbers.

Johnson, Li, Rabinovic 2007, "Adjusting batch effects in microarray expression data using empirical Bayes methods",
without covariates.  All that it needs of a client are moments of its columns, so nobody's rows leave
(Bostami et al. 2022, dCombat).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from piebald.core.errors import SettingError
from piebald.core.moments import Floats, Moments

_CONVERGED, _STEPS = 1e-10, 10_000
_FEWEST_COLUMNS = 3  # whose effects have a distribution, from which the priors are taken

Lines = dict[str, dict[str, tuple[float, float]]]  # by client and column: a number x becomes slope x + offset


def harmonised(moments: Mapping[str, Sequence[Moments]], clients: Sequence[str]) -> Lines:
    """Return by client and column the slope and offset that give all clients one mean and deviation, shrunk.

    With three columns or more the effects of a client are shrunk towards those of its other columns (section 3.2 of
    Johnson et al.); with fewer they are taken out as they are.

    Args:
        moments: of each column, one for each client.
        clients: the names of the clients, in this order.

    Raises:
        SettingError: there is one client, or one with fewer than two numbers in a column.
    """
    names = list(moments)
    if len(clients) < 2:
        raise SettingError("harmonise = 'combat' compares clients, and there is one: leave it out")
    parts = [
        [getattr(one, field)[0] for one in moments[name]] for field in ("present", "mean", "scatter") for name in names
    ]
    count, mean, scatter = np.array(parts, dtype=np.float64).reshape(3, len(names), len(clients))
    if (count < 2).any():
        column, client = np.argwhere(count < 2)[0]
        raise SettingError(
            f"harmonise = 'combat' needs two numbers of each client in each column, and {clients[client]!r} has fewer "
            f"in {names[column]!r}: leave the column or the client out"
        )
    rows = count.sum(1, keepdims=True)
    grand = (count * mean).sum(1, keepdims=True) / rows
    pooled = np.sqrt(scatter.sum(1, keepdims=True) / rows)
    pooled = np.where(pooled > 0, pooled, 1.0)
    place = (mean - grand) / pooled
    spread = scatter / (count - 1) / pooled**2
    spread = np.where(spread > 0, spread, 1.0)
    if len(names) >= _FEWEST_COLUMNS:
        for client in range(len(clients)):
            place[:, client], spread[:, client] = _shrunk(count[:, client], place[:, client], spread[:, client])
    slope = 1 / np.sqrt(spread)
    # from (x - grand) / pooled, less the place and over the root of the spread, back to units of the column
    offset = grand - slope * (grand + pooled * place)
    return {
        client: {name: (float(slope[j, i]), float(offset[j, i])) for j, name in enumerate(names)}
        for i, client in enumerate(clients)
    }


def _shrunk(count: Floats, place: Floats, spread: Floats) -> tuple[Floats, Floats]:
    """Return the posterior means of a client's effects in its columns, by iteration (equations 3.1 and 3.2)."""
    centre, width = place.mean(), place.var(ddof=1)
    middle, around = spread.mean(), spread.var(ddof=1)
    if not around > 0:  # all columns have one spread, so nothing is to be shrunk
        return (count * width * place + spread * centre) / np.maximum(count * width + spread, 1e-300), spread
    # the inverse gamma distribution with the mean and the variance of the client's spreads
    shape, rate = 2 + middle**2 / around, middle + middle**3 / around
    new_place, new_spread = place, spread
    for _ in range(_STEPS):
        before: tuple[NDArray[np.float64], NDArray[np.float64]] = new_place, new_spread
        new_place = (count * width * place + new_spread * centre) / (count * width + new_spread)
        squares = (count - 1) * spread + count * (place - new_place) ** 2
        new_spread = (rate + squares / 2) / (count / 2 + shape - 1)
        if max(np.abs(new_place - before[0]).max(), np.abs(new_spread - before[1]).max()) < _CONVERGED:
            break
    return new_place, new_spread
