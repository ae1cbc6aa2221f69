"""The page's section about participation, from results that can be computed by hand."""

from __future__ import annotations

import pytest

from piebald.report.comparison import Comparison
from piebald.report.page import participation_section as participation
from piebald.report.page.report_page import render
from piebald.report.tables import History
from piebald.storage.store import RunStore


def result(number, version, client, sent, time, **more):
    row = {"id": number, "version": version, "client": client, "kind": "train", "sent_version": version - 1}
    return row | {"sent": sent, "time": time, "status": "ok", "staleness": 0, "examples": 1, "steps": 1} | more


def history(server_optimizer="cached_average"):
    """Client 0 ends tasks at 1 and 4, client 1 one of four seconds at 4; a lost task and a query in between."""
    store = RunStore.create(
        None,
        {
            "recipe": {
                "name": "x",
                "table": {"server_optimizer": {"kind": server_optimizer}, "scheduling": {"kind": "asynchronous"}},
            },
            "label": "x",
            "seed": 0,
        },
    )
    store.commit({"version": 1, "time": 1.0}, [result(1, 1, 0, 0.0, 1.0, weight=1.0, raw_weight=3.0)])
    store.commit(
        {"version": 2, "time": 4.0},
        [
            result(2, 2, 1, 0.0, 4.0, weight=0.25, raw_weight=1.0, staleness=1),
            result(3, 2, 1, 1.0, 2.0, kind="validate", staleness=9),
            result(4, 2, 2, 1.0, 2.0, status="lost"),
        ],
    )
    store.commit({"version": 3, "time": 5.0}, [result(5, 3, 0, 3.0, 5.0, weight=0.8, raw_weight=4.0, staleness=2)])
    return History(store)


def test_the_work_of_each_client() -> None:
    made = history()
    assert participation.requests(made) == {0: 2, 1: 1}
    assert participation.staleness(made) == {0: 1.0, 1: 1.0}
    # at work: client 0 from 0 to 1 and from 3 to 5 of 5 seconds, client 1 from 0 to 4, the lost client 2 for a second
    assert participation.idle(made) == {0: pytest.approx(0.4), 1: pytest.approx(0.2), 2: pytest.approx(0.8)}


def test_weights_stay_where_last_models_are_kept() -> None:
    times, shares = participation.shares(history())
    assert times == [1.0, 4.0, 5.0]
    assert shares == {0: [1.0, pytest.approx(0.75), pytest.approx(0.8)], 1: [0.0, 0.25, pytest.approx(0.2)]}


def test_otherwise_only_clients_that_arrived_count() -> None:
    _, shares = participation.shares(history("server_sgd"))
    assert shares == {0: [1.0, 0.0, 1.0], 1: [0.0, 1.0, 0.0]}


def test_the_page_shows_the_charts() -> None:
    page = render(Comparison([history()]))
    assert 'id="participation"' in page
    for chart in ("plot-requests", "plot-idle", "plot-weights-0"):
        assert f'id="{chart}-title"' in page
    assert "plot-staleness" not in page  # equal bars: a sentence says as much
    assert "Staleness of each client, the same for all that took part: x 1." in page


def test_shares_are_over_server_steps_where_devices_are_instant() -> None:
    instant = history()
    instant._store._db.execute("UPDATE step SET time = 0")
    steps, _ = participation.shares(instant)
    assert steps == [1, 2, 3]
    assert "Server steps" in render(Comparison([instant]))
