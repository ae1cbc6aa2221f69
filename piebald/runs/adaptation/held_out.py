"""Clients that are held out of a run until its end, what each client chooses then, and a newcomer's rows.

The choices are notes of the run's last step, one for each client, and the chosen models that are no shared ones lie
beside them as `chosen-<client>.safetensors`.  Clients are asked in groups that are always the same, and a group is
recorded at once, so a run that was killed meanwhile asks the groups that are missing, to the same bits.

A newcomer's rows come from a file, a folder or a function, and are read in the same way as the run's own data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from piebald.contracts import Clients, OwnChoice, Result
from piebald.contracts.data import blank_row
from piebald.core import pytree
from piebald.core.errors import SettingError
from piebald.core.references import USERS, of_folder
from piebald.data.clients.data_source import DataSource, RunRows, client_among
from piebald.data.clients.owner import is_frame, read_owners
from piebald.data.clients.view import ClientsView
from piebald.data.embeddings import embedded_by
from piebald.data.partition.split import SplitSettings, unseen_numbers
from piebald.data.preparation import Preparation
from piebald.data.preparation.preparation import PrepareSettings
from piebald.engines.engine_choice import stack_limit
from piebald.methods.choice import local_work
from piebald.methods.queries.scores import counted
from piebald.server import ServerLoop
from piebald.storage.run_folder import CHOICE_AXIS, recorded_choices, write_chosen_model
from piebald.storage.store import RunStore


def hold_out(clients: Clients, unseen: float | Sequence[str], seed: int) -> tuple[Clients, Clients | None]:
    """Divide clients into those that take part and those that stay unseen until the end, or None.

    Args:
        clients: all clients.
        unseen: a number of clients, or a share of them below 1, or their names.
        seed: of the choice.

    Raises:
        SettingError: no client would take part, `unseen` is not a number, or a client that is held out has no rows to
            be adapted with.
    """
    held_out = unseen_numbers(clients.names, unseen, seed)
    if not held_out:
        return clients, None
    taking_part = [client for client in range(len(clients)) if client not in held_out]
    return ClientsView(clients, taking_part), ClientsView(clients, sorted(held_out))


def check_newcomers(newcomers: Clients) -> None:
    """Refuse clients that are held out and cannot be adapted to, before a whole run trains without them.

    Raises:
        SettingError: one of them has no validation rows.
    """
    for client, name in enumerate(newcomers.names):
        if newcomers.size(client, "validation") == 0:
            raise SettingError(
                f"unseen holds out the client {name!r}, which needs validation rows to be adapted and has none: give "
                "[split] validation = 0.1"
            )


GROUP = 256  # clients that are asked at once, or fewer where their models are large
_COUNTED = ("ok", "late", "excluded")  # results for which a client has worked


def choose(
    server: ServerLoop, store: RunStore, clients: Clients, query: OwnChoice, show: Callable[[int, int], None]
) -> dict[int, Tensor]:
    """Let each client choose its model, and record the choices.

    Args:
        server: the loop, after its run.
        store: where the choices are recorded.
        clients: who holds what.
        query: the query, without the clients' tasks.
        show: is called with the number of clients that have chosen, and of all.

    Returns:
        The chosen models [p] by client that are no shared ones, where the store keeps none.
    """
    done, work = recorded_choices(store.rows("note")), _work(store)
    plan, seed = server.evaluation, server.work.seed
    classes = 0 if plan.count is None else plan.count.classes
    counted = {client: query.model_copy(update={"classes": classes}) for client, _ in plan.counting(server.known, seed)}
    models: dict[int, Tensor] = {}
    size = max(1, min(GROUP, stack_limit(server.work)))
    for first in range(0, len(clients), size):
        group = range(first, min(first + size, len(clients)))
        # a group is recorded whole or not at all, so its first client stands for it where a run is resumed
        if group[0] not in done:
            queries = [
                (client, _own_query(server, clients, counted.get(client, query), client, work.get(client, ())))
                for client in group
            ]
            results = {result.task.client: result for result in server.ask_for_report(queries)}
            models |= _recorded(server, store, query, group, results)
        show(group[-1] + 1, len(clients))
    return models


def _work(store: RunStore) -> dict[int, list[tuple[str, int]]]:
    """Return the training tasks that each client has worked on: `Task.rng_version`, and the steps taken."""
    attempts: dict[tuple[int, int], int] = {}
    tasks: dict[int, list[tuple[str, int]]] = {}
    rows = store.query("SELECT client, sent_version, steps, status FROM result WHERE kind = 'train' ORDER BY id")
    for row in rows:
        attempt = attempts.get(index := (row["client"], row["sent_version"]), 0)
        attempts[index] = attempt + 1
        if row["status"] in _COUNTED:
            name = f"{row['sent_version']}.{attempt}" if attempt else str(row["sent_version"])
            tasks.setdefault(row["client"], []).append((name, row["steps"] or 0))
    return tasks


def _own_query(
    server: ServerLoop, clients: Clients, query: OwnChoice, client: int, tasks: Sequence[tuple[str, int]]
) -> OwnChoice:
    rows = clients.size(client, "train") or 0
    passes = tuple(local_work(server.work.trainer_of(client), rows, steps) for _, steps in tasks)
    return query.model_copy(update={"tasks": tuple(name for name, _ in tasks), "passes": passes})


def _recorded(
    server: ServerLoop, store: RunStore, query: OwnChoice, group: Sequence[int], results: Mapping[int, Result]
) -> dict[int, Tensor]:
    """Record the choices of a group of clients; returns the chosen models that are not written to a folder."""
    notes: list[dict[str, Any]] = []
    scores: list[dict[str, Any]] = []
    counts: list[dict[str, Any]] = []
    models: dict[int, Tensor] = {}
    for client in group:
        update = results[client].update if client in results else None
        if update is None:
            value: dict[str, Any] = {"chosen": None, "why": "it gave no usable answer, so it keeps the shared model"}
        else:
            value = query.record(update.metrics, update.examples)
            scores += _scores(server, query, client, value)
            if (matrix := update.vectors.get("confusion")) is not None and query.split is not None:
                counts += counted(server.version, client, "chosen", query.split, matrix)
            if query.is_new(value["chosen"]):
                models[client] = update.vectors["model"]
        notes.append({"axis": CHOICE_AXIS, "cluster": 0, "name": f"client-{client}", "value": value})
    if store.path is not None:
        for client, model in models.items():
            write_chosen_model(store.path, client, model)
    store.scores(scores)
    store.confusion(counts)
    # last, since they mark the group as done: a run that is killed before them asks it again
    store.add_notes(notes)
    return {} if store.path is not None else models


def _scores(server: ServerLoop, query: OwnChoice, client: int, choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of the table `score` that judge the chosen model."""
    judged, split = choice.get("judged"), query.split
    if judged is None or split is None:
        return []
    key = {"version": server.version, "client": client, "model": "chosen", "split": split}
    rows = judged["chosen"].items()
    return [key | {"metric": name, "value": value, "examples": judged["rows"]} for name, value in rows]


_SIZES = ("side", "channels", "seconds", "rate")  # of images and recordings


def from_file(
    source: str,
    target: str | None,
    meta: Mapping[str, Any],
    validation: float = 0.2,
    test: float = 0.2,
    plugins: Sequence[str] = (),
) -> Clients:
    """A newcomer's rows as a client, read in the same way as the data of the run that `meta` describes.

    Args:
        source: see `DataSource.source`; a folder has one folder for each class.
        target: the column of a table to predict, by default the one of the run.  The inputs are the run's features, or
            else all other columns in the order of the file, without the run's client column.
        meta: the description of the run.
        validation, test: the shares of validation and test rows.
        plugins: modules of the user's that the run may name, see `piebald.resume`.

    Raises:
        SettingError: the rows cannot be read, or have unexpected content.
    """
    settings = of_folder("", plugins).mark(meta.get("settings") or {})
    about, extractor = settings.get("data") or {}, settings.get("extractor")
    # those of a named data set are in the form of its rows
    sizes = {name: about[name] for name in _SIZES if name in about and about.get("source") is not None}
    given = DataSource(source=USERS.mark(source), **sizes)
    if Path(source).is_dir():
        # an extractor reads images as the run's data have them, and hides their shape
        given = given if extractor is not None else given.of_shape(pytree.form(blank_row(meta["rows"]).x))
    elif Path(source).suffix != ".npz":
        given = given.model_copy(update={"client": about.get("client")})
    as_written = () if meta.get("preparation") is None else Preparation(**meta["preparation"]).as_written
    newcomer = _client(given.read(as_written), source, target, about, meta, validation, test)
    return newcomer if extractor is None else embedded_by(newcomer, extractor)


def from_table(frame: Any, target: str | None, meta: Mapping[str, Any], validation: float, test: float) -> Clients:
    """Return the rows of a table as a client, which are to be prepared as those of the run that `meta` describes.

    Args:
        frame: a pandas DataFrame with the columns of the run's tables, in any order.
        target, meta, validation, test: as of `from_file`.

    Raises:
        SettingError: a column is missing, or a target is none of the run's classes.
    """
    return _client(frame, "the newcomer", target, {}, meta, validation, test)


def _client(
    content: Any, source: str, target: str | None, about: Mapping[str, Any], meta: Mapping[str, Any],
    validation: float, test: float,
) -> Clients:  # fmt: skip
    """Return rows as a client; `about` is the run's section [data]."""
    agreed = None if meta.get("preparation") is None else Preparation(**meta["preparation"])
    split = SplitSettings.of(meta.get("split"))
    content = agreed.cleaned(content) if agreed is not None and is_frame(content) else content
    owner = read_owners(content, pair=True)[0]
    if owner.name is not None or owner.clients is not None:
        return DataSource(source=source).rows_of(content)  # type: ignore[return-value]  # they are clients already
    division = _like_the_run(split, owner.columns, validation, test)
    regression, goal, features = bool(about.get("regression")), target or about.get("target"), about.get("features")
    if owner.is_table and agreed is not None:
        goal = goal or agreed.target_columns
        features = [name for name in agreed.names_in if name in owner.columns] or agreed.names_in
        regression = agreed.classes is None
    if owner.is_table and goal is None:
        raise SettingError(f"{source} is a table: name the column to predict with --target COLUMN")
    if is_frame(content):  # columns that say how rows are divided are no inputs
        gone = [name for name in split.columns if name in owner.columns and name not in division.columns]
        content = content.drop(columns=gone)
    run = RunRows(
        meta.get("classes") if agreed is None else agreed.classes,
        columns={"client": about.get("client"), "tokens": about.get("tokens")},
        prepare=None if agreed is None else PrepareSettings(),
        split=division,
    )
    named: dict[str, Any] = {"target": goal, "features": features} if owner.is_table else {}
    given = DataSource(source=source, regression=regression, **named)
    return client_among(read_owners(content, pair=True), given, "newcomer", run, division)[0]


def _like_the_run(split: SplitSettings, columns: list[str], validation: float, test: float) -> SplitSettings:
    """Return how a newcomer's rows are divided: as the run's, by those of its columns that the newcomer has."""
    group = [name for name in split.groups if name in columns] or None
    order = split.order if split.order in columns else None
    stratify = None if isinstance(split.stratify, str) and split.stratify not in columns else split.stratify
    return SplitSettings(validation=validation, test=test, seed=split.seed, group=group, order=order, stratify=stratify)
