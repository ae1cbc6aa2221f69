"""Run and resume recipes, and adapt finished runs: the functions behind the package's front door."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import piebald.runtimes  # noqa: F401 - registers the runtimes
from piebald.contracts import Clients, HoldsRows, RowsAtSites
from piebald.contracts.data import blank_row
from piebald.core.arguments import Count, PathLike, Positive, Share
from piebald.core.errors import RunFolderError, SettingError
from piebald.core.machine import differences
from piebald.core.plain_text import errors_alone
from piebald.core.references import USERS, Outside, of_folder
from piebald.data.clients.owner import is_frame
from piebald.data.clients.prepared import as_in_run
from piebald.data.clients.sites import RecordedClients, RowsNotKept
from piebald.data.partition import clients_from
from piebald.data.preparation.tokens import with_kept_tokenizer
from piebald.experiments.run_settings import ObjectiveKeywords, RunKeywords, RunSettings, takes
from piebald.methods.catalog import recipes
from piebald.methods.client_work import ClientWork
from piebald.methods.recipe import Recipe
from piebald.report.callbacks import Callback
from piebald.runs import adaptation
from piebald.runs.adaptation import Adaptation
from piebald.runs.execution import describe, execute, with_mapped_start
from piebald.runs.finished_run import Run
from piebald.runs.lineage import FinishedRun, Inheritance, inherit
from piebald.runs.prepare import Model, PreparedRun, is_recorded, prepare, work_without_rows
from piebald.server.cluster_state import ModelSnapshot
from piebald.settings.plugins import use_recorded
from piebald.storage.store import RunStore

if TYPE_CHECKING:
    from piebald.experiments.file import ExperimentSettings

T = TypeVar("T")
_log = logging.getLogger(__name__)


@takes(RunKeywords)
def run(
    recipe: Recipe | str,
    clients: Clients | Any,
    model: Model,
    *,
    out: PathLike | None = None,
    start_from: PathLike | None = None,
    progress: bool = False,
    settings: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    **keywords: Unpack[RunKeywords],
) -> Run:
    """Run a recipe.

    Args:
        recipe: a recipe or the name of one.
        clients: a `Clients` value, or anything that `clients_from` accepts.
        model: a module, or a function of the seed that makes one.  It is copied, not changed.
        out: the run folder, new or empty; None keeps the run in memory, where it cannot be resumed.
        start_from: the folder of a finished run whose models, and what else fits, this one begins with.
        progress: show a progress bar on a terminal.
        settings: plain values kept with the run, from which the command line rebuilds clients and model to resume it.
        callbacks: listeners, see `callbacks.Callback`; they cannot change the run and are not kept with it.
        keywords: the settings of the run, see `RunSettings`, such as `rounds`, `seed`, `evaluate_every` and `keep`.

    Raises:
        SettingError: a setting is wrong or settings do not fit together; raised before training.
        RunFolderError: `out` cannot be used.

    Examples:
        >>> import piebald as pb
        >>> clients = pb.partition.Iid(clients=3, limit=300).split(pb.data.digits())
        >>> model = pb.models.build_model("logistic", (1, 8, 8), 10)
        >>> run = pb.run("fedavg", clients, model, rounds=2, runtime=pb.Simulator(engine="sequential"))
        >>> run.final["status"], run.final["rounds"], run.final["metric"]
        ('finished', 2, 'accuracy')
    """
    finished = None if start_from is None else FinishedRun.at(Path(start_from))
    seed = keywords.get("seed", 0) if finished is None else finished.fresh_seed(keywords.get("seed", 0))
    options = RunSettings.of_call({**keywords, "seed": seed}, settings)
    plan = prepare(recipe, clients, model, options)
    keeps_models = plan.work.initial_state() or plan.work.layout.private
    # a comparison has many runs, with labels, and would say so for each
    if out is None and keywords.get("label") is None and plan.runtime.simulates and keeps_models:
        _log.warning("clients' own models are kept only with out='some/folder': run.model(client=...) has none here")
    _log.info("%s: runtime %s", plan.meta["label"], json.dumps(plan.meta["runtime"]))
    started = None if finished is None else inherit(finished, plan.recipe, plan.work, plan.clients)
    plan = plan if started is None else plan.going_on_from(started.about)
    store = RunStore.create(out, plan.meta, None if started is None else started.body)
    try:
        describe(plan, store)
    except BaseException:
        store.close()
        raise
    plan = with_mapped_start(plan, store.path)  # the first plan is dropped, and its numbers are freed
    return execute(plan, store, progress, _listeners(plan, callbacks), started)


@takes(ObjectiveKeywords)
def resume(
    path: PathLike,
    clients: Clients | Any = None,
    model: Model | None = None,
    *,
    recipe: Recipe | None = None,
    rounds: Count | None = None,
    progress: bool = False,
    callbacks: Sequence[Callback] = (),
    plugins: Sequence[str] = (),
    **objective: Unpack[ObjectiveKeywords],
) -> Run:
    """Continue a run that was interrupted; a finished one is returned as it is, unless `rounds` asks for more.

    On the same machine and engine, a run that is continued to more rounds equals one that had them from the start, to
    the bit.

    Args:
        path: the run folder.
        clients, model: as given to `run`; None rebuilds them from the experiment file that the run was started with.
        recipe: as given to `run`; None rebuilds it from the folder.
        rounds: the number of server steps to go on to, counted from the run's start; as many as it was started with by
            default.
        progress: show a bar on a terminal.
        callbacks: listeners, as given to `run`.
        plugins: modules of yours that the run may name.  A folder is data and may have any author: without this, no
            "module:name" in it is looked up, and no module is imported.
        objective: `loss` and `metrics`, as given to `run`.

    Raises:
        SettingError: fewer rounds than the run has, or more of a run whose rounds are not counted in a simulation.

    Examples:
        >>> import piebald as pb
        >>> clients = pb.partition.Iid(clients=3, limit=300).split(pb.data.digits())
        >>> model = pb.models.build_model("logistic", (1, 8, 8), 10)
        >>> here = pb.Simulator(engine="sequential")
        >>> run = pb.run("fedavg", clients, model, rounds=1, runtime=here, out="digits")
        >>> run.close()
        >>> pb.resume("digits", clients, model, rounds=2).final["rounds"]
        2
    """
    with RunStore.open_read_only(path) as ended:
        whole = ended.meta.get("status") == "finished" and rounds in (None, ended.meta.get("rounds"))
    if whole:  # nothing is written, which may not be possible
        with suppress(RunFolderError):  # its last checkpoint is damaged: an older one is continued
            return opened(path, clients, model, recipe=recipe, plugins=plugins, **objective)
    store = RunStore.open(path)
    try:
        _extend(store, rounds)
        finished = store.meta.get("status") == "finished"
        if not finished and (changed := "; ".join(differences(store.meta))):
            _log.warning("the rest of this run may differ in rounding from an uninterrupted one: %s", changed)
        started = Inheritance.of_folder(Path(path), store.meta)
        plan = _prepared_again(store.meta, path, clients, model, recipe, objective, plugins)
        store.set_meta(status="running", privacy=plan.meta["privacy"])
        if not store.version:  # it may have ended, as on a full disk, before its clients were described
            describe(plan, store)
    except BaseException:
        store.close()
        raise
    plan = with_mapped_start(plan, store.path)
    return execute(plan, store, progress, () if finished else _listeners(plan, callbacks), started)


@takes(ObjectiveKeywords)
def adapt(
    run: Run | PathLike,
    newcomer: Any,
    *,
    clients: Clients | Any = None,
    model: Model | None = None,
    epochs: Count = adaptation.EPOCHS,
    lr: Positive | None = None,
    validation: Share = 0.2,
    test: Share = 0.0,
    plugins: Sequence[str] = (),
    **objective: Unpack[ObjectiveKeywords],
) -> Adaptation:
    """Adapt a finished run to a client that took no part in it, with several methods, and choose the best one.

    The methods are: the global model as it is, fitting only the private layers (CGAU's conditioning, HDAFL's head),
    only the last layer, or all parameters, the best cluster model where the run found clusters, a mixture of these, and
    a model trained alone, for comparison.  A shared model is kept unless another one is better on the newcomer's
    validation rows by more than one standard error.  The run is not changed.

    Args:
        run: a run, or the folder of a finished one, or a copy of it; neither Ray nor a GPU that the run was made with
            needs to be there, nor the credentials of a federation.
        newcomer: a pair (x, y), anything with one client that `clients_from` accepts, or `Clients` with one client.
        clients, model: as given to `run`, for a folder whose run was started from Python.
        epochs: the maximum number of passes over the training rows; the epoch with the lowest validation loss
            is kept.
        lr: the learning rate, by default that of the run's recipe.
        validation, test: the shares of validation and test rows, where the newcomer's rows are not divided yet.
        plugins: modules of yours that the run in a folder may name, see `resume`.
        objective: `loss` and `metrics`, as given to `run`.

    Raises:
        SettingError: the rows do not fit the run's model, or there are too few.
        RunFolderError: there is no finished run in the folder.
    """
    finished = run if isinstance(run, Run) else opened(run, clients, model, plugins=plugins, **objective)
    if not isinstance(newcomer, HoldsRows):
        newcomer = _newcomer(newcomer, finished.meta, validation, test)
    if isinstance(newcomer, RowsAtSites) and newcomer.elsewhere:
        raise SettingError(
            "adapt needs a newcomer's rows, and those of this client are at its site: give its rows (x, y) there, with "
            "the run folder or a copy of it, or run with keep = 'best_for_each', so that each site chooses by itself"
        )
    if len(newcomer) != 1:
        raise SettingError(f"adapt takes one newcomer at a time, got {len(newcomer)} clients: call it once for each")
    return adaptation.fit(finished, as_in_run(newcomer, finished.meta), epochs=epochs, lr=lr)


@takes(ObjectiveKeywords)
def opened(
    path: PathLike,
    clients: Clients | Any = None,
    model: Model | None = None,
    *,
    recipe: Recipe | None = None,
    plugins: Sequence[str] = (),
    rows: bool = True,
    **objective: Unpack[ObjectiveKeywords],
) -> Run:
    """Open a finished run with its models, for reading.

    Args:
        path: the run folder.
        clients, model: as given to `run`; None rebuilds them from the experiment file that the run was started with.
            Where its source is gone, the models are there, and what needs rows says so.
        recipe, plugins: see `resume`.
        rows: whether rows are read again, which predictions need for calibration and thresholds alone.
        objective: `loss` and `metrics`, as given to `run`.
    """
    with RunStore.open_read_only(path) as store:
        meta = store.meta
        if meta.get("status") != "finished":
            raise RunFolderError(f"the run in {path} is not finished: finish it with piebald resume {path}")
        again = {**meta, "runtime": _read_here(meta["runtime"])}
        version = meta.get("best") or store.version
        models = ModelSnapshot.of(store.server_checkpoint(version))
        if clients is None and (reason := _missing_source(again, path, plugins, rows)) is not None:
            table = store.rows("client") or [{"name": str(number)} for number in range(meta["clients"])]
            work, kept, used = _without_source(again, path, table, model, recipe, objective, plugins, reason)
            return Run(Path(path), work, kept, version, models, used.sharing)
        with errors_alone("piebald.data"):  # what there is to say of its rows was said when it began
            plan = _prepared_again(again, path, clients, model, recipe, objective, plugins)
    return Run(Path(path), plan.work, plan.clients, version, models, plan.recipe.sharing)


def read_opened(path: Path, read: Callable[[Run], T], plugins: Sequence[str] = (), rows: bool = False) -> T:
    """Return what a function reads from a finished run, whose rows are read only where it needs them.

    It does for a model that its client fits to its own rows at the end, which is made of them.

    Args:
        path, plugins: see `opened`.
        read: the function, which is called a second time where the folder alone did not suffice.
        rows: whether rows are read at once.
    """
    try:
        with opened(path, plugins=plugins, rows=rows) as run:
            return read(run)
    except RowsNotKept:
        if rows:
            raise
    return read_opened(path, read, plugins, rows=True)


# -------------------------------------------------------------------------------------------------------------- helpers


def _newcomer(rows: Any, meta: Mapping[str, Any], validation: float, test: float) -> Clients:
    """Return a newcomer's rows as a client; those of a table are prepared as the run's are."""
    pair, agreed = isinstance(rows, tuple) and len(rows) == 2, meta.get("preparation")
    if agreed is not None and pair and is_frame(rows[0]) and agreed["target"] is not None:
        others = [other["name"] for other in agreed["target"].get("others", ())]
        columns = zip(*rows[1], strict=True) if others else [rows[1]]
        rows = rows[0].assign(**dict(zip([agreed["target"]["name"], *others], columns, strict=True)))
    if agreed is not None and is_frame(rows):
        newcomer: Clients = adaptation.from_table(rows, None, meta, validation, test)
        return newcomer
    regression = agreed is not None and meta.get("classes") is None
    named = {"newcomer": rows} if pair else rows
    return clients_from(
        named, test=test, validation=validation, classes=meta.get("classes"), regression=regression, prepare="none"
    )


def _read_here(runtime: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the runtime of a run that is only read: this process simulates it, since Ray or a GPU may be missing."""
    if "engine" not in runtime:
        return runtime
    kept_settings = {name: runtime[name] for name in ("map_above",) if name in runtime}
    return {"kind": "simulator", "engine": "sequential", "stack": 1, "workers": 0, **kept_settings}


def _listeners(plan: PreparedRun, callbacks: Sequence[Callback]) -> list[Callback]:
    return [*(tracker.callback() for tracker in plan.trackers), *callbacks]


def _extend(store: RunStore, rounds: int | None) -> None:
    """Record that a run is to have more rounds."""
    planned = store.meta.get("rounds")
    if rounds is None or rounds == planned:
        return
    if planned is None or rounds < planned:
        has = "no number of rounds" if planned is None else f"{planned} rounds"
        raise SettingError(f"rounds must be at least those of the run in {store.path}, which has {has}, got {rounds}")
    if store.meta["runtime"].get("kind") == "federation":
        raise SettingError(
            f"the run in {store.path} was a real federation, whose sites went home at its end: it cannot have more "
            "rounds, start a new run"
        )
    store.set_meta(rounds=rounds, status="running")


def _prepared_again(
    meta: Mapping[str, Any],
    path: Path | str,
    clients: Any,
    model: Model | None,
    recipe: Recipe | None,
    objective: Mapping[str, Any],
    plugins: Sequence[str],
) -> PreparedRun:
    """Prepare the run in a folder again, which names no more than these plugins."""
    author = _author(meta, path, plugins)
    meta, objective = author.mark(with_kept_tokenizer(meta, Path(path))), USERS.mark(objective)
    if clients is None or model is None:
        clients, model = _rebuilt(meta, path, clients, model, author)
    if recipe is None:
        recipe = recipes.rebuild(meta["recipe"]["table"])
    elif not is_recorded(recipe, meta):
        raise SettingError(f"the recipe is not that of the run in {path}: give it the same again, or none")
    plan = prepare(recipe, clients, model, RunSettings.of_folder(meta, objective))
    _check_same(plan.meta, meta, path)
    return plan.going_on_from(meta["lineage"]) if meta.get("lineage") else plan


def _author(meta: Mapping[str, Any], path: Path | str, plugins: Sequence[str]) -> Outside:
    """Return the rights of a folder's author, after the modules that its run needs were imported."""
    author = of_folder(path, plugins)
    for note in use_recorded(meta.get("plugins") or (), f"the run in {path}", author):
        _log.warning(note)
    return author


def _experiment(meta: Mapping[str, Any], path: Path | str, author: Outside) -> ExperimentSettings:
    """Return the experiment that a run belongs to, from its folder."""
    from piebald.experiments.file import ExperimentSettings

    return ExperimentSettings.of_table(meta["settings"], f"the settings in {path}", author)


def _missing_source(meta: Mapping[str, Any], path: Path | str, plugins: Sequence[str], wanted: bool) -> str | None:
    """Return why a run's rows are not there: their source is gone, or they are not wanted; None if they are needed."""
    if meta.get("settings") is None or meta.get("rows") is None:
        return None
    if not wanted:
        return "the rows of the run were not read: open it with rows = true"
    gone = _experiment(meta, path, of_folder(path, plugins)).missing_source
    return None if gone is None else f"there is no file or folder {gone} any more: put it back"


def _without_source(
    meta: Mapping[str, Any], path: Path | str, table: Sequence[Mapping[str, Any]], model: Model | None,
    recipe: Recipe | None, objective: Mapping[str, Any], plugins: Sequence[str], reason: str,
) -> tuple[ClientWork, Clients, Recipe]:  # fmt: skip
    """Return the work of a run, its clients without rows, and its recipe."""
    author = _author(meta, path, plugins)
    meta, objective = author.mark(meta), USERS.mark(objective)
    if model is None:
        settings = _experiment(meta, path, author)
        blank = RecordedClients(table, blank_row(meta["rows"]), meta["classes"], reason)
        with blank.forms():
            model = settings.plan(blank).model_of(meta["label"])
    recipe = recipe or recipes.rebuild(meta["recipe"]["table"])
    return work_without_rows(meta, table, model, recipe, RunSettings.of_folder(meta, objective), reason)


def _check_same(now: Mapping[str, Any], recorded: Mapping[str, Any], path: Path | str) -> None:
    """Refuse to continue a run with a model, clients, a loss or a metric that it was not started with."""
    for name, subject in (
        ("layout", "model"),
        ("clients", "number of clients"),
        ("objective", "loss"),
        ("metric", "first metric"),
        ("split", "division of rows"),
    ):
        if now[name] != recorded[name]:
            values = "" if name == "layout" else f": {recorded[name]!r} then, {now[name]!r} now"
            raise SettingError(f"the {subject} does not fit the run in {path}, which was started with another{values}")
    for name, subject in (
        ("own_models", "models of single clients"),
        ("frozen", "model's frozen weights"),
        ("public_rows", "public rows"),
    ):
        if now[name] != recorded[name]:
            raise SettingError(f"the {subject} are not those of the run in {path}: give it the same again")
    now, recorded = (with_kept_tokenizer(meta, Path(path)) for meta in (now, recorded))  # wherever its file lay
    for name, change in (("standardise", "standardised"), ("preparation", "prepared")):
        if now[name] != recorded[name]:
            raise SettingError(f"the clients are not {change} as in the run in {path}: give it the same rows again")


def _rebuilt(
    meta: Mapping[str, Any], path: Path | str, clients: Any, model: Model | None, author: Outside
) -> tuple[Any, Model]:
    """Rebuild clients and model from the settings in the run folder."""
    if meta.get("settings") is None:
        raise SettingError(
            f"the run in {path} was started from Python: resume it from there, with its clients and model"
        )
    plan, label = _experiment(meta, path, author).plan(), meta["label"]
    return (plan.clients_of(label) if clients is None else clients), (plan.model_of(label) if model is None else model)
