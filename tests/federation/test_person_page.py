"""A person's own page: it does what the certificate allows, and only what the page itself has asked for."""

from __future__ import annotations

import base64
import http.client
import re
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlencode

import pytest

from piebald.cli import main
from piebald.core.errors import SettingError
from piebald.federation.credentials.provisioning import Credentials, read
from piebald.federation.hub.local_federation import free_port
from piebald.federation.operate import remote
from piebald.federation.operate.experiment_queue import ExperimentQueue
from piebald.federation.operate.page_server import TOKEN, PageAddress, person_app, serve_person, web_server
from piebald.federation.operate.remote import MOST_SETTINGS, Desk
from piebald.storage.store import RunStore

from .conftest import settings
from .test_remote_operation import federation, noted

pytest.importorskip("starlette", reason="needs the extra: pip install '.[page]'")
FORM = "application/x-www-form-urlencoded"


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    server = read(federation(tmp_path / "credentials") / "server")
    made = Desk(server, ExperimentQueue(server.folder))
    made.link.start()
    yield made
    made.link.stop()


class PersonPage:
    """A page that is served, and whoever opens it."""

    def __init__(self, person: Credentials) -> None:
        self.port = free_port()
        address = PageAddress("127.0.0.1", self.port)
        self._server, self._listening = web_server(person_app(person), address, person.folder)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listening]})
        self._thread.start()
        self.token = (person.folder / TOKEN).read_text().strip()

    def asked(self, method: str, path: str, body: str = "", **headers: str) -> tuple[int, str]:
        status, content = self.answer(method, path, body, **headers)
        return status, content.decode()

    def answer(self, method: str, path: str, body: str = "", **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        basic = base64.b64encode(f"any:{self.token}".encode()).decode()
        given = {"Authorization": f"Basic {basic}", "Content-Type": FORM} | headers
        connection.request(method, path, body, {name.replace("_", "-"): text for name, text in given.items()})
        with closing(connection), connection.getresponse() as answer:
            return answer.status, answer.read()

    def key(self) -> str:
        found = re.search(r'name="key" value="([^"]+)"', self.asked("GET", "/")[1])
        assert found is not None
        return found[1]

    def send(self, path: str, **fields: object) -> str:
        """Send a form as the page would, and return the page that follows."""
        assert self.asked("POST", path, urlencode({"key": self.key(), **fields}))[0] == 303
        return self.asked("GET", "/")[1]

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        self._listening.close()


@pytest.fixture
def pages(desk: Desk) -> Iterator[dict[str, PersonPage]]:
    folder = desk._server.folder.parent
    made = {name: PersonPage(read(folder / name)) for name in ("ann", "ben", "olga", "nora")}
    yield made
    for page in made.values():
        page.close()


@pytest.mark.full
def test_a_person_submits_and_aborts_by_the_page_as_the_role_allows(
    pages: dict[str, PersonPage], desk: Desk, tmp_path: Path
) -> None:
    text = settings({"name": "fedavg"}, rounds=2, label="<script>x</script>").text()
    shown = pages["ann"].send("/submit", experiment=text.replace("\n", "\r\n"), priority="5")
    assert "experiment 1 of the queue" in shown
    assert "&lt;script&gt;x&lt;/script&gt;" in shown
    assert "<script" not in shown
    entry = desk._queue.entry(1)
    assert (entry.by, entry.priority) == ("ann", 5)
    assert "data.source names" in pages["ann"].send("/submit", experiment="[data]\nsource = 'patients.csv'")
    assert "no experiment 1 of yours" in pages["ben"].send("/abort", number=1)
    assert "nora is administrator here, who may not abort" in pages["nora"].send("/abort", number=1)
    assert "who may not submit" in pages["nora"].send("/submit", experiment=text)
    for number in ("0", "-1", "1e9", "9" * 30, ""):
        assert "number must be a whole number" in pages["ann"].send("/abort", number=number)
    assert desk._queue.entry(1).state == "waiting"
    assert "experiment 1 is being stopped" in pages["ann"].send("/abort", number=1)
    assert desk._queue.entry(1).state == "stopped"
    lines = [(line["by"], line["what"], line["event"]) for line in noted(desk) if line["what"] != "status"]
    assert lines == [
        ("ann", "submit", "called"), ("ann", "submit", "called"), ("ann", "submit", "refused"),
        ("ben", "abort", "refused"), ("nora", "abort", "refused"), ("nora", "submit", "refused"),
        ("ann", "abort", "called"),
    ]  # fmt: skip


@pytest.mark.full
def test_a_person_reads_logs_and_fetches_runs_by_the_page_as_the_role_allows(
    pages: dict[str, PersonPage], desk: Desk, tmp_path: Path
) -> None:
    queue = desk._queue
    queue.add("of ann", "rounds = 1", tmp_path / "run", by="ann")

    def sent(name: str, path: str) -> tuple[int, bytes]:
        return pages[name].answer("POST", path, urlencode({"key": pages[name].key(), "number": 1}))

    assert b"nothing yet" in sent("ann", "/logs")[1]
    queue.log_file(1).write_bytes(b"step 1/9 of <script>\x1b[2J\n" + b"\xff" * 9)
    for name in ("ann", "olga"):
        status, page = sent(name, "/logs")
        assert (status, b"step 1/9 of &lt;script&gt;" in page, b"\x1b" in page) == (200, True, False)
    assert sent("ann", "/fetch")[0] == 303
    assert "there is no run" in pages["ann"].asked("GET", "/")[1]
    with RunStore.create(tmp_path / "run", {"recipe": {"name": "fedavg"}}) as store:
        store.commit({"version": 1, "arrived": 2}, [])
    status, packed = sent("ann", "/fetch")
    assert status == 200
    (tmp_path / "run.tar").write_bytes(packed)
    assert main(["restore", str(tmp_path / "run.tar"), str(tmp_path / "restored")]) == 0
    with RunStore.open_read_only(tmp_path / "restored") as store:
        assert store.version == 1
    for name, path, says in (
        ("ben", "/logs", "no experiment 1 of yours"),
        ("ben", "/fetch", "no experiment 1 of yours"),
        ("olga", "/fetch", "olga is operator here, who may not fetch"),
        ("nora", "/logs", "nora is administrator here, who may not logs"),
        ("nora", "/fetch", "nora is administrator here, who may not fetch"),
    ):
        assert sent(name, path)[0] == 303
        assert says in pages[name].asked("GET", "/")[1]
    offered = {name: re.findall(r'action="/(\w+)"', page.asked("GET", "/")[1]) for name, page in pages.items()}
    assert offered == {
        "ann": ["logs", "abort", "fetch", "submit"], "ben": ["logs", "abort", "fetch", "submit"],
        "olga": ["logs", "abort", "submit"], "nora": ["submit"],
    }  # fmt: skip
    lines = [(line["by"], line["what"], line["event"]) for line in noted(desk) if line["what"] != "status"]
    assert lines == [
        ("ann", "logs", "called"), ("ann", "logs", "called"), ("olga", "logs", "called"),
        ("ann", "fetch", "called"), ("ann", "fetch", "refused"), ("ann", "fetch", "called"),
        ("ben", "logs", "refused"), ("ben", "fetch", "refused"), ("olga", "fetch", "refused"),
        ("nora", "logs", "refused"), ("nora", "fetch", "refused"),
    ]  # fmt: skip


def test_a_form_takes_the_longest_experiment_however_it_travels(
    pages: dict[str, PersonPage], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = list[bytes]()
    monkeypatch.setattr(
        "piebald.federation.operate.page_server.called",
        lambda person, what, body=b"", **_: taken.append(body) or b'{"number": 1, "experiments": [], "runs": {}}',
    )
    for text in ("\n" * MOST_SETTINGS, "\u00e9" * (MOST_SETTINGS // 2), "\U0001f600" * (MOST_SETTINGS // 4)):
        taken.clear()
        pages["ann"].send("/submit", experiment=text.replace("\n", "\r\n"), priority="-100")
        assert text.encode() in taken


def test_nothing_is_done_that_another_page_or_user_asks_for(pages: dict[str, PersonPage], desk: Desk) -> None:
    desk._queue.add("of ann", "rounds = 1", desk._server.folder / "run", by="ann")
    page = pages["ann"]
    key, other = page.key(), pages["ben"].key()
    right = urlencode({"key": key, "number": 1})
    host = f"localhost:{page.port}"
    for status, body, headers in (
        (403, "number=1", {}),  # a form of another page, with the token that the browser adds by itself
        (403, urlencode({"key": other, "number": 1}), {}),
        (403, urlencode({"key": "\u00e9", "number": 1}), {}),
        (403, right, {"Origin": "http://elsewhere.example"}),
        (403, right, {"Origin": "null"}),
        (403, right, {"Sec_Fetch_Site": "cross-site"}),
        (403, right, {"Sec_Fetch_Site": "same-site"}),
        (421, right, {"Host": "elsewhere.example"}),
        (401, right, {"Authorization": ""}),
        (401, right, {"Authorization": "Bearer " + pages["ben"].token}),
        (413, right + "&x=" + "x" * 400_000, {}),
    ):
        assert page.asked("POST", "/abort", body, **headers)[0] == status, (body[:80], headers)
    for path in ("/abort", "/logs", "/fetch"):
        assert page.asked("GET", f"{path}?{right}")[0] == 405
        assert page.asked("POST", path, "number=1")[0] == 403
    assert page.asked("GET", "/", Authorization="Basic eDp4")[0] == 401
    assert desk._queue.entry(1).state == "waiting"
    origin = {"Host": host, "Origin": f"http://{host}", "Sec_Fetch_Site": "same-origin"}
    assert page.asked("POST", "/abort", right, **origin)[0] == 303
    assert desk._queue.entry(1).state == "stopped"


def test_the_page_says_that_the_server_is_away_and_is_served_on_this_machine_alone(
    pages: dict[str, PersonPage], desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    desk.link.stop()
    monkeypatch.setattr(remote, "_CONNECTING", 0.5)
    assert "does not answer" in pages["ann"].asked("GET", "/")[1]
    with pytest.raises(SettingError, match="on this machine alone"):
        serve_person(read(desk._server.folder.parent / "ann"), PageAddress("0.0.0.0", free_port()))
    # and no address is printed where there is no page
    for flags in (
        ["--status-host", "0.0.0.0", "--status-port", str(free_port())],
        ["--status-port", str(pages["ben"].port)],
    ):
        assert main(["status", str(desk._server.folder.parent / "ann"), *flags]) == 2
        assert "http" not in capsys.readouterr().out


def test_a_fetch_that_breaks_off_is_told_on_the_page_and_leaves_no_traceback(
    pages: dict[str, PersonPage], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> Iterator[bytes]:
        yield b"the beginning"
        raise SettingError("what was asked for has changed meanwhile: ask again")

    monkeypatch.setattr("piebald.federation.operate.page_server.pieces", broken)
    page = pages["ann"]
    with pytest.raises(http.client.IncompleteRead):
        page.answer("POST", "/fetch", urlencode({"key": page.key(), "number": 1}))
    assert "the experiment was not fetched to its end: what was asked for has changed" in page.asked("GET", "/")[1]
    assert not any(record.exc_info for record in caplog.records)
