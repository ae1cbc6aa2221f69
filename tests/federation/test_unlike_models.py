"""Clients with models of their own in a real federation: what travels and what comes of it is as in the simulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from .conftest import Sites, carry_out, settings

CASES: dict[str, dict[str, Any]] = {
    "heterofl": {"recipe": {"name": "heterofl", "widths": [1.0, 0.5, 0.25]}},
    "fedproto": {
        "recipe": {"name": "fedproto"},
        "model": {"name": "mlp", "hidden": [32], "clients": {"*[23]": {"name": "mlp", "hidden": [16, 32]}}},
    },
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_a_federation_of_unlike_models_ends_as_the_simulator(case: str, sites: Sites) -> None:
    made = settings(**CASES[case], rounds=2)
    simulated = carry_out(made)
    real = carry_out(made, credentials=str(sites.folder / "server"))
    for name in ("bytes_down", "bytes_up"):
        trained = [[row for row in run.results if row["kind"] == "train"] for run in (simulated, real)]
        sent = [{row["client"]: row[name] for row in rows} for rows in trained]
        assert sent[0] == sent[1]
        assert len({*sent[0].values()}) == (3 if case == "heterofl" else 1)
    assert all(row["status"] == "ok" for row in real.results)
    torch.testing.assert_close(real.start(), simulated.start(), atol=1e-4, rtol=1e-4)
    scores = [{(row["client"], row["metric"]): row["value"] for row in run.scores} for run in (simulated, real)]
    assert scores[1] == pytest.approx(scores[0], abs=1e-3)
    for client in range(3):
        left = load_file(sites.folder / f"site-{client + 1}" / "model.safetensors")
        wanted = simulated.work.of(client).layout
        assert {name: tuple(one.shape) for name, one in left.items()} == {one.name: one.shape for one in wanted.slots}
