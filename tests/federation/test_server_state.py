"""What the server's threads share: its clock."""

from __future__ import annotations

import pytest

from piebald.contracts import Query, Task
from piebald.federation.hub import server_state
from piebald.federation.hub.server_state import FederationState, Timeouts
from piebald.methods.queries.scores import Evaluate


def test_the_runs_clock_begins_when_the_sites_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, half a minute of waiting for sites made a run of two seconds 95 % idle time."""
    now = [1000.0]
    monkeypatch.setattr(server_state.time, "monotonic", lambda: now[0])
    state = FederationState(["east"], "terms", Timeouts(None, 60.0, 30.0, 600.0))
    now[0] += 30
    state.begin()
    assert state.clock() == state.now == 0
    now[0] += 2
    checkpoint = state.checkpoint()

    resumed = FederationState(["east"], "terms", Timeouts(None, 60.0, 30.0, 600.0))
    resumed.restore(checkpoint, dict[int, Task]())
    now[0] += 600
    resumed.begin()
    now[0] += 1
    assert resumed.clock() == 3


@pytest.mark.parametrize("query", [None, Evaluate()], ids=["training", "a question"])
def test_only_training_that_fails_is_a_failing_run(query: Query | None) -> None:
    """Sites with few test rows tell no scores, which said "failing" before the first update was there."""
    state = FederationState(["east", "west"], "terms", Timeouts(None, 60.0, 30.0, 600.0))
    for number in range(1, 4):
        member, task = state.members[number % 2], Task(number, number % 2, 0, {}, query=query)
        assert state.activity(True)["state"] != "failing"
        with state.lock:
            state.add(task)
            state.end_task(member, member.open[number], None, "withheld")
    assert (state.activity(True)["state"] == "failing") == (query is None)
