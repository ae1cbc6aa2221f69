"""Three organisations with rows of their own, with a policy; and a federation on one machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from sklearn.datasets import load_breast_cancer

import piebald
from piebald.cli import main
from piebald.cli.predicting import relayed
from piebald.contracts.component import Component
from piebald.core.errors import SettingError
from piebald.experiments.file import ExperimentSettings
from piebald.federation.credentials import provisioning
from piebald.federation.hub.local_federation import LocalFederation
from piebald.federation.link.wire_format import MINOR, PROTOCOL, Welcome
from piebald.federation.site.client_runtime import FederationClient
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_process import SiteSettings, SiteWork
from piebald.runs.run import opened

from .conftest import Server, Sites, provisioned, until
from .test_site_choice import Wire

NAMES = ["north", "south", "east"]
FUNCTION = """
import numpy as np

def load():
    rows = np.load({path!r})
    return {{"train": (rows["x"][:100], rows["y"][:100]), "test": (rows["x"][100:], rows["y"][100:])}}
"""


def organisations(folder: Path) -> Sites:
    """A table, an archive and a function, each at its own site."""
    table = load_breast_cancer(as_frame=True).frame
    table.iloc[:, :-1] = np.log1p(table.iloc[:, :-1])
    x, y = table.iloc[:, :-1].to_numpy(np.float32), table["target"].to_numpy()
    made = Sites(provisioned(folder / "credentials", NAMES))
    table.iloc[0::3].to_csv(made.folder / "north" / "rows.csv", index=False)
    (made.folder / "north" / "site.toml").write_text(
        "[data]\nsource = 'rows.csv'\ntarget = 'target'\n[policy]\nprivate = ['classifier']\n"
    )
    np.savez(folder / "rows.npz", x=x[1::3], y=y[1::3])
    (folder / "rows.py").write_text(FUNCTION.format(path=str(folder / "rows.npz")))
    return made


def described(recipe: str) -> ExperimentSettings:
    table: dict[str, Any] = {
        "rounds": 3,
        "partition": {"kind": "sites", "clients": NAMES, "inputs": [30], "classes": ["0", "1"]},
        "model": {"name": "mlp"},
        "recipe": {"name": recipe, "lr": 0.1},
        "runtime": {"kind": "federation"},
    }
    return ExperimentSettings.of_table(table, "the test's settings")


@pytest.mark.long
def test_organisations_train_on_rows_of_their_own(tmp_path: Path) -> None:
    sites = organisations(tmp_path)
    sites.start("north")
    sites.start("south", "--data", str(tmp_path / "rows.npz"))
    sites.start("east", "--data", f"{tmp_path / 'rows.py'}:load")
    server = Server(described("hdafl"), sites.folder / "server", tmp_path / "run")
    try:
        until(server.over)
        run = opened(server.out)
        assert {row["client"] for row in run.results if row["status"] == "ok"} == {0, 1, 2}
        models = [until(lambda name=name: kept(sites, name)) for name in NAMES]
        for name in ("features.1.0.weight", "classifier.weight"):
            alike = bool((models[0][name] == models[1][name]).all())
            assert alike == (not name.startswith("classifier"))
        with pytest.raises(SettingError, match="never leaves its site"):
            run.model(0)
        with np.load(tmp_path / "rows.npz") as rows:  # a newcomer brings rows of its own; there are none here
            adapted = piebald.adapt(server.out, (rows["x"], rows["y"]), epochs=2)
        assert {"global", "private", "local"} <= {method.name for method in adapted.methods}
        policy = Server(described("fedavg"), sites.folder / "server", tmp_path / "refused")
        assert policy.process.wait(180) == 0  # the others train without it
        assert "classifier.bias must stay at this site but the recipe would send it" in policy.log.read_text()
        assert {row["client"] for row in opened(policy.out).results if row["status"] == "ok"} == {1, 2}
    finally:
        sites.close()
        server.close()


def kept(sites: Sites, name: str) -> dict[str, Any] | None:
    path = sites.folder / name / "model.safetensors"
    return load_file(path) if path.exists() else None


CHECKS = ("credentials", "certificate", "device", "disk", "rows", "run", "server", "clock")


def test_what_sites_print_is_relayed_by_whole_lines_each_once(tmp_path: Path) -> None:
    site, lines = tmp_path / "fold-1" / "federation" / "north", list[str]()
    site.mkdir(parents=True)
    with relayed(tmp_path, lines.append):
        (site / "log.txt").write_bytes("✓ disk\n\n".encode())
        until(lambda: len(lines) == 2)
        with (site / "log.txt").open("ab") as file:
            file.write(b"M\xfcller\nbeg")
        until(lambda: len(lines) == 3)
        with (site / "log.txt").open("ab") as file:
            file.write(b"un\nthe run is over\n")
    printed = ["✓ disk", "", "M\N{REPLACEMENT CHARACTER}ller", "begun", "the run is over"]
    assert lines == [f"north | {line}".rstrip() for line in printed]


@pytest.mark.long
def test_all_on_one_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "rounds=1", "--out", str(tmp_path / "run")]
    assert main(["up", "--local", "3", "--set", "partition.clients=2", *options]) == 2
    assert "the experiment has 2 clients, --local says 3" in capsys.readouterr().err
    assert main(["up", "--local", "2", *options]) == 0  # as many clients of the built-in experiment
    said = capsys.readouterr()
    assert re.search(r"^status +finished", said.out, re.MULTILINE)
    assert "state: finished" in said.err
    for name in ("site-1", "site-2"):  # all that piebald site up prints there, and in its order
        printed = (tmp_path / "run" / "federation" / name / "log.txt").read_text().splitlines()
        relayed = [line.partition("| ")[2] for line in said.err.splitlines() if line.startswith(f"{name} |")]
        assert relayed == [line.rstrip() for line in printed]
        marks = [line.split()[:2] for line in printed if line.startswith(("✓", "✗"))]
        assert marks == [["✓", check] for check in CHECKS]
        assert printed[-1] == "the run is over"
    assert main(["status", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "site-1" in said
    assert "site-2" in said
    assert main(["stop", str(tmp_path / "run")]) == 0
    assert "nothing is running" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "sites.toml"], "nothing to simulate"),
        (["run", "sites.toml", "--runtime", "federation"], "cannot be tried on this machine alone"),
        (["run", "--runtime", "federation", "--set", "unseen=1"], "unseen holds out clients"),
        (["server", "credentials/site-1", "sites.toml"], "the server needs the credentials of the server"),
        (["server", "credentials/server", "sites.toml"], "provision one site for each client"),
        (["client", "nowhere"], "holds no credentials"),
        (["status", "credentials/server"], "nothing has run"),
        (["status", "."], "no credentials and no run"),
    ],
    ids=str,
)
def test_what_cannot_work_is_said_in_one_sentence(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    provisioned(tmp_path / "credentials", ["site-1"])
    table = described("fedavg").table()
    del table["runtime"]
    Path("sites.toml").write_text(ExperimentSettings.of_table(table, "").text())
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_any_site_that_the_credentials_list_may_take_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, given = provisioned(tmp_path / "credentials", ["b", "a"]), list[ExperimentSettings]()
    (tmp_path / "e.toml").write_text(described("fedavg").text().replace('["north", "south", "east"]', '"any"'))
    monkeypatch.setattr("piebald.cli.federate.carry_out", lambda settings, *_, **__: given.append(settings))
    monkeypatch.chdir(tmp_path)
    assert main(["server", str(folder / "server"), str(tmp_path / "e.toml")]) == 0
    assert list(given[0].clients().names) == ["b", "a"]  # in the order of their numbers
    with pytest.raises(SettingError, match="start it with piebald server CREDENTIALS FILE"):
        ExperimentSettings.load(tmp_path / "e.toml").clients()


def test_what_is_wrong_with_a_sites_rows_stays_at_the_site(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    credentials = provisioning.read(provisioned(tmp_path / "credentials", ["north"]) / "north")
    rebuild = SiteWork(credentials, SiteSettings.model_validate({"data": {"source": "patients-of-dr-x.csv"}}), tmp_path)
    terms = {
        "protocol": PROTOCOL, "minor": MINOR, "piebald": piebald.__version__,
        "experiment": described("fedavg").table(), "training": {"kind": "sgd"}, "transforms": [],
        "private": [], "layout": [], "objective": "classification", "metrics": [], "seed": 0, "shape": [30],
        "outputs": [2], "classes": ["0", "1"], "clients": ["north"], "sites": ["north"],
    }  # fmt: skip
    with pytest.raises(SettingError) as caught:
        rebuild(terms)
    assert "dr-x" not in str(caught.value)
    assert "dr-x" in caplog.text


def test_a_loss_that_does_not_fit_tells_the_server_no_number_of_a_sites_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, a server that asked for survival was told the first event that is none: "got 37.5"."""
    folder = provisioned(tmp_path / "credentials", ["north"]) / "north"
    (folder / "rows.py").write_text(
        "import numpy as np\ndef load():\n    return np.ones((9, 4), np.float32), np.full((9, 2), 37.5, np.float32)\n"
    )
    credentials, about = provisioning.read(folder), {"data": {"source": "rows.py:load"}}
    experiment = {
        "partition": {"kind": "sites", "clients": ["north"], "inputs": [4], "targets": 2},
        "model": {"name": "mlp"}, "loss": "survival", "recipe": {"name": "fedavg"},
    }  # fmt: skip
    terms = {
        "protocol": PROTOCOL, "minor": MINOR, "piebald": piebald.__version__,
        "experiment": experiment, "training": {"kind": "sgd"}, "transforms": [],
        "private": [],
        "layout": [], "objective": "survival", "metrics": [], "seed": 0, "shape": [4], "outputs": [1], "classes": None,
        "clients": ["north"], "sites": ["north"],
    }  # fmt: skip
    site = FederationClient(
        credentials, SiteWork(credentials, SiteSettings.model_validate(about), folder), policy=Policy(), make_link=Wire
    )  # type: ignore[arg-type]
    for change in ({}, {"objective": "regression", "experiment": {**experiment, "loss": "regression"}, "shape": [5]}):
        welcome = Welcome(version="0", run="ab", epoch="aa", terms="cd")
        site._accept_or_refuse(welcome, bytearray(json.dumps(terms | change).encode()))
        assert site.session.refused
        assert "37.5" not in site.session.refused
        assert str(tmp_path) not in site.session.refused
    assert site.session.refused == "its rows have inputs [4] for regression, the run takes [5] for regression"
    assert "got 37.5 in the event of row 1" in caplog.text  # the site's own log says what to mend


def test_sites_on_this_machine_take_queries_of_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their processes know such a kind only with a run, so that it is no misspelt one in their settings."""
    with monkeypatch.context() as here:
        here.setitem(Component.registry["query"], "of_the_lab", type("Query", (), {"__module__": "lab"}))
        LocalFederation.start(1, str(tmp_path))
    policy = SiteSettings.load(tmp_path / "site-1" / "site.toml").policy
    assert "of_the_lab" in policy.queries
    assert "evaluate" in policy.queries
    assert "lab" in policy.plugins
    assert not [module for module in policy.plugins if module.startswith("piebald")]
