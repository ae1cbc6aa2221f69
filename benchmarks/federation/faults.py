"""Disturb a run at random moments, and measure what was lost and how long it took to recover."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import parties

import piebald
from piebald.storage.store import RunStore

PATIENCE = 300  # seconds for a run to go on after a fault


def disturb(name: str, times: int, seed: int = 0) -> dict[str, Any]:
    """Cause a fault several times in one run, and compare the run with an undisturbed one."""
    rng, fault, recoveries = random.Random(seed), parties.FAULTS[name], []
    with tempfile.TemporaryDirectory() as place:
        run = parties.Parties(Path(place), parties.experiment())
        try:
            wait_for_round(run, 1)
            for _ in range(times):
                before = run.version()
                wait_for_round(run, before + 1)
                time.sleep(rng.uniform(0, 0.5))
                fault(run, rng)
                began, at = time.monotonic(), run.version()
                wait_for_round(run, at + 1)
                recoveries.append(time.monotonic() - began)
            parties.kill(run.server)
            return {"fault": name, "times": times, **compare(run), **summary(recoveries)}
        finally:
            run.close()


def wait_for_round(run: parties.Parties, version: int) -> None:
    """Wait until the run has made so many rounds."""
    until = time.monotonic() + PATIENCE
    while run.version() < version:
        if time.monotonic() > until:
            raise RuntimeError(f"no round in {PATIENCE} seconds: {(run.folder / 'server.log').read_text()[-2000:]}")
        time.sleep(0.01)


def compare(run: parties.Parties) -> dict[str, Any]:
    """The disturbed run beside a simulated one of as many rounds."""
    with RunStore.open_read_only(run.out) as store:
        version = store.version
        found = store.last_checkpoint()
        assert found is not None
        version, checkpoint = found
        model = next(t for name, t in checkpoint.tensors.items() if name.startswith("cluster/0/model"))
        counted = store.query("SELECT version, client FROM result WHERE status = 'ok' AND version <= ?", version)
    plan = parties.experiment(rounds=version).plan()
    recipe = next(iter(plan.recipes.values()))
    simulated = piebald.run(
        recipe, plan.clients, plan.model, rounds=version, seed=1, evaluate_every=0, measure="none",
        runtime={"kind": "simulator", "engine": "sequential", "workers": 0}, out=run.folder / "simulated",
    )  # fmt: skip
    due = {(number, client) for number in range(1, version + 1) for client in range(3)}
    there = [(row["version"], row["client"]) for row in counted]
    return {
        "rounds": version,
        "lost": len(due - set(there)),
        "twice": len(there) - len(set(there)),
        "apart": float((model - simulated.cluster_models[0]).abs().max()),
    }


def summary(recoveries: list[float]) -> dict[str, float]:
    """Seconds from the end of the fault to the next round with all sites."""
    return {
        "median": statistics.median(recoveries),
        "longest": max(recoveries),
    }
