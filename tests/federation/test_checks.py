"""Before a party takes part: what is wrong is said in one sentence, and what is asked of the server leaves no trace."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from piebald import recipes
from piebald.core.errors import SettingError
from piebald.data import partition
from piebald.experiments.file import ExperimentSettings
from piebald.experiments.run_settings import RunSettings
from piebald.federation.credentials import provisioning
from piebald.federation.operate.machine_checks import (
    Check,
    check_certificate,
    check_port,
    check_space,
    refuse_crosses,
    server_machine,
    server_run,
)
from piebald.federation.operate.status import read_status
from piebald.federation.site import site_check
from piebald.federation.site.gate import Mechanism, declared, stated_rows
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_check import check_site, site_machine
from piebald.federation.site.site_process import site_work
from piebald.federation.site.site_rows import SiteSource, rows_before_a_run
from piebald.inference.experiment import agreed_at_sites
from piebald.models import Logistic
from piebald.privacy import SecureAggregation
from piebald.runs.prepare import prepare
from tests import processes

from .conftest import ENVIRONMENT, Server, provisioned, until
from .test_deploy import described

NAMES = ["north", "south", "east"]
ROWS = np.random.default_rng(0).normal(size=(40, 2)).astype("f4")
TABLES = [(ROWS, (ROWS[:, 0] > 0).astype(int))] * 5


def told(checks: list[Check]) -> dict[str, tuple[bool | None, str]]:
    return {one.what: (one.fine, one.told) for one in checks}


def table(path: Path, odd: str = "3.5") -> Path:
    """Rows of a site in which one value can be something else."""
    rows = [f"{n},{n % 7}.25,{'ill' if n % 3 else 'well'}" for n in range(40)]
    path.write_text("\n".join(["age,dose,state", *rows, f"41,{odd},ill"]) + "\n")
    return path


def test_a_missing_file_is_noticed_before_a_connection_is_made(tmp_path: Path) -> None:
    provisioned(tmp_path / "credentials", NAMES)
    work = site_work(tmp_path / "credentials" / "north", str(tmp_path / "patients.csv"), "state")
    checks = site_machine(work)
    assert [one.what for one in checks if one.fine is False] == ["rows"]
    with pytest.raises(SettingError, match=r"rows: there is no file or folder '.*patients.csv'.*--data"):
        refuse_crosses(checks, "")


def test_rows_are_counted_by_class_and_the_site_is_told_what_is_wrong_with_them(tmp_path: Path) -> None:
    folder = provisioned(tmp_path / "credentials", NAMES) / "north"
    fine, about = told(site_machine(site_work(folder, str(table(tmp_path / "rows.csv")), "state")))["rows"]
    assert fine
    assert "inputs [2]" in about
    assert "ill 27, well 14" in about
    broken = site_machine(site_work(folder, str(table(tmp_path / "broken.csv", odd="Miller")), "state"))
    (cross,) = [one for one in broken if one.fine is False]
    assert "Miller" in cross.told
    with pytest.raises(SettingError) as caught:
        refuse_crosses(broken, "")
    assert "got 'Miller' in row" in str(caught.value)


def test_a_function_with_words_for_targets_is_read_before_classes_are_agreed(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import numpy as np\ndef load():\n    return np.zeros((20, 3), np.float32), np.array(['b', 'a'] * 10)\n"
    )
    rows = rows_before_a_run(SiteSource(source="own.py:load"), tmp_path, "north")
    assert rows.classes == ["a", "b"]
    assert sum(len(rows.rows(0, split)) for split in ("train", "validation", "test")) == 20


def test_a_certificate_is_looked_at_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = provisioned(tmp_path / "a", NAMES)
    other = provisioned(tmp_path / "b", NAMES)
    one = check_certificate(folder / "north")
    assert (one.fine, one.told.partition(",")[0]) == (True, "1 day left (ask for new credentials soon)")
    mixed = {"key.pem": "it belongs to another key", "authority.pem": "it cannot be used"}
    for name, says in mixed.items():
        kept = (folder / "north" / name).read_bytes()
        (folder / "north" / name).write_bytes((other / "north" / name).read_bytes())
        assert check_certificate(folder / "north").told.startswith(says)
        (folder / "north" / name).write_bytes(kept)
    (folder / "north" / "certificate.pem").write_text("nothing")
    assert check_certificate(folder / "north").fine is False


def test_disk_and_port(tmp_path: Path) -> None:
    assert check_space(tmp_path / "not" / "there", 1).fine
    assert check_space(tmp_path, 1 << 60).fine is False
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert check_port(port).told.startswith(f"port {port} cannot be listened on (address already in use)")
    assert check_port(port).fine


def test_a_server_is_looked_at(tmp_path: Path) -> None:
    folder = provisioned(tmp_path / "credentials", NAMES)
    own = provisioning.read(folder / "server")
    (tmp_path / "experiment.toml").write_text(described("fedavg").text())
    flags = [f'runtime.credentials="{folder / "server"}"']
    checks = [*server_machine(own), *server_run(own, tmp_path / "experiment.toml", flags, "run")]
    assert all(one.fine for one in checks), checks
    assert told(checks)["sites"][1] == "north, south, east"
    (tmp_path / "experiment.toml").write_text(described("fedavg").text().replace('"fedavg"', '"fedagv"'))
    assert "fedavg" in told(server_run(own, tmp_path / "experiment.toml", [], None))["experiment"][1]
    assert told(server_machine(provisioning.read(folder / "north")))["credentials"][0] is False


def test_a_look_finds_what_the_start_would(tmp_path: Path) -> None:
    """Tables at sites need a target, and a server without rows names it alone."""
    folder = provisioned(tmp_path / "credentials", NAMES)
    own, file = provisioning.read(folder / "server"), tmp_path / "experiment.toml"
    sites = f"model.name = 'logistic'\nrecipe.name = 'fedavg'\npartition = {{ kind = 'sites', clients = {NAMES} }}\n"
    flags = [f'runtime={{ kind = "federation", credentials = "{folder / "server"}" }}']
    file.write_text(sites)
    with pytest.raises(SettingError) as start:
        agreed_at_sites(ExperimentSettings.load(file, flags))
    assert told(server_run(own, file, flags, None))["experiment"] == (False, str(start.value))
    file.write_text(sites + "data.target = 'ill'\n")
    assert all(one.fine for one in server_run(own, file, flags, None))
    here = "partition = { kind = 'iid', clients = 3 }\n"
    file.write_text(sites.partition("partition")[0] + "data.target = 'ill'\n" + here)
    with pytest.raises(SettingError, match=r"neither name nor source"):
        ExperimentSettings.load(file).plan()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server whose run nobody has joined."""
    folder = provisioned(tmp_path / "credentials", NAMES)
    started = Server(described("fedavg"), folder / "server", tmp_path / "run")
    until(lambda: "listening" in started.log.read_text() or started.over())
    yield started
    started.close()


@pytest.mark.full
def test_looking_tells_all_and_leaves_no_trace(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "credentials"
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "fits.npz", x=rng.normal(size=(60, 30)).astype("f4"), y=np.arange(60) % 2)
    np.savez(tmp_path / "wide.npz", x=rng.normal(size=(60, 31)).astype("f4"), y=np.arange(60) % 2)
    checks = told(check_site(site_work(folder / "north", str(tmp_path / "fits.npz"), None)))
    assert not {name: about for name, (fine, about) in checks.items() if not fine}, server.log.read_text()
    assert "inputs [30]; 0 30, 1 30" in checks["rows"][1]  # the classes have the names of the experiment
    assert checks["run"][1].startswith("client 1 of 3")
    assert "certificate until" in checks["server"][1]
    (north, *_) = until(lambda: read_status(folder / "server").get("sites"))
    assert (north["heard"], north["version"], north["rows"]) == (None, None, None)  # it is not taken for present
    assert "north looks whether it could take part" in server.log.read_text()
    monkeypatch.setattr(site_check, "CLOCK", -1.0)
    checks = told(check_site(site_work(folder / "north", str(tmp_path / "wide.npz"), None)))
    assert checks["run"] == (
        False,
        "its rows have inputs [31] for classification, the run takes [30] for classification",
    )
    assert checks["clock"][0] is False
    (tmp_path / "table.csv").write_text("a,diagnosis\n1.5,x\n2,y\n")
    checks = told(check_site(site_work(folder / "north", str(tmp_path / "table.csv"), "diagnos")))
    table = tmp_path / "table.csv"
    assert checks["rows"] == (False, f"{table}: there is no column 'diagnos': did you mean 'diagnosis'?")
    assert checks["run"] == (None, "-")  # what is wrong is said once
    checks = told(check_site(site_work(folder / "north", None, None)))
    site_toml = folder / "north" / "site.toml"
    assert checks["rows"] == (False, f"say where this site's rows are: [data] in {site_toml}, or --data")
    (folder / "south" / "site.toml").write_text("[policy]\nprivate = ['classifier']\n")
    checks = told(check_site(site_work(folder / "south", str(tmp_path / "fits.npz"), None)))
    assert checks["run"][0] is False
    assert "must stay at this site" in checks["run"][1]


def test_a_server_that_is_not_there_or_another_is_said_so(tmp_path: Path) -> None:
    folder = provisioned(tmp_path / "credentials", NAMES)
    began = time.monotonic()
    checks = told(check_site(site_work(folder / "north", None, None), patience=120.0))
    assert checks["server"] == (
        False,
        f"127.0.0.1:{json.loads((folder / 'north' / 'credentials.json').read_text())['port']} does not answer "
        "(connection refused): compare host and port, the firewall, and whether it runs",
    )
    assert checks["run"] == (None, "-")
    assert time.monotonic() - began < 100  # a refused connection is not waited for


@pytest.mark.full
def test_the_owner_reads_all_that_may_leave_by_name(tmp_path: Path) -> None:
    """The list of the gate, by the policy alone where no server answers."""
    folder = provisioned(tmp_path / "credentials", NAMES) / "north"
    (folder / "site.toml").write_text("[policy]\nsecure_aggregation = 5\nqueries = ['masked_sums', 'evaluate']\n")
    words = processes.command("client", folder, "--data", table(tmp_path / "rows.csv"), "--target", "state", "--check")
    printed = processes.run(words, capture_output=True, text=True, env=ENVIRONMENT, timeout=300).stdout
    for line in declared(Policy(secure_aggregation=5, queries=["masked_sums", "evaluate"])):
        assert all(cell in printed for cell in line.cells), line
    assert "only a sum over at least 5 sites can be opened" in printed
    assert "answer evaluate" in printed


@pytest.mark.full
def test_the_list_of_a_run_has_its_numbers() -> None:
    noisy = recipes.dp_sgd(clip=0.5, noise=1.25, batch=10)
    summed = recipes.fedavg().with_(transforms=(SecureAggregation(bits=64, least=4),), aggregation="equal_weighted")
    policy = Policy(training={"epsilon": 3.0, "delta": 1e-6})
    found = {}
    for name, recipe in {"noisy": noisy, "summed": summed}.items():
        plan = prepare(recipe, partition.clients_from(TABLES, test=0.25, seed=0), Logistic([2], 2), RunSettings(seed=1))
        lines = declared(policy, plan.work, stated_rows(plan.work, {"train": 30, "validation": 0, "test": 10}))
        found[name] = {line.cells[0]: line for line in lines}
    update, counts = found["noisy"]["update model"], found["noisy"]["row numbers"]
    assert update.mechanism is Mechanism.NOISED
    assert all(number in update.how for number in ("0.5", "1.25", "epsilon 3", "1e-06"))
    assert (counts.mechanism, counts.how) == (Mechanism.OPEN, "30 train, 0 validation, 10 test")
    assert not {"loss", "keys"} & found["noisy"].keys()  # neither leaves
    assert found["summed"]["update"].mechanism is Mechanism.MASKED
    assert "at least 4 sites" in found["summed"]["update"].how
    assert "train" not in found["summed"]["row numbers"].how
