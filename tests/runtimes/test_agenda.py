"""The order of simulated events, whose times become known only when their tasks are served."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from piebald.contracts import Task
from piebald.runtimes.simulation.device_times import Agenda, Due, Event

TIMES = st.floats(0, 4).map(round)  # few different ones, so that many events are due at once


@given(st.lists(st.tuples(st.integers(0, 9), TIMES, st.booleans()), max_size=60))
def test_events_come_in_order_of_their_last_times(steps: list[tuple[int, float, bool]]) -> None:
    agenda, times = Agenda(), dict[int, float]()
    event: Any = Event(Task(0, 0, 0, {}), 0.0, None, 0)
    for id, time, takes in steps:
        if takes and times:
            first = min(times, key=lambda id: (times[id], id))
            assert agenda.first()[:2] == agenda.pop()[:2] == (times.pop(first), first)
        else:
            times[id] = time
            agenda.put(Due(time, id, event))
        assert [due[:2] for due in agenda] == sorted((time, id) for id, time in times.items())
        assert len(agenda) == len(times)
