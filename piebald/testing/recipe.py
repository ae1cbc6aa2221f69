"""The contract test of recipes and of all that is in one: engines agree, runs repeat, runs resume."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import piebald
from piebald.contracts import Clients
from piebald.contracts.component import Component
from piebald.core.references import USERS
from piebald.methods.catalog import recipes
from piebald.methods.clustering.base import Clustering
from piebald.methods.recipe import Recipe
from piebald.methods.scheduling.base import Scheduler
from piebald.methods.server_optimizer.base import ServerOptimizer
from piebald.methods.sharing.base import Sharing
from piebald.methods.training.base import Trainer
from piebald.runs.finished_run import Run
from piebald.runtimes.workers.pool import can_fork
from piebald.storage.store import RunStore
from piebald.testing.component import check_component, promises
from piebald.testing.federation import assert_same, hardest_network, uneven_clients

Network = Callable[[int], nn.Module]
# Whatever could be measured, and so differ from run to run, is named.
REFERENCE: dict[str, Any] = {"engine": "reference", "workers": 0}
ENGINES: dict[str, dict[str, Any]] = {
    "the sequential engine": {"engine": "sequential", "workers": 0},
    "the batched engine": {"engine": "batched", "stack": 3, "workers": 0},
    "the vmapped engine": {"engine": "vmapped", "stack": 3, "workers": 0},
    "two worker processes": {"engine": "sequential", "workers": 2},
}


@promises(Recipe, "a recipe")
def check_recipe(
    recipe: Recipe, *, model: Network | None = None, clients: Clients | None = None, rounds: int = 3
) -> None:
    """Check that a recipe gives the numbers of the plain reference wherever it runs, repeats, and can be resumed.

    It is run for a few rounds on five small, uneven clients, on every engine and in two worker processes.

    Args:
        recipe: the recipe, with settings with which it does something.
        model: a function of the seed that makes a network, by default the hardest one that the recipe can take.
        clients: the clients, by default ones with 6 inputs, 4 classes, validation and test rows.
        rounds: server steps of each run.

    Raises:
        AssertionError: it breaks one of these promises.
    """
    check_runs(recipe, model=model, clients=clients, rounds=rounds)


def check_runs(
    recipe: Recipe, *, model: Network | None = None, clients: Clients | None = None, rounds: int = 3
) -> None:
    """See `check_recipe`; what fails is said by the check that calls it."""
    for component in recipe.components:
        check_component(component)
    rebuilt = recipes.rebuild(USERS.mark(json.loads(json.dumps(recipe.model_dump()))))
    assert rebuilt == recipe, f"recipe {recipe.name!r}: its tables build another recipe"
    network = model or hardest_network(recipe)
    rows = clients or uneven_clients()

    def run(settings: Mapping[str, Any], **options: Any) -> Run:
        runtime = piebald.Simulator(**settings)
        return piebald.run(recipe, rows, network, rounds=rounds, seed=1, runtime=runtime, **options)

    expected = run(REFERENCE)
    for name, settings in ENGINES.items():
        if settings["workers"] and not can_fork():
            continue
        try:
            assert_same(expected, run(settings))
        except AssertionError as error:
            raise AssertionError(
                f"recipe {recipe.name!r}: {name} and the plain reference differ: write client code for one client, "
                f"with arithmetic on the last axis, without .item(), a += b or global random numbers: {error}"
            ) from None
    _check_repeats(recipe, run)
    _check_resumes(recipe, run, rows)


def _check_repeats(recipe: Recipe, run: Callable[..., Run]) -> None:
    settings = ENGINES["the sequential engine"]
    first, second = (run(settings) for _ in range(2))
    assert torch.equal(_vector(first), _vector(second)), (
        f"recipe {recipe.name!r}: two runs with one seed end with other bits: take random numbers from "
        "piebald.core.randomness, and keep nothing in the component"
    )


def _check_resumes(recipe: Recipe, run: Callable[..., Run], clients: Clients) -> None:
    """A run that is interrupted after its first server step ends like an undisturbed one."""
    settings = ENGINES["the sequential engine"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        # as a kill would: the step is on the disk, and nothing after it happens
        commit = RunStore.commit

        def interrupted(self: RunStore, *arguments: Any, **named: Any) -> None:
            commit(self, *arguments, **named)
            if self.last_checkpoint() is not None:
                raise KeyboardInterrupt

        RunStore.commit = interrupted  # type: ignore[method-assign]
        try:
            run(settings, out=out, checkpoint_every=1)
        except KeyboardInterrupt:
            pass
        finally:
            RunStore.commit = commit  # type: ignore[method-assign]
        whole = run(settings)  # in between, so that whatever a component keeps to itself is not that of the first run
        resumed = piebald.resume(out, clients, whole.work.model, recipe=recipe)
        assert torch.equal(_vector(whole), _vector(resumed)), (
            f"recipe {recipe.name!r}: interrupted and resumed, it ends with other numbers: what a component keeps from "
            "step to step belongs into its state, as tensors and plain values"
        )
        resumed.close()


def _vector(run: Run) -> torch.Tensor:
    return run.work.layout.flatten(run.model())


# ----------------------------------------------------------------------------------------------- components in a recipe


@promises(Trainer, "a trainer")
def check_trainer(trainer: Trainer, **options: Any) -> None:
    """Check a trainer in FedAvg: see `check_recipe`, which takes the options.

    It also checks that updates carry the vectors that the trainer declares, and no others: the server refuses others.

    Raises:
        AssertionError: it breaks a promise.
    """
    _check_in_fedavg(training=trainer, **options)


@promises(Sharing, "a sharing")
def check_sharing(sharing: Sharing, **options: Any) -> None:
    """Check a choice of shared parameters in FedAvg: see `check_recipe`, which takes the options."""
    _check_in_fedavg(sharing=sharing, **options)


@promises(Scheduler, "a scheduler")
def check_scheduler(scheduler: Scheduler, **options: Any) -> None:
    """Check a scheduler in FedAvg: see `check_recipe`, which takes the options."""
    _check_in_fedavg(scheduling=scheduler, **options)


@promises(Clustering, "a clustering")
def check_clustering(clustering: Clustering, **options: Any) -> None:
    """Check a clustering in FedAvg: see `check_recipe`, which takes the options."""
    _check_in_fedavg(clustering=clustering, **options)


@promises(ServerOptimizer, "a server optimizer")
def check_server_optimizer(server_optimizer: ServerOptimizer, **options: Any) -> None:
    """Check a server optimizer in FedAvg: see `check_recipe`, which takes the options."""
    _check_in_fedavg(server_optimizer=server_optimizer, **options)


def in_fedavg(**components: Component | tuple[Component, ...]) -> Recipe:
    """FedAvg with small steps over four of the clients, and other components."""
    cohort = {} if "scheduling" in components else {"cohort": 4}
    return recipes.fedavg(**cohort, lr=0.1, batch=10).with_(**cast(Any, components))


def _check_in_fedavg(
    model: Network | None = None, clients: Clients | None = None, rounds: int = 3, **components: Component
) -> None:
    check_runs(in_fedavg(**components), model=model, clients=clients, rounds=rounds)
