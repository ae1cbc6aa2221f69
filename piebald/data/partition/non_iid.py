"""Non-IID(x): every client holds x classes, and classes are held by several clients."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from piebald.core.errors import shown
from piebald.data.clients.lists import Numbered
from piebald.data.partition.partition import NOBODY, Partition, Sizes, Uniform, spread
from piebald.data.partition.split import Bools, Ints

if TYPE_CHECKING:
    from numpy.random import Generator

    from piebald.data.sets.dataset import DataSet

_SECONDS = 60.0  # for a program that chooses classes


class NonIid(Partition):
    """Every client holds exactly `classes_each` classes: Metis' Non-IID(x) (Stripelis, Ambite 2020, section VI).

    The classes are drawn at random such that each class has the same number of holders (within one); a class's rows are
    dealt evenly over its holders.

    With `sizes` or with more than one number in `classes_each`, as in the paper's power law and Non-IID(8x1,4x1,3x8),
    clients get as many rows as `sizes` says (equal by default) and their classes in portions as even as that allows.
    Clients choose their classes in order, always those with the most rows left; where that leaves somebody without
    enough rows, a mixed-integer program chooses, which finds a choice wherever there is one.

    The paper's notation fixes the number of classes of each client, but not which ones.  To reproduce a printed
    pattern, list the classes of each client in `held`.

    Attributes:
        clients: number of clients.
        classes_each: number of classes of each client: a number, one for each client, or groups as text, "8x1,4x1,3x8"
            (8 classes for 1 client, 4 for 1, 3 for 8).
        held: instead of `classes_each`, the class numbers of each client.
        sizes: number of rows of each client.

    Examples:
        >>> import piebald as pb
        >>> clients = pb.partition.NonIid(clients=5, classes_each=2).split(pb.data.digits())
        >>> [sum(rows > 0 for rows in clients.counts(client, "train")) for client in range(5)]
        [2, 2, 2, 2, 2]
    """

    clients: int = Field(ge=1)
    classes_each: int | str | tuple[int, ...] | None = None
    held: tuple[tuple[int, ...], ...] | None = None
    sizes: Sizes | None = None

    @model_validator(mode="after")
    def _check(self) -> NonIid:
        if (self.classes_each is None) == (self.held is None):
            raise ValueError("either classes_each or held must be given, and not both")
        name = "classes_each" if self.held is None else "held"
        each = self._each()
        if len(each) != self.clients:
            raise ValueError(
                f"{name} says how many classes for {len(each)} clients but clients is {self.clients}: "
                f"give one {'number' if self.held is None else 'list'} for each client"
            )
        if min(each) < 1:
            raise ValueError(f"{name} must give each client at least 1 class, got {min(each)}")
        for client, classes in enumerate(self.held or ()):
            if len(set(classes)) < len(classes) or min(classes) < 0:
                raise ValueError(
                    f"held must list different classes, numbered from 0, got {classes} for client {client}"
                )
        return self

    def _each(self) -> Sequence[int]:
        """Return the number of classes of each client."""
        if self.held is not None:
            return [len(classes) for classes in self.held]
        if isinstance(self.classes_each, int):
            return [self.classes_each] * self.clients
        if not isinstance(self.classes_each, str):
            return self.classes_each or ()
        groups = re.findall(r"(\d+)x(\d+)", self.classes_each)
        # `findall` skips what does not match, so only a text that its groups give back in full is accepted
        if ",".join("x".join(group) for group in groups) != self.classes_each.replace(" ", ""):
            raise ValueError(
                f"classes_each must be a number, a list or groups like '8x1,4x1,3x8', got {shown(self.classes_each)}"
            )
        return [int(number) for number, times in groups for _ in range(int(times))]

    def deal(self, data: DataSet, rows: Ints) -> tuple[Ints, Sequence[str]]:
        """The client of each row [n], and names."""
        label, classes = self.class_labels(data, rows)
        each = self._each()
        if max(each) > classes:
            raise self.refuse(f"classes_each must be at most the {classes} classes of {data.name}, got {max(each)}")
        if self.held is None and sum(each) < classes:
            raise self.refuse(
                f"{self.clients} clients of {self.classes_each} classes cannot hold the {classes} classes of "
                f"{data.name}: raise clients or classes_each"
            )
        rng = self.generator("deal")
        if self.sizes is not None or not isinstance(self.classes_each, int):
            return self._deal_sizes(label, np.array(each), classes, rng), Numbered(self.clients)
        held = _draw(self.clients, self.classes_each, classes, rng)
        order = np.argsort(held.ravel(), kind="stable")
        cuts = np.searchsorted(held.ravel()[order], np.arange(1, classes))
        # a place in the flat array over `classes_each` is the client's number
        holders = np.split(order // self.classes_each, cuts)
        for number, (members, count) in enumerate(zip(holders, np.bincount(label, minlength=classes), strict=True)):
            # a holder without a row of it would not hold as many classes as asked for
            if len(members) > count:
                raise self.refuse(
                    f"class number {number} has {count} rows for its {len(members)} holders: "
                    f"lower clients or classes_each" + ("" if self.limit is None else ", or raise limit")
                )
        return spread(label, holders, rng), Numbered(self.clients)

    def _deal_sizes(self, label: Ints, each: Ints, classes: int, rng: Generator) -> Ints:
        """The client of each row [n], with the sizes asked for."""
        stock = np.bincount(label, minlength=classes)
        self.check_room(self.clients, label)
        listed = None if self.held is None else self._as_held(classes)
        rows = len(label) if listed is None else int(stock[listed.any(0)].sum())  # the others get no client
        sizes = (self.sizes or Uniform()).counts(self.clients, rows, rng)
        held = pattern(each, sizes, stock, rng) if listed is None else listed
        counts = fill(held, sizes, stock)  # None only if no counts exist, since the flow is exact
        if counts is None and listed is None:
            counts = self._solved(each, sizes, stock, rng)
        if counts is None:
            raise self.refuse(
                f"rows of {classes} classes cannot be dealt to sizes {sizes.max()} to {sizes.min()} with these "
                "lists of classes: give the largest clients more classes, or sizes that differ less"
            )
        client = np.full(len(label), NOBODY)
        for number in range(classes):
            dealt = rng.permutation(np.flatnonzero(label == number))[: counts[:, number].sum()]
            client[dealt] = np.repeat(np.arange(self.clients), counts[:, number])
        return client

    def _solved(self, each: Ints, sizes: Ints, stock: Ints, rng: Generator) -> Ints:
        """Return the rows of each class for each client [clients, classes], of any choice of classes that has some.

        Raises:
            SettingError: there is no such choice.
        """
        try:
            held, _ = solve_pattern(each, sizes, stock, rng)
            counts = None if held is None else fill(held, sizes, stock)
            if counts is not None:
                return counts
            nearest, numbers = solve_pattern(each, sizes, stock, rng, change=True)
        except TimeoutError:
            raise self.refuse(
                f"no choice of classes was found within {_SECONDS:.0f} seconds: lower clients, or list classes in held"
            ) from None
        start = f"rows of {len(stock)} classes cannot be dealt to sizes {sizes.max()} to {sizes.min()} with "
        if nearest is None:
            raise self.refuse(f"{start}any classes_each: sizes must be at least 1, and no more than there are rows")
        places = np.flatnonzero(numbers != each)
        changes = [f"{numbers[place]} instead of {each[place]} for client number {place}" for place in places[:5]]
        more = f", and {len(places) - 5} more" if len(places) > 5 else ""
        raise self.refuse(
            f"{start}these classes_each, whichever classes are chosen: the smallest change that makes it possible is "
            f"{', '.join(changes)}{more}"
        )

    def _as_held(self, classes: int) -> Bools:
        """Return the classes of each client [clients, classes], as `held` lists them."""
        lists = self.held or ()
        most = max(max(classes_held) for classes_held in lists)
        if most >= classes:
            raise self.refuse(f"held must name classes in 0..{classes - 1}, got {most}")
        held = np.zeros((self.clients, classes), dtype=bool)
        for client, classes_held in enumerate(lists):
            held[client, list(classes_held)] = True
        return held


def _draw(clients: int, each: int, classes: int, rng: Generator) -> Ints:
    """Distinct classes for each client [clients, each], every class equally often (within one).

    Clients take the next `each` classes of a random order of all classes, which starts over at its end; a new order is
    drawn whenever the end falls between two clients, so no client takes classes of two orders.
    """
    block = classes // np.gcd(classes, each)  # clients from one shuffling to the next
    orders = np.argsort(rng.random((-(-clients // block), classes)), axis=1)
    client = np.arange(clients)[:, None]
    position = (client % block * each + np.arange(each)) % classes
    drawn: Ints = orders[client // block, position]
    return drawn


def pattern(each: Ints, sizes: Ints, stock: Ints, rng: Generator) -> Bools:
    """Draw the classes of each client [clients, classes]: the largest clients choose first, and take the classes with
    the most rows left.

    Args:
        each: number of classes of each client [clients], at most the number of classes.
        sizes: number of rows of each client [clients].
        stock: number of rows of each class [classes].
        rng: random generator that breaks ties.
    """
    held = np.zeros((len(each), len(stock)), dtype=bool)
    remaining = stock.astype(np.float64)
    for client in np.argsort(-sizes, kind="stable"):
        # By rows left, classes that are used up last; equal ones in random order.
        order = np.lexsort((rng.random(len(stock)), -remaining, held.any(0) & (remaining <= 0)))[: each[client]]
        held[client, order] = True
        # an even portion for each class; `fill` may deviate from it, so this may fall below 0
        remaining[order] -= sizes[client] / each[client]
    return held


def solve_pattern(
    each: Ints, sizes: Ints, stock: Ints, rng: Generator, change: bool = False
) -> tuple[Bools | None, Ints]:
    """Choose the classes of each client by a mixed-integer program, which finds them where there are any.

    Args:
        each, sizes, stock, rng: as of `pattern`.
        change: whether clients may have other numbers of classes, as few more or less in all as possible.

    Returns:
        The classes of each client [clients, classes], None where there are none, and their numbers [clients].

    Raises:
        TimeoutError: the program was not solved within a minute.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import block_array, eye_array, kron

    clients, classes = len(each), len(stock)
    pairs = eye_array(clients * classes)
    by_client = kron(eye_array(clients), np.ones((1, classes)))
    by_class = kron(np.ones((1, clients)), eye_array(classes))
    room = np.minimum(sizes[:, None], stock[None]).ravel()
    # variables: whether a client holds a class, its rows of it, classes more and less than asked for
    matrix = block_array([
        [by_client, None, -eye_array(clients), eye_array(clients)],
        [None, by_client, None, None],
        [None, by_class, None, None],
        [-pairs, pairs, None, None],  # a row at least of a class that is held
        [pairs.multiply(room[None]), -pairs, None, None],  # and none of others
    ])  # fmt: skip
    nothing = np.zeros(clients * classes)
    lowest = np.concatenate([each, sizes, np.zeros(classes), nothing, nothing])
    highest = np.concatenate([each, sizes, stock, np.full(2 * len(nothing), np.inf)])
    most = np.full(2 * clients, classes if change else 0)
    # costs choose among patterns at random: the first one that is found is taken, unless changes are to be few
    cost = np.concatenate([nothing if change else rng.uniform(1, 2, len(nothing)), nothing, np.ones(2 * clients)])
    solution = milp(
        cost, constraints=LinearConstraint(matrix.tocsr(), lowest, highest),
        integrality=np.concatenate([np.ones(len(nothing)), nothing, np.ones(2 * clients)]),
        bounds=Bounds(0, np.concatenate([np.ones(len(nothing)), room, most])),
        options={"mip_rel_gap": 0.0 if change else 1.0, "time_limit": _SECONDS},
    )  # fmt: skip
    if solution.status == 1:  # the time was up
        raise TimeoutError
    if solution.x is None:
        return None, each
    # the solver's whole numbers are whole within a tolerance only
    held: Bools = solution.x[: len(nothing)].reshape(clients, classes) > 0.5
    return held, held.sum(1)


def fill(held: Bools, sizes: Ints, stock: Ints) -> Ints | None:
    """Rows of each class for each client [clients, classes]: at least one where it holds the class, none elsewhere.

    As even as sizes and stock allow (iterative proportional fitting), rounded by a maximum flow.

    Args:
        held: which classes each client holds [clients, classes].
        sizes: number of rows of each client [clients].
        stock: number of rows of each class [classes].

    Returns:
        The counts, or None where no such counts exist.
    """
    ones = held.astype(np.int64)  # each pair gets one row first; the rest is fitted
    # a class that nobody holds has no room, or its rows would count as available below
    row, column = sizes - ones.sum(1), np.where(held.any(0), stock - ones.sum(0), 0)
    if row.min() < 0 or column.min() < 0 or row.sum() > column.sum():
        return None
    # sizes may sum up to less than the stock: then all classes give the same share of what is left
    fitted = _proportions(held, row, column * (row.sum() / max(int(column.sum()), 1)))
    # The flow adds what rounding down has left.  If that does not fit, it deals all rows, less evenly.
    for start in (np.floor(fitted + 1e-9).astype(np.int64), np.zeros_like(ones)):
        open_rows, open_columns = row - start.sum(1), column - start.sum(0)
        if open_rows.min() < 0 or open_columns.min() < 0:
            continue
        flow = _flow(held, open_rows, open_columns)
        if int(flow.sum()) == int(open_rows.sum()):
            counts: Ints = ones + start + flow
            return counts
    return None


def _proportions(held: Bools, row: Ints, column: NDArray[np.float64], passes: int = 300) -> NDArray[np.float64]:
    """Numbers where `held`, with these sums of rows and columns, if there are any (Deming, Stephan 1940)."""
    tiny = 1e-100  # such small numbers only shrink: the pattern cannot have these sizes, which the flow will find
    x = held.astype(np.float64)
    for _ in range(passes):
        x *= (column / np.maximum(x.sum(0), tiny))[None]
        x *= (row / np.maximum(x.sum(1), tiny))[:, None]
        if np.abs(x.sum(0) - column).max() < 1e-6:
            break
    return x


def _flow(held: Bools, row: Ints, column: Ints) -> Ints:
    """The most whole rows [clients, classes] that can be dealt inside these limits."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    clients, classes = held.shape
    edges = np.zeros((clients + classes + 2, clients + classes + 2), dtype=np.int32)
    source, sink = clients + classes, clients + classes + 1
    edges[source, :clients], edges[clients : clients + classes, sink] = row, column
    edges[:clients, clients : clients + classes] = np.where(held, np.minimum(row[:, None], column), 0)
    flow = maximum_flow(csr_array(edges), source, sink).flow.toarray()
    dealt: Ints = np.maximum(flow[:clients, clients : clients + classes], 0).astype(np.int64)
    return dealt
