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

import piebald
from piebald.cli import main
from piebald.runs.run import opened
from piebald.storage.store import RunStore

from .conftest import SITES, Server, Sites, carry_out, provisioned, settings, until

pytestmark = pytest.mark.full

ROUNDS = 6


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Sites]:
    """Three sites of this test alone."""
    made = Sites(provisioned(tmp_path / "credentials"))
    for name in SITES:
        made.start(name)
    yield made
    made.close()


# 64 bits: rounding differs between two runs, and 240 epochs with momentum would magnify what 32 bits leave of it
MASKED = {"kind": "secure_aggregation", "bits": 64}


@pytest.mark.long
@pytest.mark.parametrize("transforms", [[], [MASKED]], ids=["plain", "secure aggregation"])
@pytest.mark.parametrize("seed", [0])
def test_kills_at_random_change_nothing(seed: int, transforms: list[Any], sites: Sites, tmp_path: Path) -> None:
    """HDAFL with momentum: client states must move on exactly once in each round."""
    recipe = {"name": "hdafl", "epochs": 40, "momentum": 0.5, "keep_momentum": True, "transforms": transforms}
    made = settings(recipe, rounds=ROUNDS, evaluate={"every": 0})
    undisturbed = carry_out(made, tmp_path / "simulated")
    made = settings(recipe, rounds=ROUNDS, evaluate={"every": 0}, runtime={"kind": "federation"})
    server = Server(made, sites.folder / "server", tmp_path / "run")
    rng = random.Random(seed)
    try:
        disturb(server, sites, rng)
        until(server.over)
    finally:
        server.close()
    assert_same_run(undisturbed, server.out, sites)


def disturb(server: Server, sites: Sites, rng: random.Random) -> None:
    """Kill a site, then the server."""
    for victim in ("site", "server"):
        now = server.version()
        until(lambda now=now: server.version() > now or server.over())
        time.sleep(rng.uniform(0, 0.4))
        if server.over():
            return
        if victim == "server":
            server.kill_and_resume()
        else:
            name = rng.choice(SITES)
            sites.kill(name)
            sites.start(name)


def assert_same_run(simulated: piebald.Run, out: Path, sites: Sites) -> None:
    """The same global model, the same private numbers at the sites, and one update from each client in each round."""
    real = opened(out)
    torch.testing.assert_close(real.cluster_models[0], simulated.cluster_models[0], atol=1e-4, rtol=1e-4)
    trained = [
        (row["version"], row["client"]) for row in real.results if (row["kind"], row["status"]) == ("train", "ok")
    ]
    assert trained == [(version, client) for version in range(1, ROUNDS + 1) for client in range(3)]
    for client, name in enumerate(SITES):
        (state,) = (folder for folder in (sites.folder / name / "state").iterdir() if folder.is_dir())
        until(lambda state=state: not list(state.glob("done-*")))
        kept = load_file(state / "client_state.safetensors")
        expected = simulated._store.client_state(client)
        assert kept.keys() == expected.keys()
        for vector, numbers in expected.items():
            torch.testing.assert_close(kept[vector], numbers, atol=1e-4, rtol=1e-4)


@pytest.mark.long
def test_a_site_joins_late_another_is_gone_for_good_and_the_run_is_stopped(tmp_path: Path) -> None:
    sites = Sites(provisioned(tmp_path / "credentials"))
    sites.start("site-1")
    sites.start("site-2")
    flags = {"kind": "federation", "wait_for": 2, "patience": 3.0, "silence": 2.0}
    made = settings({"name": "fedasync", "epochs": 40}, rounds=100_000, runtime=flags, evaluate={"every": 0})
    server = Server(made, sites.folder / "server", tmp_path / "run")
    try:
        until(lambda: server.version() >= 3)
        sites.kill("site-2")
        sites.start("site-3")
        until(lambda: ended(server.out, client=1, status="absent") and ended(server.out, client=2, status="ok"))
        main(["stop", str(server.out)])
        assert server.process.wait(60) == 130
    finally:
        sites.close()
        server.close()
    with RunStore.open_read_only(server.out) as store:
        assert store.meta["status"] == "stopped"
        reasons = store.query("SELECT client, reason FROM result WHERE status = 'absent'")
    assert {row["reason"] for row in reasons if row["client"] == 1} == {"silent for more than 3 seconds"}


def ended(out: Path, client: int, status: str) -> bool:
    """Whether a task of a client has ended in this way."""
    with RunStore.open_read_only(out) as store:
        return bool(store.query("SELECT 1 FROM result WHERE client = ? AND status = ? LIMIT 1", client, status))
