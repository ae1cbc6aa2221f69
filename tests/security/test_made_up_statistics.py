"""Batch-norm statistics that a client makes up: the run goes on, every model is finite, no variance is negative."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

import piebald
from piebald import data, models, partition, recipes
from piebald.core.parameters import Layout
from piebald.methods.attacks.base import Attack

MODEL = models.build_model("mlp_bn", (1, 8, 8), 10)
LAYOUT = Layout.of(MODEL)


class MadeUpStatistics(Attack):
    """The honest update with one number in place of each change of the named statistics.

    Attributes:
        value: that number.
        part: how the names of these tensors end.
    """

    value: float = 0.0
    part: str = "running_var"

    def corrupt(self, change: Tensor, keys: Sequence[int]) -> Tensor:
        change = change.clone()
        for slot in LAYOUT.slots:
            if slot.name.endswith(self.part):
                change[:, slot.start : slot.stop] = self.value
        return change


@pytest.mark.parametrize("value", [-50.0, -1e30, 1e30])
@pytest.mark.parametrize("recipe", ["distfl", "sync_dvw"])
def test_the_run_goes_on(recipe: str, value: float) -> None:
    clients = partition.Dirichlet(clients=3, alpha=1.0, limit=120, validation=0.2).split(data.digits())
    attacked = getattr(recipes, recipe)().with_(
        transforms=[MadeUpStatistics(clients=(0,), value=value, part=part) for part in ("running_var", "running_mean")]
    )
    run = piebald.run(attacked, clients, MODEL, rounds=2, seed=1)
    assert {row["client"] for row in run.results if row["status"] == "ok"} >= {1, 2}
    for model in run.cluster_models.values():
        assert bool(model.isfinite().all())
        assert all(float(model[variance].min()) >= 0 for variance in LAYOUT.variances)
