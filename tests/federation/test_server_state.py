"""What the server's threads share: its clock."""

from __future__ import annotations

import pytest

from piebald.contracts import Task
from piebald.federation.hub import server_state
from piebald.federation.hub.server_state import FederationState, Timeouts
from piebald.federation.link.wire_messages import Hello


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


def test_two_processes_with_one_sites_credentials_are_told_from_one_that_was_started_again() -> None:
    state = FederationState(["east"], "ab", Timeouts(None, 60.0, 30.0, 600.0))

    def doubled(*processes: str) -> bool:
        hellos = [Hello(protocol=1, version="0", incarnation=one) for one in processes]
        with state.lock:
            return [state.take_hello(state.members[0], hello, "") for hello in hellos][-1].doubled

    assert not doubled(*(f"a{one}" for one in range(10)), "bb", "bb")  # as often as it likes
    assert not doubled("a9", "bb", "bb")  # the last word of one that has ended, which came late
    assert doubled("a9", "a9")
