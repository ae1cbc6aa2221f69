"""`piebald ui`: the pages of a folder of runs."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

import piebald
from piebald.cli import main
from piebald.cli.browse import listed, serving_runs

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    clients = piebald.partition.Iid(clients=3, test=0.2, limit=60).split(piebald.data.digits())
    model = piebald.models.build_model("mlp", (1, 8, 8), 10, hidden=(4,))
    for recipe, place, label in (("fedavg", "a", None), ("local", "deep/b", None), ("ditto", "c", HOSTILE)):
        piebald.run(recipe, clients, model, rounds=1, out=root / place, label=label).close()
    (root / "broken").mkdir()
    (root / "broken" / "run.db").write_bytes(b"no database")
    (root.parent / "outside").mkdir(exist_ok=True)
    return root


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    with serving_runs(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def get(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
    connection.close()
    return found


def test_the_list_has_every_run_and_one_that_is_damaged_stops_no_other(folder: Path, port: int) -> None:
    assert set(listed(folder)) == {"a", "deep/b", "c", "broken"}
    code, headers, page = get(port, "/")
    assert code == 200
    for shown in ("fedavg", "local", "finished", "deep/b", "the database is damaged", "4 runs of 4"):
        assert shown in page, shown
    assert HOSTILE not in page
    assert "script" not in headers["content-security-policy"].replace("script-src", "")
    assert "form-action 'self'" in headers["content-security-policy"]


def test_a_filter_takes_all_words(port: int) -> None:
    page = get(port, "/?words=finished%20DEEP")[2]
    assert "1 run of 4" in page
    assert 'value="deep/b"' in page
    assert 'value="a"' not in page
    assert 'value="&quot;&gt;&lt;b&gt;"' in get(port, "/?words=" + quote('"><b>'))[2]


def test_one_run_and_several_are_the_pages_of_piebald_report(port: int) -> None:
    code, headers, page = get(port, "/run?run=deep%2Fb")
    assert code == 200
    assert "local ends at" in page
    assert "content-security-policy" not in headers  # the page has its own, for the scripts in it
    assert "Content-Security-Policy" in page
    code, _, page = get(port, "/compare?run=a&run=deep/b")
    assert code == 200
    assert "fedavg" in page
    assert "local" in page


@pytest.mark.parametrize("run", ["../outside", "/etc", "a/../../outside", "a\x00", "nothing", "broken/../a"])
def test_only_what_is_listed_is_opened(run: str, port: int) -> None:
    assert get(port, f"/run?run={quote(run)}")[0] == 404


def test_what_cannot_be_shown_is_said_on_the_list(port: int) -> None:
    code, _, page = get(port, "/compare?run=broken&run=a")
    assert (code, "the database is damaged" in page) == (422, True)
    assert "Mark runs of the list" in get(port, "/compare")[2]
    assert get(port, "/shell")[0] == 404


def test_it_is_read_only_and_for_this_machine(port: int) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert get(port, "/", method)[0] == 501
    assert get(port, "/", Host="rebound.example")[0] == 421
    assert get(port, "/", Host=f"127.0.0.1.rebound.example:{port}")[0] == 421
    assert get(port, "/", Host=f"localhost:{port}")[0] == 200


def test_a_folder_that_is_not_there_and_a_port_that_is_used_are_sentences(
    port: int, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ui", str(tmp_path / "nothing")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["ui", str(folder), "--port", str(port)]) == 2
    assert "cannot be listened on" in capsys.readouterr().err
