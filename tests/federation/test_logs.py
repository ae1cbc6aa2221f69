"""What the processes of a federation say: never nothing for long, one line each, and never a row."""

from __future__ import annotations

import json
import logging
import queue
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from safetensors.torch import load_file

from piebald.contracts import Task
from piebald.core.errors import SettingError
from piebald.experiments.file import ExperimentSettings
from piebald.federation.hub.local_federation import free_port
from piebald.federation.hub.member_list import OpenTask
from piebald.federation.hub.server_state import FederationState, Timeouts
from piebald.federation.link.supervision import EVERY, Heartbeat, at_work
from piebald.federation.link.wire_format import Hello, Welcome
from piebald.federation.operate import logs
from piebald.federation.operate.logs import JsonLines, OneLine, start_log
from piebald.federation.operate.page_server import token_of
from piebald.federation.site.client_session import ClientSession

from .conftest import Server, Sites, provisioned, until

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


def test_long_work_before_a_connection_is_told_until_others_speak(caplog: pytest.LogCaptureFixture) -> None:
    told, spoken = queue.SimpleQueue[str](), Heartbeat(lambda: "waiting for east", every=0.0)
    with at_work("reading rows.csv", tell=told.put, every=0.0):
        assert re.fullmatch(r"reading rows\.csv for \d+ s", told.get(timeout=60))
    with at_work("preparing the run", every=0.0), caplog.at_level(logging.INFO, "piebald.federation"):
        (before,) = [one for one in FEDERATION.filters if isinstance(one, Heartbeat)]
        before.beat()
        assert "preparing the run for 0 s" in caplog.text
        FEDERATION.addFilter(spoken)
        before.beat()
        assert FEDERATION.filters[-1:] == [spoken]
        assert before not in FEDERATION.filters
    spoken.stop()


def test_the_server_names_whom_it_waits_for() -> None:
    state = FederationState(["north", "east", *(f"more-{n}" for n in range(9))], "ab", Timeouts(None, 600, 5, 600))
    said = state.waits_for(gathered=False)
    assert said.startswith("waiting for north (not heard yet), east (not heard yet)")
    assert said.endswith("and 6 more")
    state.members[0].hear(Hello(protocol=1, version="0", incarnation="ab", pending=True), "")
    assert "north (waits until somebody there approves the experiment, last word 0 s ago)" in state.waits_for(False)
    task = Task(17, 1, 11, {})
    state.members[1].open[17] = OpenTask(task, state.clock())
    assert state.waits_for(gathered=True).startswith("waiting for east (task 17 of step 12 for 0 s, not heard")
    state.members[1].open.clear()
    state.closing = True
    assert state.waits_for(gathered=True) == ""


def test_a_site_says_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)
    session = ClientSession(tmp_path)
    away = session.waits_for("hub:8400", "connection refused", 960.0, {"task 17: training 9 rows": 955.0})
    assert away == (
        "task 17: training 9 rows for 45 s; waiting for the server at hub:8400 (connection refused; last word 40 s ago)"
    )
    assert session.waits_for("hub:8400", "", 0.0, {}) == "waiting for the server at hub:8400 (no answer; no word yet)"
    session.welcome = Welcome(version="0", run="ab", epoch="cd", terms="ef")
    assert session.waits_for("hub:8400", "", 998.0, {}) == "waiting for the server's next task (last word 2 s ago)"
    session.terms = "ef"
    assert "an experiment waits for approval" in session.waits_for("hub:8400", "", 998.0, {})
    session.refused = "classifier.bias must stay"
    assert "classifier.bias must stay" in session.waits_for("hub:8400", "", 998.0, {})


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


def test_a_log_file_is_private_and_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_BYTES", 2000)
    file = tmp_path / "site.log"
    file.touch(0o644)  # as an older Piebald left it
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


def written(numbers: np.ndarray) -> set[str]:
    """The ways in which a log could hold these numbers, to five digits or more."""
    values = [float(value) for value in numbers.ravel() if abs(value) > 1e-3]
    return {way for v in values for way in (repr(v), f"{v:.6f}", f"{v:.6g}", f"{v:.5e}")}


@pytest.mark.long
def test_the_logs_of_a_federation_tell_what_happens_and_hold_no_row_and_no_secret(tmp_path: Path) -> None:
    pytest.importorskip("starlette", reason="needs the extra: pip install '.[page]'")
    names = ["north", "south"]
    folder = provisioned(tmp_path / "credentials", names)
    rng = np.random.default_rng(7)
    forbidden: set[str] = {token_of(folder / "server")}
    for name in names:
        x = rng.normal(1000, 400, (40, 4)).astype("f4")
        forbidden |= written(x)
        np.savez(folder / name / "rows.npz", x=x, y=np.arange(40) % 2)
        (folder / name / "site.toml").write_text("[data]\nsource = 'rows.npz'\n[policy]\nleast_rows = 1\n")
    for party in ("server", "authority", *names):
        pem = (folder / party / "key.pem").read_bytes()
        number = load_pem_private_key(pem, None).private_numbers().private_value  # type: ignore[union-attr]
        forbidden |= {str(number), f"{number:x}", *pem.decode().splitlines()[1:-1]}
    made = ExperimentSettings.of_table(
        {
            "rounds": 3,
            "partition": {"kind": "sites", "clients": names, "inputs": [4], "classes": ["0", "1"]},
            "model": {"name": "mlp", "hidden": [3]},
            "recipe": {"name": "hdafl", "lr": 1e-4, "epochs": 2},
        },
        "the test's settings",
    )
    sites = Sites(folder)
    file = tmp_path / "server.jsonl"
    options = ("--log-level", "debug", "--log-json", "--log-file", str(file), "--status-port", str(free_port()))
    for name in names:
        sites.start(name, "--log-level", "debug")
    server = Server(made, folder / "server", tmp_path / "run", *options)
    try:
        until(server.over)
        until(lambda: all((folder / name / "model.safetensors").exists() for name in names))
        for name in names:
            until(lambda name=name: "the model after step 3" in sites.log(name))
    finally:
        sites.close()
        server.close()
    for name in names:
        model = load_file(folder / name / "model.safetensors")
        forbidden |= {way for key in model if key.startswith("classifier") for way in written(model[key].numpy())}
    said = {"server": file.read_text() + server.log.read_text(), **{name: sites.log(name) for name in names}}
    for party, text in said.items():
        assert [way for way in forbidden if way in text] == [], party
        assert len(text) > 1000
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    events = {line["event"] for line in lines}
    assert events >= {"listening", "connected", "joined", "begins", "sent", "received", "step", "evaluation", "ended"}
    (last,) = [line for line in lines if line["event"] == "step" and line["step"] == 3]
    assert last["message"].startswith("step 3/3: loss ")
    assert {line["site"] for line in lines if line["event"] == "joined"} == set(names)
    north = sites.log("north")
    for part in (
        "north: connecting to 127.0.0.1:",
        "the certificate of server is valid until",
        "joined as client 1 of 2, with 28 train rows, 4 validation rows, 8 test rows",
        "of step 1: training 2 epochs of 28 rows",
        "of step 3: trained in",
        ": sent 0.0",
        "answering evaluate",
    ):
        assert part in north, part
