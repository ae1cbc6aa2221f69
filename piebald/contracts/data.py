"""Contracts of what clients hold, of their devices, and of the model of a run and what it is trained for."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch

from piebald.core import pytree
from piebald.core.errors import SettingError
from piebald.core.pytree import Tree
from piebald.core.targets import Weighted
from piebald.core.tensor_store import raw

if TYPE_CHECKING:
    from torch import Tensor, nn

    from piebald.core.objective import Objective
    from piebald.core.parameters import Layout
    from piebald.core.pytree import Form


C = TypeVar("C")
R = TypeVar("R")
Split = Literal["train", "validation", "test"]


_ROW_TYPES = ("float32", "float64", "int64", "uint8", "bool")
_TRIED = 5  # candidates of a trial
_LARGEST_ROW = 1 << 28  # numbers of a row that is made up from a description

SERVER_ID = -1  # the client number of the server itself, which may hold a common test set


@dataclass(frozen=True, slots=True)
class Rows:
    """Examples of one client or one test set: inputs `x` and targets `y`, the first axis counts examples.

    Each is a tensor, or a tuple or dict of tensors with this axis in common (`pytree.Tree`).  `weight` says how much
    each row counts in a mean [n], above 0; None where all count alike.

    Examples:
        >>> import torch
        >>> rows = Rows(torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 0]))
        >>> len(rows), rows[1:].y
        (3, tensor([1, 0]))
    """

    x: Tree
    y: Tree
    weight: Tensor | None = None

    def __len__(self) -> int:
        return pytree.count(self.x)

    def __getitem__(self, index: Any) -> Rows:
        """Rows at some positions: a slice, or an array or tensor of them."""
        weight = None if self.weight is None else pytree.take(self.weight, index)
        return Rows(pytree.take(self.x, index), pytree.take(self.y, index), weight)

    @property
    def targets(self) -> Tree | Weighted:
        """The targets, with the rows' weights where they have some."""
        return self.y if self.weight is None else Weighted(self.y, self.weight)


@runtime_checkable
class HoldsRows(Protocol):
    """A holder of clients' rows: the part of `Clients` by which an object is recognized as such."""

    def rows(self, client: int, split: Split) -> Rows:
        """The rows of one split; empty where the client has none."""

    def size(self, client: int, split: Split) -> int | None:
        """Return the number of rows, or None where that is not known without fetching them."""

    def counts(self, client: int, split: Split) -> Sequence[int] | None:
        """Rows of each class, or None where that is not known without fetching them."""


class Clients(HoldsRows, Protocol):
    """The clients and their rows.  Clients are numbered from 0; their rows are fetched only when asked for.

    They may offer more: `InMemory`, `HasServerRows`, `HasPublicRows`, `RowsAtSites`.
    """

    @property
    def names(self) -> Sequence[str]:
        """A name for each client."""

    @property
    def classes(self) -> Sequence[str] | None:
        """Names of the classes, or None where targets are not classes."""

    @property
    def common(self) -> Rows | None:
        """A test set that belongs to no client, or None."""

    def __len__(self) -> int: ...


@runtime_checkable
class InMemory(Protocol):
    """Clients that share one pool of rows, so that engines can index the pool instead of fetching rows.

    All members are methods: `isinstance` evaluates properties, and reading a pool may decode every file of a data set.
    """

    def in_memory(self) -> bool:
        """Return whether the pool is in memory; False where rows stay in files until they are asked for."""

    def pool(self) -> Rows:
        """All rows."""

    def indices(self, client: int, split: Split) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Positions in the pool of one split of one client."""


@runtime_checkable
class HasServerRows(Protocol):
    """Clients that come with rows of the server, which it may train on or look at; never those of `Clients.common`."""

    @property
    def server_rows(self) -> Rows | None:
        """The rows that the server keeps for itself, or None."""


@runtime_checkable
class HasPublicRows(Protocol):
    """Clients that have some rows in common, which are not secret; never those of `Clients.common`."""

    @property
    def public_rows(self) -> Rows | None:
        """The rows that all clients have, or None."""


@runtime_checkable
class HasTables(Protocol):
    """Clients whose tables are still to be prepared."""

    def table(self, client: int, split: Split) -> Any:
        """The rows of one split as `data.preparation.answers.Table`."""


@runtime_checkable
class LacksInputs(Protocol):
    """Clients of which some lack an input that others have; their rows come without it."""

    def lacks(self, client: int) -> frozenset[str]:
        """Return the names of the inputs that a client lacks."""


@runtime_checkable
class RowsAtSites(Protocol):
    """Clients whose rows may be at their sites, and not on this machine."""

    @property
    def elsewhere(self) -> bool:
        """True if the rows are at the sites."""


@dataclass(frozen=True, slots=True)
class Device:
    """The speed and the availability of a client.  The default is instant and always available.

    Attributes:
        seconds_per_step: time of one optimizer step.
        down, up: bandwidth in bytes a second.
        latency: seconds before each transfer.
        dropout: probability that a task is lost.
        on: (start, stop) intervals in seconds when the client can be asked, or None for always.
        seconds_per_row: time to run a model over one row when a question is answered; None takes a sixtieth of a step,
            as if a step had 20 rows and forward were a third of it.

    Examples:
        >>> Device(seconds_per_step=6.0).answering(rows=20), Device(seconds_per_row=0.5).answering(rows=20)
        (2.0, 10.0)
    """

    seconds_per_step: float = 0.0
    down: float = float("inf")
    up: float = float("inf")
    latency: float = 0.0
    dropout: float = 0.0
    on: tuple[tuple[float, float], ...] | None = None
    seconds_per_row: float | None = None

    def answering(self, rows: int) -> float:
        """Seconds to run a model over some rows."""
        return rows * (self.seconds_per_step / 60 if self.seconds_per_row is None else self.seconds_per_row)


@runtime_checkable
class Fleet(Protocol):
    """The devices of a federation."""

    def device(self, client: int) -> Device:
        """The device of one client, the same at each call."""

    def available(self, clients: int, now: float) -> Sequence[int]:
        """Clients out of range(clients) that can be asked at this time, increasing; `range(clients)` itself if all
        can.
        """


def lacked_inputs(clients: Clients, client: int) -> frozenset[str]:
    """Return the names of the inputs that a client lacks, none where nobody says so."""
    return clients.lacks(client) if isinstance(clients, LacksInputs) and client != SERVER_ID else frozenset()


def rows_with_all_inputs(clients: Clients, candidates: Iterable[int]) -> Rows:
    """Return training rows of the first of some clients that lacks no input; where each of them lacks one, a row put
    together from several.

    Args:
        clients: the clients.
        candidates: those to look at; client 0 where there are none.

    Raises:
        SettingError: nobody has some input.
    """
    seen = dict[int, frozenset[str]]()
    for client in candidates:
        seen[client] = lacked_inputs(clients, client)
        if not seen[client]:
            return clients.rows(client, "train")
    if not seen:
        return clients.rows(0, "train")
    if nobody := frozenset.intersection(*seen.values()):
        raise SettingError(f"every client lacks an input ({', '.join(sorted(nobody))}): leave out what nobody uses")
    pieces = [clients.rows(client, "train")[:1] for client in seen]
    inputs = {name: leaf for piece in pieces for name, leaf in pytree.named_leaves(piece.x)}
    return Rows(inputs, pieces[0].y)


def first_passing(trial: Callable[[C], R], candidates: Iterable[C]) -> tuple[C, R]:
    """Return the first of a few candidates that a trial does not refuse, and its result: one client's rows may be odd.

    Raises:
        SettingError: that of the first one, where all are refused.
    """
    refusal = SettingError("there is nothing to try")
    for index, candidate in enumerate(itertools.islice(candidates, _TRIED)):
        try:
            return candidate, trial(candidate)
        except SettingError as error:
            refusal = error if index == 0 else refusal
    raise refusal


def without_inputs(x: Tree, names: Collection[str]) -> Tree:
    """Return inputs without those of some names."""
    return {name: leaf for name, leaf in x.items() if name not in names} if names and isinstance(x, Mapping) else x


def public_rows_of(clients: Clients) -> Rows | None:
    """The rows that all of these clients have, or None."""
    return clients.public_rows if isinstance(clients, HasPublicRows) else None


def column_names(clients: Clients) -> tuple[Sequence[str] | None, str | Sequence[str] | None]:
    """Return the names of the columns of these clients' inputs and of their targets, None where they have no names."""
    return getattr(clients, "features", None), getattr(clients, "target", None)


def rows_digest(rows: Rows | None) -> str:
    """A digest of the form and the numbers of some rows, in their order; "" for none.

    Clients compare their models' outputs row by row, so all must have the same rows in the same order.
    """
    if rows is None:
        return ""
    digest = hashlib.sha256()
    for part, tree in (("x", rows.x), ("y", rows.y), ("weight", () if rows.weight is None else rows.weight)):
        for name, leaf in pytree.named_leaves(tree):
            # type and shape as well: the same bytes may be other numbers, or divided into other rows
            digest.update(f"{part} {name} {leaf.dtype} {list(leaf.shape)}\n".encode())
            digest.update(raw(leaf))
    return digest.hexdigest()


def row_form(rows: Rows) -> dict[str, Any]:
    """Return the shape and type of the inputs and targets of one row, as JSON values that `blank_row` reads."""
    return {"x": _tree_form(rows.x), "y": _tree_form(rows.y)}


def blank_row(form: Mapping[str, Any]) -> Rows:
    """Return one row of zeros of a form that `row_form` has written.

    Raises:
        SettingError: it is none, or larger than any row.
    """
    try:
        return Rows(_blank_tree(form["x"]), _blank_tree(form["y"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError):  # also RecursionError
        raise SettingError("the form of rows is none that a run writes") from None


def _tree_form(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {"named": {str(name): _tree_form(part) for name, part in tree.items()}}
    if isinstance(tree, tuple):
        return {"several": [_tree_form(part) for part in tree]}
    return [str(tree.dtype).removeprefix("torch."), *tree.shape[1:]]


def _blank_tree(form: Any) -> Any:
    if isinstance(form, Mapping) and "named" in form:
        return {str(name): _blank_tree(part) for name, part in form["named"].items()}
    if isinstance(form, Mapping):
        return tuple(_blank_tree(part) for part in form["several"])
    kind, *shape = form
    sizes = [int(size) for size in shape]
    if kind not in _ROW_TYPES or min(sizes, default=0) < 0 or math.prod(sizes) > _LARGEST_ROW:
        raise ValueError(form)
    return torch.zeros((), dtype=getattr(torch, kind)).expand(1, *sizes)  # one number, whatever the form says


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model with everything that fixes what it computes: the same on the server and on every client.

    Attributes:
        model: the module; its own parameters are not used, `initial` is.
        layout: where each tensor lies in the flat vector, and which are shared.
        initial: [p], the parameters that the run starts from.
        objective: the loss and the metrics.
        seed: of the run.
        shape: of one input, see `pytree.Form`.  outputs: of the scores that the model returns for one input.
        public_rows: how many rows all clients have in common.  public_digest: their digest, "" where there are none.
        noise_key: in a simulation with noise, a digest of all that its results follow from, else "".
    """

    model: nn.Module
    layout: Layout
    initial: Tensor
    objective: Objective
    seed: int
    shape: Form
    outputs: tuple[int, ...]
    public_rows: int = field(default=0, kw_only=True)
    public_digest: str = field(default="", kw_only=True)
    noise_key: str = field(default="", kw_only=True)

    @property
    def noise_seed(self) -> int | str:
        """What protects is drawn from this in a simulation: two runs with other settings may not share their noise."""
        return f"{self.seed} {self.noise_key}" if self.noise_key else self.seed
