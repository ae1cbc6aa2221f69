"""A transfer between two network namespaces that the test makes, over a link whose rate the kernel limits."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from piebald.federation.credentials import provisioning
from piebald.federation.link.messaging import SERVER, Link
from piebald.federation.link.transfer import Assembly, send_body
from piebald.federation.link.wire_format import Piece, Reply, TermsRequest, digest, encode

from .conftest import provisioned, until

HERE, THERE = (f"piebald-{os.getpid()}-{end}" for end in "ab")
ADDRESS, NETWORK_NAMESPACE = "10.231.7.1", 0x40000000
SIZE, RATE = 2_000_000, "20mbit"


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def namespaces() -> Iterator[None]:
    """Two namespaces with a link between them, skipped where the system does not let this process make any."""
    if shutil.which("ip") is None or shutil.which("tc") is None or os.geteuid() != 0:
        pytest.skip("needs ip and tc, as root")
    try:
        for name in (HERE, THERE):
            ip("netns", "add", name)
        ip("link", "add", "v0", "netns", HERE, "type", "veth", "peer", "name", "v1", "netns", THERE)
        for name, device, address in ((HERE, "v0", ADDRESS), (THERE, "v1", "10.231.7.2")):
            ip("-n", name, "address", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            limit = ["tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", "rate", RATE]
            subprocess.run([*limit, "burst", "32k", "latency", "400ms"], check=True, capture_output=True)
        yield
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this kernel makes no such link: {error.stderr}")
    finally:
        for name in (HERE, THERE):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def within(name: str, act: Callable[[], Any]) -> Any:
    """Do something in a thread that is in a namespace; threads and sockets that it makes are there, too."""
    found = list[Any]()

    def run() -> None:
        handle = os.open(f"/run/netns/{name}", os.O_RDONLY)
        assert ctypes.CDLL(None, use_errno=True).setns(handle, NETWORK_NAMESPACE) == 0, os.strerror(ctypes.get_errno())
        os.close(handle)
        found.append(act())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_what_is_made_before_the_system_refuses_a_link_is_deleted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark's: each refused start would leave namespaces and devices behind."""
    file = Path(__file__).parents[2] / "benchmarks" / "networks" / "namespaces.py"
    spec = importlib.util.spec_from_file_location("namespaces", file)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    asked, devices = list[tuple[str, ...]](), list[int]()

    def ran(*words: str) -> str:
        asked.append(words)
        if words[3:5] == ("address", "add") and len(devices) == 2:
            sys.exit("refused here")
        return ""

    def device(_: str) -> int:
        devices.append(os.open(os.devnull, os.O_RDWR))
        return devices[-1]

    deleted = list[str]()
    monkeypatch.setattr(program, "ran", ran)
    monkeypatch.setattr(program.Links, "_device", staticmethod(device))
    monkeypatch.setattr(program.subprocess, "run", lambda words, **_: deleted.append(words[-1]))
    with pytest.raises(SystemExit):
        program.Links(0.0, 0.0)
    assert {words[3] for words in asked if words[:3] == ("ip", "netns", "add")} <= set(deleted)
    for handle in devices:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(handle)


@pytest.mark.usefixtures("namespaces")
def test_a_transfer_between_namespaces_over_a_link_that_the_kernel_limits(tmp_path: Path) -> None:
    folder = provisioned(tmp_path / "credentials", ["site-1"])
    server, site = provisioning.read(folder / SERVER), provisioning.read(folder / "site-1")
    assembly, arrived, body = Assembly(tmp_path), list[Any](), np.random.default_rng(0).bytes(SIZE)

    def listening() -> Link:
        made = Link(SERVER, ("0.0.0.0", server.port), server.folder, {"site-1"}.__contains__, pytest.fail)
        made.on("hello", TermsRequest, lambda *_: encode(Reply(status="known")))
        made.on("result", Piece, take)
        made.start()
        return made

    def take(origin: str, piece: Piece, data: memoryview) -> bytes:
        reply, whole = assembly.take(piece, data, SIZE)
        arrived.extend([whole] if whole is not None else [])
        return encode(reply)

    def connected() -> Link:
        made = Link("site-1", (ADDRESS, server.port), site.folder, SERVER.__eq__, lambda _: None)
        made.start()
        until(lambda: made.request(SERVER, "hello", TermsRequest(start=0), timeout=1.0) is not None)
        return made

    there = within(HERE, listening)
    here = within(THERE, connected)
    try:
        head = Piece(run="ab", epoch="cd", id=1, trains=True, start=0, size=SIZE, digest=digest(body))
        assert send_body(here, SERVER, "result", head, body, timeout=60) == "done"
    finally:
        here.stop()
        there.stop()
    (whole,) = arrived
    assert whole.read(0, SIZE) == body
    (about,) = json.loads(ip("-n", THERE, "-j", "-s", "link", "show", "v1"))
    assert about["stats64"]["tx"]["bytes"] > SIZE  # it crossed that link
