"""Frozen weights in a federation: each site has its own, and one that has others takes no part."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from piebald.contracts import Task
from piebald.core.errors import SettingError
from piebald.core.parameters import frozen_digest
from piebald.experiments.file import ExperimentSettings
from piebald.experiments.run_settings import RunSettings
from piebald.federation.credentials import provisioning
from piebald.federation.hub.run_terms import terms
from piebald.federation.operate.machine_checks import Check
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_check import _met
from piebald.federation.site.site_process import SiteSettings, SiteWork
from piebald.federation.site.site_rows import SiteClient
from piebald.federation.site.task_runner import TaskRunner
from piebald.methods.client_work import ClientWork
from piebald.runs.prepare import prepare

from .conftest import SITES, provisioned

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install '.[hf]'")
pytest.importorskip("peft", reason="needs the extra: pip install '.[hf]'")
NAME = "hospital/notes"  # what the experiment calls the weights


def written(folder: Path, seed: int) -> Path:
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4,
        num_channels=1, num_labels=10, hidden_dropout_prob=0.0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformers.ViTForImageClassification(config).save_pretrained(folder)
    return folder


def planned(weights: Path) -> tuple[ClientWork, dict[str, Any]]:
    """The server's work, and the run's terms: weights have the experiment's name in them and not the server's path."""
    table: dict[str, Any] = {
        "rounds": 1,
        "seed": 1,
        "data": {"name": "digits"},
        "model": {
            "name": "pretrained", "weights": str(weights), "task": "image_classification", "adapter": "lora", "rank": 2,
        },
        "partition": {"kind": "dirichlet", "clients": 3, "alpha": 0.5, "limit": 60},
        "recipe": {"name": "fedavg", "lr": 0.1, "batch": 10},
    }  # fmt: skip
    made = ExperimentSettings.of_table(table, "the test's settings")
    plan = made.plan()
    ready = prepare(next(iter(plan.recipes.values())), plan.clients, plan.model, RunSettings(rounds=1, seed=1))
    table["model"]["weights"] = NAME
    return ready.work, json.loads(terms(ready.work, table, plan.clients.names, SITES, plan.clients.classes))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's weights, the same ones in the folder of a site's credentials, and others."""
    folder = tmp_path_factory.mktemp("weights")
    server = written(folder / "server", 1)
    shutil.copytree(server, provisioned(folder / "credentials") / SITES[0] / "own")
    written(folder / "others", 2)
    return folder


@pytest.fixture(scope="module")
def run(place: Path) -> tuple[ClientWork, dict[str, Any]]:
    made = planned(place / "server")
    shutil.rmtree(place / "server")  # a site never needs it
    return made


def rebuilt(place: Path, weights: Mapping[str, str], values: Mapping[str, Any], asked: Any = NAME) -> SiteClient:
    """The run at a site with these settings, where the experiment asks for weights by this name."""
    values = copy.deepcopy(dict(values))
    values["experiment"]["model"]["weights"] = asked
    folder = place / "credentials" / SITES[0]
    settings = SiteSettings.model_validate({"weights": dict(weights)})
    return SiteWork(provisioning.read(folder), settings, folder)(values)


def test_a_site_trains_with_weights_of_its_own(place: Path, run: tuple[ClientWork, dict[str, Any]]) -> None:
    """Its update is the one that the server's machine would make, and holds adapters and head alone."""
    work, values = run
    assert values["frozen"] == frozen_digest(work.model) != ""
    assert values["weights"] == "server"
    client = rebuilt(place, {NAME: "own"}, values)
    task = Task(1, 0, 0, {"model": work.initial})
    first, second = (
        TaskRunner(SiteClient(one, client.clients, 0), Policy(), "cpu").serve(task, None)[0]
        for one in (client.work, work)
    )
    assert first is not None
    assert second is not None
    assert torch.equal(first.vectors["model"], second.vectors["model"])
    assert first.nbytes == 4 * work.layout.size == 4 * (2 * 2 * 2 * 8 + 8 * 10 + 10)


def test_a_site_with_other_frozen_weights_says_so(place: Path, run: tuple[ClientWork, dict[str, Any]]) -> None:
    with pytest.raises(SettingError) as refused:
        rebuilt(place, {NAME: str(place / "others")}, run[1])
    assert str(refused.value) == (
        "the frozen weights of this site's model are not the server's, which are those of server: have the same "
        "weights on both"
    )


@pytest.mark.parametrize("asked", [NAME, "/etc", "credentials/site-1/own", "../x", 3, None])
def test_a_site_opens_no_path_of_the_servers(place: Path, run: tuple[ClientWork, dict[str, Any]], asked: Any) -> None:
    with pytest.raises(SettingError, match=r"this site does not have the weights .* name their folder in \[weights\]"):
        rebuilt(place, {"another/name": "own"}, run[1], asked)


def test_what_is_wrong_with_a_sites_weights_stays_at_the_site(
    place: Path, run: tuple[ClientWork, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SettingError) as refused:
        rebuilt(place, {NAME: "patients-of-dr-x"}, run[1])
    assert str(refused.value) == "its own weights cannot be used for this run; the site's own log says why"
    assert "patients-of-dr-x" in caplog.text
    values = {
        **run[1],
        "experiment": {**run[1]["experiment"], "model": {**run[1]["experiment"]["model"], "weights": NAME}},
    }
    settings = SiteSettings.model_validate({"weights": {NAME: "patients-of-dr-x"}})
    folder = place / "credentials" / SITES[0]
    site = SiteWork(provisioning.read(folder), settings, folder)
    checks = {
        check.what: check for check in _met(site, Check("rows", True, ""), json.dumps(values).encode(), lambda _: None)
    }
    assert "patients-of-dr-x" in checks["weights"].told  # `--check` is for this site
    assert [checks[name].fine for name in ("rows", "weights", "run")] == [True, False, None]
