"""Certificates that expire while processes run: what both ends say, and what becomes of the run after a renewal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType

import pytest

from piebald.cli import main
from piebald.federation.credentials import audit
from piebald.federation.hub.local_federation import free_port
from piebald.storage.store import RunStore
from tests.scripts import loaded

from .conftest import Server, Sites, provisioned, settings, until
from .test_operating_faults import remade

ROOT = Path(__file__).parents[2]
TWO = ["site-1", "site-2"]


@pytest.fixture(scope="module")
def networks() -> ModuleType:
    return loaded(ROOT / "benchmarks" / "networks" / "bad_link.py")


class Running:
    """A server and two sites, processes whose connections a proxy can break; steps are made until it is closed."""

    def __init__(self, networks: ModuleType, folder: Path, wait_for: int | None = 2) -> None:
        port = free_port()
        self.link = networks.BadLink(("127.0.0.1", port))
        self.credentials = provisioned(folder / "credentials", TWO, port=self.link.port)
        about = self.credentials / "server" / "credentials.json"
        about.write_text(json.dumps(json.loads(about.read_text()) | {"port": port}))
        described = f'name = "test"\nhost = "127.0.0.1"\nport = {self.link.port}\ndays = 2\nsites = {json.dumps(TWO)}\n'
        (folder / "federation.toml").write_text(described)
        self.sites = Sites(self.credentials)
        for name in TWO:
            self.sites.start(name)
        flags = {"kind": "federation", "silence": 2.0} | ({} if wait_for is None else {"wait_for": wait_for})
        parts = {"kind": "dirichlet", "clients": 2, "alpha": 0.5, "limit": 300}
        more = {"runtime": flags, "partition": parts, "evaluate": {"every": 0}}
        made = settings({"name": "fedavg"}, rounds=100_000, **more)
        self.server = Server(made, self.credentials / "server", folder / "run")

    def expire(self, party: str) -> None:
        """Give a party a certificate of two seconds, with which it connects anew."""
        now = datetime.now(UTC).replace(microsecond=0)
        ends = now + timedelta(seconds=2)
        remade(self.credentials / party, self.credentials / "authority", now - timedelta(minutes=5), ends)
        self.link.reset()

    def renew(self, *options: str) -> None:
        file = self.credentials.parent / "federation.toml"
        assert main(["provision", str(file), "--out", str(self.credentials), "--renew", *options]) == 0

    def counted(self) -> list[tuple[int, int]]:
        """The version and the client of every update that counts."""
        with RunStore.open_read_only(self.server.out) as store:
            rows = store.query("SELECT version, client FROM result WHERE status = 'ok' AND kind = 'train'")
            return [(row["version"], row["client"]) for row in rows]

    def trained(self, client: int, above: int) -> bool:
        """Whether a client has an update that counts of a version above this one."""
        return any(version > above for version, who in self.counted() if who == client)

    def says(self, line: str) -> bool:
        """Whether the server's log has a line."""
        return line in self.server.log.read_text(errors="replace")

    def close(self) -> None:
        self.sites.close()
        self.server.close()
        self.link.close()


@pytest.fixture
def running(networks: ModuleType, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    made = Running(networks, tmp_path, *([request.param] if hasattr(request, "param") else []))
    try:
        yield made
    finally:
        made.close()


@pytest.mark.long
@pytest.mark.parametrize(("running", "waits_for_all"), [(2, True), (None, False)], indirect=["running"])
def test_certificates_that_expire_during_a_run_are_told_at_both_ends_and_renewed_without_a_stop(
    running: Running, waits_for_all: bool
) -> None:
    """A site's first, for which the run waits only if it needs both; then the server's, without which it waits."""
    server, sites = running.server, running.sites
    until(lambda: server.version() >= 2)

    running.expire("site-1")
    until(lambda: "site-1/certificate.pem expired on 2" in sites.log("site-1"))
    until(lambda: running.says("did not prove that it belongs to this federation: its certificate has expired ("))
    if waits_for_all:
        until(lambda: running.says("waiting for site-1"))
    now = server.version()
    if not waits_for_all:
        until(lambda: running.trained(1, now + 2))
    assert not running.trained(0, now + 1)
    running.renew("--party", "site-1")
    until(lambda: running.trained(0, now + 2))
    assert "was renewed: it is valid until" in sites.log("site-1")

    committed = running.counted()
    running.expire("server")
    until(lambda: running.says("server/certificate.pem expired on 2"))
    until(lambda: running.says("does not accept this end: this end's certificate has expired"))
    for name in TWO:
        until(lambda name=name: "its certificate has expired (this machine's clock says" in sites.log(name))
    waits = server.version()
    running.renew()
    until(lambda: running.trained(0, waits + 2) and running.trained(1, waits + 2))

    for name in ("site-1", "server"):
        log = sites.log(name) if name != "server" else server.log.read_text()
        assert log.count(f"{name}/certificate.pem expired on 2") == 1
    main(["stop", str(server.out)])
    assert server.process.wait(60) == 130
    counted = running.counted()
    assert set(committed) <= set(counted)
    assert len(counted) == len(set(counted))
    logs = [running.credentials / name / audit.FILE for name in ("server", *TWO)]
    for log_of_one in logs:
        audit.verify(log_of_one)
    assert [audit.missing(log_of_one, logs[0]) for log_of_one in logs[1:]] == [[], []]
