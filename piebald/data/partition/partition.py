"""The base class of partitions, which deal training rows to clients and give them test parts, and the simplest one.

A partition deals the rows of a data set to clients (`deal`).  There are two ways to make test parts:

- If the data set publishes a test part, it is dealt to clients class by class, in proportion to the training rows that
  each client has of the class, so a client is tested on its own class shares.  No test row has two holders, so a client
  with few rows of a class may get no test row of it.  `common` is the published test part (of the classes with
  holders).
- Otherwise, or if `pool` is set, or if the test part belongs to other owners, each client holds out a share of its own
  rows, spread evenly over its classes.  `common` is the union of all clients' test parts.

Rows of one group (`DataSet.groups`: windows of one recording, flows of one session) would leak from training to test,
so for partitions that scatter rows a share of the groups is held out for testing first.  A partition that learns from
the rows it deals can hold out a share of all rows first, too (`ByEmbedding.test_first`).

Numbers of rows per client: the setting `sizes` of partitions that deal rows one by one.  Client 0 gets most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from piebald.contracts.component import Component
from piebald.core.arguments import Count
from piebald.core.errors import SettingError, shown, unknown
from piebald.core.randomness import generator, key
from piebald.data.clients.convert import class_numbers
from piebald.data.clients.lists import Lists, Numbered
from piebald.data.clients.pooled_clients import PooledClients
from piebald.data.partition.data_change import DataChange, changed
from piebald.data.partition.leakage import RowKeys, three_ways
from piebald.data.partition.split import Bools, Ints, SplitSettings, folds_of, hold_out, thin

if TYPE_CHECKING:
    from numpy.random import Generator

    from piebald.data.sets.dataset import DataSet

NOBODY = -1  # the holder of a row that no client gets


class Partition(Component):
    """Base class of partitions: ways to deal the rows of a data set to clients.

    Attributes:
        seed: seed of all choices.
        validation: share of each client's rows (published test rows apart) for its validation part, in [0, 1).
        test: share of each client's rows for its test part if the data set publishes none, in [0, 1).
        pool: deal the published training and test rows as one set.
        server_rows: number of training rows that the server keeps and no client gets, in proportion from all classes;
            for methods that need a few trusted rows.
        public_rows: number of training rows that all clients have and none has for itself, in proportion from all
            classes; for methods that compare models on common rows.
        limit: use at most this many rows, drawn in proportion from classes and from training and test.
        changes: changes of some clients' rows after the partition: flipped labels, noise, blur, ...
    """

    axis = "partition"
    scatters: ClassVar[bool] = True  # rows of one owner may go to different clients

    seed: int = 0
    validation: float = Field(default=0.0, ge=0, lt=1)
    test: float = Field(default=0.2, ge=0, lt=1)
    pool: bool = False
    server_rows: int = Field(default=0, ge=0)
    public_rows: int = Field(default=0, ge=0)
    limit: int | None = Field(default=None, ge=1)
    changes: tuple[DataChange, ...] | None = None

    @model_validator(mode="after")
    def _leave_rows(self) -> Self:
        if self.validation + self.test >= 1:
            raise ValueError(
                f"validation = {self.validation} and test = {self.test} leave no rows to train on: "
                "their sum must be below 1"
            )
        return self

    def split(self, data: DataSet, division: SplitSettings | None = None) -> PooledClients:
        """Deal a data set to clients.

        Args:
            data: the data set.
            division: how each client's rows are divided, in place of `validation` and `test`.

        Raises:
            SettingError: the settings do not fit this data set, or a client would hold no row.
        """
        settings = self._division(data, division)
        keys = data.keys if data.keys is not None else keys_of(data, settings)
        train, test = self._published(data)
        amount, share = settings.validation, 0.0
        divides = bool(settings.test_amount or settings.folds) and keys.part is None
        if test is None and divides and self.holds_out_first(data):
            out = self._held_out_first(labels(data, train), settings, keys.at(train))
            train, test = train[~out], train[out]
            whole = settings.fold is not None or isinstance(settings.test_amount, int)
            # what is out already, by which the share for validation of the remaining rows is raised below
            share = float(out.mean()) if whole else settings.test_amount
        # both are taken before rows are dealt, so that they have no row in common with each other or with a client
        server_rows, train = self._set_aside(data, train, "server_rows", self.server_rows, "centre")
        public_rows, train = self._set_aside(data, train, "public_rows", self.public_rows, "public")
        client, names = self._dealt(data, train)
        lists = Lists.of(client, len(names), train)  # rows of nobody are dropped
        if not lists.sizes.all():
            empty = int(np.argmin(lists.sizes > 0))
            raise self.refuse(
                f"client {names[empty]!r} would hold no row of {len(train)}: lower clients or raise limit"
            )
        holder = None if test is None else self.follow(data, train, client, test)
        label = None if data.classes is None or class_numbers(data.y) is None else labels(data, np.arange(len(data)))
        if test is None or holder is None:
            parts = three_ways(lists, label, settings, keys, names=names)
            common = np.sort(parts["test"].values) if test is None else test
        else:
            # a share of all rows, of which some are test rows already
            rest = {"validation": amount / (1 - share) if isinstance(amount, float) else amount, "test": 0}
            parts = three_ways(lists, label, settings.with_(**rest, folds=None, fold=None), keys, names=names)
            client = np.concatenate([parts["test"].clients, holder])  # of those that do not train, and published ones
            parts["test"] = Lists.of(client, len(names), np.concatenate([parts["test"].values, test]))
            common = test[holder != NOBODY]
        clients = PooledClients(
            data.x, data.y, parts, names=names, classes=data.classes, common=common, server_rows=server_rows,
            public_rows=public_rows, division=division, features=data.features, target=data.target,
            columns=data.columns, weights=data.weights,
        )  # fmt: skip
        return changed(clients, self.changes, data.inputs) if self.changes else clients

    def _division(self, data: DataSet, division: SplitSettings | None) -> SplitSettings:
        """Return how each client's rows are divided, which this partition says itself where nothing else does."""
        if division is None:
            return SplitSettings(test=self.test, validation=self.validation, seed=self.seed)
        if twice := sorted({"test", "validation"} & self.model_fields_set):
            raise self.refuse(f"{twice[0]} is set in split: leave it out here")
        if data.test is not None and not self.pool and (division.folds or division.order or division.column):
            raise self.refuse(
                f"{data.name} has a test part of its own: set pool = true, so that split divides all rows"
            )
        return division

    def _held_out_first(self, label: Ints, division: SplitSettings, keys: RowKeys) -> Bools:
        """Choose the rows that are for testing before rows are dealt, as if all were those of one client."""
        one_client = np.zeros(len(label), dtype=np.int64)
        stratum = keys.stratum if keys.stratum is not None else None if division.stratify is False else label
        if division.folds is not None and division.fold is not None:
            folds = folds_of(one_client, division.folds, key(division.seed, "folds"), stratum, keys.group)
            return np.asarray(folds == division.fold)
        return hold_out(
            one_client, division.test_amount, key(division.seed, "together"), stratum, keys.group, keys.order
        )

    def _dealt(self, data: DataSet, rows: Ints) -> tuple[Ints, Sequence[str]]:
        """Return the value of `deal`, after a check."""
        dealt = self.deal(data, rows)
        if not isinstance(dealt, tuple) or len(dealt) != 2 or not isinstance(dealt[1], Sequence):
            raise self.refuse(f"deal must return the client of each row and the clients' names, got {shown(dealt)}")
        # partitions may come from users, whose mistakes would surface much later as wrong rows
        client, names = np.asarray(dealt[0]), dealt[1]
        if client.shape != rows.shape or client.dtype.kind not in "iu":
            got = f"{client.dtype} {list(client.shape)}"
            raise self.refuse(f"deal must return a whole number for each of {len(rows)} rows, got {got}")
        if len(client) and not NOBODY <= client.min() <= client.max() < len(names):
            span = f"{client.min()}..{client.max()}"
            raise self.refuse(f"deal must number clients from 0 to {len(names) - 1}, as many as names, got {span}")
        return client.astype(np.int64), names

    def deal(self, data: DataSet, rows: Ints) -> tuple[Ints, Sequence[str]]:
        """The client of each of these rows [n] (or `NOBODY`), and the clients' names.

        Args:
            data: the data set.
            rows: the training rows' numbers [n], increasing.
        """
        raise NotImplementedError

    def follow(self, data: DataSet, train: Ints, client: Ints, test: Ints) -> Ints | None:
        """The client of each published test row [m], or None if clients must hold out their own rows.

        Args:
            data: the data set.
            train: the training rows' numbers [n].
            client: their clients [n].
            test: the test rows' numbers [m].
        """
        return follow_classes(labels(data, train), client, labels(data, test), self.generator("follow"))

    def holds_out_first(self, data: DataSet) -> bool:
        """Return whether test rows are held out before the others are dealt, if the data set publishes no test part."""
        return data.groups is not None and self.scatters

    def strata(self, data: DataSet) -> Ints:
        """The stratum of each row of the data set, for `limit`, which keeps strata in proportion."""
        return labels(data, np.arange(len(data)))

    def refuse(self, reason: str) -> SettingError:
        """An error about this partition."""
        return SettingError(f"partition {self.kind!r}: {reason}")

    def class_labels(self, data: DataSet, rows: Ints) -> tuple[Ints, int]:
        """The class of each row [n] and the number of classes, for partitions that need classes.

        Raises:
            SettingError: the targets of this data set are not classes.
        """
        if data.classes is None or class_numbers(data.y) is None:
            raise self.refuse(f"{data.name} has no class for each row to divide by: use iid or by_owner")
        return labels(data, rows), len(data.classes)

    def check_room(self, clients: int, rows: Ints, least: int = 1, setting: str = "least") -> None:
        """Refuse more clients than there are rows for, with `least` rows per client as `setting` says."""
        if clients * least > len(rows):
            each = "one row" if least == 1 else f"{least} rows ({setting})"
            setting_names = "clients" if least == 1 else f"clients or {setting}"
            advice = "" if self.limit is None else ", or raise limit"
            raise self.refuse(
                f"{clients} clients of at least {each} need more than the {len(rows)} rows: lower "
                f"{setting_names}{advice}"
            )

    def generator(self, *purpose: int | str) -> Generator:
        """A NumPy generator for what is drawn in `deal` or `follow`.

        It depends on the partition's seed and kind and on the words given, and on nothing else: the same settings give
        the same clients on every machine.

        Args:
            purpose: what the numbers are for.  Draw for another purpose, or for another client, with other words.
        """
        return generator(self.seed, "partition", self.kind, *purpose)

    def _published(self, data: DataSet) -> tuple[Ints, Ints | None]:
        """Training and test rows to use, increasing; no test rows if clients hold out their own."""
        rows = np.arange(len(data))
        train = rows if data.train is None else data.train
        if data.test is None:
            return np.sort(self._limited(data, train)), None
        if self.pool:
            return np.sort(self._limited(data, np.concatenate([train, data.test]))), None
        if self.limit is None or self.limit >= len(train) + len(data.test):
            return np.sort(train), np.sort(data.test)
        limited = self._limited(
            data, np.concatenate([train, data.test]), np.repeat([0, 1], [len(train), len(data.test)])
        )
        is_test = np.isin(limited, data.test)
        return np.sort(limited[~is_test]), np.sort(limited[is_test])

    def _set_aside(
        self, data: DataSet, train: Ints, setting: str, count: int, rng_key: str
    ) -> tuple[Ints | None, Ints]:
        """The rows that a setting keeps from being dealt, and those that are left."""
        if not count:
            return None, train
        if count >= len(train):
            raise self.refuse(f"{setting} must be below the {len(train)} training rows, got {count}")
        chosen = train[thin(labels(data, train), count, key(self.seed, rng_key))]
        return chosen, np.setdiff1d(train, chosen)

    def _limited(self, data: DataSet, rows: Ints, side: Ints | None = None) -> Ints:
        if self.limit is None or self.limit >= len(rows):
            return rows
        stratum = self.strata(data)[rows]
        if side is not None:
            # training and test rows are strata of their own, so that both shrink by the same share
            stratum = stratum * 2 + side
        return rows[thin(stratum, self.limit, key(self.seed, "limit"))]


def keys_of(data: DataSet, division: SplitSettings) -> RowKeys:
    """Return the keys of the rows of a data set that is no table: its groups, or owners of the kinds that are named.

    Raises:
        SettingError: settings name something else.
    """
    columns = [*division.columns, *([division.stratify] if isinstance(division.stratify, str) else [])]
    if not columns:
        return RowKeys(group=data.groups)
    if other := next((name for name in columns if name not in division.groups or name not in data.owners), None):
        raise unknown(f"kind of owners of {data.name} to divide by (split)", other, data.owners)
    codes = np.stack([data.owners[name].codes for name in division.groups])
    # some versions of NumPy return the inverse with two axes
    return RowKeys(group=np.unique(codes, axis=1, return_inverse=True)[1].reshape(-1))


def labels(data: DataSet, rows: Ints) -> Ints:
    """The class of each row [n]; all 0 if rows do not have one class each."""
    label = None if data.classes is None else class_numbers(data.y)
    return np.zeros(len(rows), dtype=np.int64) if label is None else label[rows]


def spread(label: Ints, holders: Sequence[Ints], rng: Generator) -> Ints:
    """Deal each class's rows evenly over its holders (within one row).

    Args:
        label: class of each row [n].
        holders: for each class, the clients that hold it.
        rng: random generator of the order of rows and of the holders that get one row more.

    Returns:
        The client of each row [n]; `NOBODY` for a class without holders.
    """
    client = np.full(len(label), NOBODY)
    for number, members in enumerate(holders):
        rows = np.flatnonzero(label == number)
        if len(members):
            client[rng.permutation(rows)] = rng.permutation(members)[np.arange(len(rows)) % len(members)]
    return client


def follow_classes(label: Ints, client: Ints, test_label: Ints, rng: Generator) -> Ints:
    """Deal test rows class by class, in proportion to the training rows that each client has of the class.

    Args:
        label: class of each training row [n].
        client: client of each training row [n].
        test_label: class of each test row [m].
        rng: random generator of the order of rows and of the clients whose fractions are rounded up.

    Returns:
        The client of each test row [m]; `NOBODY` for a class without training rows.
    """
    holder = np.full(len(test_label), NOBODY)
    for number in np.unique(test_label):
        members, held = np.unique(client[(label == number) & (client != NOBODY)], return_counts=True)
        rows = np.flatnonzero(test_label == number)
        if len(members):
            # Rounded cut points, so that the parts add up to all rows; clients in random order, or the same small
            # clients would be rounded up in every class.
            order = rng.permutation(len(members))
            cuts = np.floor(np.cumsum(held[order]) * (len(rows) / held.sum()) + 0.5)
            holder[rng.permutation(rows)] = members[order][np.searchsorted(cuts, np.arange(len(rows)), side="right")]
    return holder


class Sizes(Component):
    """Rows of each client."""

    axis = "sizes"

    def counts(self, clients: int, rows: int, rng: Generator) -> Ints:
        """Number of rows of each client [clients], at least 1 each and `rows` in all, or fewer if sizes are explicit.

        Raises:
            SettingError: there are too few rows.
        """
        raise NotImplementedError

    def _refuse(self, reason: str) -> SettingError:
        return SettingError(f"sizes {self.kind!r}: {reason}")


class Uniform(Sizes):
    """Equal sizes, within one row."""

    def counts(self, clients: int, rows: int, rng: Generator) -> Ints:
        return apportion(np.ones(clients), rows)


class Skewed(Sizes):
    """Right-skewed sizes, all different: sizes decrease geometrically from client to client (Metis' "skewed").

    Attributes:
        ratio: rows of the first client divided by those of the last, if there are many rows; above 1.
    """

    ratio: float = Field(default=8.0, gt=1, le=1e6)

    def counts(self, clients: int, rows: int, rng: Generator) -> Ints:
        stairs = np.arange(clients, 0, -1)  # strictly decreasing, so that the sum of both is, too
        rest = rows - int(stairs.sum())
        if rest < 0:
            raise self._refuse(
                f"{clients} clients of different sizes need {stairs.sum()} rows, got {rows}: lower clients"
            )
        weight = self.ratio ** -(np.arange(clients) / max(clients - 1, 1))
        added = np.floor(rest * weight / weight.sum()).astype(np.int64)
        # the odd rows go to the first clients, so that sizes still decrease
        added[: rest - int(added.sum())] += 1
        return np.asarray(stairs + added, dtype=np.int64)


class PowerLaw(Sizes):
    """Client k gets rows in proportion to (k + 1) ** -exponent, so few clients hold most rows (Metis: exponent 1.5).

    Attributes:
        exponent: exponent of the power law, above 0.
    """

    exponent: float = Field(default=1.5, gt=0, le=20)

    def counts(self, clients: int, rows: int, rng: Generator) -> Ints:
        return apportion(np.arange(1, clients + 1, dtype=np.float64) ** -self.exponent, rows)


class Quantity(Sizes):
    """Shares drawn from a Dirichlet distribution, the largest first (quantity skew of Li, Diao, Chen, He 2022).

    Attributes:
        alpha: concentration, above 0; 0.1 gives most rows to few clients, 100 nearly equal sizes.
    """

    alpha: float = Field(gt=0, le=1e6)

    def counts(self, clients: int, rows: int, rng: Generator) -> Ints:
        # Logarithms of gamma variates (Marsaglia, Tsang 2000, section 6), which do not underflow where alpha is tiny.
        # 1 - u is never 0, as u may be, so its logarithm is finite
        log = np.log(rng.standard_gamma(self.alpha + 1, clients)) + np.log1p(-rng.random(clients)) / self.alpha
        # a common factor cancels in `apportion`, and the largest weight becomes 1
        return apportion(np.sort(np.exp(log - log.max()))[::-1], rows)


class Explicit(Sizes):
    """Sizes as listed; rows that are left over get no client.

    Attributes:
        rows: number of rows of each client, at least 1 each.
    """

    rows: tuple[Count, ...] = Field(min_length=1)

    def counts(self, clients: int, rows: int, rng: Generator) -> Ints:
        if len(self.rows) != clients:
            raise self._refuse(f"rows must have a number for each of the {clients} clients, got {len(self.rows)}")
        if sum(self.rows) > rows:
            raise self._refuse(f"rows add up to {sum(self.rows)}, and there are {rows} rows to train on: lower them")
        return np.array(self.rows, dtype=np.int64)


def apportion(weight: NDArray[np.float64], rows: int) -> Ints:
    """Whole numbers [n] of at least 1 that add up to `rows`, in proportion to weights (largest remainders).

    Raises:
        SettingError: fewer rows than there are weights.
    """
    n = len(weight)
    if rows < n:
        raise SettingError(f"{n} clients of at least one row need more than the {rows} rows: lower clients")
    least = np.zeros(n, dtype=bool)
    while True:  # clients that would get less than one row get one, and the others share the rest
        # no weight is left where all clients get the least, and tiny ones may have underflowed to 0
        scale = (rows - least.sum()) / max(float(weight[~least].sum()), np.finfo(float).tiny)
        share = np.where(least, 1.0, weight * scale)
        below = (share < 1) & ~least
        if not below.any():
            break
        least |= below
    # a share that rounding left just below a whole number counts as it
    counts = np.floor(share + 1e-9).astype(np.int64)
    # ties go to the first clients, so equal weights give the same counts on every machine
    counts[np.argsort(-(share - counts), kind="stable")[: rows - int(counts.sum())]] += 1
    return counts


class Iid(Partition):
    """Shuffled rows in equal portions (within one row), the IID partition of McMahan et al. 2017, section 3.

    Attributes:
        clients: number of clients.
        sizes: number of rows of each client; equal by default.

    Examples:
        >>> import piebald as pb
        >>> pb.partition.Iid(clients=4).split(pb.data.digits())
        <4 clients: 1437 train, 0 validation, 360 test rows of [1, 8, 8], 10 classes>
    """

    clients: int = Field(ge=1)
    sizes: Sizes | None = None

    def deal(self, data: DataSet, rows: Ints) -> tuple[Ints, Sequence[str]]:
        """The client of each row [n], and names."""
        self.check_room(self.clients, rows)
        rng = self.generator("deal")
        client = np.full(len(rows), NOBODY)
        shuffled = rng.permutation(len(rows))
        if self.sizes is None:
            client[shuffled] = np.arange(len(rows)) % self.clients
        else:
            # explicit sizes may be fewer rows than there are: the rest stays with nobody
            holder = np.repeat(np.arange(self.clients), self.sizes.counts(self.clients, len(rows), rng))
            client[shuffled[: len(holder)]] = holder
        return client, Numbered(self.clients)
