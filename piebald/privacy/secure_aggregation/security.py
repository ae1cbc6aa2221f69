"""The clients that must collude with the server before it reads one update, and parameters for a security level.

The server is active: it may show different things to different clients, say who dropped out as it likes after it has
seen the graph, and act with c of the n clients.  Where all are neighbours nothing is left to chance; see
`colluders_needed`.  With k neighbours on a ring whose order nobody chose (`key_queries.CommitKeys`), three things can
go wrong for a graph of n clients (after Bell et al. 2020, section 3: what they ask of a good graph):

1.  Some client has t colluders among its k neighbours.  They hold t shares of all its secrets.
2.  Honest clients fall into parts that share no mask.  Parts end where no honest client is left in k / 2 places in a
    row.  An honest client accepts a list of survivors only if everyone in it has t of its k + 1 holders in it, so of
    the k / 2 places beside a survivor at least t - 1 - k / 2 are in the list; all of these would have to collude.
    (Bell et al. take drop-outs as given before the graph; here the server picks them, so the condition is stricter.)
3.  Too few neighbours of some client arrive, so that the sum is not opened: a loss of one round, not of a secret.

How many of some places of a random ring collude has a hypergeometric distribution; the union over all clients bounds
each chance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction as Exactly
from functools import lru_cache
from typing import Annotated

from pydantic import Field

from piebald.core.arguments import Count, Fraction, Share, Whole, checked, checked_class
from piebald.core.errors import SettingError

SECURITY = 40  # the chance that a graph is bad must be below 2^-SECURITY
Bits = Annotated[int, Field(ge=1, le=1000)]
AVAILABILITY = 30  # the chance that a sum cannot be opened must be below 2^-AVAILABILITY


@checked_class
@dataclass(frozen=True, slots=True)
class SumParameters:
    """Parameters of a secure aggregation.

    Attributes:
        neighbours: of each client, even; None for all others.
        threshold: how many shares open a mask.
    """

    neighbours: Whole | None
    threshold: Whole


@checked
def tail(population: Whole, marked: Whole, drawn: Whole, least: int) -> Exactly:
    """The chance that of `drawn` out of a population at least `least` are marked (hypergeometric), exactly."""
    if max(marked, drawn) > population:
        raise SettingError(f"{max(marked, drawn)} of {population} clients cannot be: lower it")
    if least <= 0:
        return Exactly(1)
    # in whole numbers: binomials of some thousand clients overflow float64, and chances near 2^-40 need all digits
    ways = sum(
        math.comb(marked, hit) * math.comb(population - marked, drawn - hit)
        for hit in range(least, min(marked, drawn) + 1)
    )
    return Exactly(ways, math.comb(population, drawn))


@checked
@lru_cache(maxsize=256)
def exposure(clients: Count, neighbours: Whole, threshold: Whole, colluding: Whole) -> float:
    """The chance, at most, that a ring lets the server and so many colluding clients read part of a sum.

    Args:
        clients: n, in one sum.
        neighbours: k, even and below n - 1.
        threshold: t, shares that open a mask.
        colluding: c, of the clients.
    """
    if not colluding:
        return 0.0
    # point 1 of the module's list, then point 2, each for any of the clients by the union bound
    opened = clients * tail(clients - 1, colluding, neighbours, threshold)
    cut = clients * tail(clients, colluding, neighbours // 2, threshold - 1 - neighbours // 2)
    return float(min(Exactly(1), opened + cut))


@checked
def failure(clients: Count, neighbours: Whole, threshold: Whole, dropping: Whole) -> float:
    """The chance, at most, that a sum cannot be opened though only so many clients, who do not choose, drop out."""
    # k neighbours and itself hold shares: fewer than t are left once k + 2 - t neighbours are gone
    return float(min(Exactly(1), clients * tail(clients - 1, dropping, neighbours, neighbours + 2 - threshold)))


@checked
def quorum(clients: Count, holders: Count, threshold: Whole) -> int:
    """Return how many of the clients must sign one list of survivors: the share of them that opens a mask."""
    # a ceiling in whole numbers: a float quotient could fall on the wrong side of a whole number
    return -(-threshold * clients // holders)


@checked
def colluders_needed(clients: Count, threshold: Whole, least: Whole = 2) -> int:
    """Return how many of n clients must act with the server before it reads one update, where all are neighbours.

    The smallest of: t, who hold the shares of everything; 2 t - n, who sign two lists of survivors, where a list can
    do without one client; all but one client of the smallest sum.
    """
    smallest = max(threshold, least)
    ways = [threshold, smallest - 1]
    return min(*ways, 2 * threshold - clients) if smallest < clients else min(ways)


@checked
def parameters(
    clients: Count,
    colluding: Share = 0.1,
    dropping: Share = 0.1,
    *,
    security: Bits = SECURITY,
    availability: Bits = AVAILABILITY,
    threshold: Fraction = 2 / 3,
) -> SumParameters:
    """The fewest neighbours, and the lowest threshold with them, that keep to a level of security.

    Args:
        clients: n, in one sum.
        colluding: the share of them that acts with the server, at most.
        dropping: the share of them that drops out, at most.
        security: the chance that an update or the sum of a part can be read is below 2^-security.
        availability: the chance that the sum cannot be opened is below 2^-availability.
        threshold: the least share of a key's shares that opens a mask.

    Raises:
        SettingError: not even masks with all others do that.
    """
    bad, away = math.floor(colluding * clients), math.floor(dropping * clients)
    for neighbours in range(4, clients - 1, 2):
        holders = neighbours + 1
        # below k / 2 + 2 the ring may be cut without a single colluder (point 2), whatever the numbers
        for shares in range(max(neighbours // 2 + 2, math.ceil(round(threshold * holders, 9))), holders + 1):
            if failure(clients, neighbours, shares, away) > 2.0**-availability:
                break  # a higher one only fails more often
            signing = quorum(clients, holders, shares)
            agreed = 2 * signing - clients > bad and signing <= clients - away
            if agreed and exposure(clients, neighbours, shares, bad) <= 2.0**-security:
                return SumParameters(neighbours, shares)
    # the least t with 2 t - n > c, so that those who collude cannot sign two lists of survivors
    shares = max((clients + bad) // 2 + 1, math.ceil(round(threshold * clients, 9)))
    if shares > clients - away:
        raise SettingError(
            f"{clients} clients of which {bad} collude and {away} drop out have no safe threshold: {shares} must "
            "arrive; plan with fewer that collude or drop out"
        )
    return SumParameters(None, shares)
