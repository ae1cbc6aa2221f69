"""Put one run together: recipe, clients, model and runtime in; a history and a run folder out."""

from __future__ import annotations

import copy
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

import piebald.runtimes  # noqa: F401 - so that runtimes can be named
from piebald import __version__, newcomers, recipes
from piebald.client import Evaluate
from piebald.contracts import Clients, Rows, Split, Work
from piebald.controller import Check, Controller, Measuring, Stop
from piebald.controller.best import Models
from piebald.controller.pace import cohort_size
from piebald.data.dataset import DataSet
from piebald.divergence import Measure, unlike
from piebald.errors import RunFolderError, SettingError, unknown
from piebald.newcomers import Adaptation, set_apart
from piebald.outcome import Run
from piebald.parameters import Layout
from piebald.partition import clients_from
from piebald.parts import Part, Recipe, Where, build
from piebald.progress import Bar
from piebald.report.comparison import Comparison
from piebald.report.store import RunStore
from piebald.task import Task, task_for
from piebald.update.budget import installed, of_recipe

Model = nn.Module | Callable[[int], nn.Module]
Metrics = Mapping[str, Any] | Sequence[str]

_DESCRIBED_CLIENTS = 10_000  # above this the run folder keeps no row for each client: nobody could look at the picture


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything of one run but the store."""

    recipe: Recipe
    clients: Clients
    work: Work
    runtime: Where
    measuring: Measuring
    rounds: int | None
    stop: Stop | None
    checkpoint_every: int
    meta: Mapping[str, Any]
    strangers: Clients | None = None


def run(
    recipe: Recipe | str,
    clients: Clients | Any,
    model: Model,
    *,
    rounds: int | None = None,
    stop: Stop | Mapping[str, Any] | None = None,
    seed: int = 0,
    runtime: str | Part | Mapping[str, Any] = "simulator",
    out: Path | str | None = None,
    loss: Any = None,
    metrics: Metrics | None = None,
    evaluate_every: int = 1,
    evaluate_clients: int | None = None,
    evaluate_split: Split = "test",
    keep: Literal["last", "best"] = "last",
    unseen: float = 0,
    checkpoint_every: int = 1,
    measure: Measure = "data",
    label: str | None = None,
    progress: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Run:
    """Run a recipe.

    Args:
        recipe: a recipe or the name of one.
        clients: a `Clients` value, or anything `clients_from` takes.
        model: any module, or a function of the seed that makes one.  It is copied, not changed.
        rounds: commits of the community model; 10 by default, or as many as it takes where `stop` says when to stop.
        stop: other limits, e.g. ``{"seconds": 3600, "target": 0.9}``, see `controller.Stop`; the first that is met ends
            the run.
        seed: of everything random.
        runtime: a runtime's name, table or value, e.g. ``Simulator(engine="stacked")``.
        out: the run folder, new or empty; None keeps the run in memory, from where it cannot be resumed.
        loss: a task's name ("classification", "regression", "multilabel") or a function (outputs, targets) -> [batch];
            None looks at the targets.
        metrics: names ("accuracy", "auc"), or by name functions (outputs, targets) -> [batch] or torchmetrics objects;
            the first is the one that matters.
        evaluate_every: commits between measurements, 0 for none.  evaluate_clients: on how many clients, None for all.
            evaluate_split: on which of their rows.
        keep: which models the run ends with: those after the last commit, or the best ones, of the measured version
            with the least loss on all clients' validation rows.
        unseen: a number of clients, or a share of them, that are held out until the end; then the models are fitted to
            each of them, see `adapt` and `Run.newcomers`.
        checkpoint_every: commits between checkpoints.
        measure: how unlike clients are, kept in the run folder: "data" for what data in memory tell
            (`partition.survey`), "weights" also trains one epoch on every client (`divergence.diverge`), or "none".
        label: what tables call the run, the recipe's name by default.
        progress: show a bar on a terminal.
        settings: plain values kept with the run, from which the command line rebuilds clients and model to resume it.

    Raises:
        SettingError: something does not fit, said before anything is trained.
        RunFolderError: `out` cannot be used.
    """
    plan = _plan(
        recipe, clients, model, (rounds, stop), seed, runtime, loss, metrics,
        (evaluate_every, evaluate_clients, evaluate_split), keep, unseen, checkpoint_every, label, settings,
    )  # fmt: skip
    if measure not in get_args(Measure):
        raise unknown("measure", measure, get_args(Measure))
    store = RunStore.create(out, plan.meta)
    if len(plan.clients) <= _DESCRIBED_CLIENTS:
        store.clients(list(_client_rows(plan.clients, plan.runtime)))
        if seen := unlike(plan.clients, getattr(plan.runtime, "fleet", None), plan.work, measure):
            store.set_meta(units=seen.units)
            store.measures(seen.records())
    return _carry_out(plan, store, progress)


def resume(
    path: Path | str, clients: Clients | Any = None, model: Model | None = None, *, progress: bool = False, **task: Any
) -> Run:
    """Go on with a run that was cut off; a finished one is handed back.

    Args:
        path: the run folder.
        clients, model: as given to `run`; None rebuilds them from the settings file that the run was started with.
        progress: show a bar on a terminal.
        task: `loss` and `metrics`, as given to `run`.
    """
    store = RunStore.open(path)
    try:
        plan = _again(store.meta, path, clients, model, task)
        store.set_meta(status="running")
    except BaseException:
        store.close()
        raise
    return _carry_out(plan, store, progress)


def compare(
    methods: Mapping[str, Recipe] | Sequence[Recipe | str],
    clients: Clients | Any,
    model: Model,
    *,
    seeds: Sequence[int] = (0,),
    out: Path | str | None = None,
    progress: bool = False,
    **options: Any,
) -> Comparison:
    """Run several recipes on the same clients and seeds, so that their results pair.

    Args:
        methods: recipes by label, or a list of recipes or names.
        clients, model, options: see `run`.  A function of the seed as the model, or as the clients, gives each seed its
            own first model, or its own partition, the same for all recipes.
        seeds: each recipe runs once for each.
        out: a folder for the run folders; what is finished there is not run again, what was cut off is resumed.
        progress: show a bar for each run.
    """
    if isinstance(methods, str):
        raise SettingError(
            f"compare takes several recipes, like ['fedavg', {methods!r}], or a mapping from labels to recipes"
        )
    if not isinstance(methods, Mapping):
        made = [recipes.make(method) if isinstance(method, str) else method for method in methods]
        methods = {method.name: method for method in made}
        if len(methods) < len(made):
            raise SettingError("two recipes have the same name: give a mapping from labels to recipes")
    if not methods or not seeds:
        raise SettingError("a comparison needs at least one recipe and one seed")
    if out is not None and len({_folder_name(label) for label in methods}) < len(methods):
        raise SettingError("two labels would share a run folder: let them differ in letters or digits")
    runs = []
    federation = None if callable(clients) else _clients(clients)
    for seed in seeds:
        if callable(clients):
            federation = _clients(clients(seed))
        for label, recipe in methods.items():
            folder = None if out is None else Path(out) / _folder_name(label) / f"seed-{seed}"
            task = {name: options[name] for name in ("loss", "metrics") if name in options}
            if folder is not None and (folder / "run.db").exists():
                _check_repeats(folder, recipe, options)
                runs.append(resume(folder, federation, model, progress=progress, **task))
            else:
                runs.append(
                    run(recipe, federation, model, seed=seed, out=folder, label=label, progress=progress, **options)
                )
    return Comparison(runs)


def adapt(
    run: Run | Path | str,
    newcomer: Any,
    *,
    clients: Clients | Any = None,
    model: Model | None = None,
    epochs: int = newcomers.EPOCHS,
    lr: float | None = None,
    validation: float = 0.2,
    test: float = 0.0,
    **task: Any,
) -> Adaptation:
    """Fit a finished run to a client that took no part in it, and find which way of doing so is best.

    Tried are the community model as it is, the private layers alone (CGAU's conditioning, HDAFL's head), the last layer
    alone, everything, and the nearest group where the run found groups.  Nothing of the run is changed.

    Args:
        run: a run, or the folder of a finished one.
        newcomer: a pair (x, y), or anything `clients_from` takes with one client, or `Clients` of one.
        clients, model: as given to `run`, for a folder whose run was started from Python.
        epochs: passes over the newcomer's training rows at most; the one of least validation loss is kept.
        lr: learning rate, by default that of the run's recipe.
        validation, test: shares of the newcomer's rows, where they are not divided yet.
        task: `loss` and `metrics`, as given to `run`.

    Raises:
        SettingError: the rows do not fit the run's model, or there are too few.
        RunFolderError: there is no finished run in the folder.
    """
    finished = run if isinstance(run, Run) else opened(run, clients, model, **task)
    if not hasattr(newcomer, "counts"):
        pair = isinstance(newcomer, tuple) and len(newcomer) == 2
        classes = finished.meta.get("classes")
        newcomer = clients_from(
            {"newcomer": newcomer} if pair else newcomer, test=test, validation=validation, classes=classes
        )
    if len(newcomer) != 1:
        raise SettingError(f"adapt takes one newcomer at a time, got {len(newcomer)} clients: call it for each")
    return newcomers.fit(finished, newcomer, epochs=epochs, lr=lr)


def opened(path: Path | str, clients: Clients | Any = None, model: Model | None = None, **task: Any) -> Run:
    """A finished run with its models, for reading.

    Args:
        path: the run folder.
        clients, model: as given to `run`; None rebuilds them from the settings file that the run was started with.
        task: `loss` and `metrics`, as given to `run`.
    """
    with RunStore.open_read_only(path) as store:
        meta = store.meta
        if meta.get("status") != "finished":
            raise RunFolderError(f"the run in {path} is not finished: finish it with piebald resume {path}")
        plan = _again(meta, path, clients, model, task)
        version = meta.get("best") or store.version
        models = Models.of(store.centre(version))
    return Run(Path(path), plan.work, plan.clients, version, models, plan.recipe.share)


# --------------------------------------------------------------------------------------------------------------- inside


def _plan(
    recipe: Recipe | str,
    clients: Any,
    model: Model,
    length: tuple[int | None, Any],
    seed: int,
    runtime: Any,
    loss: Any,
    metrics: Metrics | None,
    evaluate: tuple[int, int | None, Split],
    keep: str,
    unseen: float,
    checkpoint_every: int,
    label: str | None,
    settings: Mapping[str, Any] | None,
) -> _Plan:
    """Check everything and make all choices, so that nothing can go wrong in round 90 that could be seen now."""
    rounds, stop = _length(*length)
    for name, value, least in (("rounds", rounds, 1), ("seed", seed, 0), ("checkpoint_every", checkpoint_every, 1)):
        if name == "rounds" and value is None:
            continue
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
            raise SettingError(f"{name} must be a whole number of at least {least}, got {value!r}")
    rounds, seed, checkpoint_every = None if rounds is None else int(rounds), int(seed), int(checkpoint_every)
    recipe = recipes.make(recipe) if isinstance(recipe, str) else recipe
    if not isinstance(recipe, Recipe):
        raise SettingError(f"recipe must be a Recipe or the name of one, got {type(recipe).__name__}")
    federation, strangers = set_apart(_clients(clients), unseen, seed)
    work, task = _work(recipe, federation, model, seed, loss, metrics)
    cohort = getattr(recipe.pace, "cohort", 1.0)
    if isinstance(cohort, int) and cohort > len(federation):
        raise SettingError(
            f"cohort is {cohort} but there are {len(federation)} clients: choose at most that, or a share like 1.0"
        )
    where = build("runtime", {"kind": runtime} if isinstance(runtime, str) else runtime)
    assert isinstance(where, Where)
    for part in (*recipe.update, *(getattr(recipe, axis) for axis in Recipe.axes if axis != "update")):
        if why := part.misfit(work):
            raise SettingError(why)
        if part.needs_root() and getattr(federation, "root", None) is None:
            raise SettingError(
                f"{part.axis} {part.kind!r} needs rows that the centre may look at, and there are none: set the "
                "partition's centre = 100, or root = (x, y) of clients_from"
            )
    where = where.settled(work, federation, cohort_size(cohort, len(federation)))
    every, count, split = evaluate
    if stop is not None and stop.measures and not every:
        raise SettingError("stop goes by scores but evaluate_every is 0: set it to 1 or more, or drop the target")
    alone = not work.layout.private and federation.common is not None and len(federation.common) > 0
    common = Evaluate(personal=False) if alone else None
    validate = _validate(keep, every, federation)
    measuring = Measuring(Evaluate(split=split), every, count, common, task.higher_is_better, validate)
    meta = {
        "piebald": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "recipe": {"name": recipe.name, "fields": dict(recipe.fields), "table": recipe.model_dump()},
        "paper": recipe.paper,
        "label": label or recipe.name,
        "seed": seed,
        "rounds": rounds,
        "stop": None if stop is None else stop.model_dump(exclude_none=True),
        "task": task.name,
        "metric": task.metric,
        "higher_is_better": task.higher_is_better,
        "model": type(work.model).__name__,
        "parameters": work.layout.size,
        "shared": work.layout.shared,
        "privacy": [one.plain() for one in of_recipe(recipe, len(federation), rounds)] if installed() else None,
        "layout": [[slot.name, list(slot.shape)] for slot in work.layout.slots],
        "classes": list(federation.classes) if federation.classes is not None else None,
        "clients": len(federation),
        "runtime": where.table(),
        "evaluate": list(evaluate),
        "metrics": None if metrics is None or isinstance(metrics, Mapping) else list(metrics),
        "keep": keep,
        "unseen": unseen,
        "checkpoint_every": checkpoint_every,
        "settings": dict(settings) if settings is not None else None,
    }
    return _Plan(recipe, federation, work, where, measuring, rounds, stop, checkpoint_every, meta, strangers)


def _length(rounds: int | None, stop: Stop | Mapping[str, Any] | None) -> tuple[int | None, Stop | None]:
    """How long to run: ten rounds where nothing is said."""
    made = Stop(**stop) if isinstance(stop, Mapping) else stop
    if made is not None and not isinstance(made, Stop):
        raise SettingError(f"stop must be a Stop or a table like {{'seconds': 3600}}, got {stop!r}")
    return (10 if rounds is None and made is None else rounds), made


def _validate(keep: str, every: int, clients: Clients) -> Evaluate | None:
    """What tells the best version, where that is to be kept."""
    if keep not in ("last", "best"):
        raise unknown("version to keep called", keep, ("last", "best"))
    if keep == "last":
        return None
    if not every:
        raise SettingError("keep = 'best' needs measurements to choose by: evaluate_every must be at least 1")
    if not any(clients.size(client, "validation") != 0 for client in range(len(clients))):
        raise SettingError(
            "keep = 'best' needs validation rows but no client has any: give the partition validation = 0.1"
        )
    return Evaluate(split="validation")


def _clients(clients: Any) -> Clients:
    if isinstance(clients, DataSet):
        raise SettingError(
            f"the data set {clients.name} belongs to nobody yet: deal it out first, "
            "like partition.Iid(clients=10).split(dataset)"
        )
    made: Clients = clients if hasattr(clients, "rows") and hasattr(clients, "counts") else clients_from(clients)
    if len(made) == 0:
        raise SettingError("there are no clients: give at least one")
    return made


def _work(
    recipe: Recipe, clients: Clients, model: Model, seed: int, loss: Any, metrics: Metrics | None
) -> tuple[Work, Task]:
    module = model if isinstance(model, nn.Module) else model(seed) if callable(model) else None
    if not isinstance(module, nn.Module):
        raise SettingError(
            f"model must be an nn.Module or a function of the seed that makes one, got {type(model).__name__}"
        )
    layout = Layout.of(module, recipe.share.private(module))
    first = next((client for client in range(len(clients)) if clients.size(client, "train") != 0), 0)
    rows = clients.rows(first, "train")
    if len(rows) == 0:
        raise SettingError("no client has a training row")
    task = task_for(rows.y, loss, metrics)
    _check_validation(recipe, clients)
    initial = layout.flatten(module)
    recipe.share.first(initial[layout.shared :], layout, len(clients) - 1)  # refuses a model with room for fewer
    module = copy.deepcopy(module).cpu()
    shape, outputs = tuple(rows.x.shape[1:]), _outputs(module, rows)
    return Work(module, layout, initial, recipe.learn, recipe.update, task, seed, shape, outputs), task


def _outputs(module: nn.Module, rows: Rows) -> tuple[int, ...]:
    """The shape of what the model makes of one row; so a model that does not fit the data is found out at once."""
    trial = copy.deepcopy(module).eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            made = trial(rows.x[:1])
    except Exception as error:
        shape = list(rows.x.shape[1:])
        raise SettingError(f"the model fails on an input of shape {shape}: {type(error).__name__}: {error}") from error
    return tuple(made.shape[1:]) if isinstance(made, torch.Tensor) else ()


def _check_validation(recipe: Recipe, clients: Clients) -> None:
    """Refuse parts that go by validation rows where the first clients have none."""
    for part in (recipe.weigh, recipe.learn):
        first = range(min(10, len(clients)))
        if part.validates() and not any(clients.size(client, "validation") != 0 for client in first):
            raise SettingError(
                f"{part.kind} goes by validation rows but clients have none: set validation = 0.05 in the partition"
            )


def _client_rows(clients: Clients, runtime: Any) -> Iterator[dict[str, Any]]:
    fleet = getattr(runtime, "fleet", None)
    for client in range(len(clients)):
        counts = clients.counts(client, "train")
        device = fleet.device(client) if fleet is not None else None
        yield {
            "client": client,
            "name": str(clients.names[client]),
            "train": clients.size(client, "train"),
            "validation": clients.size(client, "validation"),
            "test": clients.size(client, "test"),
            "counts": None if counts is None else list(counts),
            "device": device,
        }


def _carry_out(plan: _Plan, store: RunStore, progress: bool) -> Run:
    """Open the runtime, take up the last checkpoint if there is one, and run to the end."""
    runtime = plan.runtime.open(plan.work, plan.clients)
    with (
        _ending(store, runtime),
        Bar(plan.meta["label"], plan.meta["seed"], plan.rounds, plan.work.task.metric, progress) as bar,
    ):
        controller = Controller(
            plan.recipe,
            runtime,
            plan.work,
            store,
            known=len(plan.clients),
            rounds=plan.rounds,
            stop=plan.stop,
            measuring=plan.measuring,
            checkpoint_every=plan.checkpoint_every,
            check=Check(),
            watch=bar.show,
        )
        last = store.last_checkpoint()
        if last is not None:
            controller.restore(last[1])
        controller.run()
        version, models = _kept(store, controller)
        if plan.strangers is not None:
            ended = Run(store, plan.work, plan.clients, version, models, plan.recipe.share)
            every = range(len(plan.strangers))
            store.set_meta(newcomers=[newcomers.fit(ended, plan.strangers, client).table() for client in every])
    if store.path is not None:
        store.close()  # lets go of the lock: from here on the run is only read
    return Run(store if store.path is None else store.path, plan.work, plan.clients, version, models, plan.recipe.share)


def _kept(store: RunStore, controller: Controller) -> tuple[int, Models]:
    """The version that the run ends with, and its community models."""
    best = controller.best
    if best.version is None:
        return controller.version, controller.models
    store.set_meta(best=best.version)
    return best.version, best.models or Models.of(store.centre(best.version))


@contextmanager
def _ending(store: RunStore, runtime: Any) -> Iterator[None]:
    """Write down how the run ended, whatever happens, and let processes and files go."""
    status = "failed"
    try:
        yield
        status = "finished"
    except KeyboardInterrupt:
        status = "stopped"
        raise
    finally:
        runtime.close()
        try:
            store.finish(status)
        except RunFolderError:  # a full disk: the reason why the run ended is on its way up already
            if status == "finished":
                raise
        if status != "finished":
            store.close()


def _again(
    meta: Mapping[str, Any], path: Path | str, clients: Any, model: Model | None, task: Mapping[str, Any]
) -> _Plan:
    """The plan of a run that is in a folder."""
    if clients is None or model is None:
        clients, model = _rebuilt(meta, path, clients, model)
    plan = _plan(
        recipes.rebuild(meta["recipe"]["table"]), clients, model, (meta["rounds"], meta["stop"]), meta["seed"],
        meta["runtime"], task.get("loss"), task.get("metrics") or meta.get("metrics"), tuple(meta["evaluate"]),
        meta.get("keep", "last"), meta.get("unseen", 0), meta["checkpoint_every"], meta["label"], meta["settings"],
    )  # fmt: skip
    _check_same(plan.meta, meta, path)
    return plan


def _check_repeats(folder: Path, recipe: Recipe, options: Mapping[str, Any]) -> None:
    """Refuse to pass off a run with other settings as the one that is wanted."""
    with RunStore.open_read_only(folder) as store:
        meta = store.meta
    evaluate = [
        options.get(f"evaluate_{name}", default)
        for name, default in (("every", 1), ("clients", None), ("split", "test"))
    ]
    rounds, stop = _length(options.get("rounds"), options.get("stop"))
    limits = None if stop is None else stop.model_dump(exclude_none=True)
    wanted = {"rounds": rounds, "stop": limits, "evaluate": evaluate, "recipe": recipe.model_dump()}
    found = {"rounds": meta["rounds"], "stop": meta["stop"], "evaluate": meta["evaluate"]}
    found["recipe"] = meta["recipe"]["table"]
    for name, default in (("keep", "last"), ("unseen", 0)):
        wanted[name], found[name] = options.get(name, default), meta.get(name, default)
    for name, value in wanted.items():
        if json.dumps(value, sort_keys=True) != json.dumps(found[name], sort_keys=True):
            raise SettingError(f"{folder} holds a run with another {name}: choose another folder, or delete that one")


def _check_same(now: Mapping[str, Any], then: Mapping[str, Any], path: Path | str) -> None:
    """Refuse to go on with something else than the run was started with."""
    for name, what in (
        ("layout", "model"),
        ("clients", "number of clients"),
        ("task", "loss"),
        ("metric", "first metric"),
    ):
        if now[name] != then[name]:
            came = "" if name == "layout" else f": {then[name]!r} then, {now[name]!r} now"
            raise SettingError(f"the {what} does not fit the run in {path}, which was started with another{came}")


def _rebuilt(meta: Mapping[str, Any], path: Path | str, clients: Any, model: Model | None) -> tuple[Any, Model]:
    """Clients and model again, from the settings file that is kept in the run folder."""
    if meta.get("settings") is None:
        raise SettingError(f"the run in {path} was started from Python: resume it there, with its clients and model")
    from piebald.settings import Settings

    plan = Settings.of_table(meta["settings"], f"the settings in {path}").plan()
    return (plan.clients if clients is None else clients), (plan.model if model is None else model)


def _folder_name(label: str) -> str:
    kept = "".join(letter if letter.isalnum() or letter in "-_.=" else "-" for letter in label).strip(".-")
    return kept or "run"
