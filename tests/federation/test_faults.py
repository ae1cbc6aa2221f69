"""Processes are killed at random moments; the run ends with the model of one that nobody disturbed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from piebald import experiment
from piebald.cli import main
from piebald.report.store import RunStore

from .conftest import SITES, Server, Sites, carry_out, provisioned, settings, until

pytestmark = pytest.mark.full

ROUNDS = 6


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[Sites]:
    """Three sites of this test alone."""
    made = Sites(provisioned(tmp_path / "credentials"))
    for name in SITES:
        made.start(name)
    yield made
    made.close()


@pytest.mark.parametrize("update", [[], [{"kind": "secure_aggregation"}]], ids=["plain", "secure aggregation"])
@pytest.mark.parametrize("seed", [0])
def test_kills_at_random_change_nothing(seed: int, update: list[Any], crowd: Sites, tmp_path: Path) -> None:
    """HDAFL with momentum: what sites remember must move on exactly once for each commit."""
    recipe = {"name": "hdafl", "epochs": 40, "momentum": 0.5, "keep_momentum": True, "update": update}
    made = settings(recipe, rounds=ROUNDS, evaluate={"every": 0})
    undisturbed = carry_out(made, tmp_path / "simulated")
    flags = {"kind": "federation", "silence": 60.0 if update else 5.0}  # a site that starts again still answers
    made = settings(recipe, rounds=ROUNDS, evaluate={"every": 0}, runtime=flags)
    server = Server(made, crowd.folder / "server", tmp_path / "run")
    dice = random.Random(seed)
    try:
        disturb(server, crowd, dice)
        until(server.over)
    finally:
        server.close()
    assert_same_run(undisturbed, server.out, crowd)


def disturb(server: Server, crowd: Sites, dice: random.Random) -> None:
    """Kill a site, then the server."""
    for victim in ("site", "server"):
        now = server.version()
        until(lambda now=now: server.version() > now or server.over())
        time.sleep(dice.uniform(0, 0.4))
        if server.over():
            return
        if victim == "server":
            server.kill_and_resume()
        else:
            name = dice.choice(SITES)
            crowd.kill(name)
            crowd.start(name)


def assert_same_run(simulated: experiment.Run, out: Path, crowd: Sites) -> None:
    """The same global model, the same private numbers at the sites, and one update from each client a commit."""
    real = experiment.opened(out)
    torch.testing.assert_close(real.cluster_models[0], simulated.cluster_models[0], atol=1e-4, rtol=1e-4)
    trained = [
        (row["version"], row["client"]) for row in real.results if (row["kind"], row["status"]) == ("train", "ok")
    ]
    assert trained == [(version, client) for version in range(1, ROUNDS + 1) for client in range(3)]
    for client, name in enumerate(SITES):
        (state,) = (folder for folder in (crowd.folder / name / "state").iterdir() if folder.is_dir())
        until(lambda state=state: not list(state.glob("done-*")))
        kept = load_file(state / "memory.safetensors")
        remembered = simulated._store.client_state(client)
        assert kept.keys() == remembered.keys()
        for part, numbers in remembered.items():
            torch.testing.assert_close(kept[part], numbers, atol=1e-4, rtol=1e-4)


def test_a_site_joins_late_another_is_gone_for_good_and_the_run_is_stopped(tmp_path: Path) -> None:
    crowd = Sites(provisioned(tmp_path / "credentials"))
    crowd.start("site-1")
    crowd.start("site-2")
    flags = {"kind": "federation", "wait_for": 2, "patience": 3.0, "silence": 2.0}
    made = settings({"name": "fedasync", "epochs": 40}, rounds=100_000, runtime=flags, evaluate={"every": 0})
    server = Server(made, crowd.folder / "server", tmp_path / "run")
    try:
        until(lambda: server.version() >= 3)
        crowd.kill("site-2")
        crowd.start("site-3")
        until(lambda: ended(server.out, client=1, status="lost") and ended(server.out, client=2, status="ok"))
        main(["stop", str(server.out)])
        assert server.process.wait(60) == 130
    finally:
        crowd.close()
        server.close()
    with RunStore.open_read_only(server.out) as store:
        assert store.meta["status"] == "stopped"
        (lost,) = store.query("SELECT reason FROM result WHERE status = 'lost'")
    assert "silent for more than 3 seconds" in lost["reason"]


def ended(out: Path, client: int, status: str) -> bool:
    """Whether a task of a client has ended in this way."""
    with RunStore.open_read_only(out) as store:
        return bool(store.query("SELECT 1 FROM result WHERE client = ? AND status = ? LIMIT 1", client, status))
