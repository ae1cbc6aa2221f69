"""The table of recipes that every contract test walks, and the small uneven federation that it is run on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.finished_run import Run
from piebald.models import GatedUnit
from piebald.partition import Lists, PooledClients
from piebald.recipe import Recipe
from piebald.training.base import HidesRows

STORE = 80 << 20  # bytes of each Ray node's object store
# Whatever could be measured and so differ from run to run is named.
HERE: dict[str, Any] = {"engine": "sequential", "workers": 0, "onednn": False}
TWO: dict[str, Any] = {"engine": "sequential", "workers": 2, "onednn": False}

# One row for each recipe: its name, and settings with which it does something.
TABLE: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"mu": 0.5},
    "scaffold": {},
    "fedavgm": {},
    "fedadam": {},
    "fedyogi": {},
    "feddyn": {"alpha": 0.2},
    "fednova": {},
    "local": {},
    "fine_tuned": {"tune_epochs": 2},
    "lg_fedavg": {},
    "fedbn": {},
    "ditto": {"lam": 0.3},
    "dp_sgd": {"clip": 0.5, "noise": 0.5},
    "hdafl": {},
    "cgau": {},
    "fedasync": {},
    "fedbuff": {"buffer_size": 3},
    "async_fedavg": {},
    "sync_dvw": {},
    "async_dvw": {"above_chance": True, "power": 2.0},
    "distfl": {"probes": 20},
    "ifca": {"k": 2},
    "cfl": {"eps1": 2.0, "eps2": 0.1},
    "adaptive_dvw": {"cycles": 3, "vc_tomb": 1},
}
# Settings of local training that have to work beside the recipes' defaults.
VARIANTS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9, "keep_momentum": True, "weight_decay": 0.01, "clip": 0.5},
    "lr_schedule": {"lr_schedule": {"kind": "exponential", "rate": 0.5}, "epochs": 2},
    "steps": {"steps": 5},
}
SIZES = (7, 40, 21, 12, 33)  # uneven; with batch 10 most last batches are short, and 21 leaves a lone row


def federation(order: tuple[int, ...] = tuple(range(len(SIZES)))) -> PooledClients:
    """Five uneven clients whose data differ; `order` renumbers them, their names go along."""
    draw = np.random.default_rng(5)
    vectors, names, start = [], [], 0
    held = sum(SIZES) + 8 * len(SIZES)  # validation rows lie behind all others
    xs, ys = [], []
    for client, size in enumerate(SIZES):
        labels = draw.integers(0, 4, size + 8)
        xs.append((draw.normal(size=(size + 8, 6)) + labels[:, None] * 0.5 + client).astype(np.float32))
        ys.append(labels)
        vectors.append((np.arange(start, start + size), np.arange(start + size, start + size + 8), held + np.arange(6)))
        held += 6
        names.append(f"site {client}")
        start += size + 8
    for client in range(len(SIZES)):
        labels = draw.integers(0, 4, 6)
        xs.append((draw.normal(size=(6, 6)) + labels[:, None] * 0.5 + client).astype(np.float32))
        ys.append(labels)
    lists = {}
    for place, split in enumerate(("train", "test", "validation")):
        own = [vectors[client][place] for client in order]
        lists[split] = Lists(np.concatenate(own), np.cumsum([0, *map(len, own)]))
    x, y = torch.from_numpy(np.concatenate(xs)), torch.from_numpy(np.concatenate(ys))
    return PooledClients(x, y, lists, names=[names[c] for c in order], classes=list("abcd"), common=np.arange(7, 15))


def network(seed: int = 0) -> nn.Module:
    """Everything that is hard on engines: batch norm, dropout, integer buffers, two linear layers, conditioning."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), GatedUnit(8, 8), nn.Linear(8, 4)
        )


def plain_network(seed: int = 0) -> nn.Module:
    """A network whose rows do not mix, so that short batches are padded and masked."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))


def method(name: str, **more: Any) -> Recipe:
    """A row of the table."""
    return recipes.make(name, **{"cohort": 4, "lr": 0.1, "batch": 10} | TABLE[name] | more)


def fitting(recipe: Recipe) -> Any:
    """The hardest network that a recipe can take."""
    return network if not isinstance(recipe.training, HidesRows) else plain_network


def carry_out(recipe: Recipe, clients: Any = None, model: Any = None, **options: Any) -> Run:
    """A short run, by default in this process on the sequential engine."""
    model = model or fitting(recipe)
    where = HERE | options.pop("simulator", {})
    return piebald.run(
        recipe, clients or federation(), model, runtime=piebald.Simulator(**where), **{"rounds": 3, "seed": 1} | options
    )


def on_ray(recipe: Any, clients: Any = None, model: Any = None, **options: Any) -> piebald.Run:
    where, model = piebald.Ray(**TWO | options.pop("ray", {})), model or fitting(recipe)
    return piebald.run(recipe, clients or federation(), model, runtime=where, **{"rounds": 3, "seed": 1} | options)


def vector(run: Run, client: int | None = None) -> Tensor:
    """All numbers of a run's model."""
    return run.work.layout.flatten(run.model(client))


class Outcome(NamedTuple):
    """What runs are compared by: the global model, all scores, and all results of clients."""

    model: Tensor
    scores: list[dict[str, Any]]
    results: list[dict[str, Any]]

    @classmethod
    def of(cls, run: Run) -> Self:
        return cls(vector(run), run.scores, run.results)


_references: dict[str, Outcome] = {}


def reference(recipe: Recipe, **options: Any) -> Outcome:
    """What the reference engine makes of a recipe: computed once in a process, whatever it is compared with."""
    label = repr((recipe, sorted(options.items())))
    if label not in _references:
        where = options.pop("simulator", {}) | {"engine": "reference"}
        _references[label] = Outcome.of(carry_out(recipe, simulator=where, **options))
    return _references[label]


def assert_same(first: Run | Outcome, second: Run | Outcome, atol: float = 1e-5) -> None:
    """Two runs came to the same: the global model, every score, every loss, every byte."""
    one, two = (made if isinstance(made, Outcome) else Outcome.of(made) for made in (first, second))
    torch.testing.assert_close(one.model, two.model, atol=atol, rtol=1e-4)
    for mine, theirs in ((one.scores, two.scores), (one.results, two.results)):
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs, strict=True):
            for name, value in a.items():
                if isinstance(value, float):
                    assert b[name] == pytest.approx(value, abs=10 * atol, rel=1e-3), (name, a, b)
                else:
                    assert b[name] == value, (name, a, b)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever starts a cluster belongs to the full tier."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.full)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two nodes on this machine, each with one core, and a connection to them."""
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'piebald[ray]'")
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    node = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=node)
    try:
        made.add_node(num_cpus=1, object_store_memory=STORE)
        ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture(params=TABLE)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every recipe of the table in turn."""
    return request.param  # type: ignore[no-any-return]
