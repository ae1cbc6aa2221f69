"""The process of a site: its settings, and its work in a run."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from piebald import models
from piebald.contracts import Rows
from piebald.contracts.data import public_rows_of, rows_digest
from piebald.core import pytree
from piebald.core.errors import PiebaldError, SettingError, shown
from piebald.core.files import settings_text
from piebald.core.machine import device_named
from piebald.core.objective import Objective
from piebald.core.plain_text import printable
from piebald.core.references import USERS, Outside, Resolver, is_file, list_file
from piebald.core.tensor_store import file_of_start
from piebald.data.clients.data_source import RunRows
from piebald.data.clients.prepared import StandardisedClients, in_own_unit
from piebald.data.preparation.preparation import PrepareSettings
from piebald.data.preparation.tokens import cached_file, with_tokenizer
from piebald.experiments.file import ExperimentSettings
from piebald.federation.credentials.party_files import raise_passing
from piebald.federation.credentials.provisioning import Credentials, read
from piebald.federation.credentials.slots import slot_folder
from piebald.federation.hub.run_terms import RunTerms
from piebald.federation.link.supervision import Supervision
from piebald.federation.operate.logs import without_message
from piebald.federation.site.client_runtime import FederationClient
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_rows import (
    SPLITS,
    SiteClient,
    SiteRows,
    SiteSource,
    missing_source,
    own_rows,
    place_of,
    rows_of_one,
)
from piebald.federation.site.work_limits import WorkLimits
from piebald.methods.catalog.registry import lookup
from piebald.methods.client_work import ClientWork
from piebald.methods.recipe import Recipe
from piebald.models.weights_folder import cached
from piebald.settings import plugins
from piebald.settings.toml_document import Document, of_document

_LOOK, _AGAIN = 0.5, 5.0  # seconds between two looks at a process, and before it is started again
_ENDING = 15.0  # seconds that a process has to end

log = logging.getLogger("piebald.federation")


class SiteSettings(BaseModel):
    """Settings of a site, from the `site.toml` of its credentials.

    Attributes:
        data: where its rows are; None takes those that the experiment's partition gives it.
        device: where it computes: "cpu", "cuda", "cuda:1", "mps", or "auto" for the first GPU that is here, else "cpu".
        weights: folders of pretrained weights by the name that the experiment gives them, relative to the folder of
            the credentials; others must be in the Hugging Face Hub's cache on this machine.
        policy: what it allows.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: SiteSource | None = None
    device: str = "cpu"
    weights: dict[str, str] = {}
    policy: Policy = Policy()

    @field_validator("device")
    @classmethod
    def _existing_device(cls, name: str) -> str:
        return device_named(name)

    @classmethod
    def load(cls, path: Path, **options: str) -> SiteSettings:
        """Load the settings from a file; the defaults where it does not exist.

        Args:
            path: the file.
            options: override keys of its [data]; a `source` takes the place of a name.

        Raises:
            SettingError: a setting is wrong, or options name columns and there is no table.
        """
        document = Document(settings_text(path) if os.path.lexists(path) else "", str(path))
        table = document.values.get("data", {})
        if options and isinstance(table, dict):
            if not table and "source" not in options:
                raise SettingError(
                    f"--{next(iter(options))} is a column of a table: name the table with --data, or in [data] of "
                    f"{path}"
                )
            kept = {key: value for key, value in table.items() if key != "name" or "source" not in options}
            document.values["data"] = kept | options
        try:
            settings = cls.model_validate(document.values)
        except ValidationError as error:
            raise of_document(error, document, cls) from None
        document.refuse_dates()
        return settings


@dataclass(frozen=True, slots=True)
class SiteWork:
    """Rebuilds a run at this site from its terms.

    Attributes:
        credentials: the site's credentials.
        settings: the site's settings.
        folder: what the path of its data is relative to.
        local: whether the server is a process of the same user on this machine, which started the site.
    """

    credentials: Credentials
    settings: SiteSettings
    folder: Path
    local: bool = False

    def __call__(self, values: Mapping[str, Any]) -> SiteClient:
        """See `FederationClient.prepare`.

        Raises:
            SettingError: this site cannot take part.  The server gets the message, so it discloses nothing about rows.
        """
        author = self.author
        terms = RunTerms.read(values, author)
        if self.credentials.party not in terms.sites:
            raise SettingError(
                f"the run has no place for {self.credentials.party}: its sites are {', '.join(terms.sites)}"
            )
        if not self.local and (reason := self.settings.policy.jobs.reject_reason(terms.needs)):
            raise SettingError(reason)
        number = terms.sites.index(self.credentials.party)
        terms.use_plugins(author)
        of_all, terms = terms, terms.of(number)
        terms, weights = (terms, None) if self.local else with_own_weights(terms, self.settings.weights, self.folder)
        if not self.local:
            terms = with_own_tokenizer(terms, self.settings.weights, self.folder)
        limits = self.settings.policy.work
        # before settings are built from them, which could take the memory that the numbers in them claim
        if reason := limits.terms_reject_reason(terms) or _model_reason(terms, limits):
            raise _refusal(reason, weights)
        if reason := of_all.unlike_reason():
            raise SettingError(reason)
        settings = ExperimentSettings.of_table(terms.experiment, "the server's experiment", author)
        settings.use_plugins()
        if self.settings.policy.accept is not None and (
            reason := _name_reason(terms, settings, author, terms.clients[number])
        ):
            raise SettingError(reason)
        rules = settings.prepare.cleaning if isinstance(settings.prepare, PrepareSettings) else None
        if reason := self.settings.policy.cleaning_reject_reason(terms.protects, rules):
            raise SettingError(reason)  # before rows are read
        clients, objective = self._rows_and_objective(terms, settings, number)
        terms.check_public(rows_digest(clients.public_rows))
        trainer, rows = terms.client_components()[0], len(clients.rows(number, "train"))
        steps = trainer.max_steps(rows)
        if steps is not None and (reason := limits.steps_reject_reason(steps)):
            raise SettingError(reason)
        try:
            work = _work(terms, settings, clients, objective)
            by_task = work.own_models is not None and work.own_models.by_task
            held = work if by_task else work.of(number)
            if clients.division is not None and (reason := self.settings.policy.split_reject_reason(held)):
                raise SettingError(reason)
            return SiteClient(held, clients, number, terms.begins, clients.records, clients.rows_per_person, self.place)
        except SettingError as error:
            refusal = _refusal(str(error), weights)
            raise refusal from refusal.__cause__

    def _rows_and_objective(
        self, terms: RunTerms, settings: ExperimentSettings, number: int
    ) -> tuple[SiteRows, Objective]:
        """Return all clients' names with this site's rows, and what is learnt of their targets.

        Raises:
            SettingError: the rows cannot be used.
        """
        try:
            clients = self._rows(terms, settings, number)
            objective = _objective(terms, settings, clients.rows(number, "train"))
            _check_targets(clients, number, objective, terms, settings, self._hides_rows(terms))
        except Exception as error:
            raise_passing(error)
            # the message may quote a row ("got text like 'Miller'"): it is for this site, and the server gets none
            cause = error.__cause__ if isinstance(error.__cause__, PiebaldError) else error
            why = str(cause) if isinstance(cause, PiebaldError) else without_message(cause)
            log.warning(
                "the rows %(source)s cannot be used: %(why)s; mend them, and start this site again",
                {"event": "rows", "source": self.source, "why": printable(" ".join(why.split()))},
            )
            # what the form of rows is not may tell of a row, so that it stays here where something hides rows
            if isinstance(error, _OtherForm) and self.settings.policy.demanded is None and not terms.protects:
                raise
            raise SettingError("its rows cannot be used for this run; the site's own log says why") from error
        return clients, objective

    @property
    def author(self) -> Resolver:
        """The rights of whoever wrote the terms: those of this site's policy, or its own user's in a local trial."""
        if self.local:
            return USERS
        allowed, advice = self.settings.policy.plugins, "name it in plugins of the policy"
        return Outside(allowed, advice, paths_from=self.credentials.folder)

    @property
    def source(self) -> str:
        """Source of the rows, in words."""
        return "of the experiment's partition" if self.settings.data is None else f"in {self.settings.data.where}"

    @property
    def place(self) -> Path | None:
        """The folder that the rows lie in, None where that is not known."""
        return None if self.settings.data is None else place_of(self.settings.data, self.folder)

    def _hides_rows(self, terms: RunTerms) -> bool:
        """Return whether the run, or this site's policy, hides single rows by noise."""
        policy = self.settings.policy
        noisy = policy.training is not None or policy.budget is not None
        return noisy or terms.client_components()[0].row_privacy() is not None

    def _rows(self, terms: RunTerms, settings: ExperimentSettings, number: int) -> SiteRows:
        data = self.settings.data
        if data is not None:
            if reason := missing_source(data, self.folder, None if self.local else self.settings.policy.plugins):
                raise SettingError(reason)
            if data.weights is not None and settings.data.weights is None:
                raise SettingError(
                    "[data] in site.toml names a column of weights, and the run's rows have none: leave weights out"
                )
            rows = own_rows(data, self.folder, self.credentials.party, _of_run(terms, settings), terms.clients, number)
            constants = settings.data.standardise  # those of the run, never of this site's rows alone
            if constants == "federated":
                raise SettingError("the run's terms have no constants of standardise")
            if constants is not None:
                given, rows = rows, rows_of_one(StandardisedClients(rows, constants), number)
                rows.records, rows.rows_per_person = given.records, given.rows_per_person
            named = settings.data.source is None and settings.data.public is None
            if terms.public_rows and not settings.rows_at_sites and named:
                rows.public_rows = public_rows_of(settings.clients())  # of a named data set, as the server makes them
            return rows
        elsewhere = settings.data.source is not None or settings.data.public is not None
        if not self.local and (settings.rows_at_sites or elsewhere):  # no path of the server's is read here
            raise SettingError(
                f"say where this site's rows are: [data] in {self.credentials.folder / 'site.toml'}, or --data"
            )
        return rows_of_one(settings.clients(), number)


def _of_run(terms: RunTerms, settings: ExperimentSettings) -> RunRows:
    """Return what the terms say of a site's rows."""
    agreed = settings.partition.model_dump() if settings.rows_at_sites and settings.partition is not None else {}
    columns = {name: getattr(settings.data, name) for name in ("client", "target", "features", "weights", "tokens")}
    columns["tokens"] = columns["tokens"] or agreed.get("tokens") is True
    plain = settings.extractor is None and isinstance(terms.shape, list)
    inputs: Any = agreed.get("inputs") or (terms.shape if plain else None)
    prepare = settings.prepare if isinstance(settings.prepare, PrepareSettings) else None
    asks = prepare is not None and prepare.agreed is None  # of classes as well
    return RunRows(
        terms.classes,
        numbers=settings.data.regression or (bool(agreed) and terms.classes is None and not asks),
        inputs=[length for length in inputs or () if isinstance(length, int)] or None,
        columns=columns,
        extractor=settings.extractor,
        prepare=prepare,
        split=settings.split,
    )


def _name_reason(terms: RunTerms, settings: ExperimentSettings, author: Resolver, client: str) -> str | None:
    """Return why a run is not what its recipe's name says, which the policy accepts, or None."""
    table = {} if settings.recipe is None else settings.recipe.settings()
    plain = {key: value for key, value in table.items() if key not in Recipe.axes or not isinstance(value, dict | list)}
    name = plain.pop("name", "")
    recipe = lookup(name, author).make(**plain).for_clients(settings.client_settings or {})
    table = recipe.training.of_client(client).table()
    table.pop("clients", None)  # of other sites
    # through JSON as the terms came, where tuples are lists
    if json.loads(json.dumps(table)) == terms.training:
        return None
    return f"the run calls itself {name!r}, and its training is not that of this recipe"


def _model_reason(terms: RunTerms, limits: WorkLimits) -> str | None:
    """Return why the model that the terms describe is too large, or None; counting takes no memory for it."""
    settings = dict(terms.experiment.get("model") or {})
    name = settings.pop("name", None)
    if name not in models.names():
        return None  # that of a plugin, of which the layout in the terms tells the size
    outputs = max(math.prod(terms.outputs), 1)
    try:
        models.count_parameters(name, pytree.formed(terms.shape), outputs, limits.parameters, **settings)
    except SettingError as error:
        return str(error)
    return None


class _OtherForm(SettingError):
    """Rows of another form than the run takes; the message tells the forms and nothing else."""


def _objective(terms: RunTerms, settings: ExperimentSettings, rows: Rows) -> Objective:
    """Return the run's loss and metrics, for the site's own rows."""
    agreed = settings.prepare.agreed if isinstance(settings.prepare, PrepareSettings) else None
    named = plugins.objective_named(rows.y, settings.chosen_loss, settings.evaluate.metrics)
    objective = in_own_unit(named, agreed)
    if objective.name != terms.objective or pytree.form(rows.x) != terms.own_shape:
        raise _OtherForm(
            f"its rows have inputs {pytree.plain(pytree.form(rows.x))} for {objective.name}, "
            f"the run takes {pytree.plain(terms.own_shape)} for {terms.objective}"
        )
    return objective


def _check_targets(
    clients: SiteRows, number: int, objective: Objective, terms: RunTerms, settings: ExperimentSettings, hides: bool
) -> None:
    """Refuse targets that the run's loss cannot take; the message says what it takes, and the cause names the row.

    Where noise hides rows, such rows have no target instead: a site that takes no part would tell of them.
    """
    column = f"column {settings.data.target!r}" if settings.data.target else "targets"
    for split in SPLITS:
        targets = clients.rows(number, split).y
        try:
            objective.check_targets(targets, terms.outputs, f"{split} rows, {column}")
        except SettingError as error:
            if hides:
                log.warning("rows without a target that the loss takes count as unknown: %s", error)
                clients.forget_misfits(split, objective, terms.outputs)
                continue
            allowed = str(error).partition("targets must be ")[2].partition(", got ")[0]
            raise _OtherForm(f"its {column} must be {allowed}, in {split} rows") from error


def _work(terms: RunTerms, settings: ExperimentSettings, clients: SiteRows, objective: Objective) -> ClientWork:
    """Return the run's work, rebuilt from installed components."""
    trainer, transforms, own_query = terms.client_components()
    model = terms.model_of(settings, clients)
    initial = file_of_start(model.initial)
    model.layout.lend(model.model, initial)
    public = clients.public_rows
    work = ClientWork(
        model.model, model.layout, initial, objective, terms.seed, terms.own_shape, model.outputs, trainer,
        transforms, own_query,
        terms.choice_query(), public_rows=0 if public is None else len(public), public_digest=terms.public_rows,
        questions=tuple(terms.questions), trains=terms.trains, weighted=settings.data.weights is not None,
    )  # fmt: skip
    work = replace(work, own_models=trainer.own_models(work))
    for transform in transforms:  # now, and not at each task: a package may be missing here that the server has
        if reason := transform.unsupported_model(work):
            raise SettingError(reason)
    return work


def with_own_weights(terms: RunTerms, weights: Mapping[str, str], folder: Path) -> tuple[RunTerms, Path | None]:
    """Return the terms with this site's folder in place of the weights that the experiment names, and that folder.

    A site opens no path that a server gives it, and downloads nothing at its word.

    Args:
        terms: the run's terms.
        weights: the site's folders, by the experiment's name of the weights.
        folder: what they are relative to.

    Raises:
        SettingError: the site has no such weights.
    """
    model = terms.experiment.get("model")
    if not isinstance(model, Mapping) or model.get("name") != "pretrained":
        return terms, None
    name, revision = model.get("weights"), model.get("revision")
    if isinstance(name, str) and name in weights:
        weights_folder = (folder / weights[name]).resolve()
    else:
        download = cached(name, revision) if isinstance(name, str) and isinstance(revision, str | None) else None
        if download is None:
            at = "" if revision is None else f" of revision {shown(revision)}"
            raise SettingError(
                f"this site does not have the weights {shown(name)}{at}: name their folder in [weights] of its "
                "site.toml, or put them into the Hugging Face Hub's cache"
            )
        weights_folder = download.path.resolve()
    changed = {key: value for key, value in model.items() if key != "revision"} | {"weights": str(weights_folder)}
    return terms.model_copy(update={"experiment": {**terms.experiment, "model": changed}}), weights_folder


def with_own_tokenizer(terms: RunTerms, weights: Mapping[str, str], folder: Path) -> RunTerms:
    """Return the terms with this site's file in place of the tokenizer that the sites agree on; its hash is checked.

    Args:
        terms, weights, folder: see `with_own_weights`; a folder of weights has the tokenizer as well.

    Raises:
        SettingError: the site has no such tokenizer.
    """
    experiment = with_tokenizer(terms.experiment, lambda name: _own_tokenizer(name, weights, folder))
    return terms.model_copy(update={"experiment": experiment})


def _own_tokenizer(name: Any, weights: Mapping[str, str], folder: Path) -> Path:
    path = None
    if isinstance(name, str):
        path = (folder / weights[name]).resolve() if name in weights else cached_file(name)
    if path is None:
        raise SettingError(
            f"this site does not have the tokenizer {shown(name)}: name its file or folder in [weights] of its "
            "site.toml, or put it into the Hugging Face Hub's cache"
        )
    return path


def _refusal(reason: str, weights: Path | None) -> SettingError:
    """Return an error whose message the server gets: a path of this site is in its cause alone."""
    if weights is None or str(weights) not in reason:
        return SettingError(reason)
    log.warning("the weights cannot be used: %s", reason)
    refusal = SettingError("its own weights cannot be used for this run; the site's own log says why")
    refusal.__cause__ = SettingError(reason)
    return refusal


def site_work(
    folder: Path, data: str | None, target: str | None, local: bool = False, client: str | None = None, slot: int = 0
) -> SiteWork:
    """Return a site from its credentials and settings.

    Args:
        folder: the site's credentials.
        data, target, client: override those of its settings.
        local: whether the server is a process of the same user on this machine, which started the site.
        slot: of the runs that it takes part in at once, see `credentials.slots`.

    Raises:
        SettingError: a setting is wrong, or there is no table that the columns are of.
    """
    options = {"source": data, "target": target, "client": client}
    settings = SiteSettings.load(
        folder / "site.toml", **{key: value for key, value in options.items() if value is not None}
    )
    for plugin in filter(is_file, settings.policy.plugins):
        list_file(plugin, folder)
    if slot:
        (folder / "state").mkdir(mode=0o700, exist_ok=True)  # which all slots share
    credentials = read(folder if slot == 0 else slot_folder(folder, slot))
    return SiteWork(credentials, settings, folder if data is None else Path(), local)


class OtherSlots:
    """The processes of a site's runs beyond the first, where its policy allows several at once.

    One that ends is started again, until the site itself ends.

    Args:
        commands: of the processes.
    """

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        self._commands, self._over, self._threads = commands, threading.Event(), list[threading.Thread]()
        # the site waits for the server in `join`, so a failure ends it as its service would
        self._supervision = Supervision(self._over.wait, partial(os.kill, os.getpid(), signal.SIGTERM))

    def __enter__(self) -> Self:
        for number, command in enumerate(self._commands, 1):
            name = f"the process of run {number + 1} at once"
            self._threads.append(self._supervision.start(name, partial(self._keep, command)))
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(_ENDING)
        self._supervision.check()

    def _keep(self, command: Sequence[str]) -> None:
        while not self._over.is_set():
            process = subprocess.Popen([*command, "--with-parent", str(os.getpid())], stdin=subprocess.DEVNULL)
            while process.poll() is None and not self._over.wait(_LOOK):
                pass
            process.terminate()
            code = process.wait()
            if not self._over.wait(_AGAIN):
                log.error("the process of a further run has ended with code %d, and is started again", code)


def join(work: SiteWork, stays: bool, parent: int | None) -> str:
    """Run a site until its run has ended, and return why it ended.

    Args:
        work: the site.
        stays: whether to wait for another run when one has ended.
        parent: a process with which this one ends.
    """
    if work.local:
        torch.set_num_threads(1)  # sites on one machine share its cores
    site = FederationClient(
        work.credentials, work, policy=work.settings.policy, device=work.settings.device, stays=stays
    )
    if parent is not None:
        threading.Thread(target=_stop_with, args=(site, parent), daemon=True).start()
    try:
        return site.run()
    except KeyboardInterrupt:
        return "stopped"


def _stop_with(site: FederationClient, parent: int) -> None:
    # a killed process tells nobody, but its children get another parent
    while os.getppid() == parent:
        time.sleep(0.5)
    site.stop()
