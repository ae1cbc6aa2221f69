"""A server of secure aggregation that lies reads no single update, alone or with as many sites as the docs say."""

from __future__ import annotations

from typing import Any

import pytest

from piebald.privacy import SecureAggregation
from piebald.privacy.secure_aggregation import key_queries
from piebald.privacy.secure_aggregation.masks import MaskingGraph

from .lying_server import Clients, LyingServer

CASES: list[tuple[int, dict[str, Any]]] = [
    *((count, {"threshold": threshold}) for count in (5, 7, 10, 20) for threshold in (0.51, 0.55, 0.6, 2 / 3, 0.8)),
    *((50, {"neighbours": neighbours}) for neighbours in (8, 12, 16, 20, 30)),
    *((50, {"neighbours": neighbours, "threshold": 0.51}) for neighbours in (8, 20)),
]
TIERS = [case if case[0] < 50 else pytest.param(*case, marks=pytest.mark.full) for case in CASES]
WORKED = [(5, 0.51), (5, 0.55), (7, 0.51), (7, 0.55), (10, 0.51), (10, 0.55), (20, 0.51), (20, 0.55)]


def summing(**fields: Any) -> SecureAggregation:
    return SecureAggregation(**{"aggregation": {"kind": "equal_weighted"}, "heaviest": 1.0, "least": 2} | fields)


@pytest.mark.full
@pytest.mark.parametrize(("count", "fields"), TIERS, ids=str)
def test_different_lists_for_different_clients_open_nothing(count: int, fields: dict[str, Any]) -> None:
    """Before, this read single updates for n = 5, 7, 10, 20 at 0.51 and 0.55, and with 20 and 30 neighbours at 2/3."""
    clients = Clients(summing(**fields), count)
    for victim in (0, count // 2, count - 1):
        assert LyingServer(clients).read(victim) is None


@pytest.mark.full
@pytest.mark.parametrize(("count", "threshold"), WORKED)
def test_without_signatures_the_same_lies_open_an_update(
    count: int, threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control of the attack: clients that check no signatures of others, as before."""
    monkeypatch.setattr(key_queries, "_check_quorum", lambda *_: None)
    clients = Clients(summing(threshold=threshold), count)
    for victim in (0, count // 2, count - 1):
        read = LyingServer(clients).read(victim)
        assert read == pytest.approx([0.25 * (1 + victim % 7)] * 3, abs=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("neighbours", [8, 12, 16, 20, 30])
def test_without_signatures_the_same_lies_open_an_update_on_a_ring(
    neighbours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With neighbours, each client looked at its own neighbours only."""
    monkeypatch.setattr(key_queries, "_check_quorum", lambda *_: None)
    monkeypatch.setattr(MaskingGraph, "check_survivors", lambda *_: None)
    clients = Clients(summing(neighbours=neighbours), 50)
    assert LyingServer(clients).read(25) == pytest.approx([1.25] * 3, abs=1e-4)
