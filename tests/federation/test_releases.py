"""Two releases take part with one another: one has a later minor number, and fields that the other does not know."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import piebald
from piebald.federation.link.wire_format import (
    MINOR,
    PROTOCOL,
    CheckReply,
    Hello,
    Message,
    Piece,
    Refused,
    Reply,
    ResultHead,
    TermsRequest,
    Welcome,
    decode,
    encode,
    release,
)
from piebald.runs.run import opened

from .conftest import ENVIRONMENT, SITES, provisioned, settings

PACKAGE = Path(piebald.__file__).parent
KINDS = [Hello, Welcome, Piece, CheckReply, TermsRequest, Reply, ResultHead]


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a later release, all of whose messages and terms have one field more."""
    folder = tmp_path_factory.mktemp("later")
    shutil.copytree(PACKAGE, folder / "piebald", ignore=shutil.ignore_patterns("__pycache__"))

    def change(path: str, pattern: str, by: str, times: int = 1) -> None:
        file = folder / "piebald" / path
        text, count = re.subn(pattern, by, file.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        assert count == times, (path, pattern, count)
        file.write_text(text, "utf-8")

    change("version.py", r'"\d+\.\d+\.\d+"', '"9.9.9"')
    messages = "federation/link/wire_format.py"
    change(messages, rf"PROTOCOL, MINOR = {PROTOCOL}, {MINOR}$", f"PROTOCOL, MINOR = {PROTOCOL}, {MINOR + 1}")
    for name in ("Hello", "Piece", "TermsRequest", "Reply"):
        change(messages, rf'(class {name}\(Release\):\n    """.*?""")\n',
               r'\1\n\n    later: Annotated[str, Leaving.PRESENCE] = "of a later release"\n')  # fmt: skip
    for name in ("Welcome", "CheckReply"):
        change(
            messages, rf'(class {name}\(Message\):\n    """.*?""")\n', r'\1\n\n    later: str = "of a later release"\n'
        )
    change("federation/link/wire_format.py", r"(    failure: Annotated\[ShortText \| None, Leaving.FAILURE\] = None)",
           r'\1\n    later: Annotated[str, Leaving.PRESENCE] = "of a later release"')  # fmt: skip
    change("federation/hub/run_terms.py", r"^    trains: bool = True$",
           r'    trains: bool = True\n    later: str = "of a later release"')  # fmt: skip
    return folder


def start(release: Path, log: Path, *words: object) -> subprocess.Popen[bytes]:
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(release), *sys.path])}
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "piebald.cli", *map(str, words)], stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, env=environment,
        )  # fmt: skip


def carried_out(folder: Path, server: Path, site: Path) -> tuple[str, list[Any]]:
    """What a server of one release and three sites, one of them of another, have said, and the scores of their run."""
    credentials, log = provisioned(folder / "credentials"), folder / "log.txt"
    file = folder / "file.toml"
    file.write_text(settings({"name": "fedavg"}, rounds=2).text())
    here = PACKAGE.parent
    releases = [site, here if server != here else site, here]
    processes = [start(server, log, "server", credentials / "server", file, "--out", folder / "run")]
    processes += [start(of, log, "client", credentials / name) for of, name in zip(releases, SITES, strict=True)]
    try:
        codes = [process.wait(180) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = log.read_text()
    assert codes == [0] * 4, said
    run = opened(folder / "run")
    return said, [
        run.cluster_models[0].tolist(),
        *([row["client"], row["examples"], row["norm"]] for row in run.results),
    ]


@pytest.mark.long
def test_releases_of_one_protocol_take_part_with_one_another(later: Path, tmp_path: Path) -> None:
    """Their run is that of one release."""
    here, outcomes = PACKAGE.parent, {}
    for name, server, site in (("same", here, here), ("later site", here, later), ("later server", later, here)):
        (tmp_path / name).mkdir()
        said, outcomes[name] = carried_out(tmp_path / name, server, site)
        assert all(f"{site_name} joined as client" in said for site_name in SITES)
    assert len(outcomes["same"]) == 7  # of three sites, twice
    assert outcomes["later site"] == outcomes["later server"] == outcomes["same"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_that_is_not_known_is_left_out(kind: type[Message]) -> None:
    known = {
        Hello: {"protocol": 6, "version": "1", "incarnation": "ab"},
        Welcome: {"version": "1", "run": "ab", "epoch": "cd", "terms": "ef"},
        Piece: {"run": "ab", "epoch": "cd", "id": 1, "trains": True, "start": 0, "size": 1, "digest": "ef"},
        CheckReply: {"protocol": 6, "version": "1", "time": 1.0, "terms": "ef"},
        TermsRequest: {"start": 0},
        Reply: {"status": "done"},
        ResultHead: {"examples": 1, "steps": 1, "metrics": {}, "nbytes": 4},
    }[kind]
    whole = kind(**known)  # type: ignore[arg-type]
    text = json.dumps({**whole.model_dump(), "later": {"nested": [1]}}).encode()
    message = len(text).to_bytes(4, "little") + text + b"body"
    read, body = decode(kind, message)
    assert (read, bytes(body)) == (whole, b"body")
    for spoiled in (text[:-1], b"[]", b'{"later": 1}', text.replace(b"1", b'"1"', 1) if kind is ResultHead else b"{}x"):
        with pytest.raises(Refused):  # nothing else is taken for one
            decode(kind, len(spoiled).to_bytes(4, "little") + spoiled)


def test_a_server_that_does_not_say_its_protocol_has_the_last_one_that_did_not() -> None:
    """So that the check of a site names both releases."""
    text = b'{"version": "0.1.0", "time": 1.0, "terms": "ab"}'
    reply, _ = decode(CheckReply, len(text).to_bytes(4, "little") + text)
    assert release(reply) == "Piebald 0.1.0 with protocol 5" != release()


def test_what_is_sent_has_declared_fields_alone() -> None:
    with pytest.raises(ValueError, match="extra_forbidden"):
        Reply(status="done", later="x")  # type: ignore[call-arg]
    assert decode(Reply, encode(Reply(status="done")))[0] == Reply(status="done")
