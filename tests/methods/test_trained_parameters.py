"""Running statistics of batch norms decide nothing: who is grouped with whom, and how much an update counts.

They have no direction that is learned in and no scale in common with the weights, and were 32 to 99 % of an update's
squared length on DistFL's benchmark.  Every clustering and aggregator of the registry is tried, so a new one is, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piebald import recipes
from piebald.contracts import Cohort, QueryRequest, Update
from piebald.contracts.component import Component, build
from piebald.core.parameters import Layout
from piebald.methods.aggregation.base import Aggregator
from piebald.methods.aggregation.robust import Robust
from piebald.methods.clustering.base import Clustering
from tests.fakes import classified, client_work, seeded, simulate

SHAPE, COUNT = (5,), 14
MORE: dict[tuple[str, str], dict[str, Any]] = {
    ("clustering", "distfl"): {"probes": 20, "steps": 5},
    ("clustering", "ifca"): {"k": 3},
    ("clustering", "cfl"): {"eps1": 10.0, "eps2": 0.01, "after": 0},
    ("aggregation", "credit"): {"steps": 30},
    ("aggregation", "fixed_shares"): {"shares": {"*": 1.0}, "by_number": (1.0,) * 14},
}
KINDS = [
    (axis, kind)
    for axis in ("clustering", "aggregation")
    for kind, made in sorted(Component.registry[axis].items())
    if made.__module__.startswith("piebald.")
]


def network() -> nn.Module:
    layers = [nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)]
    return seeded(lambda: nn.Sequential(*layers))


class FakeContext:
    """A server context with a model, a state, and answers that depend on trained parameters only."""

    known, version, members, device = COUNT, 2, (), torch.device("cpu")

    def __init__(self) -> None:
        self.spec = client_work(network(), recipes.fedavg().training)
        object.__setattr__(self.spec, "shape", SHAPE)
        object.__setattr__(self.spec, "outputs", (3,))
        self.state: dict[str, Any] = {}
        self.trainer, self.excluded = self.spec.trainer, list[int]()
        self.model = self.spec.initial[: self.spec.layout.shared]
        self.models = {0: self.model}

    def query(self, requests: Sequence[QueryRequest]) -> list[Update]:
        change = torch.zeros(self.spec.layout.shared)
        change[:4] = 1.0
        change[self.spec.layout.shared_trained :] = 0.5
        return [Update({"model": change}, 5, 1, {"loss": 1.0}) for _ in requests]

    def exclude_update(self, client: int, reason: str) -> None:
        self.excluded.append(client)

    def note(self, name: str, value: Any) -> None:
        return


def cohort(buffers: Tensor, context: FakeContext) -> Cohort:
    """Fourteen updates in two camps whose trained parameters are always the same, with these buffers."""
    rng = torch.Generator().manual_seed(3)
    layout = context.spec.layout
    camps = torch.randn(2, layout.shared_trained, generator=rng)[[0] * 9 + [1] * 5]
    trained = camps + 0.2 * torch.randn(COUNT, layout.shared_trained, generator=rng)
    matrix = torch.cat([trained, buffers], dim=1)
    updates = [
        Update({"model": row}, 5, 2, {"loss": 1.0, "validation_weight": 1.0, "cluster": -1}, float(row[:part].norm()))
        for row, part in zip(matrix, [layout.shared_trained] * COUNT, strict=True)
    ]
    sent = [context.model] * COUNT
    return Cohort(list(range(COUNT)), [2] * COUNT, updates, matrix, 2, sent, layout.shared_trained)


def statistics(size: float, rows: Sequence[int] = range(COUNT)) -> Tensor:
    """Changes of running statistics, some of which are large; variances stay positive."""
    spec = FakeContext().spec
    found = 0.01 * torch.rand(COUNT, spec.layout.shared - spec.layout.shared_trained)
    found[list(rows)] = size * torch.rand(len(rows), found.shape[1], generator=torch.Generator().manual_seed(1))
    return found


def decision(component: Any, buffers: Tensor) -> Any:
    """What a component decides: labels and who is left out, or shares and the change of trained parameters."""
    context: Any = FakeContext()
    made = cohort(buffers, context)
    if isinstance(component, Clustering):
        version = {"ifca": 0}.get(component.kind, made.version)
        made = Cohort(made.clients, made.versions, made.updates, made.matrix, version, made.sent, made.trained)
        return [component.assign(made, {}, context), context.excluded]
    assert isinstance(component, Aggregator)
    assert component.overrides(Aggregator.prepare) or made.matrix is not None
    average, shares = component.aggregate(made, context)
    assert average.shape == made.sent[0].shape
    return [[round(share, 9) for share in shares], average[: made.trained]]


@pytest.mark.parametrize(("axis", "kind"), KINDS)
def test_changing_only_buffers_changes_no_decision(axis: str, kind: str) -> None:
    """Before, CFL, IFCA's warm start, FLTrust, FoolsGold, Krum and five more decided otherwise."""
    component = build(axis, {"kind": kind, **MORE.get((axis, kind), {})})
    first, trained = decision(component, statistics(0.01))
    for rows, size in ((range(COUNT), 3.0), ([2], 50.0), (range(0, COUNT, 3), 1e4)):
        again, same = decision(component, statistics(size, rows))
        if kind == "distfl" and len(rows) > 1:
            continue  # its inputs are made from the statistics by design: from their median, so one client has no say
        assert again == first, f"buffers of size {size} decided"
        assert torch.equal(torch.as_tensor(trained), torch.as_tensor(same))


ROBUST = [kind for kind, made in sorted(Component.registry["aggregation"].items()) if issubclass(made, Robust)]


@pytest.mark.parametrize("kind", ROBUST)
def test_attackers_that_robust_rules_tolerate_cannot_set_buffers(kind: str) -> None:
    """Parameters like everybody's and absurd statistics: Krum and others would otherwise choose such an update."""
    component: Any = build("aggregation", {"kind": kind, **MORE.get(("aggregation", kind), {})})
    context: Any = FakeContext()
    for struck in ([0], [3, 9], [1, 2, 12]):
        made = cohort(statistics(1e6, struck), context)
        average, _ = component.aggregate(made, context)
        assert float(average[made.trained :].abs().max()) < 1.0
        assert kind == "fltrust" or float(average[made.trained :].min()) > 0.0  # as those of all honest clients do
        context.state.clear()


def test_the_gradient_norm_leaves_buffers_out_on_its_way_from_the_client() -> None:
    """Before, inputs far from 0 made an update long by its running means, and it counted more."""
    clients = classified(20, 20, features=5)
    run = simulate(recipes.fedavg(lr=0.0001).with_(aggregation="gradient_norm_weighted"), clients, network(), rounds=1)
    layout = Layout.of(network())
    moved = layout.flatten(run.model()) - run.work.initial
    norms = [row["norm"] for row in run.results if row["version"] == 1]
    assert float(moved[layout.shared_trained :].norm()) > 10 * max(norms)
    assert all(math.isfinite(norm) and norm > 0 for norm in norms)
