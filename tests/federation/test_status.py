"""What a federation's status and its page say, and to whom."""

from __future__ import annotations

import base64
import fcntl
import http.client
import json
import logging
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from piebald.cli import main
from piebald.core.errors import SettingError
from piebald.core.private_files import write_private
from piebald.experiments.file import ExperimentSettings
from piebald.federation.credentials import provisioning
from piebald.federation.hub.local_federation import free_port
from piebald.federation.hub.server_state import FederationState, Timeouts
from piebald.federation.link.wire_format import Hello
from piebald.federation.operate import page_server, run_view, status
from piebald.federation.operate.experiment_queue import ExperimentQueue
from piebald.federation.operate.page_server import PageAddress, serving_page
from piebald.federation.operate.run_view import RunView, Viewer, exposition, page
from piebald.federation.operate.status import (
    RUN,
    check_health,
    killed_process,
    read_status,
    running_process,
    status_values,
)
from piebald.federation.site.client_session import ClientSession
from piebald.storage.lock import STOP, RunLock
from piebald.storage.store import RunStore
from tests import processes

from .conftest import ENVIRONMENT, Server, Sites, provisioned, settings, until

pytest.importorskip("starlette", reason="needs the extra: pip install '.[page]'")
HOSTILE = "<script>alert(1)</script>\x1b[2J\"'"
SITE = {
    "version": "0.1.0", "refused": None, "rows": 133, "working": [], "finished": 7, "staleness": 1, "late": 0,
    "refusals": 0, "seconds": 0.25, "received": 3_000_000, "sent": 4_000_000,
}  # fmt: skip


BUDGETS = [
    {"unit": unit, "epsilon_pld": 3.75, "delta": 1e-5, "meaning": f"Of a {unit}.", "steps": 30}
    for unit in ("row", "client")
]


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """The credentials of a server and the run folder of its federation, whose clusters are two, one name hostile."""
    credentials = provisioned(tmp_path / "credentials") / "server"
    run = tmp_path / "run"
    meta = {
        "recipe": {"name": "fedavg", "table": {}}, "label": "fedavg", "seed": 0, "rounds": 30, "metric": "accuracy",
        "higher_is_better": True, "model": "Mlp", "parameters": 4226, "clients": 3, "privacy": BUDGETS,
        "runtime": {"kind": "federation", "credentials": str(credentials)},
    }  # fmt: skip
    with RunStore.create(run, meta) as store:
        for version in range(1, 13):
            results = [
                {"id": 3 * version + client, "client": client, "kind": "train", "status": "ok", "cluster": client % 2,
                 "loss": 1 / version + client}
                for client in range(3)
            ]  # fmt: skip
            spent = [
                {"unit": "row", "epsilon": version / 8, "delta": 1e-5},
                {"unit": "client", "epsilon": None, "delta": 1e-6},
            ]
            note = {"axis": "privacy", "cluster": 0, "name": "spent", "value": spent}
            store.commit({"version": version, "loss": 1 / version, "arrived": 3, "failed": 0}, results, notes=[note])
            rows = [{"version": version, "model": "global", "split": "test", "metric": "accuracy"}]
            store.scores([rows[0] | {"client": client, "value": 0.5 + version / 30} for client in range(3)])
    names = ("north", "south", HOSTILE)
    sites = [{"site": name, "state": "ready", "heard": time.time() - 3, **SITE} for name in names]
    sites[1] |= {"state": "refuses", "refused": HOSTILE}
    about = {"party": "server", "version": "0.1.0", "run": "ab", "steps": 12, "over": False, "sites": sites}
    (credentials / "status.json").write_text(json.dumps(about))
    (credentials / RUN).write_text(json.dumps({"folder": str(run)}))
    return credentials, run


@pytest.mark.parametrize("recorded", ["running", "stopped", "failed", "finished"])
def test_the_lock_and_the_record_say_how_a_server_is(places: tuple[Path, Path], recorded: str) -> None:
    credentials, run = places
    with RunStore.open(run) as store:
        store.set_meta(status=recorded)
        for folder in places:
            assert read_status(folder)["state"] == ("finished" if recorded == "finished" else "training")
            assert read_status(folder)["process"] == os.getpid()
    for folder in places:
        os.utime(credentials / "status.json", (1e9, 1e9))
        found = status_values(folder)
        assert found["state"] == ("killed" if recorded == "running" else recorded)
        assert (found["process"], found["steps"], found["since"]) == (None, 12, 1e9)
        assert found.get("again") == (None if recorded == "finished" else f"piebald resume {run}")
        assert "over" not in found
    shutil.rmtree(run)
    assert read_status(credentials)["state"] == "stopped"  # nothing runs, and no record says how it ended
    lock = RunLock(credentials)
    assert read_status(credentials)["state"] == "training"
    lock.release()


def test_a_run_that_the_server_has_left_or_a_restored_one_is_not_said_to_run(places: tuple[Path, Path]) -> None:
    credentials, run = places
    with RunStore.open(run) as store:
        store.set_meta(status="running")
    again = run.with_name("again")
    shutil.copytree(run, again)
    lock = RunLock(credentials)  # a server serves, and its credentials name the first of the two
    assert [read_status(folder)["state"] for folder in (run, again)] == ["training", "killed"]
    assert "sites" not in read_status(again)
    lock.release()


@pytest.mark.parametrize("recorded", ["running", "stopped", "finished"])
def test_a_killed_site_is_no_stopped_one(tmp_path: Path, recorded: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = provisioned(tmp_path) / "site-1"
    (folder / "status.json").write_text(json.dumps({"party": "site-1", "state": recorded}))
    assert main(["status", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == ("killed" if recorded == "running" else recorded)


def test_what_a_server_does_is_one_word_everywhere(
    places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    credentials, run = places
    with RunStore.open(run) as store:
        store.set_meta(status="running")
    written = json.loads((credentials / "status.json").read_text())
    lock = RunLock(credentials)
    for state, ends, code in (
        ("waiting for north", "north is heard", 0),
        ("failing", "a task succeeds", 2),
        ("stalled", "south delivers", 2),
        ("training", "the last step is made", 0),
    ):
        activity = {"state": state, "since": time.time() - 90, "ends": ends}
        (credentials / "status.json").write_text(json.dumps(written | {"federation": "oncology", "activity": activity}))
        assert main(["status", str(run)]) == 0
        told = capsys.readouterr().out
        for words in ("oncology", state, " s ago", ends):
            assert words in told, (words, told)
        view = Viewer(*places).view()
        assert f'piebald_state{{state="{state.split()[0]}"}} 1.0' in exposition(view)[0].decode()
        page = run_view.page(view)
        for words in ("<title>Piebald: oncology: fedavg</title>", state, f" s, until {ends}</small></dd>"):
            assert words in page, words
        assert main(["status", str(credentials), "--check"]) == code
        assert (f"is {state} until {ends}" in capsys.readouterr().err) == bool(code)
    for name in ("status.json", "run.lock"):
        os.utime(credentials / name, (1e9, 1e9))
    found = status_values(run)
    assert (found["state"], found["since"]) == ("stalled", 1e9)  # whatever it wrote a long time ago
    lock.release()
    page = run_view.page(Viewer(*places).view())
    assert "None" not in page  # without a server sites have no state


@pytest.mark.long
def test_a_site_and_a_server_that_are_killed_change_the_word_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What log, status, page, metrics and exit code say of real processes: a wrong column, a killed site and server."""
    folder, run = provisioned(tmp_path / "credentials", ["site-1", "site-2"]), tmp_path / "run"
    credentials, port, sites = folder / "server", free_port(), Sites(folder)
    table = tmp_path / "rows.csv"
    table.write_text("a,b,y\n" + "1.5,2,0\n2,1.5,1\n" * 20)
    partition = {"kind": "sites", "clients": ["site-1", "site-2"], "inputs": [2], "classes": ["0", "1"]}
    waits = {"kind": "federation", "patience": 600.0, "silence": 2.0, "wait_for": 2}
    experiment = {"rounds": 1_000_000, "evaluate": {"every": 0}, "partition": partition, "runtime": waits}
    experiment |= {"model": {"name": "mlp"}, "recipe": {"name": "fedavg", "batch": 10}}
    made = ExperimentSettings.of_table(experiment, "the test's settings")

    def says(state: str, code: int = 0) -> bool:
        values = read_status(run)
        if not str(values["state"]).startswith(state):
            return False
        with socket.create_connection(("127.0.0.1", port), 20):
            pass
        view = Viewer(credentials, run).view()
        assert f'piebald_state{{state="{state.split()[0]}"}} 1.0' in exposition(view)[0].decode()
        assert f'class="state">{state}' in run_view.page(view)
        assert main(["status", str(credentials), "--check"]) == code
        return True

    server = Server(made, credentials, run, "--status-port", str(port))
    try:
        sites.start("site-1", "--data", str(table), "--target", "y")
        sites.start("site-2", "--data", str(table), "--target", "x")
        until(lambda: (run / "run.db").exists() and says("waiting for site-2"), 120)
        until(lambda: "there is no column 'x'" in sites.log("site-2"), 120)
        sites.kill("site-2")
        sites.start("site-2", "--data", str(table), "--target", "y")
        until(lambda: server.version() > 2, 120)
        until(lambda: says("training"), 60)
        sites.kill("site-2")
        until(lambda: says("waiting for site-2"), 60)
        server.process.kill()
        server.process.wait()
        assert read_status(run)["state"] == "killed"
        assert main(["status", str(credentials), "--check"]) == 2
        assert read_status(run)["again"] == f"piebald resume {run}"
        server.kill_and_resume()
        sites.start("site-2", "--data", str(table), "--target", "y")
        version = server.version()
        until(lambda: server.version() > version + 1, 120)
        server.process.terminate()
        assert server.process.wait(60) == 130
        assert read_status(run)["state"] == "stopped"
        assert main(["status", str(credentials), "--check"]) == 2
        told = re.findall(r"state: (\w+(?: for site-2)?)", server.log.read_text())
        assert [word for word, after in zip(told, [*told[1:], ""], strict=True) if word != after][-1] == "stopped"
        assert {"training", "waiting for site-2", "stopped"} <= {*told}
    finally:
        sites.close()
        server.close()


def killed_holder(folder: Path) -> int:
    """Kill a process that holds the lock of a folder; returns its number."""
    code = "import sys, time; from pathlib import Path; from piebald.storage.lock import RunLock; "
    code += f"kept = RunLock(Path({str(folder)!r})); print('held', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        process.kill()
    return process.pid


def test_a_killed_server_of_a_queue_is_gone_and_what_the_queue_held_is_told(
    places: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, its status was that one experiment ran, or "finished" where the last one had."""
    credentials, run = places
    queue = ExperimentQueue(credentials)
    first = queue.add("hdafl", "", run)
    queue.add("fedavg", "", tmp_path / "b")
    with RunStore.open(run) as store:
        store.set_meta(status="running")
    queue.change(first, state="running")
    lock = RunLock(credentials)
    assert status_values(credentials)["queue"] == "1 running (1 hdafl), 1 waiting (2 fedavg)"
    lock.release()
    found = read_status(credentials)  # it was stopped, whatever the run's record says
    assert (found["state"], found["queue"]) == ("stopped", "1 interrupted (1 hdafl), 1 waiting (2 fedavg)")
    process = killed_holder(credentials)
    for recorded in ("running", "finished"):
        with RunStore.open(run) as store:
            store.set_meta(status=recorded)
        assert read_status(credentials)["state"] == "killed"
    assert read_status(run)["state"] == "finished"
    assert main(["status", str(credentials)]) == 0
    told = capsys.readouterr().out
    for words in ("1 interrupted (1 hdafl), 1 waiting (2 fedavg)", f"piebald server {credentials}", "since", "ago"):
        assert words in told
    assert main(["status", str(credentials), "--check"]) == 2
    assert f"nothing is running with {credentials}: process {process} was killed" in capsys.readouterr().err


def test_a_server_that_is_killed_before_its_run_begins_was_killed(tmp_path: Path) -> None:
    """Before, it was said to be stopped, since only run folders recorded how a run ended."""
    credentials = provisioned(tmp_path / "credentials") / "server"
    with pytest.raises(SettingError, match="nothing has run"):
        read_status(credentials)
    lock = RunLock(credentials)
    assert killed_process(credentials) is None  # it runs
    lock.release()
    assert killed_process(credentials) is None  # it has ended
    process = killed_holder(credentials)
    assert killed_process(credentials) == process
    assert read_status(credentials)["state"] == "killed"
    with pytest.raises(SettingError, match=f"process {process} was killed"):
        check_health(credentials)
    RunLock(credentials).release()
    assert killed_process(credentials) is None


class Page:
    """A page that is served."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
        connection.close()
        return found


@pytest.fixture
def served(places: tuple[Path, Path]) -> Iterator[Page]:
    port = free_port()
    with serving_page(PageAddress("127.0.0.1", port), *places):
        yield Page(port)


def test_the_page_shows_the_federation_and_escapes_what_others_wrote(served: Page) -> None:
    status, headers, text = served.get()
    assert status == 200
    for shown in ("north", "12", "of 30", "90.0%", "Clusters", " s ago", "&lt;script&gt;alert(1)&lt;/script&gt;"):
        assert shown in text, shown
    assert "<script" not in text
    assert "\x1b" not in text
    assert "http://" not in text  # nothing of others is fetched
    assert "https://" not in text
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert "server" not in headers
    assert headers["x-content-type-options"] == "nosniff"


def test_budgets_of_rows_and_of_clients_are_shown_as_far_as_they_are_spent(places: tuple[Path, Path]) -> None:
    page = run_view.page(Viewer(*places).view())
    cells = re.sub("<[^>]*>", "|", page[page.index('<section id="privacy"') :])
    assert re.search(r"\|row\|+1\.5\|+3\.75\|+1e-05\|", cells)
    assert re.search(r"\|client\|+infinite\|+3\.75\|", cells)
    assert "of a row, delta 1e-05, 12 steps" in page


def test_the_page_can_only_be_read_and_only_under_this_machines_name(served: Page) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert served.get(method=method)[0] == 405
    assert served.get("/../server/key.pem")[0] == 404
    assert served.get(Host="rebound.example")[0] == 421
    assert served.get(Host="127.0.0.1.rebound.example:80")[0] == 421
    assert served.get("/metrics", Host=f"localhost:{served.port}")[0] == 200
    assert served.get("/healthz")[2] == "ok\n"
    shown = json.loads(served.get("/status.json")[2])
    assert [site["site"] for site in shown["sites"]][:2] == ["north", "south"]
    assert (shown["steps"], shown["rounds"]) == (12, 30)
    assert all(abs(time.time() - site["heard"]) < 600 for site in shown["sites"])  # a time, for programs


def test_silent_connections_stop_neither_the_page_nor_the_sites(served: Page) -> None:
    """Before, each of them took one of the files that the server may have open, for ever, and 32 ended the page."""
    most = page_server.MOST_CONNECTIONS
    idle = [socket.create_connection(("127.0.0.1", served.port), timeout=60) for _ in range(most + 8)]
    assert served.get()[0] == 200
    assert [one.recv(1) for one in idle[:9]] == [b""] * 9  # the oldest have ended, one of them for the question
    for one in idle[9:]:
        one.setblocking(False)
        with pytest.raises(BlockingIOError):
            one.recv(1)
    for one in idle:
        one.close()


def test_metrics_are_prometheus_own_form(places: tuple[Path, Path]) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in parser.text_string_to_metric_families(exposition(Viewer(*places).view())[0].decode())
        for sample in family.samples
    }
    assert Viewer(places[0]).view().scores == Viewer(*places).view().scores  # the credentials name the run folder
    assert found["piebald_steps",] == 12
    assert found["piebald_state", "killed"] == 1
    assert found["piebald_site_received_bytes_total", "north"] == 3_000_000
    assert found["piebald_score", "accuracy", "global"] == pytest.approx(0.9)
    assert (found["piebald_epsilon", "row"], found["piebald_epsilon", "client"]) == (1.5, math.inf)
    assert found["piebald_site_loss", "south"] == pytest.approx(1 / 12 + 1)
    assert exposition(RunView())  # before anything has run


def test_metrics_say_how_the_machine_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = provisioned(tmp_path) / "server"
    queue = ExperimentQueue(credentials)
    for name in ("a", "b", "c"):
        queue.add(name, "rounds = 1", tmp_path / name)
    queue.change(queue.entry(1), state="running")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=12_345 if path == credentials else 0))
    told = exposition(Viewer(credentials).view())[0].decode().splitlines()
    assert {"piebald_queue_waiting 2.0", "piebald_disk_free_bytes 12345.0"} <= {*told}
    values = dict(line.rsplit(" ", 1) for line in told if not line.startswith("#"))
    expires = provisioning.read(credentials).expires.timestamp()
    assert float(values["piebald_certificate_expires_seconds"]) == pytest.approx(expires, abs=2)
    assert not Path("/proc").exists() or float(values["process_resident_memory_bytes"]) > 1e7


def test_elsewhere_than_on_loopback_a_token_is_needed(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    credentials, _ = places
    token = page_server.token_of(credentials)
    file = credentials / page_server.TOKEN
    assert (file.stat().st_mode & 0o777, page_server.token_of(credentials)) == (0o600, token)
    compared: list[bytes] = []
    true = page_server.secrets.compare_digest
    monkeypatch.setattr(page_server.secrets, "compare_digest", lambda a, b: compared.append(a) or true(a, b))
    port = free_port()
    with caplog.at_level(logging.INFO, "piebald.federation"), serving_page(PageAddress("127.0.0.1", port), *places):
        served = Page(port)
        for path in ("/", "/metrics", "/status.json", "/nothing"):
            assert served.get(path)[0] == 401
        basic = base64.b64encode(f"me:{token}".encode()).decode()
        wrong = base64.b64encode(b"me:no").decode()
        assert served.get("/healthz")[0] == 200
        assert served.get(Authorization=f"Bearer {token}")[0] == 200
        assert served.get(Authorization=f"Basic {basic}")[0] == 200
        for given in (f"Bearer {token[:-1]}", f"Basic {wrong}", "Basic ?", token, f"Digest {token}", "Bearer \xe9"):
            assert served.get(Authorization=given)[0] == 401
    assert len(compared) >= 5  # each one in a time that does not depend on how much of it is right
    assert token not in caplog.text
    file.chmod(0o644)
    with pytest.raises(SettingError, match="chmod 600"), serving_page(PageAddress("127.0.0.1", port), *places):
        pass
    assert [PageAddress(host, 1).loopback for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "hub")] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_a_page_that_fails_is_one_warning(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    with serving_page(PageAddress("127.0.0.1", port), *places):
        with serving_page(PageAddress("127.0.0.1", port), *places):  # the port is taken
            pass
        assert "there is no status page" in caplog.text
        caplog.clear()
        monkeypatch.setattr(Viewer, "view", lambda _: 1 / 0)
        assert [Page(port).get(path)[0] for path in ("/", "/", "/metrics")] == [500, 500, 500]
        assert len(caplog.records) == 1
        assert Page(port).get("/healthz")[0] == 200


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["server", "credentials/server", "--status-host", "0.0.0.0"], "add --status-port"),
        (["resume", "run", "--status-port", "1234"], "is not a run of a federation"),
        (["resume", "run", "--log-json"], "is not a run of a federation"),
        (["server", "credentials/server", "--status-port", "0"], "at least 1"),
    ],
)
def test_options_that_have_no_effect_are_refused(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    provisioned(tmp_path / "credentials", ["site-1"])
    (tmp_path / "e.toml").write_text("rounds = 1\n")
    RunStore.create("run", {"clients": 1}).close()
    assert main([*arguments, "e.toml"] if arguments[0] == "server" else arguments) == 2
    assert says in capsys.readouterr().err


@pytest.mark.full
def test_the_page_in_a_browser(served: Page, tmp_path: Path) -> None:
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    binary = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )
    if binary is None:
        pytest.skip("no chromium was found on the PATH")
    address = f"http://localhost:{served.port}/"
    with driver.sync_playwright() as started:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
        browser = started.chromium.launch(executable_path=binary, args=arguments)
        for width in (1400, 390):
            for scheme in ("light", "dark"):
                context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
                said: list[Any] = []
                asked: list[str] = []
                shown = context.new_page()
                shown.on("console", lambda message, said=said: said.append(message.text))
                shown.on("pageerror", lambda error, said=said: said.append(error))
                shown.on("request", lambda request, asked=asked: asked.append(request.url))
                shown.goto(address)
                assert said == []
                assert {one for one in asked if not one.startswith("data:")} <= {address, f"{address}favicon.ico"}
                assert shown.evaluate("document.documentElement.scrollWidth") <= width
                assert shown.locator("script").count() == 0
                assert "<script>alert(1)</script>" in shown.locator("tbody th").nth(2).inner_text()
                back = shown.evaluate("getComputedStyle(document.body).backgroundColor")
                assert (back == "rgb(255, 255, 255)") == (scheme == "light")  # its own style is allowed to apply
                cut = """() => [...document.querySelectorAll('figure text')].filter((text) => {
                    const own = text.getBoundingClientRect(), all = text.closest('svg').getBoundingClientRect();
                    return own.left < all.left - 1 || own.right > all.right + 1 || own.bottom > all.bottom + 1;
                }).map((text) => text.textContent)"""
                assert shown.locator("figure svg").count() == 2
                assert shown.evaluate(cut) == []
                heights = "[...document.querySelectorAll('figure text')].map((t) => t.getBoundingClientRect().height)"
                assert min(shown.evaluate(heights)) >= 10  # it can be read on a telephone
                context.close()
        browser.close()


def test_a_process_that_ends_before_it_is_stopped_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    seen = iter([gone.pid, None, None])
    monkeypatch.setattr(status, "running_process", lambda folder: next(seen))
    assert main(["stop", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"stopped process {gone.pid}\n"


def test_stop_signals_no_stranger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that a container writes has the number of its process there, which is another one's here."""
    signalled: list[int] = []
    monkeypatch.setattr(os, "kill", lambda process, _: signalled.append(process))
    for stranger in (1, os.getppid(), 4_000_000):
        with (tmp_path / "run.lock").open("w+") as file:
            file.write(str(stranger))
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX)
            assert main(["stop", str(tmp_path), "--wait", "0"]) == 2
        assert "it has been asked to" in capsys.readouterr().err
        assert (tmp_path / STOP).exists()
    assert signalled == []


def test_a_number_of_a_process_that_has_ended_elsewhere_is_not_signalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two looks it may end, and its number be a stranger's here."""
    seen = iter([1, None, None])
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a stranger was signalled"))
    monkeypatch.setattr(status, "running_process", lambda folder: next(seen))
    monkeypatch.setattr(status, "is_visible", lambda *_: False)
    assert main(["stop", str(tmp_path)]) == 0
    assert not (tmp_path / STOP).exists()


@pytest.mark.full
@pytest.mark.parametrize("what", ["a run", "a server that waits for its run", "a queue", "a site"])
def test_a_process_of_another_container_stops_by_a_file(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is asked by its run folder or by its credentials, and its number means nothing where it is asked."""
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a stranger was signalled"))
    monkeypatch.setattr(status, "is_visible", lambda *_: False)
    folder, run, file = provisioned(tmp_path / "credentials"), tmp_path / "run", tmp_path / "experiment.toml"
    file.write_text(settings({"name": "fedavg"}, rounds=1_000_000, evaluate={"every": 0}).text())
    words, asked = {
        "a run": (["run", file, "--out", run], run),
        "a server that waits for its run": (["server", folder / "server", file, "--out", run], run),
        "a queue": (["server", folder / "server"], folder / "server"),
        "a site": (["client", folder / "site-1"], folder / "site-1"),
    }[what]
    log = tmp_path / "log.txt"
    with log.open("wb") as output:
        process = processes.Popen(processes.command(*words), stdout=output, stderr=output, env=ENVIRONMENT)
    try:
        until(lambda: running_process(asked) == process.pid or process.poll() is not None)
        if what == "a run":
            until(lambda: (run / "run.db").exists())
        assert main(["stop", str(asked), "--wait", "100"]) == 0, log.read_text()
        process.wait(100)
    finally:
        process.kill()
        process.wait()
    assert process.returncode in (0, 130), log.read_text()
    assert "Traceback" not in log.read_text()
    assert not (asked / STOP).exists()
    if what == "a run":
        with RunStore.open_read_only(run) as store:
            assert store.meta["status"] == "stopped"


def test_a_server_on_a_full_disk_lives(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its sign of life was a file alone, so that Kubernetes ended the server that waits for room as documented."""
    credentials, _ = places
    for name in ("status.json", "run.lock"):
        if (credentials / name).exists():
            os.utime(credentials / name, (0, 0))
    monkeypatch.setattr(
        "piebald.storage.lease.write_private", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "full"))
    )
    monkeypatch.setattr(status.os, "utime", lambda *_: (_ for _ in ()).throw(OSError(30, "read-only")))
    port = free_port()
    with serving_page(PageAddress("127.0.0.1", port), *places):
        assert Page(port).get("/healthz")[0] == 503
        status.give_sign(credentials)
        assert Page(port).get("/healthz")[0] == 200


def test_a_site_shows_the_run_as_the_server_sees_it(tmp_path: Path) -> None:
    """From the server's answer to a hello to the site's status, its page and its metrics; the texts are bounded."""
    state = FederationState(["site-1", "site-2"], "ab", Timeouts(None, 60.0, 5.0, 600.0))
    state.version = 7
    member, hello = state.members[0], Hello(protocol=6, version="0", incarnation="cd", ready="ab")
    with state.lock:
        state.take_hello(member, hello, "")
        state.activity(True)
        state.members[1].absent = "<b>" * 200
        seen = [state.take_hello(one, hello, "") for one in state.members]
    assert [len(welcome.you) for welcome in seen] == [len("ready"), 300]
    session = ClientSession(tmp_path / "state")
    session.take_welcome(seen[0])
    told = session.status()
    assert (told["steps"], told["sites_ready"], told["sites_listed"], told["seen_as"]) == (7, 1, 2, "ready")
    assert told["run_state"] == "training"
    folder = provisioned(tmp_path / "credentials") / "site-1"
    session.take_welcome(seen[1])
    values = {"party": "site-1", "federation": "test", "updates": 4, "sent": 10, "received": 20, "heard": time.time()}
    write_private(folder / "status.json", json.dumps(values | session.status()))
    view = Viewer(folder).view()
    assert "1</" in page(view) or "of 2" in page(view)
    assert "<b><b>" not in page(view)
    lines = exposition(view)[0].decode().splitlines()
    assert {"piebald_steps 7.0", "piebald_sites_ready 1.0", "piebald_sites_listed 2.0", "piebald_updates_sent 4.0",
            "piebald_sent_bytes_total 10.0", "piebald_received_bytes_total 20.0"} <= set(lines)  # fmt: skip
