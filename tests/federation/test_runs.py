"""One experiment, simulated and in a real federation: the same global model, the same scores, the same bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.security.server_entry import Entry

from .conftest import Sites, carry_out, settings

# what is asked one at a time comes in the same order everywhere
RECIPES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "hdafl": {},
    "scaffold": {},
    "fedasync": {"cohort": 1},
    "sync_dvw": {},
    "ifca": {"k": 2},
    "hierfavg": {"regions": ((0, 2), (1,))},
    "distfl": {"probes": 20},
    "fedrep": {},
    "fedbabu": {},
    "fedrod": {},
    "apfl": {},
    "pfedme": {},
    "per_fedavg": {"hessian": "differences"},
    "moon": {},
    "fedala": {"adaptive_layers": "*"},
    "fedphp": {"lam": 0.4, "horizon": 2},
    "fedamp": {"alpha": 0.4, "sigma": 20.0},
}
ALIKE = ("apfl", "pfedme", "per_fedavg", "moon", "fedphp")  # to others in what crosses the network
MODELS = {"distfl": {"name": "mlp_bn"}}


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.full) for name in RECIPES if name not in ALIKE),
        *(pytest.param(name, marks=pytest.mark.long) for name in ALIKE),
    ],
)
def test_equals_the_simulator(name: str, sites: Sites) -> None:
    made = settings({"name": name, **RECIPES[name]}, model=MODELS.get(name, {"name": "mlp"}))
    assert_same(made, sites)


@pytest.mark.full
def test_buffered_and_deadline_scheduling_end(sites: Sites) -> None:
    for recipe in (
        {"name": "fedbuff", "buffer_size": 2},
        {"name": "fedavg", "scheduling": {"kind": "deadline", "seconds": 0.5}},
    ):
        run = carry_out(settings(recipe), credentials=str(sites.folder / "server"))
        assert len(run.rounds) == 3
        assert all(row["status"] in ("ok", "late") for row in run.results)


@pytest.mark.full
def test_many_rounds_with_momentum_stay_together(sites: Sites) -> None:
    """Before, 25 rounds of HDAFL with momentum drifted apart by 4.5e-3, by float32 sums in other orders."""
    made = settings({"name": "hdafl", "momentum": 0.9, "keep_momentum": True}, rounds=25, evaluate={"every": 0})
    simulated = carry_out(made)
    real = carry_out(made, credentials=str(sites.folder / "server"))
    for group, vector in simulated.cluster_models.items():
        assert float((real.cluster_models[group] - vector).abs().max()) <= 1e-6


@pytest.mark.full
@pytest.mark.parametrize("state", ["kept", "averaged"])
def test_the_state_of_optimizers_is_that_of_the_simulator(state: str, sites: Sites) -> None:
    assert_same(settings({"name": "hdafl", "optimizer": "adamw", "optimizer_state": state}), sites)


def assert_same(made: Any, sites: Sites) -> None:
    simulated = carry_out(made)
    real = carry_out(made, credentials=str(sites.folder / "server"))
    for group, vector in simulated.cluster_models.items():
        torch.testing.assert_close(real.cluster_models[group], vector, atol=1e-4, rtol=1e-4)
    for name in ("scores", "results"):
        mine, theirs = getattr(simulated, name), getattr(real, name)
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs, strict=True):
            for key in a.keys() - {"sent", "time"}:
                same = pytest.approx(a[key], abs=1e-3, rel=1e-3) if isinstance(a[key], float) else a[key]
                assert b[key] == same, (name, key, a, b)


def test_a_federation_whose_folder_goes_with_it_ends_without_an_error(tmp_path: Path) -> None:
    """Before, the status was written into a temporary folder that had been deleted a moment ago."""
    entry = Entry(tmp_path, {"name": "fedavg"})
    folder = entry.server.credentials.folder

    class Local:
        def close(self) -> None:
            assert json.loads((folder / "status.json").read_text())["party"] == "server"
            shutil.rmtree(folder)

    entry.server._local = Local()  # type: ignore[assignment]
    entry.server.close()
    entry.server._write_status()  # as the watching thread may do that had just begun to
    assert not folder.exists()
