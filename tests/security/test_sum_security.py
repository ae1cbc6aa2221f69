"""How many must collude: the numbers behind secure aggregation, against scipy and against a ring that is simulated."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from piebald.contracts import SumDemands
from piebald.core.errors import Declined, SettingError
from piebald.privacy import SecureAggregation
from piebald.privacy.secure_aggregation.key_queries import partners_among, public_keys
from piebald.privacy.secure_aggregation.masks import MaskingGraph, demands_reject_reason
from piebald.privacy.secure_aggregation.security import (
    AVAILABILITY,
    SECURITY,
    SumParameters,
    colluders_needed,
    exposure,
    failure,
    parameters,
    tail,
)

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "secure-aggregation.md"


@pytest.mark.parametrize(("population", "marked", "drawn"), [(20, 4, 9), (99, 10, 42), (999, 200, 218)])
def test_the_tail_is_that_of_the_hypergeometric_distribution(population: int, marked: int, drawn: int) -> None:
    for least in range(drawn + 2):
        known = stats.hypergeom.sf(least - 1, population, marked, drawn)
        assert float(tail(population, marked, drawn, least)) == pytest.approx(known, rel=1e-7, abs=1e-300)


def test_where_nobody_colludes_nothing_is_exposed() -> None:
    assert exposure(10, 4, 3, 0) == 0.0 < exposure(10, 4, 3, 1)


def test_a_client_goes_on_with_as_many_neighbours_as_open_its_masks_and_itself_is_one() -> None:
    keys = [bytes([number]) * 64 for number in range(5)]
    graph = MaskingGraph.of(range(5), keys, 3, None, "")
    assert partners_among([0, 1, 4], graph, 1) == [0, 4]
    with pytest.raises(Declined, match="1 neighbours sent shares, too few for a threshold of 3"):
        partners_among([0, 1], graph, 1)


def holds(clients: int, k: int, t: int, bad: int, away: int) -> bool:
    """All conditions of the module's docstring, from scipy."""
    opened = stats.hypergeom.sf(t - 1, clients - 1, bad, k)
    cut = stats.hypergeom.sf(t - 2 - k // 2, clients, bad, k // 2)
    fails = stats.hypergeom.sf(k + 1 - t, clients - 1, away, k)
    signing = math.ceil(t * clients / (k + 1))
    agreed = 2 * signing - clients > bad and signing <= clients - away
    return bool(agreed and clients * (opened + cut) <= 2.0**-SECURITY and clients * fails <= 2.0**-AVAILABILITY)


@pytest.mark.parametrize("clients", [100, 200, 500])
@pytest.mark.parametrize(("colluding", "dropping"), [(0.05, 0.05), (0.1, 0.1), (0.2, 0.1)])
def test_the_fewest_neighbours_that_are_safe(clients: int, colluding: float, dropping: float) -> None:
    found = parameters(clients, colluding, dropping)
    bad, away = math.floor(colluding * clients), math.floor(dropping * clients)
    k, t = found.neighbours, found.threshold
    assert k is not None
    assert holds(clients, k, t, bad, away)
    assert not holds(clients, k, t - 1, bad, away) or t - 1 < 2 / 3 * (k + 1)
    fewer = [(k - 2, shares) for shares in range(math.ceil(2 / 3 * (k - 1)), k)]
    assert not any(holds(clients, *one, bad, away) for one in fewer)


def test_where_no_ring_is_safe_all_are_neighbours_and_too_many_colluders_are_refused() -> None:
    assert parameters(6, 0.0, 0.0) == SumParameters(4, 4)  # the largest ring: all others but one
    assert parameters(5) == SumParameters(None, 4)
    assert parameters(11, 0.5, 0.1) == SumParameters(None, 9)  # 2 * 9 - 11 is more than the five that collude
    with pytest.raises(SettingError, match="have no safe threshold"):
        parameters(12, 0.9, 0.2)


def ring(clients: int, k: int | None, threshold: float, seed: int = 0) -> MaskingGraph:
    keys = [public_keys(bytes([client % 256, client // 256, seed]) + bytes(29)) for client in range(clients)]
    return SecureAggregation(neighbours=k, threshold=threshold).graph(range(clients), keys)


def test_the_chance_is_an_upper_bound_of_what_random_rings_show() -> None:
    """Few neighbours and many colluders, so that bad rings are frequent enough to be counted."""
    clients, k, t, bad = 60, 8, 8, 9
    draw, bound, found = np.random.default_rng(5), exposure(60, 8, 8, 9), 0
    for _ in range(4000):
        marked = np.zeros(clients, bool)
        marked[draw.choice(clients, bad, replace=False)] = True
        around = np.concatenate((marked, marked))
        windows = [int(around[start : start + k // 2].sum()) for start in range(clients)]
        found += max(windows) >= t - 1 - k // 2
    assert 0.2 < found / 4000 < bound


@pytest.mark.parametrize("count", [3, 5, 10, 20])
def test_colluders_that_are_needed_are_counted_one_by_one(count: int) -> None:
    """By trying every number of colluders against the three ways to read an update."""
    for threshold in range(count // 2 + 1, count + 1):
        for least in (2, 3):
            smallest = max(threshold, least)
            if smallest > count:
                continue
            for colluding in range(count):
                honest = count - colluding
                shares = colluding >= threshold
                alone = smallest - 1 <= colluding  # the victim and colluders make a sum
                # every honest client but the victim signs one of two lists, with it and without it; it signs the first
                split = smallest < count and any(
                    first + 1 + colluding >= smallest and honest - 1 - first + colluding >= smallest
                    for first in range(honest)
                )
                assert (shares or alone or split) == (colluding >= colluders_needed(count, threshold, least))


def test_a_site_refuses_what_a_tenth_could_open() -> None:
    """Before, the server chose threshold and neighbours, and a site took what came."""
    safe = parameters(100)
    assert demands_reject_reason(ring(100, safe.neighbours, safe.threshold), SumDemands()) is None
    assert demands_reject_reason(ring(100, None, 2 / 3), SumDemands()) is None
    for few in (8, 20, 30):
        reason = demands_reject_reason(ring(100, few, 2 / 3), SumDemands())
        assert reason is not None
        assert reason.startswith("10 of 100 clients that collude could open an update with")
    reason = demands_reject_reason(ring(100, None, 0.6), SumDemands())
    assert reason is not None
    assert "60 of 100 shares open a mask, this site demands a share of 0.667" in reason
    reason = demands_reject_reason(ring(9, None, 2 / 3), SumDemands(colluding=0.4))
    assert reason is not None
    assert reason.startswith("3 of 9 clients that collude could open an update")


def test_the_tables_of_the_docs_are_these_numbers() -> None:
    page = PAGE.read_text("utf-8")
    for clients in (3, 5, 10, 50, 100):
        threshold = math.ceil(round(2 / 3 * clients, 9))
        cells = (clients, threshold, clients - max(threshold, 3), colluders_needed(clients, threshold, 3))
        assert f"| {' | '.join(map(str, cells))} |" in page
    for clients in (50, 100, 1000):
        for colluding in (0.05, 0.1, 0.2) if clients == 1000 else (0.1, 0.2):
            found = parameters(clients, colluding, 0.1 if colluding > 0.05 else 0.05)
            k, t = found.neighbours, found.threshold
            assert k is not None
            assert failure(clients, k, t, math.floor(min(colluding, 0.1) * clients)) <= 2.0**-AVAILABILITY
            cells = (clients, math.floor(colluding * clients), math.floor(min(colluding, 0.1) * clients), k, t)
            assert f"| {' | '.join(map(str, cells))} |" in page
