"""A person's own page: it does what the certificate allows, and only what the page itself has asked for."""

from __future__ import annotations

import base64
import http.client
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

from piebald.core.errors import SettingError
from piebald.federation.credentials.provisioning import Credentials, read
from piebald.federation.hub.local_federation import free_port
from piebald.federation.operate import remote
from piebald.federation.operate.experiment_queue import ExperimentQueue
from piebald.federation.operate.page_server import TOKEN, PageAddress, web_server
from piebald.federation.operate.person_page import person_app, serve_person
from piebald.federation.operate.remote import Desk

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
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        basic = base64.b64encode(f"any:{self.token}".encode()).decode()
        given = {"Authorization": f"Basic {basic}", "Content-Type": FORM} | headers
        connection.request(method, path, body, {name.replace("_", "-"): text for name, text in given.items()})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

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
    made = {name: PersonPage(read(folder / name)) for name in ("ann", "ben", "nora")}
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
        (413, right + "&x=" + "x" * 300_000, {}),
    ):
        assert page.asked("POST", "/abort", body, **headers)[0] == status, (body[:80], headers)
    assert page.asked("GET", f"/abort?{right}")[0] == 405
    assert page.asked("GET", "/", Authorization="Basic eDp4")[0] == 401
    assert desk._queue.entry(1).state == "waiting"
    origin = {"Host": host, "Origin": f"http://{host}", "Sec_Fetch_Site": "same-origin"}
    assert page.asked("POST", "/abort", right, **origin)[0] == 303
    assert desk._queue.entry(1).state == "stopped"


def test_the_page_says_that_the_server_is_away_and_is_served_on_this_machine_alone(
    pages: dict[str, PersonPage], desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.link.stop()
    monkeypatch.setattr(remote, "_CONNECTING", 0.5)
    assert "does not answer" in pages["ann"].asked("GET", "/")[1]
    with pytest.raises(SettingError, match="on this machine alone"):
        serve_person(read(desk._server.folder.parent / "ann"), PageAddress("0.0.0.0", free_port()))
