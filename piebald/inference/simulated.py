"""Clients who are asked, through any runtime: sites, and tables on this machine as a federation in the simulator."""

from __future__ import annotations

import itertools
import logging
import secrets
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from piebald.contracts import (
    SUM,
    ChecksSignatures,
    Clients,
    Fleet,
    Query,
    QueryRequest,
    Rows,
    Runtime,
    Split,
    SumRequest,
    Task,
    Update,
)
from piebald.contracts.data import ModelSpec
from piebald.core import pytree
from piebald.core.errors import RuntimeFault, SettingError, shown
from piebald.core.machine import HOST, count_cores, one_thread
from piebald.core.moments import Floats
from piebald.core.objective import Objective
from piebald.core.parameters import Layout
from piebald.core.plain_text import printable
from piebald.engines.model_traits import Traits
from piebald.engines.outgoing import serve
from piebald.engines.row_loader import RowLoader
from piebald.engines.sequential import SequentialEngine
from piebald.engines.stack import ClientStack, RunningSum, StackResult
from piebald.inference.columns import ClientColumns, as_text
from piebald.methods.client_work import ClientWork
from piebald.methods.recipes.fedavg import fedavg
from piebald.privacy import SecureAggregation
from piebald.privacy.secure_aggregation.key_exchange import KeyRound
from piebald.privacy.secure_aggregation.server_side import SecureRound
from piebald.runtimes.simulation.simulation import Simulation
from piebald.runtimes.workers.pool import kept_pages
from piebald.server.client_queries import ClientQueries

MOST_CATEGORIES = 10_000  # of a column that is counted


class TableClients:
    """Tables on this machine as `contracts.Clients`: columns of numbers, those of text by the numbers of categories.

    Args:
        names: the clients' names.
        features: the names of the columns.
        rows: the rows of each client by split, with inputs [n, columns]; no other split has any.
        coded: the categories of each column of text, whose numbers 0, 1, ... stand in its place.
        classes: the names of the classes, None where targets are none.

    Attributes:
        dates: the columns of dates.
    """

    common = None

    def __init__(
        self, names: Sequence[str], features: Sequence[str], rows: Sequence[Mapping[Split, Rows]],
        coded: Mapping[str, Sequence[str]], classes: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        self.names, self.features, self.coded, self.classes = names, features, coded, classes
        self._rows, self.dates = rows, frozenset[str]()

    @classmethod
    def of(
        cls, tables: Sequence[ClientColumns], stated: Mapping[str, Sequence[str]] | None = None,
        most: int | None = None, labels: Collection[str] = (),
    ) -> Self:  # fmt: skip
        """Return clients with these columns.

        Args:
            tables: the columns of each client.
            stated: categories of columns of text, which are numbered first; others follow in sorted order.
            most: categories of a column, at most; None to give all others than the stated ones one number together.
            labels: columns of text that may have any number of categories.

        Raises:
            SettingError: a column has too many categories.
        """
        names = [*tables[0].numbers, *tables[0].texts]
        # a column lies in one piece, so that a question about it reads nothing else
        arrays = [np.empty((len(names), table.rows)) for table in tables]
        coded: dict[str, Sequence[str]] = {}
        for index, name in enumerate(names):
            if name in tables[0].numbers:
                columns = [table.numbers[name] for table in tables]
            else:
                coded[name], columns = _numbered(
                    tables, name, (stated or {}).get(name, ()), sys.maxsize if name in labels else most
                )
            for array, column in zip(arrays, columns, strict=True):
                array[index] = column
        clients = cls([table.name for table in tables], names, [_training_rows(array) for array in arrays], coded)
        clients.dates = tables[0].dates
        return clients

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def joined(self) -> Self:
        """One client with the training rows of all, whose last column is the number of a row's client."""
        arrays = [pytree.single(rows["train"].x, "statistics").numpy().T for rows in self._rows]
        owners = np.repeat(np.arange(len(arrays), dtype=np.float64), [array.shape[1] for array in arrays])
        rows = _training_rows(np.vstack([np.concatenate(arrays, axis=1), owners]))
        return type(self)(["all clients"], [*self.features, ""], [rows], self.coded)

    def values(self, name: str) -> Floats:
        """Return the different numbers of a column, sorted."""
        index = list(self.features).index(name)
        columns = [pytree.single(rows["train"].x, "values")[:, index].numpy() for rows in self._rows]
        # NaN is a gap and no value, and np.unique keeps it
        values = np.unique(np.concatenate(columns))
        return np.asarray(values[~np.isnan(values)])

    def categories(self, name: str) -> tuple[str, ...]:
        """Return the different numbers of a column as categories.

        Raises:
            SettingError: there are too many.
        """
        values = self.values(name)
        if len(values) > MOST_CATEGORIES:
            raise SettingError(
                f"column {name!r} has {len(values):,} different values, which are no categories: name the columns that "
                "you want without it"
            )
        return tuple(sorted({*as_text(values).tolist()}))

    def rows(self, client: int, split: Split) -> Rows:
        """The rows of one split, the same tensors at each call."""
        splits = self._rows[client]
        return splits[split] if split in splits else splits["train"][:0]

    def size(self, client: int, split: Split) -> int:
        """Return the number of rows."""
        return len(self.rows(client, split))

    def counts(self, client: int, split: Split) -> None:
        """None: rows of classes are not counted before a question."""
        return None


def _training_rows(columns: Floats) -> dict[Split, Rows]:
    """Return columns [d, n] as training rows without targets, which share their memory."""
    return {"train": Rows(torch.from_numpy(columns.T), torch.zeros(columns.shape[1], 0))}


def _numbered(
    tables: Sequence[ClientColumns], name: str, stated: Sequence[str], most: int | None
) -> tuple[list[str], list[Floats]]:
    """Return the categories of a column of text, and their number in each row of each client [n], NaN for none."""
    import pandas as pd

    factors = [pd.factorize(table.texts[name]) for table in tables]
    words = [*stated]
    if most is not None:
        words += sorted({str(word) for _, different in factors for word in different} - {*stated})
        if len(words) > most:
            raise SettingError(
                f"column {name!r} has {len(words):,} categories like {shown(min(words), 30)}, at most {most:,} are "
                "allowed: leave it out of the columns, or join the rare ones"
            )
    numbers = {word: float(number) for number, word in enumerate(words)}
    columns = []
    for codes, different in factors:
        # the last one is for gaps, whose code is -1
        of_words = np.array([*(numbers.get(str(word), float(len(words))) for word in different), np.nan])
        columns.append(of_words[codes])
    return words, columns


class _Threads:
    """Serves stacks of questions side by side (`pool.WorkerPool`): NumPy and xgboost let other threads compute.

    What a client cannot answer about its rows ends the call, as its rows are the caller's.
    """

    def __init__(self, engine: SequentialEngine) -> None:
        self._engine, self._threads = engine, ThreadPoolExecutor(count_cores(), "piebald-questions")
        self._begun: dict[int, list[Future[StackResult]]] = {}
        self._numbers = itertools.count(1)  # 0 stands for what nobody has begun

    def begin(self, stacks: Sequence[ClientStack], costs: Sequence[float], sum_request: SumRequest | None) -> int:
        number = next(self._numbers)
        self._begun[number] = [self._threads.submit(serve, self._engine, stack) for stack in stacks]
        return number

    def collect(self, number: int) -> tuple[list[StackResult], RunningSum]:
        return [future.result() for future in self._begun.pop(number)], RunningSum()

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _OneProcess:
    """The settings of a simulation in this process, without a trial of a model (`SimulationSettings`)."""

    fleet: Fleet | None
    stack: int = 1
    workers: int = field(default_factory=count_cores)
    memory: int = 1 << 20

    def worker_pool(self, work: ClientWork, clients: Clients, room: tuple[int, int]) -> _Threads:
        traits = Traits(mixes=False, dropout=False, random=False, each=True)
        return _Threads(SequentialEngine(work, RowLoader(clients, HOST), traits, HOST))


@contextmanager
def simulated(
    clients: TableClients, masks: Collection[SecureAggregation] = (), fleet: Fleet | None = None
) -> Iterator[tuple[Simulation, ClientWork]]:
    """Open a federation in the simulator, whose clients answer questions about all of their rows.

    Args:
        clients: the clients.
        masks: the secure aggregation under which sums leave them, with 64 bits, if any.
        fleet: their devices; by default all are instant and always there.

    Raises:
        SettingError: there are too few clients for masks.
    """
    for masking in masks:
        if len(clients) < masking.least:
            raise SettingError(f"secure sums are of {masking.least} clients or more, got {len(clients)}")
    module = nn.LayerNorm(1)  # a task carries a model, though no question reads it
    layout, recipe = Layout.of(module), fedavg().with_(transforms=tuple(masks))
    shape = pytree.form(clients.rows(0, "train").x)
    # from the system's randomness: whoever could draw keys and noise of a question again could take them off
    work = ClientWork(
        module, layout, layout.flatten(module), Objective("none", lambda outputs, targets: outputs),
        secrets.randbits(63), shape, (), recipe.training, recipe.transforms, trains=False,
    )  # fmt: skip
    with one_thread(), kept_pages(), closing(
        Simulation(_OneProcess(fleet), work, clients, secrets.token_hex(32))
    ) as runtime:  # fmt: skip
        yield runtime, work


log = logging.getLogger("piebald.statistics")
NO_VECTORS: Mapping[str, Tensor] = MappingProxyType({})


class AskedSites:
    """Clients who are asked through a runtime (`contracts.AsksClients`).

    Args:
        runtime: the runtime that reaches the clients.
        spec: the model that a task carries, which the questions are not about; for sums under masks, the run's
            `ClientWork`.
        names: of the clients, by number.
        say: called with a sentence about each client that is left out.

    Attributes:
        runtime: the runtime.
        names: as given.
        left_out: why clients are left out of answers, by name.
        refused: why clients did not answer, by number; the first reason of each client.
        reasons: why clients did not answer the last question, by number.
        open_sums: the answers to the last question about sums that were no secret, by number.
    """

    def __init__(
        self, runtime: Runtime, spec: ModelSpec, names: Sequence[str] = (), say: Callable[[str], None] = log.warning
    ) -> None:  # fmt: skip
        self.runtime, self._queries = runtime, ClientQueries(runtime, spec)
        self.names, self._say = [printable(str(name)) for name in names], say
        self._work = spec.digest if isinstance(spec, ClientWork) else ""
        self._model = spec.initial[: spec.layout.shared]
        self._ids, self._version = itertools.count(), 0
        self.left_out: dict[str, str] = {}
        self.refused: dict[int, str] = {}
        self.reasons: dict[int, str] = {}
        self.open_sums: dict[int, Floats] = {}

    def query(self, requests: Sequence[QueryRequest]) -> list[Update | None]:
        """See `contracts.AsksClients`."""
        tasks = [
            Task(next(self._ids), request.client, self._version, request.vectors, request.query) for request in requests
        ]
        answers = self._queries.ask(tasks, self._version)
        rows = [row for row in self._queries.take_rows() if row["status"] != "ok"]
        self.reasons = {int(row["client"]): printable(str(row["reason"]), 200) for row in rows}
        # the first reason says why a client is left out; later ones follow from it
        self.refused = {**self.reasons, **self.refused}
        return answers

    def exclude_client(self, client: int, reason: str) -> None:
        """See `contracts.AsksClients`."""
        self.refused[client] = printable(reason, 200)

    def check_signature(self, client: int, text: bytes, signature: bytes) -> bool:
        """See `contracts.AsksClients`."""
        runtime = self.runtime
        return not isinstance(runtime, ChecksSignatures) or runtime.check_signature(client, text, signature)

    def ask(
        self, query: Query, clients: Iterable[int], vectors: Mapping[str, Tensor] = NO_VECTORS, version: int = 0
    ) -> dict[int, Update]:
        """Ask clients the same question and return the answers, by client.

        Args:
            query: the question.
            clients: the clients' numbers.
            vectors: vectors that go along besides the model.
            version: the version of the model, where questions are about several.
        """
        return self._ask(query, dict.fromkeys(clients, vectors), version)

    def leave_out(self, answered: Collection[int], asked: Collection[int] | None = None) -> None:
        """Note why clients are left out of an answer, and say so once of each.

        Args:
            answered: the numbers of those who have a part in it.
            asked: the numbers of those who were to have one; all by default.
        """
        for client in sorted({*(range(len(self.names)) if asked is None else asked)} - {*answered}):
            name = self.names[client]
            if name not in self.left_out:
                self.left_out[name] = self.refused.get(client, "it was not there")
                self._say(f"{name} is left out: {self.left_out[name]}")

    def refusal(self, sentence: str) -> SettingError:
        """Return an error that says that nobody answers, with the first reason."""
        return SettingError(f"{sentence}, the first one says: {next(iter(self.refused.values()), 'no site is there')}")

    def sums(
        self, query: Query, masking: SecureAggregation | None, vectors: Mapping[str, Tensor] = NO_VECTORS,
        version: int = 0, among: Collection[int] = (),
    ) -> tuple[list[int], Floats]:  # fmt: skip
        """Return the numbers of the clients who took part, and the sum of their answers [k] in steps.

        Args:
            query: a question about sums.
            masking: the masks under which answers come, or None where they come in the open.
            vectors: vectors that go along besides the model.
            version: the version of the model, where questions are about several.
            among: the clients who are asked; by default all.

        Raises:
            SettingError: no site answers.
            RuntimeFault: the masks cannot be taken off.
        """
        clients = [client for client in self.runtime.clients() if not among or client in among]
        self.open_sums = {}
        if masking is None:
            answers = self.ask(query, clients, vectors, version)
            if not answers:
                raise self.refusal("no site answers questions about sums")
            # float64: counts and steps are whole numbers, which it adds exactly up to 2^53
            self.open_sums = {
                client: answer.vectors[SUM].numpy().astype(np.float64) for client, answer in answers.items()
            }
            return sorted(answers), np.stack([*self.open_sums.values()]).sum(0)
        self._version = version
        # keys are agreed on for each sum: with the same masks two sums would show their difference
        about = KeyRound(version, tuple(sorted(query.rows_read(personal=False))), self._work)
        agreed = SecureRound.of(masking, clients, self, about)
        # a client without agreed keys has no masks that the others would cancel
        present = [client for client in clients if client not in agreed.absent]
        self.refused = {**agreed.absent, **self.refused}
        answers = self._ask(query, {client: {**vectors, **agreed.vectors(client)} for client in present}, version)
        total = agreed.total(answers, self) if answers else "no secure aggregation: nobody sent a sum"
        if isinstance(total, str):
            reasons = (self.refused or agreed.absent).items()
            first = "".join(f"; site {client + 1} says: {reason}" for client, reason in itertools.islice(reasons, 1))
            raise RuntimeFault(f"{total}{first}")
        # modulo 2^64 the masks have cancelled, and the sums fit 63 bits and a sign
        return sorted(answers), total.view(np.int64).astype(np.float64)

    def _ask(self, query: Query, vectors: Mapping[int, Mapping[str, Tensor]], version: int) -> dict[int, Update]:
        """Ask with vectors of each client."""
        # tasks of `query`, which key agreement calls as well, take the version from here
        self._version = version
        requests = [QueryRequest(client, query, {"model": self._model, **sent}) for client, sent in vectors.items()]
        answers = self.query(requests)
        return {client: answer for client, answer in zip(vectors, answers, strict=True) if answer is not None}
