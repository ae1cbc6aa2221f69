"""The table of recipes that every contract test walks, and the small uneven federation that it is run on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

import piebald
from piebald import recipes
from piebald.methods.recipe import Recipe
from piebald.runs.finished_run import Run
from piebald.testing.components import SIZES as SIZES
from piebald.testing.components import Outcome
from piebald.testing.components import assert_same as assert_same
from piebald.testing.components import hardest_network as fitting
from piebald.testing.components import mixing_network as network  # noqa: F401 - of the tests here
from piebald.testing.components import plain_network as plain_network
from piebald.testing.components import uneven_clients as federation

STORE = 80 << 20  # bytes of each Ray node's object store
# Whatever could be measured and so differ from run to run is named.
HERE: dict[str, Any] = {"engine": "sequential", "workers": 0}
TWO: dict[str, Any] = {"engine": "sequential", "workers": 2}

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
    "qfedavg": {"q": 2.0},
    "term": {"t": 2.0},
    "afl": {"lambda_lr": 0.3},
    "moon": {"mu": 2.0},
    "fedlc": {"tau": 0.5},
    "feddecorr": {"beta": 1.0},
    "fedsam": {"rho": 0.2},
    "silobn": {},
    "fedala": {"adaptive_layers": "*", "first_passes": 2},
    "fedphp": {"lam": 0.4, "horizon": 2},
    "fedamp": {"alpha": 0.4, "sigma": 20.0},
    "heterofl": {"widths": (1.0, 0.5, 0.3, 0.5, 1.0), "static_batch_norm": True},
    "fedproto": {"lam": 2.0, "inference": "prototypes"},
    "flexlora": {"ranks": (4, 2, 1, 2, 4)},
    "fedmd": {"digest_steps": 3, "public_steps": 2},
    "local": {},
    "fine_tuned": {"tune_epochs": 2},
    "lg_fedavg": {},
    "fedbn": {},
    "ditto": {"lam": 0.3},
    "fedrep": {"head_epochs": 2},
    "fedbabu": {"tune_epochs": 2},
    "fedrod": {},
    "apfl": {},
    "pfedme": {"lam": 3.0, "eta": 0.2, "inner_steps": 2},
    "per_fedavg": {"alpha": 0.05, "hessian": "differences"},
    "dp_sgd": {"clip": 0.5, "noise": 0.5},
    "hdafl": {},
    "cgau": {},
    "fedasync": {},
    "fedbuff": {"buffer_size": 3},
    "async_fedavg": {},
    "sync_dvw": {},
    "async_dvw": {"above_chance": True, "power": 2.0},
    "distfl": {"probes": 20},
    "hierfavg": {"regions": ((0, 2), (1, 3, 4)), "region_rounds": 2},
    "ifca": {"k": 2},
    "cfl": {"eps1": 2.0, "eps2": 0.1},
    "adaptive_dvw": {"cycles": 3, "vc_tomb": 1},
}
# Settings of local training that have to work beside the recipes' defaults.
VARIANTS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9, "keep_momentum": True, "weight_decay": 0.01, "clip": 0.5},
    "lr_schedule": {"lr_schedule": {"kind": "exponential", "rate": 0.5}, "epochs": 2},
    "steps": {"steps": 5},
    # a bias in front of batch norm has no gradient but rounding, which Adam with a small eps would blow up
    "adam, averaged": {
        "optimizer": {"kind": "adam", "eps": 0.1},
        "optimizer_state": "averaged",
        "clip": 0.5,
        "epochs": 2,
    },
    "adamw, kept": {
        "optimizer": {"kind": "adamw", "eps": 0.001},
        "optimizer_state": "kept",
        "parameter_groups": [{"layers": "*.bias", "weight_decay": 0.0, "lr": 0.02}],
        "step_schedule": {"kind": "cosine", "warmup": 0.3},
        "lr_schedule": {"kind": "exponential", "rate": 0.5},
    },
}


def method(name: str, **more: Any) -> Recipe:
    """A row of the table."""
    return recipes.make(name, **{"cohort": 4, "lr": 0.1, "batch": 10} | TABLE[name] | more)


def at_clients(name: str) -> tuple[type, ...]:
    """What decides what is computed at the clients, and when."""
    recipe = method(name)
    return type(recipe.training), type(recipe.sharing), type(recipe.clustering), type(recipe.scheduling)


# One recipe for each kind of work at clients: the others differ in what the server does with the same updates.
DISTINCT = sorted({at_clients(name): name for name in reversed(TABLE)}.values())


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


_references: dict[str, Outcome] = {}


def reference(recipe: Recipe, **options: Any) -> Outcome:
    """What the reference engine makes of a recipe: computed once in a process, whatever it is compared with."""
    label = repr((recipe, sorted(options.items())))
    if label not in _references:
        where = options.pop("simulator", {}) | {"engine": "reference"}
        _references[label] = Outcome.of(carry_out(recipe, simulator=where, **options))
    return _references[label]


def in_turn(turn: int) -> pytest.MarkDecorator:
    """Parametrize by `name` over all recipes: in the quick tier an eighth of them, for each turn another one."""
    names = [name if place % 8 == turn else pytest.param(name, marks=tier(name)) for place, name in enumerate(TABLE)]
    return pytest.mark.parametrize("name", names)


def tier(name: str) -> pytest.MarkDecorator:
    """The tier of a recipe that the quick one leaves out: full for one of each kind of work at clients, else long."""
    return pytest.mark.full if name in DISTINCT else pytest.mark.long


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two nodes on this machine, each with one core, and a connection to them."""
    ray = pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")
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
def name(request: pytest.FixtureRequest) -> str:
    """Every recipe of the table in turn."""
    return request.param  # type: ignore[no-any-return]
