"""What the processes of a federation say: never nothing for long, one line each, and never a row."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest

from piebald.contracts import Task
from piebald.deploy import logs
from piebald.deploy.logs import JsonLines, OneLine, start_log
from piebald.errors import SettingError
from piebald.runtimes.federation.client_session import ClientSession
from piebald.runtimes.federation.heartbeat import EVERY, Heartbeat
from piebald.runtimes.federation.member_list import OpenTask
from piebald.runtimes.federation.messages import Welcome
from piebald.runtimes.federation.server_state import FederationState
from piebald.runtimes.federation.timeouts import Timeouts
from piebald.runtimes.federation.waiting import server_waits_for, site_waits_for

FEDERATION = logging.getLogger("piebald.federation")


@pytest.fixture(autouse=True)
def _log_as_before() -> object:
    """Leave the package's log as it was."""
    loggers = [logging.getLogger("piebald"), FEDERATION]
    before = [(one, one.level, list(one.handlers)) for one in loggers]
    yield
    for one, level, handlers in before:
        one.setLevel(level)
        one.handlers[:] = handlers


def test_a_log_is_never_silent_for_30_seconds(caplog: pytest.LogCaptureFixture) -> None:
    now, waits = [0.0], ["waiting for east"]
    heartbeat = Heartbeat(lambda: waits[0], clock=lambda: now[0])
    FEDERATION.addFilter(heartbeat)
    said: list[float] = []
    with caplog.at_level(logging.INFO, "piebald.federation"):
        for second in range(200):
            now[0] = float(second)
            if second == 70:
                FEDERATION.info("a line of another kind")
            before = len(caplog.records)
            heartbeat.beat()
            said += [now[0]] * (len(caplog.records) - before)
        gaps = [b - a for a, b in zip([0.0, *said], [*said, 199.0], strict=True)]
        assert max(gaps) <= 30
        assert min(gaps[:-1]) >= EVERY  # and no more lines than are needed
        assert not [second for second in said if 70 <= second < 70 + EVERY]
        waits[0] = ""
        now[0] = 1000.0
        count = len(caplog.records)
        heartbeat.beat()
        assert len(caplog.records) == count  # nothing is expected, so nothing is said
    heartbeat.stop()


def test_the_server_names_whom_it_waits_for() -> None:
    state = FederationState(["north", "east", *(f"more-{n}" for n in range(9))], "ab", Timeouts(None, 600, 5, 600))
    said = server_waits_for(state, gathered=False)
    assert said.startswith("waiting for north (not heard yet), east (not heard yet)")
    assert said.endswith("and 6 more")
    task = Task(17, 1, 11, {})
    state.members[1].open[17] = OpenTask(task, state.clock())
    assert server_waits_for(state, gathered=True).startswith("waiting for east (task 17 of step 12 for 0 s, not heard")
    state.members[1].open.clear()
    state.closing = True
    assert server_waits_for(state, gathered=True) == ""


def test_a_site_says_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)
    session = ClientSession(tmp_path)
    away = site_waits_for(session, "hub:8400", "connection refused", 960.0, {"task 17: training 9 rows": 955.0})
    assert away == (
        "task 17: training 9 rows for 45 s; waiting for the server at hub:8400 (connection refused; last word 40 s ago)"
    )
    assert (
        site_waits_for(session, "hub:8400", "", 0.0, {})
        == "waiting for the server at hub:8400 (no answer; no word yet)"
    )
    session.welcome = Welcome(version="0", run="ab", epoch="cd", terms="ef")
    assert (
        site_waits_for(session, "hub:8400", "", 998.0, {}) == "waiting for the server's next task (last word 2 s ago)"
    )
    session.refused = "classifier.bias must stay"
    assert "classifier.bias must stay" in site_waits_for(session, "hub:8400", "", 998.0, {})


def record(message: str, *args: object, error: bool = False) -> logging.LogRecord:
    return logging.LogRecord(
        "piebald.federation", logging.WARNING, "", 0, message, args, sys.exc_info() if error else None
    )


def test_an_error_that_quotes_a_row_does_not_bring_it_into_the_log() -> None:
    try:
        float("Miller 1954")
    except ValueError:
        failed = record("task %d failed", 3, error=True)
    for formatter in (OneLine("%(message)s"), JsonLines()):
        said = formatter.format(failed)
        assert "Miller" not in said
        assert "ValueError at test_logs.py" in said
        failed.exc_text = None


def test_json_lines_hold_names_numbers_and_no_control_characters() -> None:
    about = {"event": "sent", "site": "a\x1b[2Jb\nc", "seconds": 0.5, "level": "forged"}
    line = JsonLines().format(record("%(site)s in %(seconds).1f s", about))
    read = json.loads(line)
    assert "\n" not in line
    assert (read["event"], read["level"], read["site"], read["seconds"]) == ("sent", "warning", "ab c", 0.5)
    assert read["message"] == "ab c in 0.5 s"
    assert read["time"].endswith("+00:00")


def test_a_log_file_is_private_and_put_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_BYTES", 2000)
    file = tmp_path / "site.log"
    start_log("debug", True, file)
    for number in range(100):
        FEDERATION.debug("line %(number)d", {"event": "test", "number": number})
    kept = sorted(tmp_path.glob("site.log*"))
    assert [path.name for path in kept] == ["site.log", *(f"site.log.{n}" for n in range(1, 6))]
    assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}
    assert json.loads(file.read_text().splitlines()[-1])["number"] == 99
    start_log("warning", False, file)
    FEDERATION.info("too little")
    assert "too little" not in file.read_text()
    with pytest.raises(SettingError, match="cannot be written"):
        start_log("info", False, tmp_path / "missing" / "site.log")
