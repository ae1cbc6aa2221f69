"""Preparation of a run: everything but its store is checked and resolved before training."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType
from typing import Any, Self, get_args

import torch
from torch import nn

from piebald.contracts import Clients, HasServerRows, Query, Rows, RowsAtSites
from piebald.contracts.component import build
from piebald.contracts.data import (
    InMemory,
    ModelSpec,
    Split,
    blank_row,
    column_names,
    first_passing,
    lacked_inputs,
    public_rows_of,
    row_form,
    rows_digest,
    rows_with_all_inputs,
)
from piebald.core import pytree
from piebald.core.errors import SettingError
from piebald.core.machine import existing_objects_frozen, machine
from piebald.core.objective import unfit_classes
from piebald.core.parameters import Layout, frozen_digest
from piebald.core.tensor_store import raw
from piebald.data.clients import prepared
from piebald.data.clients.sites import RecordedClients
from piebald.data.clients.sources import clients_of
from piebald.data.clients.target_check import check_targets, tell_of_lacking_rows, trains_batch_norm
from piebald.data.clients.target_columns import PairOfColumns, target_columns
from piebald.data.clients.view import ClientsView
from piebald.data.partition.split import division_of
from piebald.data.preparation import Preparation
from piebald.experiments.recipes import GivenModels, copied_for_run, outputs_of
from piebald.experiments.recipes import Model as Model
from piebald.experiments.run_settings import RunSettings
from piebald.methods.aggregation.linear import FixedShares
from piebald.methods.catalog import recipes
from piebald.methods.catalog.registry import maker
from piebald.methods.choice import own_choice
from piebald.methods.client_work import ClientWork
from piebald.methods.queries.scores import Evaluate
from piebald.methods.recipe import Recipe
from piebald.methods.scheduling.base import HasCohort, cohort_size
from piebald.methods.training.base import Trainer
from piebald.methods.training.sgd import Sgd
from piebald.privacy.accounting import installed
from piebald.privacy.secure_aggregation.masks import unlike_reason
from piebald.privacy.spending import Spending, told_together
from piebald.report.callbacks import Tracker, trackers_of
from piebald.runs.adaptation import check_newcomers, hold_out
from piebald.runs.lineage import models_without_inputs
from piebald.runtimes.base import RuntimeSettings, SimulatesDevices
from piebald.server import EvaluationPlan, ResultChecks, StoppingCriteria
from piebald.server.evaluation import class_query, row_query, threshold_query, totals_query
from piebald.settings.plugins import needed_by, objective_named
from piebald.version import __version__


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that is ready to start: everything but its store."""

    recipe: Recipe  # adapted to the model
    clients: Clients
    work: ClientWork
    runtime: RuntimeSettings
    measuring: EvaluationPlan
    rounds: int | None
    stop: StoppingCriteria | None
    check: ResultChecks
    checkpoint_every: int | None
    meta: Mapping[str, Any]
    spending: Spending
    unseen: Clients | None = None
    untrained: Sequence[int] = ()  # clients that are scored and never train
    trackers: Sequence[Tracker] = ()

    def going_on_from(self, about: Mapping[str, Any]) -> Self:
        """The same run with its lineage: it goes on from a finished one (`lineage.Inheritance.about`)."""
        runtime, spending = self.runtime.going_on_from(about["federation"]), self.spending.after_runs(about)
        changes: dict[str, Any] = {"runtime": runtime.table(), "lineage": dict(about)}
        if self.meta["noise_key"]:  # it begins with another model than a run that begins anew
            changes["noise_key"] = hashlib.sha256(f"{self.meta['noise_key']} {about['sha256']}".encode()).hexdigest()
        plan = replace(self, runtime=runtime, meta={**self.meta, **changes}, spending=spending)
        return replace(plan, meta={**plan.meta, "privacy": plan.spent(plan.most_rounds)})

    @property
    def most_rounds(self) -> int | None:
        """The rounds after which the run ends at the latest: those it was given, or those that its budget allows."""
        if self.stop is None or self.stop.epsilon is None:
            return self.rounds
        allowed = self.spending.most_rounds(self.stop.epsilon)
        # where sites have yet to state their rows, `allowed` is None and the server's loop looks before each round
        return min((count for count in (self.rounds, allowed) if count is not None), default=None)

    def described(self) -> dict[str, Any]:
        """What would be trained: clients, their rows, the network, and for how long; as values by name."""
        rows: dict[str, int | None] = {}
        for split in get_args(Split):
            sizes = [self.clients.size(client, split) for client in range(len(self.clients))]
            known = [size for size in sizes if size is not None]
            # a client that has not counted its rows yet, as at a site, leaves the sum unknown
            rows[f"{split} rows"] = sum(known) if len(known) == len(sizes) else None
        names = "model", "parameters", "shared", "metric"
        limits = None if self.stop is None else self.stop.model_dump(exclude_none=True)
        return {
            "clients": len(self.clients), **rows, **{name: self.meta[name] for name in names}, "rounds": self.rounds,
            "stop": limits,
        }  # fmt: skip

    def spent(self, rounds: int | None) -> list[dict[str, Any]] | None:
        """The budgets that so many rounds spend, as plain values; none where that is open, None without accountants."""
        if not installed():
            return None
        plain = [budget.plain() for budget in self.spending.budgets(rounds)]
        return told_together(plain, self.meta.get("lineage"))


@existing_objects_frozen()
def prepare(recipe: Recipe | str, clients: Any, model: Model, options: RunSettings) -> PreparedRun:
    """Check everything and make all choices now, so that no avoidable error appears in a later round."""
    rounds, stop = options.length()
    check = ResultChecks(**{name: options.value(name) for name in ResultChecks.model_fields})
    recipe = recipes.make(recipe) if isinstance(recipe, str) else recipe
    if not isinstance(recipe, Recipe):
        raise SettingError(f"recipe must be a Recipe or the name of one, got {type(recipe).__name__}")
    if problem := check.unlimited_reason(recipe):
        raise SettingError(problem)
    accepted = clients_of(clients)
    if options.loss is None and isinstance(target := column_names(accepted)[1], PairOfColumns):
        options = options.model_copy(update={"loss": target.loss})
    if problem := unfit_classes(options.loss, accepted.classes, stated=True):
        raise SettingError(problem)
    all_clients = prepared.in_unit_of_loss(accepted, options.loss)
    federation, unseen = hold_out(all_clients, options.unseen, options.seed)
    division = division_of(federation)
    untrained = [] if division is None else division.untrained(federation.names)
    trained = [client for client in range(len(federation)) if client not in untrained] if untrained else None
    training = federation if trained is None else ClientsView(federation, trained)
    gathered = prepared.gathered_bytes(all_clients)
    if gathered is not None and (unseen is not None or untrained):
        raise SettingError("all training rows in one place (pooled = true) are those of all clients: hold none out")
    work, adapted = _work(recipe, federation, model, options)
    # by the model's number, since thousands of clients may have the same model
    mixes = functools.cache(lambda number: trains_batch_norm(work.numbered(number)))
    tell_of_lacking_rows(
        federation,
        work.objective,
        options.evaluate.split if options.evaluate.every else None,
        lambda client: plain.batch if isinstance(plain := work.trainer_of(client), Sgd) else 0,
        lambda client: mixes(work.number(client)),
    )
    if gathered is not None and work.layout.private:
        raise SettingError(
            "all training rows in one place (pooled = true) give all clients one model, and this recipe leaves parts "
            "at clients: choose one without, such as 'fedavg'"
        )
    if options.evaluate.split == "train" and work.protection is not None:
        raise SettingError(
            f"scores on training rows tell what {work.protection} hides, and no privacy budget counts them: evaluate "
            "on split 'test' or 'validation', got 'train'"
        )
    if problem := prepared.unhidden_reason(all_clients, work.noise) or _unlike_reason(work, federation, options):
        raise SettingError(problem)
    runtime = _runtime(recipe, federation, len(training), work, options.runtime)
    _check_rows_are_here(runtime, federation, options)
    if unseen is not None:
        check_newcomers(unseen)
    _check_fit(adapted, federation, len(training), work)
    if options.checkpoint_every is None and not runtime.repeats:
        options = options.model_copy(update={"checkpoint_every": 1})
    if not runtime.repeats and options.checkpoint_every != 1 and adapted.noises_mean:
        raise SettingError(
            "checkpoint_every must be 1 where gaussian adds noise at a real server: one that goes back over several "
            "steps would publish them twice, each time with other noise; leave it out"
        )
    measuring = _measuring(federation, work, runtime, options, stop)
    by_components = [
        query for component in adapted.components for query in component.asks(work) if isinstance(query, Query)
    ]
    work = replace(work, questions=tuple(query.stated() for query in [*measuring.asked, *by_components]))
    trackers = trackers_of(options.trackers)
    constants = prepared.constants_of(all_clients)
    meta = {
        **_meta(recipe, federation, training, work, runtime, options),
        "trackers": [tracker.table() for tracker in trackers],
    }
    agreed = prepared.preparation_of(all_clients)
    meta["preparation"] = None if agreed is None else agreed.model_dump()
    meta["standardise"] = None if constants is None else constants.model_dump()
    features, target = column_names(all_clients)
    meta["features"] = None if features is None else list(features)
    target = target if target is None or isinstance(target, str) else list(target)
    meta["target"] = target or target_columns(((options.experiment or {}).get("data") or {}).get("target"))
    meta["rows"] = row_form(_whole_rows(federation))
    meta["split"] = None if division is None else division.model_dump(exclude_defaults=True)
    meta["division"] = "" if division is None else division.title
    meta["gathered_bytes"] = gathered
    meta["noise_key"] = _noise_key(meta, work, training) if runtime.simulates and _adds_noise(work) else None
    plan = PreparedRun(
        adapted, federation, work, runtime, measuring, rounds, stop, check, options.checkpoint_every, meta,
        Spending(recipe, _sizes(recipe, training), _asks_everybody(recipe, runtime, len(training))),
        unseen, untrained, trackers,
    )  # fmt: skip
    meta["privacy"] = plan.spent(plan.most_rounds)
    return plan


def _unlike_reason(work: ClientWork, clients: Clients, options: RunSettings) -> str | None:
    """Return why the members of a sum under masks would not all do the same, or None."""
    if work.masking is None:
        return None
    division, agreed = division_of(clients), prepared.preparation_of(clients)
    sections = {"split": division, "prepare": agreed}
    tables = {name: section.model_dump() for name, section in sections.items() if section is not None}
    numbers = range(len(clients))
    works = ((id(work.trainer_of(c)), work.number(c), lacked_inputs(clients, c)) for c in numbers)
    return unlike_reason(work.trainer, tables, options.experiment or {}, works)


# how a run is described, computed and watched, and when it ends: it goes on with the same noise when that is changed
_NO_INFLUENCE = frozenset(
    ("piebald", "torch", "python", "machine", "label", "plugins", "metric", "metrics", "per_class", "runtime",
     "checkpoint_every", "settings", "rounds", "stop", "evaluate", "keep", "threshold", "trackers", "privacy",
     "higher_is_better", "paper", "gathered_bytes", "measure")
)  # fmt: skip


def _noise_key(meta: Mapping[str, Any], work: ClientWork, clients: Clients) -> str:
    """Return a digest of all that the results of a simulation follow from, for its noise.

    Two runs that shared noise would give away the difference of what it hides, and their budgets would not add up.
    """
    settings = {name: value for name, value in meta.items() if name not in _NO_INFLUENCE}
    # "fields" say how it was written, the components what it does
    settings["recipe"] = table = {**meta["recipe"]["table"], "fields": None}
    if isinstance(work.trainer, Sgd):  # passes that add up to the same steps are the same mechanism
        table["training"] = {**table["training"], "batch": work.trainer.step_rows, "accumulate": 1}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    runtime = [meta["runtime"].get(name) for name in ("fleet", "bfloat16", "tf32")]
    digest.update(json.dumps(runtime, sort_keys=True, default=str).encode())
    digest.update(re.sub(" at 0x[0-9a-f]+", "", repr(work.model)).encode())  # another address in each process
    for function in (work.objective.loss, *(type(module).forward for module in work.model.modules())):
        if (code := getattr(function, "__code__", None)) is not None:
            digest.update(code.co_code + repr((code.co_names, _constants(code))).encode())
    digest.update(raw(work.initial))
    indexed = clients if isinstance(clients, InMemory) and clients.in_memory() else None
    digest.update(rows_digest(None if indexed is None else indexed.pool()).encode())
    for client, name in enumerate(clients.names):
        digest.update(f"{name} {clients.size(client, 'train')}\n".encode())
        digest.update(b"" if indexed is None else indexed.indices(client, "train").tobytes())
    return digest.hexdigest()


def _constants(code: CodeType) -> list[str]:
    """Return the constants of code without that of functions in it, alike in every process."""
    values = [value for value in code.co_consts if not isinstance(value, CodeType)]
    # the order of a set of texts is another in each process
    return [repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value) for value in values]


def _adds_noise(work: ClientWork) -> bool:
    """Return whether anything is hidden by noise: clipping alone promises nothing."""
    privacy = work.row_privacy
    return (privacy is not None and privacy.noise > 0) or any(transform.hides() for transform in work.transforms)


def _sizes(recipe: Recipe, clients: Clients) -> list[int]:
    """Return the training rows of each client, as far as a privacy budget goes by them, else 0."""
    if recipe.training.row_privacy() is None:
        return [0] * len(clients)
    return [clients.size(client, "train") or 0 for client in range(len(clients))]


def _asks_everybody(recipe: Recipe, runtime: RuntimeSettings, known: int) -> bool:
    """Return whether any client can be asked in each round, and nobody knows who was, for budgets of drawn cohorts."""
    fleet = runtime.fleet if runtime.simulates and isinstance(runtime, SimulatesDevices) else None
    if fleet is None or not recipe.noises_mean:
        return runtime.simulates
    # a fleet's own `available` may go by anything, so the range that stands for all is asked for, too
    devices = (fleet.device(client) for client in range(known))
    return isinstance(fleet.available(known, 0.0), range) and not any(device.on or device.dropout for device in devices)


def _runtime(recipe: Recipe, clients: Clients, known: int, work: ClientWork, runtime: Any) -> RuntimeSettings:
    cohort = recipe.scheduling.cohort if isinstance(recipe.scheduling, HasCohort) else 1.0
    if isinstance(cohort, int) and cohort > known:
        that_train = "" if known == len(clients) else " that train"
        raise SettingError(
            f"cohort is {cohort} but there are {known} clients{that_train}: choose at most that, or a share like 1.0"
        )
    chosen = build("runtime", runtime)
    assert isinstance(chosen, RuntimeSettings)
    return chosen.resolved(work, clients, cohort_size(cohort, known))


def _check_rows_are_here(runtime: RuntimeSettings, clients: Clients, options: RunSettings) -> None:
    if runtime.simulates and isinstance(clients, RowsAtSites) and clients.elsewhere:
        raise SettingError(
            "partition 'sites' means that rows are at their sites, so there is nothing to simulate: run it with "
            "piebald server CREDENTIALS FILE, or choose another partition"
        )
    if options.unseen and not runtime.simulates:
        raise SettingError(
            "unseen holds out clients whose rows are on this machine, but a federation has no such rows: leave it out"
        )


def _check_fit(recipe: Recipe, clients: Clients, known: int, work: ClientWork) -> None:
    """Refuse components that cannot work with this model, or that need rows that do not exist."""
    cohort = recipe.scheduling.cohort if isinstance(recipe.scheduling, HasCohort) else 1.0
    count, works = cohort_size(cohort, known), work.different()
    for component in recipe.components:
        if problem := component.unsupported_cohort(count) or next(
            filter(None, (component.unsupported_model(spec) for spec in works)), None
        ):
            raise SettingError(problem)
        if component.needs_server_rows() and (not isinstance(clients, HasServerRows) or clients.server_rows is None):
            raise SettingError(
                f"{component.axis} {component.kind!r} needs rows that the server may see, and there are none: set the "
                "partition's server_rows = 100, or server_rows = (x, y) of clients_from"
            )


def _measuring(
    clients: Clients, work: ClientWork, runtime: RuntimeSettings, options: RunSettings, stop: StoppingCriteria | None
) -> EvaluationPlan:
    interval = options.evaluate.every
    global_model = not work.layout.private and clients.common is not None and len(clients.common) > 0
    common = Evaluate(personal=False) if global_model else None
    validate = _validate(options.keep, interval, clients)
    query, higher = Evaluate(split=options.evaluate.split), work.objective.higher_is_better
    clients_asked = min(options.evaluate.clients or len(clients), len(clients)) if interval else 0
    count = class_query(
        options.evaluate.per_class, work, clients, options.evaluate.split, clients_asked, runtime.simulates
    )
    rows = row_query(work, clients, options.evaluate.split, clients_asked, runtime.simulates)
    thresholds = threshold_query(options.evaluate.threshold, work, clients, options.evaluate.split, clients_asked)
    asked = (query, interval, options.evaluate.clients, common, higher, validate, count, rows, totals_query(rows, work))
    return EvaluationPlan(*asked, thresholds, _stopping(stop, interval, clients))


def _meta(
    recipe: Recipe,
    clients: Clients,
    training: Clients,
    work: ClientWork,
    runtime: RuntimeSettings,
    options: RunSettings,
) -> dict[str, Any]:
    """The description of the run for its folder, as plain values."""
    objective = work.objective
    of_users = [*recipe.components, maker(recipe), work.model, objective.loss, objective.metrics]
    of_users += trackers_of(options.trackers)
    return {
        "piebald": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": machine(),
        **recorded_recipe(recipe),
        "objective": objective.name,
        "plugins": [list(plugin) for plugin in needed_by(of_users, [options.experiment, recipe.name])],
        "metric": objective.metric,
        "higher_is_better": objective.higher_is_better,
        "model": type(work.model).__name__,
        "parameters": work.layout.size,
        "shared": work.layout.shared,
        "privacy": None,
        "layout": [[slot.name, list(slot.shape)] for slot in work.layout.slots],
        "own_models": None if work.own_models is None else work.own_models.plain(),
        "frozen": frozen_digest(work.model),
        "public_rows": work.public_digest,
        "classes": list(clients.classes) if clients.classes is not None else None,
        "clients": len(clients),
        **options.record(),
        "label": options.label or recipe.name,
        "runtime": runtime.table(),
    }


def recorded_recipe(recipe: Recipe) -> dict[str, Any]:
    """What the description of a run says of its recipe."""
    named = {"name": recipe.name, "fields": dict(recipe.fields), "table": recipe.model_dump()}
    return {"recipe": named, "paper": recipe.paper}


def _validate(keep: str | Mapping[str, Any], interval: int, clients: Clients) -> Evaluate | None:
    """Return the query that finds the best version, if `keep` asks for it."""
    if keep == "last":
        return None
    if keep == "best" and not interval:
        raise SettingError("keep = 'best' needs evaluations to choose by: evaluate_every must be at least 1")
    if not _has_validation(clients):
        raise SettingError(
            f"keep = {keep!r} needs validation rows but no client has any: give [split] validation = 0.1"
        )
    return Evaluate(split="validation") if keep == "best" else None


def _stopping(stop: StoppingCriteria | None, interval: int, clients: Clients) -> Evaluate | None:
    """Return the query whose scores may end the run: those of test rows decide nothing."""
    if stop is None or not stop.measures:
        return None
    if not interval:
        raise SettingError("stop uses scores but evaluate_every is 0: set it to 1 or more, or remove the target")
    if not _has_validation(clients):
        raise SettingError(
            "target and patience of stop need validation rows, since test rows choose nothing, but no client has any: "
            "give [split] validation = 0.1, or take another limit"
        )
    return Evaluate(split="validation")


def _whole_rows(clients: Clients, after: int = 0) -> Rows:
    """Return training rows with all inputs, of the first client that has some and whose number is at least `after`."""
    held = (client for client in range(after, len(clients)) if clients.size(client, "train") != 0)
    return rows_with_all_inputs(clients, held)


def _tried(module: nn.Module, clients: Clients) -> tuple[Rows, tuple[int, ...]]:
    """Return training rows with all inputs that a model takes, and the shape of its outputs for one of them."""

    def trial(client: int) -> tuple[Rows, tuple[int, ...]]:
        rows = _whole_rows(clients, client)
        return rows, outputs_of(module, rows)

    held = (client for client in range(len(clients)) if clients.size(client, "train") != 0)
    if (first := next(held, None)) is None:
        raise SettingError("no client has a training row")
    return first_passing(trial, itertools.chain([first], held))[1]


def work_without_rows(
    meta: Mapping[str, Any],
    table: Sequence[Mapping[str, Any]],
    model: Model,
    recipe: Recipe,
    options: RunSettings,
    reason: str,
) -> tuple[ClientWork, Clients, Recipe]:
    """Return the work of a finished run, and its clients without rows, from what its folder keeps.

    Args:
        meta: the description of the run.
        table: of its clients, see `RecordedClients`.
        model, recipe, options: those of the run.
        reason: why the rows cannot be read.

    Raises:
        SettingError: the models are not those of the run.
    """
    recorded = RecordedClients(table, blank_row(meta["rows"]), meta["classes"], reason)
    agreed = meta.get("preparation")
    clients: Clients = recorded if agreed is None else prepared.SitesPrepared(recorded, Preparation(**agreed))
    with recorded.forms():
        work, adapted = _work(recipe, clients, model, options.model_copy(update={"keep": "last"}))
    for name, value in (("layout", [[slot.name, list(slot.shape)] for slot in work.layout.slots]),
                        ("own_models", None if work.own_models is None else work.own_models.plain()),
                        ("frozen", frozen_digest(work.model))):  # fmt: skip
        if meta.get(name) != value:
            raise SettingError(f"the models of this run need its rows: {reason}")
    choice = own_choice(options.keep, options.evaluate.split if options.evaluate.every else None)
    return replace(work, choice=choice), clients, adapted


def _work(recipe: Recipe, clients: Clients, model: Model, options: RunSettings) -> tuple[ClientWork, Recipe]:
    models = GivenModels.of(model, clients.names, options.seed)
    module = models.modules[0]
    layout = Layout.of(module, recipe.sharing.private(module))
    rows, outputs = _tried(module, clients)
    objective = prepared.in_own_unit(
        objective_named(rows.y, options.loss, options.evaluate.metrics), prepared.preparation_of(clients)
    )
    _check_validation(recipe, clients)
    module = copied_for_run(module)
    initial = layout.taken(module)
    # Refuses a model with room for fewer clients.
    recipe.sharing.initial_private(initial[layout.shared :], layout, len(clients) - 1)
    shape = pytree.form(rows.x)
    public = public_rows_of(clients)
    count, digest = 0 if public is None else len(public), rows_digest(public)
    spec = ModelSpec(
        module, layout, initial, objective, options.seed, shape, outputs, public_rows=count, public_digest=digest
    )
    check_targets(clients, spec, _column(options, "target"))
    judged = options.evaluate.split if options.evaluate.every else None
    for component in recipe.components:
        if reason := component.unsupported_clients(clients.names):
            raise SettingError(reason)
    if isinstance(recipe.aggregation, FixedShares):
        recipe = recipe.model_copy(update={"aggregation": recipe.aggregation.of_clients(clients.names)})
    adapted = recipe.adapted_to(spec)
    own_query = None if adapted.transforms else adapted.aggregation.sender_query(spec)
    choice = own_choice(options.keep, judged)
    trainer = recipe.training
    own_models = models.own_models(recipe, spec, rows)
    if trainer.overrides(Trainer.own_models):
        if own_models is not None:
            raise SettingError(f"{trainer.kind} makes clients' models from one: give one model, and not one for each")
        own_models = trainer.own_models(spec)
    if (parts := models_without_inputs(recipe, spec, clients, rows)) is not None:
        if own_models is not None:
            raise SettingError("clients that lack an input have a part of one model: give all clients that one")
        own_models = parts
    for client_spec in [
        spec,
        *(() if own_models is None else (replace(spec, model=other.model) for other in own_models.models)),
    ]:
        if choice is not None and (reason := choice.unsupported_model(client_spec)):
            raise SettingError(reason)
    work = ClientWork(
        module, layout, initial, objective, options.seed, shape, outputs, trainer, adapted.transforms, own_query,
        choice, own_models, public_rows=count, public_digest=digest, own_trainers=_own_trainers(trainer, clients.names),
        weighted=options.experiment is None or _column(options, "weights") is not None,
    )  # fmt: skip
    return work, adapted


def _own_trainers(trainer: Trainer, names: Sequence[str]) -> dict[int, Trainer]:
    """Return the trainers of clients that have settings of their own; clients with the same settings have one."""
    if not isinstance(trainer, Sgd) or not trainer.clients:
        return {}
    made: dict[str, Trainer] = {}
    own = {number: trainer.of_client(name) for number, name in enumerate(names)}
    return {number: made.setdefault(own_trainer.model_dump_json(), own_trainer) for number, own_trainer in own.items()}


def _column(options: RunSettings, setting: str) -> str | None:
    """Return the name of the column of targets, or of weights, where an experiment file names it."""
    data = (options.experiment or {}).get("data")
    name = data.get(setting) if isinstance(data, Mapping) else None
    return name if isinstance(name, str) else None


def _check_validation(recipe: Recipe, clients: Clients) -> None:
    """Refuse components that need validation rows where no client has any."""
    for component in (recipe.aggregation, recipe.training, recipe.clustering):
        if component.needs_validation_rows() and not _has_validation(clients):
            raise SettingError(
                f"{component.kind} needs validation rows but clients have none: set validation = 0.05 in [split]"
            )


def _has_validation(clients: Clients) -> bool:
    return any(clients.size(client, "validation") != 0 for client in range(len(clients)))


def check_repeats(folder: Path, meta: Mapping[str, Any], recipe: Recipe, options: RunSettings) -> None:
    """Refuse to reuse the run in a folder if its settings differ from the wanted ones.

    Args:
        folder: the folder of the existing run.
        meta: the description of that run.
        recipe, options: the wanted settings.
    """
    if not is_recorded(recipe, meta):
        raise SettingError(f"{folder} holds a run with another recipe: choose another folder, or delete that one")
    for name, value in options.repeated().items():
        if _text(value) != _text(meta[name]):
            raise SettingError(f"{folder} holds a run with another {name}: choose another folder, or delete that one")


def is_recorded(recipe: Recipe, meta: Mapping[str, Any]) -> bool:
    """Return whether a recipe is that of a run."""
    return _text(meta["recipe"]["table"]) == _text(recipe.model_dump())


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
