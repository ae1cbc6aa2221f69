"""Clients that are held out of a run until its end, and what each client chooses then.

The choices are notes of the run's last step, one for each client, and the chosen models that are no shared ones lie
beside them as `chosen-<client>.safetensors`.  Clients are asked in groups that are always the same, and a group is
recorded at once, so a run that was killed meanwhile asks the groups that are missing, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from piebald.contracts import Clients, InMemory, OwnChoice, Result, Rows, Split
from piebald.contracts.data import column_names, lacked_inputs, public_rows_of
from piebald.core.errors import SettingError
from piebald.data.partition.split import unseen_numbers
from piebald.data.partition.split_settings import division_of
from piebald.engines.engine_choice import stack_limit
from piebald.methods.choice import local_work
from piebald.methods.queries.scores import counted
from piebald.server import ServerLoop
from piebald.storage.run_folder import CHOICE_AXIS, recorded_choices, write_chosen_model
from piebald.storage.store import RunStore


class ClientSubset:
    """A subset of clients, numbered from 0.

    Args:
        clients: all clients.
        chosen: the numbers of those in the subset.
    """

    def __init__(self, clients: Clients, chosen: Sequence[int]) -> None:
        self._clients, self._chosen = clients, list(chosen)
        self.names = [clients.names[number] for number in self._chosen]
        self.classes, self.common, self.division = clients.classes, clients.common, division_of(clients)
        self.features, self.target = column_names(clients)

    def __len__(self) -> int:
        return len(self._chosen)

    @property
    def public_rows(self) -> Rows | None:
        """See `contracts.HasPublicRows`."""
        return public_rows_of(self._clients)

    def lacks(self, client: int) -> frozenset[str]:
        """See `contracts.data.LacksInputs`."""
        return lacked_inputs(self._clients, self._chosen[client])

    def rows(self, client: int, split: Split) -> Rows:
        """See `contracts.Clients`."""
        return self._clients.rows(self._chosen[client], split)

    def size(self, client: int, split: Split) -> int | None:
        """See `contracts.Clients`."""
        return self._clients.size(self._chosen[client], split)

    def counts(self, client: int, split: Split) -> Sequence[int] | None:
        """See `contracts.Clients`."""
        return self._clients.counts(self._chosen[client], split)


class PooledClientSubset(ClientSubset):
    """A subset of clients whose rows are in one pool, which engines index (`contracts.InMemory`)."""

    def in_memory(self) -> bool:
        """See `contracts.InMemory`."""
        return self._pooled().in_memory()

    def pool(self) -> Rows:
        """All rows, also those of clients that were not chosen."""
        return self._pooled().pool()

    def indices(self, client: int, split: Split) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The row numbers of one split of one client."""
        return self._pooled().indices(self._chosen[client], split)

    def _pooled(self) -> InMemory:
        assert isinstance(self._clients, InMemory)
        return self._clients


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
    pooled = isinstance(clients, InMemory) and clients.in_memory()
    subset = PooledClientSubset if pooled else ClientSubset
    return subset(clients, taking_part), subset(clients, sorted(held_out))


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
        attempt = attempts.get(place := (row["client"], row["sent_version"]), 0)
        attempts[place] = attempt + 1
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
