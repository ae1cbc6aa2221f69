"""Tables on this machine as clients of a federation in the simulator, which get the questions that sites get."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from piebald.contracts import Clients, Fleet, Rows, Split
from piebald.core import pytree
from piebald.core.errors import SettingError, shown
from piebald.core.moments import Floats
from piebald.core.objective import Objective
from piebald.core.parameters import Layout
from piebald.engines.model_traits import Traits
from piebald.engines.row_loader import RowLoader
from piebald.engines.sequential import SequentialEngine
from piebald.methods.client_work import ClientWork
from piebald.methods.recipes import fedavg
from piebald.privacy import SecureAggregation
from piebald.runtimes.simulation.simulation import Simulation
from piebald.runtimes.workers.pool import InProcess
from piebald.statistics.columns import ClientColumns

_HOST = torch.device("cpu")


class TableClients:
    """Clients whose rows are on this machine, as queries take them (`contracts.Clients`).

    Args:
        names: the clients' names.
        features: the names of the columns.
        rows: the rows of each client by split, with inputs [n, columns]; no other split has any.
        coded: the categories of columns whose values are their numbers 0, 1, ...
        classes: the names of the classes, None where targets are none.
    """

    common = None

    def __init__(
        self, names: Sequence[str], features: Sequence[str], rows: Sequence[Mapping[Split, Rows]],
        coded: Mapping[str, Sequence[str]], classes: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        self.names, self.features, self.coded, self.classes = names, features, coded, classes
        self._rows = rows

    @classmethod
    def of(
        cls, tables: Sequence[ClientColumns], stated: Mapping[str, Sequence[str]] | None = None,
        most: int | None = None,
    ) -> Self:  # fmt: skip
        """Return clients with these columns, those of text as the numbers of their categories.

        Args:
            tables: the columns of each client.
            stated: categories of columns of text, which come first; others are numbered as they are sorted.
            most: of the categories of a column, None where others than the stated ones have one number together.

        Raises:
            SettingError: a column has too many categories.
        """
        names = [*tables[0].numbers, *tables[0].texts]
        # a column lies in one piece, so that a question about it reads nothing else
        tensors = [np.empty((len(names), table.rows)) for table in tables]
        coded: dict[str, Sequence[str]] = {}
        for place, name in enumerate(names):
            if name in tables[0].numbers:
                columns = [table.numbers[name] for table in tables]
            else:
                coded[name], columns = _numbered(tables, name, (stated or {}).get(name, ()), most)
            for tensor, column in zip(tensors, columns, strict=True):
                tensor[place] = column
        rows: list[Mapping[Split, Rows]] = [
            {"train": Rows(torch.from_numpy(tensor.T), torch.zeros(tensor.shape[1], 0))} for tensor in tensors
        ]
        return cls([table.name for table in tables], names, rows, coded)

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def joined(self) -> Self:
        """One client with the training rows of all, whose last column is the number of a row's client."""
        parts = [pytree.single(rows["train"].x, "statistics").numpy().T for rows in self._rows]
        owners = np.repeat(np.arange(len(parts), dtype=np.float64), [part.shape[1] for part in parts])
        x = torch.from_numpy(np.vstack([np.concatenate(parts, axis=1), owners]).T)
        rows: list[Mapping[Split, Rows]] = [{"train": Rows(x, torch.zeros(len(x), 0))}]
        return type(self)(["all clients"], [*self.features, ""], rows, self.coded)

    def values(self, name: str) -> Floats:
        """Return the different numbers of a column, sorted."""
        place = list(self.features).index(name)
        # NaN is a gap and no value, and np.unique keeps it
        values = np.unique(
            np.concatenate([pytree.single(rows["train"].x, "values")[:, place].numpy() for rows in self._rows])
        )
        return np.asarray(values[~np.isnan(values)])

    def rows(self, client: int, split: Split) -> Rows:
        """The rows of one split, the same tensors at each call."""
        held = self._rows[client]
        return held[split] if split in held else held["train"][:0]

    def size(self, client: int, split: Split) -> int:
        """Return the number of rows."""
        return len(self.rows(client, split))

    def counts(self, client: int, split: Split) -> None:
        """None: rows of classes are not counted before a question."""
        return None


def _numbered(
    tables: Sequence[ClientColumns], name: str, stated: Sequence[str], most: int | None
) -> tuple[list[str], list[Floats]]:
    """Return the categories of a column of text, and their number in each row of each client [n], NaN for none."""
    import pandas as pd

    parts = [pd.factorize(table.texts[name]) for table in tables]
    words = [*stated]
    if most is not None:
        words += sorted({str(word) for _, different in parts for word in different} - {*stated})
        if len(words) > most:
            raise SettingError(
                f"column {name!r} has {len(words):,} categories like {shown(min(words), 30)}, at most {most:,} are "
                "allowed: leave it out of the columns, or join the rare ones"
            )
    numbers = {word: float(number) for number, word in enumerate(words)}
    columns = []
    for codes, different in parts:
        # the last one is for gaps, whose code is -1
        of_words = np.array([*(numbers.get(str(word), float(len(words))) for word in different), np.nan])
        columns.append(of_words[codes])
    return words, columns


class _NoModel(nn.Module):
    """A model that a task carries, and that no question reads."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.nothing.expand(len(x))


@dataclass(frozen=True, slots=True)
class _OneProcess:
    """The settings of a simulation in this process, without a trial of a model (`SimulationSettings`)."""

    fleet: Fleet | None
    stack: int = 1
    workers: int = 0
    memory: int = 1 << 20

    def worker_pool(self, work: ClientWork, clients: Clients, room: tuple[int, int]) -> InProcess:
        traits = Traits(mixes=False, dropout=False, random=False, each=True)
        return InProcess(SequentialEngine(work, RowLoader(clients, _HOST), traits, _HOST))


@contextmanager
def simulated(
    clients: TableClients, masks: Collection[SecureAggregation] = (), fleet: Fleet | None = None
) -> Iterator[tuple[Simulation, ClientWork]]:
    """Open a federation in the simulator, whose clients answer all questions about their rows.

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
    module = _NoModel()
    layout, recipe = Layout.of(module), fedavg().with_(transforms=tuple(masks))
    shape = pytree.form(clients.rows(0, "train").x)
    # from the system's randomness: whoever could draw keys and noise of a question again could take them off
    work = ClientWork(
        module, layout, layout.flatten(module), Objective("none", lambda outputs, targets: outputs),
        secrets.randbits(63), shape, (), recipe.training, recipe.transforms, trains=False,
    )  # fmt: skip
    runtime = Simulation(_OneProcess(fleet), work, clients, secrets.token_hex(32))
    try:
        yield runtime, work
    finally:
        runtime.close()
