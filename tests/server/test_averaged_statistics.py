"""Running statistics at the server: averages of the clients' own; no steps, noise or lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.contracts import Cohort, ServerContext, StepContext
from piebald.core.errors import SettingError
from piebald.core.parameters import Layout
from piebald.methods.aggregation.base import Aggregator
from piebald.methods.clustering.base import Clustering
from piebald.methods.recipe import Recipe
from piebald.methods.transforms import Gaussian
from piebald.methods.transforms.base import Transform
from piebald.privacy import SecureAggregation
from piebald.storage.store import RunStore
from tests.fakes import classified, federation, seeded, simulate

SIZES = (40, 8, 24, 16)
FAR = 100.0  # mean of all clients' inputs, from which statistics start 100 away


def far_clients() -> Any:
    pairs = [
        (FAR + torch.randn(size, 3, generator=torch.Generator().manual_seed(size)), torch.arange(size) % 2)
        for size in SIZES
    ]
    return federation(*pairs, classes=["no", "yes"])


def network(momentum: float | None = 0.1) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.BatchNorm1d(3, momentum=momentum), nn.Linear(3, 2)))


def norm_of(run: piebald.Run) -> nn.BatchNorm1d:
    layer = run.model()[0]
    assert isinstance(layer, nn.BatchNorm1d)
    return layer


RECIPES: Mapping[str, Recipe] = {
    "fedavgm": recipes.fedavgm(lr=0.1, beta=0.9),
    "fedadam": recipes.fedadam(lr=0.1, server_lr=1.0),
    "feddyn": recipes.feddyn(lr=0.1, alpha=0.01, cohort=2),
    "fednova": recipes.fednova(lr=0.1, epochs=3),
    "qfedavg": recipes.qfedavg(lr=0.1, q=2.0),
    "fedbuff": recipes.fedbuff(lr=0.1, buffer_size=1),
    "fedasync": recipes.fedasync(lr=0.1, alpha=0.9),
    "async_fedavg": recipes.async_fedavg(lr=0.1),
    "krum": recipes.fedavg(lr=0.1).with_(aggregation="krum"),
    "product of shares": recipes.afl(lr=0.1, lambda_lr=0.0),
}


@pytest.mark.parametrize("name", RECIPES)
def test_statistics_stay_within_those_of_clients(name: str) -> None:
    """Each client's running mean lies between 0 and its inputs' mean, so no average lies further out: also where four
    stale changes from one model arrive one after another, each of which would go the whole way.
    """
    run = simulate(RECIPES[name], far_clients(), network(), rounds=12)
    mean, variance = norm_of(run).running_mean, norm_of(run).running_var
    assert mean is not None
    assert variance is not None
    assert 0.0 < float(mean.min()) <= float(mean.max()) < FAR + 1.0
    assert 0.0 <= float(variance.min()) <= float(variance.max()) < 2.0
    assert float(mean.min()) > 0.2 * FAR, "and they get there"


def test_weights_of_the_aggregation_are_those_of_statistics() -> None:
    """One pass of one batch: client k's running mean is a tenth of its inputs' mean."""
    clients, everybody = far_clients(), range(len(SIZES))
    means = torch.stack([clients.rows(client, "train").x.mean(0) for client in everybody]) / 10
    by_rows = torch.tensor([float(size) for size in SIZES])
    for recipe, weights in (
        (recipes.fedavg, by_rows),
        (recipes.fednova, by_rows),  # all take one step, so all shares are those of rows
        (recipes.feddyn, torch.ones(4)),
    ):
        run = simulate(recipe(lr=0.1, batch=40), clients, network(), rounds=1)
        expected = weights @ means / weights.sum()
        torch.testing.assert_close(norm_of(run).running_mean, expected, rtol=1e-5, atol=0.0)


def test_fednova_averages_statistics_by_rows_whatever_the_steps() -> None:
    """Unequal numbers of steps: changes are divided by them (eq. 7), statistics are not."""
    run = simulate(recipes.fednova(lr=0.1, batch=8), far_clients(), network(), rounds=1)
    steps = torch.tensor([5.0, 1.0, 3.0, 2.0], dtype=torch.float64)
    assert sum(row["weight"] for row in run.results) > 1.2, "shares of changes are those of other steps"
    rough = FAR * (1 - 0.9**steps)  # of a mean of 100 that moves by a tenth at each step
    by_rows = torch.tensor(SIZES, dtype=torch.float64)
    expected = float(by_rows @ rough / by_rows.sum())
    assert float(norm_of(run).running_mean.mean()) == pytest.approx(expected, rel=0.02)  # type: ignore[union-attr]


class Longest(Aggregator):
    """The longest change, by all that it is shown; a rule of somebody else's, who knows nothing of statistics."""

    axis = "aggregation"

    def aggregate(self, cohort: Cohort, context: ServerContext) -> tuple[Tensor, list[float]]:
        assert cohort.matrix is not None
        assert torch.equal(torch.stack([update.vectors["model"] for update in cohort.updates]), cohort.matrix)
        lengths = cohort.matrix.norm(dim=1)
        shares = [float(length == lengths.max()) for length in lengths]
        return torch.tensor(shares) @ cohort.matrix, shares


class Doubled(Transform):
    """Twice the change on the way, half of it at the server."""

    axis = "transforms"

    def on_client(
        self, vectors: Mapping[str, Tensor], keys: Sequence[int], clients: Sequence[int]
    ) -> Mapping[str, Tensor]:
        return {**vectors, "model": 2 * vectors["model"]}

    def on_server(self, average: Tensor, context: StepContext) -> Tensor:
        assert len(average) == 2 * 3 + 2 * 3 + 2  # scale, shift, weights and biases
        return 3 * average


def test_components_from_outside_see_parameters_only() -> None:
    clients, model = far_clients(), network()
    plain = simulate(recipes.fedavg(lr=0.1), clients, model, rounds=1)
    changed = simulate(recipes.fedavg(lr=0.1).with_(transforms=[Doubled()]), clients, model, rounds=1)
    layout = Layout.of(network())
    first, end, other = plain.work.initial, plain.cluster_models[0], changed.cluster_models[0]
    assert torch.equal(end[layout.statistics], other[layout.statistics])
    moved = slice(layout.shared_trained)
    torch.testing.assert_close(other[moved] - first[moved], 6 * (end[moved] - first[moved]), rtol=1e-4, atol=1e-6)
    run = simulate(recipes.fedavg(lr=0.1).with_(aggregation=Longest()), clients, model, rounds=1)
    norms = {row["client"]: row["norm"] for row in run.results}
    counted = [row["client"] for row in run.results if row["weight"] > 0]
    assert counted == [max(norms, key=lambda client: norms[client])]


class ByLength(Clustering):
    """Two clusters by the length of what is compared; somebody else's, too."""

    axis = "clustering"

    def assign(self, cohort: Cohort, known: Mapping[int, int], context: ServerContext) -> list[int]:
        assert cohort.matrix is not None
        assert cohort.matrix.shape[1] == context.spec.layout.shared_trained
        assert len(cohort.model(0)) == context.spec.layout.shared
        lengths = cohort.matrix.norm(dim=1)
        return (lengths > lengths.median()).int().tolist()


def test_a_clustering_from_outside_compares_parameters() -> None:
    run = simulate(recipes.fedavg(lr=0.1).with_(clustering=ByLength()), far_clients(), network(), rounds=1)
    rows = sorted(run.results, key=lambda row: row["norm"])
    assert [row["cluster"] for row in rows] == [0, 0, 1, 1]


def test_a_largest_weight_holds_for_statistics() -> None:
    """Of 40, 8, 24 and 16 rows the first may count 30 %: as much as the two shares above that bound allow."""
    clients = far_clients()
    means = torch.stack([clients.rows(client, "train").x.mean(0) for client in range(4)]) / 10
    run = simulate(recipes.fedavg(lr=0.1, batch=40), clients, network(), rounds=1, max_weight=0.3)
    shares = torch.tensor([row["weight"] for row in run.results])
    assert float(shares.max()) <= 0.3 + 1e-6
    torch.testing.assert_close(norm_of(run).running_mean, shares @ means, rtol=1e-5, atol=0.0)


def test_sums_under_masks_have_statistics_in_them() -> None:
    recipe = recipes.fedavg(lr=0.1, batch=8).with_(server_optimizer={"kind": "momentum", "lr": 2.0})
    clients, model = classified(*SIZES, features=3), network()
    plain = simulate(recipe, clients, model, rounds=2)
    masked = simulate(recipe.with_(transforms=[SecureAggregation(largest_share=0.9)]), clients, model, rounds=2)
    torch.testing.assert_close(masked.cluster_models[0], plain.cluster_models[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("recipe", ["scaffold", "feddyn"])
def test_control_variates_have_no_drift_of_statistics(recipe: str, tmp_path: Path) -> None:
    name = {"scaffold": "control", "feddyn": "gradient"}[recipe]
    run = simulate(getattr(recipes, recipe)(lr=0.1), far_clients(), network(), rounds=2, out=tmp_path / "run")
    state = RunStore.open(tmp_path / "run").client_state(0, 2)[name]
    layout = run.work.layout
    assert bool(state[: layout.shared_trained].any())
    assert not bool(state[layout.statistics].any())


# ------------------------------------------------------------------------------------------------------------ privacy


class Hoarder(nn.Module):
    """A model with a buffer of its own that holds the last rows it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("rows", torch.zeros(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) == 8:
            self.rows.copy_(x.detach())
        return self.linear(x)


@pytest.mark.parametrize("where", ["client", "server"])
def test_noise_lets_no_statistics_by(where: str) -> None:
    """A norm that shares its statistics is refused; whatever other buffers hold does not leave beside noise."""
    noisy = recipes.fedavg(lr=0.1, batch=8).with_(
        transforms=[Gaussian(clip=1.0, noise=1.0, where=where)], aggregation="equal_weighted"
    )
    clients, model = far_clients(), seeded(Hoarder)
    with pytest.raises(SettingError, match=r"statistics of the norm '0', which would leave clients"):
        simulate(noisy, clients, network())
    open_rows = simulate(recipes.fedavg(lr=0.1, batch=8), clients, model, rounds=1)
    assert float(open_rows.model().rows.mean()) > 50.0  # the attack, without noise
    assert not bool(simulate(noisy, clients, model, rounds=1).model().rows.any())
    quiet = noisy.with_(sharing={"kind": "all_except", "private_layers": ["*running_*"]})
    simulate(quiet, clients, network(), rounds=1)


def test_a_clip_without_noise_measures_parameters_only() -> None:
    """The running mean moves by tens, the clip is 0.001: it holds for parameters and leaves the mean as it is."""
    clients, model = far_clients(), network()
    clip = recipes.fedavg(lr=0.1).with_(transforms=[Gaussian(clip=0.001, noise=0.0)])
    run, free = (simulate(recipe, clients, model, rounds=1) for recipe in (clip, recipes.fedavg(lr=0.1)))
    assert [row["norm"] for row in run.results] == pytest.approx([0.001] * 4, rel=1e-3)
    assert torch.equal(norm_of(run).running_mean, norm_of(free).running_mean)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- counted batches


def test_a_norm_without_momentum_counts_the_batches_of_its_task() -> None:
    """Each task counts anew, on every engine: the mean of a pass's batches, averaged by rows, is that of all inputs."""
    clients = far_clients()
    rows = torch.cat([clients.rows(client, "train").x for client in range(4)])
    for engine in ("sequential", "vmapped", "batched", "reference"):
        run = simulate(recipes.fedavg(lr=0.1, batch=8), clients, network(None), rounds=2, simulator={"engine": engine})
        torch.testing.assert_close(norm_of(run).running_mean, rows.mean(0), rtol=1e-5, atol=0.0)
