"""A site's files: its client state, and finished training tasks until the server has saved their results.

    <folder>/
      client_state.safetensors  the client state after the last training task that the server has saved
      done-<id>.safetensors     a finished training task: its result, and the client state after it
      secrets.safetensors       keys of a secure aggregation that is under way, and how they were used

A training task that the server may still forget (it may die before its next checkpoint) does not change
`client_state.safetensors`: it is a link of the chain client_state -> done-3 -> done-5, and can be discarded or sent
again.  Each file is written under another name and renamed, so that it is complete whenever the process dies.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from piebald.contracts import MOST_REMEMBERED, Clients, shown_digest
from piebald.core import pytree
from piebald.core.errors import RuntimeFault
from piebald.core.files import UnfitFile
from piebald.core.parameters import frozen_digest
from piebald.core.private_files import write_private
from piebald.core.reading import opened_tensors
from piebald.data.clients.owner import Owner
from piebald.federation.link.wire_format import ResultBody, file_of
from piebald.federation.site.site_rows import SPLITS, UnpreparedRows
from piebald.methods.client_work import ClientWork

_STATE = "state/"
_BASE = "client_state.safetensors"

log = logging.getLogger("piebald.federation")


@dataclass(frozen=True, slots=True)
class FinishedTask:
    """A finished training task.

    Attributes:
        id: id of the task.
        digest: digest of the task's body, which differs from that of another task with the same id.
        epoch: the server process that sent the task.
        size: bytes of the result.
        rng_version: `Task.rng_version` of the task.
        steps: the optimizer steps that it took, 0 where that is hidden.
    """

    id: int
    digest: str
    epoch: str
    size: int
    rng_version: str = "0"
    steps: int = 0


class ClientStore:
    """Files of one site in one run.

    Args:
        folder: the folder, created where it does not exist.

    Raises:
        OSError: the system opens no file now; it is tried again.
        RuntimeFault: a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # not `parents=True`, which gives a new parent the default mode, for others to read
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        self._base = self._read(folder / _BASE)
        confirmed, self._trained = self._read_trained(folder / _BASE)
        self._chain: dict[int, tuple[FinishedTask, dict[str, Tensor] | None]] = {}
        for path in sorted(folder.glob("done-*.safetensors")):
            done, state = self._open(path)
            if done.id <= confirmed:  # it died between the two files: this task is in the first one already
                path.unlink()
                continue
            self._chain[done.id] = (done, state)
        # by number: as text, done-10 comes before done-9
        self._chain = dict(sorted(self._chain.items()))

    @property
    def done(self) -> list[FinishedTask]:
        """Finished training tasks, by id."""
        return [done for done, _ in self._chain.values()]

    @property
    def trained(self) -> list[tuple[str, int]]:
        """The training tasks that led to the client state: `Task.rng_version`, and the steps taken."""
        return [
            *self._trained,
            *((done.rng_version, done.steps) for done, state in self._chain.values() if state is not None),
        ]

    def state(self, before: int) -> dict[str, Tensor] | None:
        """The client state before a task of this id, None before the first training task."""
        states = [state for id, (_, state) in self._chain.items() if state is not None and id < before]
        return states[-1] if states else self._base

    def begin_with(self, state: Mapping[str, Tensor], lineage: str) -> bool:
        """Begin with the client state of another run; returns whether this one had none yet."""
        # a site that restarts must not fall back behind what it has trained in this run
        if self._base is not None or self._chain:
            return False
        write_private(self.folder / _BASE, file_of(state, {"trained": "[]", "lineage": lineage}))
        self._base = dict(state)
        return True

    def result(self, id: int) -> ResultBody:
        """The body of a result."""
        with opened_tensors(self._path(id)) as file:
            return ResultBody(file.get_tensor("result").numpy().tobytes())

    def finish(self, done: FinishedTask, result: ResultBody, state: Mapping[str, Tensor] | None) -> None:
        """Save the result of a task and the new client state (None: unchanged)."""
        # on disk before it is in `done`: what a hello lists as held must outlive this process
        self._write(done, result, state)
        self._chain[done.id] = (done, None if state is None else dict(state))

    def adopt(self, id: int, epoch: str) -> None:
        """Take a finished task as the one that another server process has sent again."""
        done, state = self._chain[id]
        done = replace(done, epoch=epoch)
        self._write(done, self.result(id), state)
        self._chain[id] = (done, state)

    def confirm(self, id: int) -> None:
        """Drop the results of this task and of all before it, which the server has saved."""
        for number in [number for number in self._chain if number <= id]:
            done, state = self._chain[number]
            if state is not None:
                trained = [*self._trained, (done.rng_version, done.steps)]
                metadata = {"id": str(number), "trained": json.dumps(trained)}
                write_private(self.folder / _BASE, file_of(state, metadata))
                self._base, self._trained = state, trained
            del self._chain[number]
            self._path(number).unlink(missing_ok=True)

    def discard(self, id: int) -> None:
        """Discard this task and all after it, with the client state that they led to."""
        # the last first, so that a crash leaves a chain without a gap
        for number in sorted((number for number in self._chain if number >= id), reverse=True):
            del self._chain[number]
            self._path(number).unlink(missing_ok=True)

    def secrets(self) -> dict[str, Tensor]:
        """The site's secrets for secure aggregation."""
        return dict(self._read(self._secrets) or {})

    def save_secrets(self, secrets: Mapping[str, Tensor]) -> None:
        """Replace the site's secrets for secure aggregation."""
        write_private(self._secrets, file_of(secrets, {}))

    # -- files

    @property
    def _secrets(self) -> Path:
        return self.folder / "secrets.safetensors"

    def _path(self, id: int) -> Path:
        return self.folder / f"done-{id}.safetensors"

    def _write(self, done: FinishedTask, result: bytes, state: Mapping[str, Tensor] | None) -> None:
        tensors = {"result": result} | {_STATE + name: tensor for name, tensor in (state or {}).items()}
        # `has_state`: a state without tensors and an unchanged one look alike in the file
        values = {"id": done.id, "digest": done.digest, "epoch": done.epoch, "has_state": state is not None}
        values |= {"rng_version": done.rng_version, "steps": done.steps}
        write_private(self._path(done.id), file_of(tensors, {"about": json.dumps(values)}))

    def _open(self, path: Path) -> tuple[FinishedTask, dict[str, Tensor] | None]:
        try:
            with opened_tensors(path) as file:
                values = json.loads(file.metadata()["about"])
                size = file.get_slice("result").get_shape()[0]
                names = [name for name in file.keys() if name.startswith(_STATE)]  # noqa: SIM118 - not a mapping
                state = {name.removeprefix(_STATE): file.get_tensor(name) for name in names}
        except (UnfitFile, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise RuntimeFault(f"{path} cannot be read: {type(error).__name__}: restore it from a backup") from None
        done = FinishedTask(
            values["id"], values["digest"], values["epoch"], size, values["rng_version"], values["steps"]
        )
        return done, state if values["has_state"] else None

    def _read(self, path: Path) -> dict[str, Tensor] | None:
        if not path.exists():
            return None
        try:
            with opened_tensors(path) as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except (UnfitFile, SafetensorError) as error:
            raise RuntimeFault(f"{path} cannot be read: {type(error).__name__}: restore it from a backup") from None

    def _read_trained(self, path: Path) -> tuple[int, list[tuple[str, int]]]:
        """The id of the last task that the server has saved, -1 before, and the tasks up to it, see `trained`."""
        if not path.exists():
            return -1, []
        with opened_tensors(path) as file:
            metadata = file.metadata() or {}
        tasks = [(str(version), int(steps)) for version, steps in json.loads(metadata.get("trained", "[]"))]
        return int(metadata.get("id", -1)), tasks


FILE = "row-values.safetensors"
MOST_VALUES = 1 << 20  # of a run: nothing is remembered of more rows, whose standard errors are small in any case
_BITS = 48  # of a number, which a float holds exactly


class RowMemory:
    """The values of rows under the last runs, in a file that only the site reads.

    Args:
        path: the file; without it values are remembered as long as this object.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        # by number, the oldest first: the rows and the run that they are of, their name, and the values [n]
        self._entries: dict[int, tuple[str, str, str, Tensor]] = {} if path is None else _read(path)

    def remember(self, rows: str, run: str, vectors: Mapping[str, Tensor]) -> tuple[dict[str, int], dict[int, Tensor]]:
        """Remember values of rows under a run, in place of those that it had before.

        Values that are already remembered of the same rows keep their number.

        Args:
            rows: digest of the rows and of what is measured.
            run: digest of the run's terms.
            vectors: the values [n], by name.

        Returns:
            The numbers by name, and all values of these rows that are remembered, by number, the newest first.

        Raises:
            OSError: they cannot be written.
        """
        numbers = {}
        for name, vector in vectors.items():
            if len(vector) > MOST_VALUES:
                continue
            same = (n for n, (of, *_, held) in self._entries.items() if of == rows and torch.equal(held, vector))
            number = next(same, secrets.randbits(_BITS))
            before = [n for n, (*source, _) in self._entries.items() if source == [rows, run, name] and n != number]
            for old in [*before, number]:
                # its own number as well: what is added anew below becomes the newest, and the oldest are dropped
                self._entries.pop(old, None)
            self._entries[number] = rows, run, name, vector.detach().cpu()
            numbers[name] = number
        self._entries = dict([*self._entries.items()][-MOST_REMEMBERED:])
        if self._path is not None:
            sources = {str(number): [*entry[:3]] for number, entry in self._entries.items()}
            tensors = {str(number): entry[3].contiguous() for number, entry in self._entries.items()}
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            write_private(self._path, file_of(tensors, {"sources": json.dumps(sources)}))
        newest_first = reversed(self._entries.items())
        return numbers, {number: vector for number, (of, *_, vector) in newest_first if of == rows}


def _read(path: Path) -> dict[int, tuple[str, str, str, Tensor]]:
    """Return what a file holds; nothing where it cannot be read, since comparisons do without it."""
    if not path.exists():
        return {}
    try:
        with opened_tensors(path, links=False) as file:
            sources = json.loads(file.metadata()["sources"])
            return {
                int(number): (str(rows), str(run), str(name), file.get_tensor(number))
                for number, (rows, run, name) in sources.items()
            }
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s cannot be read (%s): no run is compared with earlier ones by row", path, type(error).__name__)
        return {}


def work_digest(work: ClientWork) -> str:
    """Return the digest of a run as a site has rebuilt it from the terms: of the model, and what is done with it."""
    objective = work.objective
    values = {
        "model": [repr(work.model), frozen_digest(work.model)],
        "layout": [[slot.name, *slot.shape] for slot in work.layout.slots],
        "private": sorted(work.layout.private),
        "objective": [objective.name, repr(objective.domain), *objective.metrics],
        "components": [work.trainer.table(), *(transform.table() for transform in work.transforms)],
        "queries": [None if query is None else query.table() for query in (work.own_query, work.choice)],
        "form": [pytree.plain(work.shape), work.outputs, work.seed, work.public_rows, work.public_digest],
        "asked": [work.questions, work.trains, work.weighted],
    }  # fmt: skip
    return shown_digest(values, {"initial": work.initial}).hex()


def site_rows_digest(clients: Clients, client: int) -> str:
    """Return the digest of a client's rows as the run's questions see them, prepared by its terms."""
    # before they are prepared, the run's questions see tables and the rows are blank
    tables = [clients.table(client, split) for split in SPLITS] if isinstance(clients, UnpreparedRows) else []
    return Owner(None, clients).fingerprint(client, tables)
