"""Contract tests of components, aggregators, transforms, and recipes with all that is in one.

A component is a frozen value that its table rebuilds, with documented settings.  In a recipe engines agree, runs
repeat, and runs resume: on a small federation, with networks that are hard on engines.  Transforms that pack updates
have a check of their own.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

import piebald
from piebald.contracts import Clients, Cohort, ModelSpec, Rows, ServerContext, Update
from piebald.contracts.component import Component, build
from piebald.core.errors import PiebaldError, SettingError, shown
from piebald.core.objective import OBJECTIVES
from piebald.core.parameters import Layout
from piebald.core.randomness import torch_seed
from piebald.core.references import USERS
from piebald.data.partition import Lists, PooledClients
from piebald.methods.aggregation.base import Aggregator
from piebald.methods.aggregation.linear import Linear
from piebald.methods.catalog import recipes
from piebald.methods.clustering.base import Clustering
from piebald.methods.recipe import Recipe
from piebald.methods.scheduling.base import Scheduler
from piebald.methods.server_optimizer.base import ServerOptimizer
from piebald.methods.sharing.base import Sharing
from piebald.methods.training.adapter_ranks import AdapterRanks
from piebald.methods.training.base import Trainer
from piebald.methods.transforms.base import MaskingTransform, Transform
from piebald.methods.transforms.compression import Compressor, WireContext
from piebald.models import GatedUnit
from piebald.runs.finished_run import Run
from piebald.runtimes.workers.pool import can_fork
from piebald.storage.store import RunStore

SIZES = (7, 40, 21, 12, 33)  # uneven; with batch 10 most last batches are short, and 21 leaves a lone row
_TEST, _VALIDATION = 8, 6  # rows of each client


def uneven_clients(order: Sequence[int] = tuple(range(len(SIZES)))) -> PooledClients:
    """Five uneven clients whose data differ: 6 inputs, 4 classes, test and validation rows.

    Args:
        order: renumbers the clients; their names and rows go along.
    """
    draw = np.random.default_rng(5)
    xs, ys, parts = [], [], []
    start, held = 0, sum(SIZES) + _TEST * len(SIZES)  # validation rows lie behind all others
    for client, size in enumerate(SIZES):
        labels = draw.integers(0, 4, size + _TEST)
        xs.append((draw.normal(size=(size + _TEST, 6)) + labels[:, None] * 0.5 + client).astype(np.float32))
        ys.append(labels)
        end = start + size
        parts.append((np.arange(start, end), np.arange(end, end + _TEST), held + np.arange(_VALIDATION)))
        start, held = end + _TEST, held + _VALIDATION
    for client in range(len(SIZES)):
        labels = draw.integers(0, 4, _VALIDATION)
        xs.append((draw.normal(size=(_VALIDATION, 6)) + labels[:, None] * 0.5 + client).astype(np.float32))
        ys.append(labels)
    lists = {}
    for index, split in enumerate(("train", "test", "validation")):
        rows_of_split = [parts[client][index] for client in order]
        lists[split] = Lists(np.concatenate(rows_of_split), np.cumsum([0, *map(len, rows_of_split)]))
    x, y = torch.from_numpy(np.concatenate(xs)), torch.from_numpy(np.concatenate(ys))
    names = [f"site {client}" for client in order]
    settings: dict[str, Any] = {"names": names, "classes": list("abcd"), "common": np.arange(7, 15)}
    return PooledClients(x, y, lists, public_rows=_public_rows(), **settings)  # type: ignore[arg-type]


def _public_rows() -> Rows:
    """Rows of nobody's, drawn apart."""
    draw = np.random.default_rng(6)
    labels = draw.integers(0, 4, 15)
    x = (draw.normal(size=(15, 6)) + labels[:, None] * 0.5 + 2).astype(np.float32)
    return Rows(torch.from_numpy(x), torch.from_numpy(labels))


def mixing_network(seed: int = 0) -> nn.Module:
    """Everything that is hard on engines: batch norm, dropout, integer buffers, two linear layers, conditioning."""
    with torch_seed(seed):
        return nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), GatedUnit(8, 8), nn.Linear(8, 4)
        )


def narrowable_network(seed: int = 0) -> nn.Module:
    """A network whose channels can be left out one by one, with batch norm and dropout."""
    with torch_seed(seed):
        return nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 4)
        )


class _Adapted(nn.Module):
    """A frozen linear layer with an adapter, and dropout in front of it."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.own = nn.Linear(inputs, outputs).requires_grad_(False)
        self.drop = nn.Dropout(0.2)
        self.lora_A, self.lora_B = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.own(x) + self.lora_B(self.lora_A(self.drop(x)))
        return output


def adapted_network(seed: int = 0) -> nn.Module:
    """Two layers with adapters of rank 4, batch norm, and a head of its own."""
    with torch_seed(seed):
        return nn.Sequential(_Adapted(6, 8, 4), nn.BatchNorm1d(8), nn.ReLU(), _Adapted(8, 7, 4), nn.Linear(7, 4))


def hardest_network(recipe: Recipe) -> Callable[[int], nn.Module]:
    """The hardest of these networks that a recipe can take."""
    if recipe.training.row_privacy() is not None:
        return plain_network
    if isinstance(recipe.training, AdapterRanks):
        return adapted_network
    return narrowable_network if recipe.training.overrides(Trainer.own_models) else mixing_network


def plain_network(seed: int = 0) -> nn.Module:
    """A network whose rows do not mix, so that short batches are padded and masked."""
    with torch_seed(seed):
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))


class Outcome(NamedTuple):
    """The global model of a run, all scores, and all results of clients."""

    model: Tensor
    scores: Sequence[Mapping[str, Any]]
    results: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, run: Run) -> Self:
        """The outcome of a finished run."""
        return cls(run.work.layout.flatten(run.model()), run.scores, run.results)


def assert_same(first: Run | Outcome, second: Run | Outcome, atol: float = 1e-5) -> None:
    """Check that two runs came to the same: the global model, every score, every loss, every byte.

    Args:
        first, second: the runs, or their outcomes.
        atol: how far numbers of the model may be apart; ten times as far for those in tables.

    Raises:
        AssertionError: they differ; the message names the first difference.
    """
    outcome, other_outcome = (run if isinstance(run, Outcome) else Outcome.of(run) for run in (first, second))
    torch.testing.assert_close(outcome.model, other_outcome.model, atol=atol, rtol=1e-4)
    for rows, theirs in ((outcome.scores, other_outcome.scores), (outcome.results, other_outcome.results)):
        assert len(rows) == len(theirs), f"{len(rows)} and {len(theirs)} rows"
        for a, b in zip(rows, theirs, strict=True):
            for name, value in a.items():
                alike = _close(value, b[name], 10 * atol) if isinstance(value, float) else value == b[name]
                assert alike, f"{name}: {value!r} and {b[name]!r}, in {a} and {b}"


def _close(first: float, second: Any, atol: float) -> bool:
    return isinstance(second, float | int) and math.isclose(first, second, rel_tol=1e-3, abs_tol=atol)


Check = TypeVar("Check", bound=Callable[..., None])


def promises(kind: type, what: str) -> Callable[[Check], Check]:
    """A check that says in words that it was given something else, and what fails inside of a component.

    Args:
        kind: the base class of what it checks.
        what: what it checks, for messages, e.g. ``"an aggregator"``.
    """

    def decorate(check: Check) -> Check:
        first = next(iter(inspect.signature(check).parameters))

        @functools.wraps(check)
        def checked(*arguments: Any, **named: Any) -> None:
            value = arguments[0] if arguments else named.get(first)
            if not isinstance(value, kind):
                advice = ": make one of it first" if isinstance(value, type) and issubclass(value, kind) else ""
                raise AssertionError(f"{what} must be an instance of {kind.__name__}, got {shown(value)}{advice}")
            try:
                check(*arguments, **named)
            except (AssertionError, PiebaldError):
                raise
            except Exception as error:
                raise AssertionError(f"{what}, {type(value).__name__}: {_failure(error)}") from error

        return cast(Check, checked)

    return decorate


def _failure(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, NotImplementedError):
        return f"it has no method {place.name!r}"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{f': {text}' if text else ''} (in {place.name})"


@promises(Component, "a component")
def check_component(component: Component) -> None:
    """Check that a component is a value: frozen, rebuilt from its table, with a documented meaning of each setting.

    Raises:
        AssertionError: it breaks one of these promises.

    Examples:
        >>> from piebald.methods.training import Sgd
        >>> check_component(Sgd(lr=0.1))
    """
    subject = f"{component.axis} {component.kind!r}"
    table = component.table()
    try:
        text = json.dumps(table, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(
            f"{subject}: its settings must be plain values, numbers, text, lists and tables: {error}"
        ) from None
    rebuilt = build(component.axis, USERS.mark(json.loads(text)))
    assert rebuilt == component, f"{subject}: its table {text} builds another component, {rebuilt!r}"
    try:
        type(component)(**{**component.model_dump(), "no_such_setting": 1})
    except SettingError:
        pass
    else:
        raise AssertionError(f"{subject}: it takes settings that it does not have: do not change model_config")
    names = type(component).model_fields
    if names:
        field = next(iter(names))
        try:
            setattr(component, field, getattr(component, field))
        except ValueError:  # pydantic's, for frozen values
            pass
        else:
            raise AssertionError(f"{subject}: it can be changed: do not change model_config")
    assert vars(type(component)).get("__doc__"), f"{subject}: the class needs a docstring that says what it does"
    documented = "\n".join(
        inspect.getdoc(base) or "" for base in type(component).__mro__ if issubclass(base, Component)
    )
    for name in names:
        assert f"{name}:" in documented or f"{name}," in documented, (
            f"{subject}: the docstring does not say what {name} means"
        )


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


_NO_CONTEXT = cast(ServerContext, None)


@promises(Aggregator, "an aggregator")
def check_aggregator(aggregator: Aggregator, *, recipe: bool = True, asks: bool = False, **options: Any) -> None:
    """Check that an aggregator treats updates alike, leaves them as they are, and averages.

    Alone: a weighted mean does not depend on the order of updates, the average of equal changes is that change (or a
    shorter one, for those that clip), shares are at least 0 and sum to at most 1, and nothing that it gets is changed.
    In FedAvg: see `check_recipe`, which takes the options.

    Args:
        aggregator: the aggregator.
        recipe: whether to check it in FedAvg as well.
        asks: whether it asks clients or the server's context anything, so that it cannot be called alone.
        options: those of `check_recipe`.

    Raises:
        AssertionError: it breaks one of these promises.

    Examples:
        >>> from piebald.methods.aggregation import Median
        >>> check_aggregator(Median(), recipe=False)
    """
    check_component(aggregator)
    if not asks and not aggregator.overrides(Aggregator.prepare):
        for seed in range(5):
            _check_aggregator_alone(aggregator, seed)
    if recipe:
        check_runs(in_fedavg(aggregation=aggregator), **options)


def _check_aggregator_alone(aggregator: Aggregator, seed: int) -> None:
    subject = f"aggregation {aggregator.kind!r}"
    draw = torch.Generator().manual_seed(seed)
    changes = torch.randn(8, 5, generator=draw)
    examples = torch.randint(1, 50, (8,), generator=draw).tolist()
    before = changes.clone()
    average, shares = aggregator.aggregate(_cohort(changes, examples), _NO_CONTEXT)
    assert torch.equal(changes, before), f"{subject}: it changes the updates that it gets"
    assert average.shape == (5,), (
        f"{subject}: the average must have the shape of a change, [5], got {list(average.shape)}"
    )
    assert bool(average.isfinite().all()), f"{subject}: the average of finite changes is not finite"
    assert len(shares) == 8, f"{subject}: there must be a share for each of 8 updates, got {len(shares)}"
    assert min(shares) >= 0, f"{subject}: shares must be at least 0, got {min(shares)}"
    assert sum(shares) <= 1 + 1e-5, f"{subject}: shares must sum to at most 1, got {sum(shares)}"
    order = torch.randperm(8, generator=draw).tolist()
    average_shuffled, shuffled = aggregator.aggregate(
        _cohort(changes[order], [examples[row] for row in order]), _NO_CONTEXT
    )
    if isinstance(aggregator, Linear):  # others may have to choose among equals
        torch.testing.assert_close(
            average_shuffled, average, atol=1e-5, rtol=1e-4, msg=f"{subject}: it depends on the order of updates"
        )
        torch.testing.assert_close(torch.tensor(shuffled), torch.tensor([shares[row] for row in order]))
    # a robust rule may shorten the mean of equal changes, but not turn it
    same = changes[:1].expand(8, 5).clone()
    average, shares = aggregator.aggregate(_cohort(same, [10] * 8), _NO_CONTEXT)
    length = float(average.norm() / same[0].norm())
    aligned = float(torch.nn.functional.cosine_similarity(average, same[0], dim=0)) if length > 0 else 0.0
    assert 0 < length <= 1 + 1e-4, f"{subject}: the average of equal changes has {length:.3g} times their length"
    assert aligned > 1 - 1e-4, f"{subject}: the average of equal changes points elsewhere"


def _cohort(changes: Tensor, examples: Sequence[int]) -> Cohort:
    updates = [
        Update({"model": change}, count, 1, {"loss": 1.0}, norm=float(change.norm()))
        for change, count in zip(changes, examples, strict=True)
    ]
    count, size = changes.shape
    return Cohort(list(range(count)), [0] * count, updates, changes, 0, [torch.zeros(size)] * count)


@promises(Transform, "a transform")
def check_transform(transform: Transform, *, recipe: bool = True, **options: Any) -> None:
    """Check that a transform treats clients one by one, repeats, and keeps names, shapes and what it gets.

    One that packs updates (`transforms.Compressor`) is also given bytes of others to unpack: it must make the change
    that its sender counts with from its own, and refuse those that are cut off, longer, or at random.

    In FedAvg: see `check_recipe`, which takes the options.

    Args:
        transform: the transform.
        recipe: whether to check it in FedAvg as well.
        options: those of `check_recipe`.

    Raises:
        AssertionError: it breaks one of these promises.

    Examples:
        >>> from piebald.methods.transforms import Gaussian
        >>> check_transform(Gaussian(clip=1.0, noise=0.5), recipe=False)
    """
    check_component(transform)
    if not isinstance(transform, MaskingTransform):
        _check_transform_alone(transform)
    if isinstance(transform, Compressor):
        _check_packing(transform)
    if recipe:
        check_runs(in_fedavg(transforms=(transform,)), **options)


def _check_transform_alone(transform: Transform) -> None:
    subject = f"transforms {transform.kind!r}"
    draw = torch.Generator().manual_seed(0)
    vectors = {"model": torch.randn(3, 50, generator=draw)}
    before = {name: vector.clone() for name, vector in vectors.items()}
    keys, clients = [11, 12, 13], [0, 1, 2]
    changed = transform.on_client(vectors, keys, clients)
    assert torch.equal(vectors["model"], before["model"]), f"{subject}: it changes the vectors that it gets"
    assert set(changed) == {"model"}, f"{subject}: it must keep the names of vectors, got {sorted(changed)}"
    assert changed["model"].shape == (3, 50), (
        f"{subject}: it must keep the shape [3, 50], got {list(changed['model'].shape)}"
    )
    assert changed["model"].dtype == torch.float32, f"{subject}: it must keep float32, got {changed['model'].dtype}"
    assert bool(changed["model"].isfinite().all()), f"{subject}: it makes finite numbers infinite"
    again = transform.on_client(vectors, keys, clients)
    assert torch.equal(changed["model"], again["model"]), (
        f"{subject}: it must draw from the keys alone, so that runs repeat"
    )
    for row in range(3):
        alone = transform.on_client(
            {"model": vectors["model"][row : row + 1]}, keys[row : row + 1], clients[row : row + 1]
        )
        torch.testing.assert_close(
            alone["model"][0],
            changed["model"][row],
            msg=f"{subject}: what it makes of a client's update depends on the other clients in the stack",
        )
    assert transform.nbytes({"model": torch.zeros(50)}) > 0, (
        f"{subject}: nbytes must be the bytes of an update on the wire"
    )


def _check_packing(compressor: Compressor) -> None:
    subject, model = (
        f"transforms {compressor.kind!r}",
        nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)),
    )
    layout, draw = Layout.of(model, ["2.bias"]), torch.Generator().manual_seed(0)
    spec = ModelSpec(model, layout, layout.flatten(model), OBJECTIVES["classification"], 1, (6,), (3,))
    state, context = compressor.initial_state(spec), WireContext(layout, 1, 2, 3)
    for version in range(3):
        change = torch.randn(layout.shared, generator=draw)
        context = WireContext(layout, 1, 2, version)
        before = {name: tensor.clone() for name, tensor in [*state.items(), ("change", change)]}
        compressed, again = (compressor.compress(change, state, context) for _ in range(2))
        assert torch.equal(compressed.packed, again.packed), (
            f"{subject}: it must draw from the context alone, so that runs repeat"
        )
        same = all(torch.equal(tensor, before[name]) for name, tensor in [*state.items(), ("change", change)])
        assert same, f"{subject}: it changes the tensors that it gets"
        received = compressor.decompress(compressed.packed, context)
        assert torch.equal(received, compressed.change), (
            f"{subject}: the server unpacks another change than the client packed"
        )
        assert set(compressed.state) == set(state), (
            f"{subject}: it must return the state that it began with, {sorted(state)}"
        )
        state = dict(compressed.state)
    whole = compressed.packed
    garbage = torch.randint(256, (len(whole),), generator=draw, dtype=torch.uint8)
    for body in (whole[:0], whole[:-1], torch.cat([whole, whole]), torch.zeros(1 << 20, dtype=torch.uint8), garbage):
        try:
            got = compressor.decompress(body, context)
        except ValueError:
            continue
        assert len(body) == len(whole), f"{subject}: it takes bytes that it did not pack"
        assert got.shape == (layout.shared,), f"{subject}: it unpacks another shape than [s]"
