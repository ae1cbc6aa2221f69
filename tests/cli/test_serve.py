"""`piebald serve`: the answers of `piebald predict` over HTTP, and hostile requests."""

from __future__ import annotations

import http.client
import io
import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from piebald.cli.predicting import _answerer
from piebald.federation.operate.page_server import PageAddress, Token
from piebald.federation.operate.prediction_server import MOST_BYTES, MOST_ROWS, Answerer, prediction_app, rows_in
from tests.cli.conftest import Command
from tests.processes import command as process_of

pytest.importorskip("starlette", reason="needs the extra: pip install '.[page]'")
testclient = pytest.importorskip("starlette.testclient")

FILE = """\
rounds = 2

[data]
source = "*.csv"
client = "site"
target = "ill"

[prepare]
columns = { born = "leave out" }
parse = { weight = "number", dose = "decimal comma" }
unit = { weight = "kg" }
map = { ward = { ICU = "icu" } }
absent = { dose = ["unknown"] }
by_site = { b = { unit = { glucose = "mg/dl -> mmol/l" } } }

[partition]
kind = "by_owner"
owner = "site"

[model]
name = "logistic"

[recipe]
name = "fedavg"
"""


def table(site: str, rows: int = 60) -> pd.DataFrame:
    rng = np.random.default_rng(ord(site))
    dose, weight, glucose = rng.normal(3, 1, rows), rng.normal(70, 9, rows), rng.normal(5.5, 1, rows)
    ill = np.where(dose + rng.normal(0, 1, rows) > 3, "yes", "no")
    return pd.DataFrame({
        "site": site, "glucose": glucose * (18.016 if site == "b" else 1),
        "dose": [f"{number:.3f}".replace(".", ",") for number in dose], "weight": [f"{kg:.1f} kg" for kg in weight],
        "ward": rng.choice(["icu", "ICU", "south"], rows), "seen": rng.choice(["2024-05-01", "2024-06-03"], rows),
        "smoker": rng.choice(["yes", "no"], rows), "born": "x", "ill": ill,
    })  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three sites, one of which has its glucose in mg/dl."""
    from piebald.cli import main

    folder = tmp_path_factory.mktemp("serve")
    for site in "abc":
        table(site).to_csv(folder / f"{site}.csv", index=False)
    (folder / "study.toml").write_text(FILE)
    assert main(["run", str(folder / "study.toml"), "--out", str(folder / "run"), "-q"]) == 0
    return folder / "run"


@pytest.fixture
def model(run: Path) -> Answerer:
    return _answerer(run, (), "b", None, False, None, False)


@pytest.fixture
def served(model: Answerer, run: Path) -> Any:
    app = prediction_app(model, Token(run, loopback=True), loopback=True)
    return testclient.TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = json.loads(frame.to_json(orient="records"))
    return read


@pytest.mark.parametrize("client", ["a", "b"])
def test_answers_and_warnings_are_those_of_predict(
    command: Command, run: Path, client: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Cleaned by the rules of the same site, in its units and forms, of which 1,234 is 1.234 and not 1234."""
    rows = table("b", 30).drop(columns=["site", "ill", "born"])
    rows.loc[3, "dose"], rows.loc[5, "ward"] = "unknown", "north"
    rows.to_csv(run.parent / "new.csv", index=False)
    caplog.clear()
    told = command("predict", run, run.parent / "new.csv", "--client", client)
    assert told.code == 0, told.err
    warned = caplog.messages
    answerer = _answerer(run, (), client, None, False, None, False)
    page = testclient.TestClient(prediction_app(answerer, Token(run, True), True), base_url="http://localhost")
    answer = page.post("/predict", json={"rows": rows_of(rows)}).json()
    pd.testing.assert_frame_equal(pd.DataFrame(answer["predictions"]), pd.read_csv(io.StringIO(told.out)))
    # a file's rows are numbered as in a spreadsheet
    assert [said.partition(" in row ")[0] for said in answer["warnings"]] == [
        said.partition(" in row ")[0] for said in warned
    ]
    assert any("north" in said for said in warned)
    assert any("glucose" in said and "outside" in said for said in warned) == (client == "a")


def test_one_row_in_another_unit_is_said(served: Any) -> None:
    row = rows_of(table("a", 1).drop(columns=["site", "ill", "born"]))[0]
    usual = served.post("/predict", json={"rows": [row | {"glucose": 100}]}).json()
    assert not any("outside" in said for said in usual["warnings"])
    other = served.post("/predict", json={"rows": [row | {"glucose": 5.5}]}).json()
    assert any("column 'glucose' has numbers outside" in said for said in other["warnings"])


def test_the_schema_takes_what_is_answered_and_no_more(served: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = served.get("/schema.json").json()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    row = rows_of(table("b", 1).drop(columns=["site", "ill", "born"]))[0]
    changes: list[tuple[dict[str, Any], int]] = [
        ({}, 200), ({"weight": 70}, 200), ({"dose": None}, 200), ({"glucose": [1]}, 422), ({"glucose": {}}, 422),
        ({"born": "x"}, 422),
    ]  # fmt: skip
    for change, status in changes:
        body = {"rows": [row | change]}
        answer = served.post("/predict", json=body)
        assert (answer.status_code, validator.is_valid(body)) == (status, status == 200), (change, answer.text)
    lacking = {"rows": [{name: cell for name, cell in row.items() if name != "glucose"}]}
    assert (served.post("/predict", json=lacking).status_code, validator.is_valid(lacking)) == (422, False)


def _row(**changes: Any) -> bytes:
    row = rows_of(table("b", 1).drop(columns=["site", "ill", "born"]))[0]
    return json.dumps({"rows": [row | changes]}).encode()


HOSTILE: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "no JSON": lambda: b"glucose=5",
    "NaN": lambda: _row(glucose=float("nan")),
    "infinite": lambda: _row(glucose=float("inf")),
    "a power that overflows": lambda: _row().replace(b'"glucose": ', b'"glucose": 1e999, "x": '),
    "a number of 10,000 digits": lambda: b'{"rows": [{"glucose": ' + b"9" * 10_000 + b"}]}",
    "a number of 400 digits": lambda: b'{"rows": [{"glucose": ' + b"9" * 400 + b"}]}",
    "deep arrays": lambda: b'{"rows": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep objects": lambda: b'{"rows":' * 100_000 + b"1" + b"}" * 100_000,
    "no UTF-8": lambda: b'{"rows": [{"ward": "\xff\xfe"}]}',
    "half a pair": lambda: b'{"rows": [{"ward": "\\ud800"}]}',
    "UTF-16": lambda: '{"rows": []}'.encode("utf-16"),
    "no object": lambda: b"[1, 2]",
    "no rows": lambda: b'{"rows": []}',
    "rows by number": lambda: b'{"rows": {"0": {}}}',
    "more keys": lambda: b'{"rows": [{}], "client": "a"}',
    "a row of numbers": lambda: b'{"rows": [[1, 2, 3]]}',
    "rows of nothing": lambda: b'{"rows": [null]}',
    "empty row": lambda: b'{"rows": [{}]}',
    "too many rows": lambda: json.dumps({"rows": [{}] * (MOST_ROWS + 1)}).encode(),
    "unknown column": lambda: _row(glucsoe=5),
    "column of a dunder": lambda: _row(__class__=5),
    "truth for a number": lambda: _row(glucose=True),
    "text for a number": lambda: _row(glucose="<script>"),
    "infinite as text": lambda: _row(glucose="inf"),
    "NUL in text": lambda: _row(dose="\0"),
    "a list in a cell": lambda: _row(ward=["icu"]),
    "no date": lambda: _row(seen="32.13.2024"),
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_what_cannot_be_used_is_one_sentence(body: Callable[[], bytes], served: Any) -> None:
    answer = served.post("/predict", content=body(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    assert 0 < len(error) < 500
    assert "Traceback" not in error
    assert "\n" not in error
    assert error.isprintable()
    assert served.post("/predict", content=_row(), headers={"Content-Type": "application/json"}).status_code == 200


def test_numbers_and_texts_in_one_column_are_refused_since_they_would_be_read_alike(served: Any) -> None:
    rows = rows_of(table("b", 2).drop(columns=["site", "ill", "born"]))
    rows[0]["dose"] = 1.234
    answer = served.post("/predict", json={"rows": rows})
    assert (answer.status_code, "'dose' must have numbers, or texts" in answer.json()["error"]) == (422, True)


def test_bodies_are_bounded_before_they_are_read(served: Any) -> None:
    blocks: list[bytes] = []

    def endless() -> Any:
        for _ in range(40):
            blocks.append(b" " * (MOST_BYTES // 4))
            yield blocks[-1]

    answer = served.post("/predict", content=endless(), headers={"Content-Type": "application/json"})
    assert (answer.status_code, "at most 8,388,608 bytes" in answer.json()["error"]) == (413, True)


def test_pages_of_other_sites_are_kept_out(served: Any) -> None:
    """A browser asks for leave to send JSON, and names the site where another name was made to be this machine."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        assert served.post("/predict", content=_row(), headers={"Content-Type": kind}).status_code == 415
    assert served.post("/predict", content=_row(), headers={"Host": "rebound.example"}).status_code == 421
    assert served.options("/predict").status_code == 405
    for path, status in (("/", 404), ("/predict", 405), ("/run.db", 404)):
        answer = served.get(path)
        assert (answer.status_code, "POST rows to /predict" in answer.json()["error"]) == (status, True)
    assert "default-src 'none'" in served.get("/healthz").headers["content-security-policy"]


def test_a_fault_shows_nothing_of_the_program(model: Answerer, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(rows: Any, tell: Any) -> Any:
        raise RuntimeError("secret row 17")

    app = prediction_app(Answerer(broken, "none", "", model.preparation), Token(run, True), True)
    answer = testclient.TestClient(app, base_url="http://localhost").post("/predict", json={"rows": [{}]})
    assert (answer.status_code, "secret" in answer.text + caplog.text) == (500, False)


def test_inputs_without_names_are_arrays(served: Any) -> None:
    assert rows_in(b'{"rows": [[1, 2.5], [3, 4]]}', None).tolist() == [[1, 2.5], [3, 4]]
    for body in (b'{"rows": [[1], [2, 3]]}', b'{"rows": ["5"]}', b'{"rows": [[1e999]]}', b'{"rows": [[null]]}',
                 b'{"rows": [[true]]}', b'{"rows": [{"x": 1}]}'):  # fmt: skip
        with pytest.raises(ValueError, match=r"arrays of numbers|must be JSON"):
            rows_in(body, None)


def test_others_need_a_certificate_and_the_token(command: Command, run: Path) -> None:
    told = command("serve", run, "--host", "0.0.0.0", "--port", 0)
    assert (told.code, "has no certificate.pem: give --credentials" in told.err) == (2, True)
    assert command("serve", run, "--client", "north").code == 2
    with PageSocket() as port:
        told = command("serve", run, "--port", port)
    assert (told.code, "cannot be listened on" in told.err) == (2, True)


class PageSocket:
    """A port that somebody listens on."""

    def __enter__(self) -> int:
        from piebald.federation.operate.page_server import FewConnections

        self.socket = FewConnections.at(PageAddress("127.0.0.1", 0))
        port: int = self.socket.getsockname()[1]
        return port

    def __exit__(self, *_: object) -> None:
        self.socket.close()


@pytest.mark.long
def test_a_process_answers_until_it_is_told_to_end(run: Path) -> None:
    words = process_of("serve", run, "--client", "b", "--port", 0, "--json")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        about = json.loads(process.stdout.readline())
        port = int(about["url"].rpartition(":")[2].strip("/"))
        end = time.monotonic() + 30
        while True:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
                connection.request("POST", "/predict", _row(), {"Content-Type": "application/json"})
                break
            except ConnectionError:
                connection.close()
                assert time.monotonic() < end
        answer = json.loads(connection.getresponse().read())
        connection.close()
        assert sum(answer["predictions"][name][0] for name in ("no", "yes")) == pytest.approx(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
