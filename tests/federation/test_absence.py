"""A site that belongs to a run is waited for up to `patience`, whenever it fell silent; each absence is recorded."""

from __future__ import annotations

import importlib
import json
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from piebald.cli import main
from piebald.contracts import Task
from piebald.core.errors import SettingError
from piebald.experiments.file import ExperimentSettings
from piebald.federation.hub.server_state import FederationState, Timeouts
from piebald.federation.link.messaging import Unwelcome
from piebald.federation.link.wire_format import Hello
from piebald.federation.operate.status import status_values
from piebald.methods.queries import Evaluate
from piebald.report.tables import History
from piebald.runs.run import opened
from tests.security.server_entry import Entry, packed

from .conftest import SITES, Server, Sites, carry_out, provisioned, settings, until

ROOT = Path(__file__).parents[2]
FEDAVG = {"name": "fedavg"}


@pytest.fixture
def entry(tmp_path: Path) -> Iterator[Entry]:
    """A server that waits 60 seconds for a site, and of which all sites are heard."""
    made = Entry(tmp_path, FEDAVG, Timeouts(None, 60.0, 5.0, 600.0))
    for name in SITES:
        made.join(name)
    assert made.server.clients() == [0, 1, 2]
    yield made
    made.server.close()


def fall_silent(entry: Entry, site: int, seconds: float) -> None:
    """Make it so long ago that a site was heard, and that the server began."""
    member = entry.server.shared.members[site]
    assert member.heard is not None
    member.heard -= seconds
    entry.server.shared._opened -= seconds
    member.unready_for(entry.server.shared.terms, 5.0)


@pytest.mark.parametrize("query", [None, Evaluate()], ids=["training", "a question"])
@pytest.mark.parametrize("asked", [True, False], ids=["silent when asked", "silent before"])
def test_whenever_a_site_falls_silent_it_is_waited_for_as_long(asked: bool, query: Any, entry: Entry) -> None:
    """Before, one that was silent for more than 5 seconds when a round began was left out of it, and nobody knew."""
    for seconds, absent in ((10.0, False), (55.0, True)):  # of 60
        if asked:
            entry.task(1 if absent else 2, client=1, query=query)
        fall_silent(entry, 1, seconds)
        assert entry.server.clients() == ([0, 2] if absent else [0, 1, 2])
        if not asked:
            entry.task(1 if absent else 2, client=1, query=query)
        with entry.server.shared.lock:
            entry.server._give_up()
        assert bool(entry.server.shared.members[1].open) is not absent
    results = [entry.server.next(until=60.0) for _ in range(2)]
    assert {result.failure for result in results if result} == {"silent for more than 60 seconds"}
    assert entry.server.absences() == {1: "silent for more than 60 seconds"}
    entry.join("site-2")
    assert entry.server.clients() == [0, 1, 2]


def test_a_site_that_comes_later_belongs_from_then_on(tmp_path: Path) -> None:
    entry = Entry(tmp_path, FEDAVG, Timeouts(2, 60.0, 5.0, 600.0))
    entry.join("site-1")
    entry.join("site-3")
    assert entry.server.clients() == [0, 2]
    assert entry.server.absences() == {1: "not heard yet"}
    entry.join("site-2", ready="")
    assert entry.server.clients() == [0, 2]
    entry.join("site-2")
    assert (entry.server.clients(), entry.server.absences()) == ([0, 1, 2], {})
    entry.join("site-2", ready="")  # it was started anew, and reads its rows
    assert entry.server.clients() == [0, 1, 2]
    entry.server.close()


def test_a_site_that_is_not_ready_does_not_belong_in_the_tick_in_which_it_is_heard(monkeypatch: Any) -> None:
    """Before, on a clock with coarse ticks, rounds waited for it from then on."""
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    state = FederationState(["east"], "ab", Timeouts(1, 60.0, 5.0, 600.0))
    with state.lock:
        state.take_hello(state.members[0], Hello(protocol=1, version="0", incarnation="cd"), "")
    assert [state.belonging() for _ in range(2)] == [[], []]


def test_a_resumed_server_waits_for_those_that_were_there_before() -> None:
    """Before, one that needs two sites began with the first two that it heard."""
    hours = Timeouts(1, 60.0, 5.0, 600.0)
    before, after = (FederationState(["east", "west"], "ab", hours) for _ in range(2))
    before.members[0].belongs = True
    after.restore(before.checkpoint(), dict[int, Task]())
    assert (after.belonging(), after.absence(after.members[1])) == ([0], "not heard yet")
    after._opened -= 61
    assert after.absence(after.members[0]) == "silent for more than 60 seconds"


@pytest.mark.parametrize("wait_for", [3, "all"])
def test_no_round_ends_or_begins_with_fewer_sites_than_are_needed(wait_for: Any, tmp_path: Path) -> None:
    """Before, it held for the first round alone."""
    entry = Entry(tmp_path, FEDAVG, Timeouts(wait_for, 60.0, 5.0, 600.0))
    for name in SITES:
        entry.join(name)
    entry.server.clients()
    entry.task(1, client=1)
    fall_silent(entry, 1, 100.0)
    with entry.server.shared.lock:
        assert entry.server.shared.absence(entry.server.shared.members[1])
        entry.server._give_up()
    assert list(entry.server.shared.members[1].open) == [1]
    seen: list[Any] = []
    asking = threading.Thread(target=lambda: seen.append(entry.server.clients()), daemon=True)
    asking.start()
    until(lambda: entry.server.waits_for().startswith("waiting for site-2"))
    assert not seen
    entry.join("site-2", held=[1])
    asking.join(60)
    assert seen == [[0, 1, 2]]
    assert entry.deliver(packed(entry), id=1, site="site-2") == "done"
    result = entry.result()
    assert result is not None
    assert result.update is not None
    entry.server.close()


def test_a_run_that_all_sites_refuse_ends_with_what_they_say(entry: Entry) -> None:
    """Before, it went on empty: thousands of steps, as many warnings, and "finished"."""
    for name in SITES:
        entry.join(name, ready="", refused="no rounds are left of its limit in all runs")
    for waiting in (entry.server.clients, entry.server.next):
        with pytest.raises(SettingError, match=r"3 of 3 sites do not take part, site-1: no rounds are left"):
            waiting()


def test_a_second_process_of_a_living_site_is_turned_away(entry: Entry, caplog: pytest.LogCaptureFixture) -> None:
    """Before, the two took turns, and each round that asked the wrong one went on without the site."""
    entry.wire.open["site-2"] = 2
    for _ in range(3):
        with pytest.raises(Unwelcome, match="another process runs with these credentials"):
            entry.join("site-2", incarnation="cd")
    entry.join("site-2")  # the first one, which goes on as before
    assert entry.server.clients() == [0, 1, 2]
    assert [line.split(" ")[0:3] for line in caplog.messages] == [["a", "second", "process"]]
    entry.wire.open["site-2"] = 1  # it was killed
    entry.join("site-2", incarnation="cd")
    entry.wire.open["site-2"] = 2
    with pytest.raises(Unwelcome):
        entry.join("site-2")
    fall_silent(entry, 1, 10.0)  # it hangs
    entry.join("site-2", incarnation="ef")
    log = (entry.server.credentials.folder / "audit.jsonl").read_text()
    assert log.count('"event":"doubled"') == 2


# ------------------------------------------------------------------------------------------------------- in processes


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Sites]:
    """Three sites of this test alone."""
    made = Sites(provisioned(tmp_path / "credentials"))
    for name in SITES:
        made.start(name)
    yield made
    made.close()


def of_site(sites: Sites, name: str) -> dict[str, Any]:
    """What the server's status says of a site."""
    return next((row for row in status_sites(sites) if row["site"] == name), {})


def status_sites(sites: Sites) -> Sequence[dict[str, Any]]:
    """What the server's status says of all sites."""
    try:
        return list(status_values(sites.folder / "server").get("sites", ()))
    except SettingError:  # nothing was written yet
        return []


@pytest.mark.long
def test_a_site_that_is_away_while_a_slower_one_trains_misses_no_round(sites: Sites, tmp_path: Path) -> None:
    """Before, the next round began without it, with exit code 0 and no row that said so."""
    flags = {"kind": "federation", "silence": 2.0}
    made = settings(FEDAVG, rounds=5, evaluate={"every": 0}, runtime=flags)
    server = Server(made, sites.folder / "server", tmp_path / "run")

    def send(name: str, how: int) -> None:
        sites.running[name].send_signal(how)

    try:
        until(lambda: server.version() >= 1)
        send("site-1", signal.SIGSTOP)
        until(lambda: of_site(sites, "site-1").get("state") == "silent")  # and so the round waits for it
        until(lambda: not of_site(sites, "site-3")["working"])
        send("site-3", signal.SIGSTOP)
        until(lambda: of_site(sites, "site-3")["state"] == "silent")
        now = server.version()
        send("site-1", signal.SIGCONT)
        until(lambda: server.version() > now or server.over())
        send("site-3", signal.SIGCONT)
        until(server.over)
    finally:
        server.close()
    real = opened(server.out)
    trained = [(row["version"], row["client"], row["status"]) for row in real.results if row["kind"] == "train"]
    assert trained == [(version, client, "ok") for version in range(1, 6) for client in range(3)]
    assert not real.absences
    calm = carry_out(settings(FEDAVG, rounds=5, evaluate={"every": 0}))
    torch.testing.assert_close(real.cluster_models[0], calm.cluster_models[0], atol=1e-4, rtol=1e-4)


@pytest.mark.long
def test_each_absence_is_in_results_status_page_log_and_report(sites: Sites, tmp_path: Path) -> None:
    flags = {"kind": "federation", "silence": 2.0, "patience": 3.0}
    made = settings(FEDAVG, rounds=100_000, evaluate={"every": 0}, runtime=flags)
    server = Server(made, sites.folder / "server", tmp_path / "run")
    try:
        until(lambda: "site-3" in [row["site"] for row in status_sites(sites) if row["finished"]])
        sites.kill("site-3")
        before = of_site(sites, "site-3")["absent"]
        until(lambda: of_site(sites, "site-3")["absent"] >= before + 2)
        sites.start("site-3")
        back = server.log.read_text().count("site-3 takes part from step")
        until(lambda: server.log.read_text().count("site-3 takes part from step") > back)
        now = server.version()
        until(lambda: server.version() > now + 2)
        main(["stop", str(server.out)])
        server.process.wait(60)
    finally:
        server.close()
    run = History(server.out)
    absent = [row for row in run.results if (row["client"], row["status"]) == (2, "absent")]
    assert "silent for more than 3 seconds" in {row["reason"] for row in absent}
    rounds = {row["version"] for row in absent}
    came = {row["version"] for row in run.results if (row["client"], row["status"]) == (2, "ok")}
    assert rounds | came == set(range(1, len(run.rounds) + 1))
    assert not rounds & came
    sentence = f"{run.names[2]} was absent in {len(rounds):,} of {len(run.rounds):,} rounds"
    assert sentence in str(run.table())
    main(["report", str(server.out), "--out", str(tmp_path / "page")])
    assert sentence in (tmp_path / "page" / "report.html").read_text()
    lines = [json.loads(line) for line in (sites.folder / "server" / "audit.jsonl").read_text().splitlines()]
    events = [line["event"] for line in lines if line["event"] in ("absent", "takes part") and line["site"] == "site-3"]
    assert events[-2:] == ["absent", "takes part"]
    assert "rounds go on without site-3 from step" in server.log.read_text()


@pytest.mark.long
def test_a_listed_site_joins_a_running_run_at_the_start_of_a_round(tmp_path: Path, monkeypatch: Any) -> None:
    """Earlier rounds count it absent, and all is bit-equal to a calm run with the same attendance."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "federation"))
    compared = importlib.import_module("soak").compared
    sites = Sites(provisioned(tmp_path / "credentials"))
    made = settings({"name": "scaffold"}, rounds=100_000, evaluate={"every": 0})
    there = {"kind": "federation", "wait_for": 2, "silence": 2.0}
    server = Server(
        ExperimentSettings.of_table(made.table() | {"runtime": there}, "it"), sites.folder / "server", tmp_path / "run"
    )
    try:
        for name in SITES[:2]:
            sites.start(name)
        until(lambda: server.version() >= 3)
        sites.start(SITES[2])
        until(lambda: "site-3 takes part from step" in server.log.read_text())
        now = server.version()
        until(lambda: server.version() > now + 2)
        main(["stop", str(server.out)])
        server.process.wait(60)
    finally:
        server.close()
        sites.close()
    rows = [row for row in History(server.out).results if row["client"] == 2]
    absent = [row["version"] for row in rows if row["status"] == "absent"]
    came = [row["version"] for row in rows if row["status"] == "ok"]
    assert absent == [*range(1, len(absent) + 1)]
    assert came
    assert min(came) == len(absent) + 1
    found = compared(server.out, made)
    assert (found["steps that differ"], found["updates counted twice"]) == (0, 0)
    assert found["updates"] == 2 * len(absent) + 3 * len(came)
