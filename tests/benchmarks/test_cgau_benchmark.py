"""CGAU's benchmark: XOR is the task of the paper's appendix A, and nothing is fitted on test rows."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests import processes
from tests.scripts import loaded

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "cgau"


@pytest.fixture(scope="module")
def xor() -> ModuleType:
    return loaded(FOLDER / "xor.py")


def test_clients_are_half_planes_and_labels_are_signs_that_differ(xor: ModuleType) -> None:
    """Before, there was one feature, and the client was the other."""
    x, y = xor.points()
    assert x.shape == (2, xor.ROWS, 2)
    assert (x[xor.UP, :, 1] > 0).all()
    assert (x[xor.DOWN, :, 1] < 0).all()
    assert ((x[..., 0] * x[..., 1] < 0) == (y > 0.5)).all()
    for client in (xor.UP, xor.DOWN):  # both classes and both signs of the first feature at each client
        assert y[client].mean() == 0.5
        assert (x[client, :, 0] > 0).float().mean() == 0.5


def test_only_conditioned_units_are_told_the_client(xor: ModuleType) -> None:
    """Before, an MLP got the client's number as an input."""
    x, _ = xor.points()
    for name, make in xor.MODELS.items():
        torch.manual_seed(0)
        module = make()
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
        up, down = (module(x[xor.UP], one) for one in torch.eye(2))
        told = name == xor.CONDITIONED or "only its" in name
        assert torch.equal(up, down) != told


def test_conditioning_that_is_turned_off_ignores_the_client(xor: ModuleType) -> None:
    x, _ = xor.points()
    module = xor.MODELS[xor.CONDITIONED]()
    numbers = {name: torch.randn_like(value) for name, value in module.named_parameters()}
    off = xor.without(numbers, "filter", "gate")
    rows = x[xor.UP].expand(2, -1, -1)
    out = xor.logits(module, off, rows)
    assert torch.equal(out[0], out[1])
    for half in ("filter", "gate"):
        out = xor.logits(module, xor.without(numbers, half), rows)
        assert not torch.equal(out[0], out[1])


@pytest.mark.full
def test_a_gated_unit_solves_xor_without_conditioning(xor: ModuleType) -> None:
    """Before, the table said that none of 50 such starts did."""
    _, right, _ = xor.train(xor.MODELS[xor.BLIND], starts=12, steps=1500)
    assert (right == 1).sum() > 6


def test_intervals_of_shares_hold_the_share(xor: ModuleType) -> None:
    for solved in (0, 25, 50):
        low, high = xor.interval(solved, 50)
        assert 0 <= low <= solved / 50 <= high <= 1
        assert high - low > 0.05


@pytest.mark.long
@pytest.mark.skipif("PIEBALD_DATA" not in os.environ, reason="PIEBALD_DATA is not set")
def test_no_client_depends_on_what_is_in_test_rows() -> None:
    """Before, principal components and k-means saw the rows that clients were tested on."""
    program = """
import federations, numpy as np
rows = federations.rare_sound()
split = federations.rare_by_clusters(0.2, 3)
def own(clients, *parts):
    return [np.concatenate([clients.indices(c, part) for part in parts]).tolist() for c in range(len(clients))]
tested = np.concatenate([split.indices(c, "test") for c in range(len(split))])
assert len(tested) > 1000, len(tested)
rows.x[tested] *= -50.0
assert own(federations.rare_by_clusters(0.2, 3), "train", "validation") == own(split, "train", "validation")
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, FOLDER, FOLDER.parent)))}
    done = processes.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
@pytest.mark.parametrize("scale", ["small", "full"])
def test_a_dry_run_prints_the_conditions_beside_the_papers(scale: str, tmp_path: Path) -> None:
    command = [sys.executable, FOLDER / "run.py", "--scale", scale, "--dry-run", "--out", tmp_path / "out"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = processes.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "out").exists()
    lines = {line.split("  ")[1]: line for line in done.stdout.splitlines() if line.startswith("  ")}
    assert lines["rounds"].split()[-1].isdigit() or "500" in lines["rounds"]
    if scale == "full":
        assert "*" not in lines["units"] + lines["dropout"] + lines["batch"] + lines["repetitions"]
