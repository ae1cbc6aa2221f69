"""Clients from your own data: arrays, torch data sets, tables in memory or in files, Hugging Face data sets, and
`flwr-datasets` partitioners.

Clients whose rows are items of torch data sets, read when they are needed; they implement `contracts.Clients`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch

from piebald.contracts import Clients, HoldsRows, Rows, Split
from piebald.core import pytree
from piebald.core.arguments import Count, Share, checked, checked_class
from piebald.core.errors import SettingError
from piebald.core.targets import IGNORED
from piebald.data.clients.client_tables import ClientTable, Reading, from_frame, from_frames, from_hub
from piebald.data.clients.convert import Collate, floats, kind, lengths_of, target_arrays
from piebald.data.clients.lists import Lists
from piebald.data.clients.owner import ALLOWED, Owner, different_names, given, is_table_path, read_owners
from piebald.data.clients.pairs import from_pairs, looking_alike, pair
from piebald.data.clients.pooled_clients import LazyClients, PooledClients, warn_of_codings
from piebald.data.clients.prepared import PreparedClients, prepared
from piebald.data.partition.leakage import RowKeys, three_ways
from piebald.data.partition.split import Ints, SplitSettings
from piebald.data.preparation.columns import are_classes, factorized, in_order
from piebald.data.preparation.preparation import PrepareSettings
from piebald.data.sets.dataset import DataSet


@checked
def clients_from(
    source: Any,
    *,
    client: str | None = None,
    target: str | Sequence[str] | Mapping[str, str | float] | None = None,
    features: Sequence[str] | None = None,
    weights: str | None = None,
    test: Share = 0.2,
    validation: Share = 0.0,
    seed: int = 0,
    split: SplitSettings | Mapping[str, Any] | str | None = None,
    names: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    common: Any = None,
    regression: bool = False,
    tokens: bool = False,
    server_rows: Any = None,
    public_rows: Any = None,
    collate: Collate = "stack",
    length: Count | None = None,
    prepare: Literal["federated", "none"] | PrepareSettings | Mapping[str, Any] | None = None,
) -> PooledClients | PreparedClients:
    """Make clients from your own data.

    Inputs become float32; uint8 images ([n, h, w], which get a channel axis, or [n, channels, h, w]) and volumes ([n,
    channels, slices, h, w]) are scaled to [0, 1].
    Whole-number, boolean and text targets are classes and become int64 (text in sorted order, unless `classes` gives
    another order); real targets are numbers to predict and become float32.  Of a table or file, up to 20 different
    whole numbers are classes, by their own names, and others are numbers to predict.

    Args:
        source: a list, or a dict from client names, of (x, y) arrays or tensors, of map-style torch data sets, or of
            each client's own parts {"train": (x, y), "validation": (x, y), "test": (x, y)}; or a tuple (x, y, owner)
            with the name of each row's client; or a table with a row for each example: a pandas DataFrame, the path of
            a CSV (".csv", ".tsv", also ".gz") or Parquet file, or a Hugging Face `datasets.Dataset`; or a dict from
            client names of such tables in memory or in files; or a `flwr_datasets` partitioner that has its data set,
            whose partitions become the clients.
        client: the column of a table that names the client of each row.
        target: the column of a table to predict; or several that are predicted together, of numbers, or of labels that
            are 0 or 1 (for `loss="multilabel"`); or {"time": column, "event": column} of survival.
        features: the columns of a table to predict from, by default all others.
        weights: the column of a table that says how much each row counts in losses and scores, of finite numbers of at
            least 0; it is no input, and a row of weight 0 is left out.
        test: share of each client's rows held out for testing, in [0, 1), the same for every class; without effect,
            like `validation`, where clients come with their own parts.
        validation: share of each client's rows for validation.  A client's only row is always for training.
        seed: seed of the choice of rows.
        split: how each client's rows are divided, in place of `test`, `validation` and `seed`: a table of
            `SplitSettings`, like {"group": "patient", "test": 0.3}, or the name of a column of parts.
        names: a name for each client; from the dict or the client column by default.
        classes: names of the classes in the order of their numbers.
        common: a test set (x, y) that belongs to no client; by default the union of all clients' test rows, of those
            that lack no input.
        regression: targets are numbers to predict, also where all of them are whole.
        tokens: inputs are whole numbers for an embedding layer (token ids of a text) and become int64, not float32.
        server_rows: rows (x, y) that the server keeps for itself, for methods that need a few trusted rows.
        public_rows: rows (x, y) that all clients have and that are not secret, for methods that compare models on them.
        collate: "pad" fills up inputs and targets that are lists of sequences, and makes masks; "stack" refuses rows
            of unequal length.
        length: the length to which "pad" fills up, by default that of the longest sequence of all clients.
        prepare: how the columns of a table become inputs: "federated", the default for files, as the clients agree from
            their training rows; the settings of that (`PrepareSettings`); or "none", the default for all else, and
            beside rows of the server's or the public's, for numbers as they are.

    Raises:
        SettingError: the data cannot be used; the message names the client or the column.

    Examples:
        >>> import numpy as np
        >>> import piebald as pb
        >>> x = np.arange(8.0).reshape(4, 2)
        >>> clients = pb.clients_from({"ward a": (x, [0, 1, 0, 1]), "ward b": (x + 1, [1, 1, 0, 0])}, test=0.25)
        >>> clients
        <2 clients: 6 train, 0 validation, 2 test rows of [2], 2 classes>
        >>> clients.names
        ['ward a', 'ward b']
    """
    if length is not None and collate != "pad":
        raise SettingError(f"length is that of padded sequences: leave it out, or set collate = 'pad', got {collate!r}")
    if classes is not None and (twice := [name for name in classes if list(classes).count(name) > 1]):
        raise SettingError(f"classes must be different names, got {twice[0]!r} twice: rename one of them")
    division = _division(split, test, validation, seed)
    alone = common is None and server_rows is None and public_rows is None and not tokens
    files = list(source.values()) if isinstance(source, Mapping) else [source]
    is_file = bool(files) and all(map(is_table_path, files))
    wanted = ("federated" if is_file and alone else "none") if prepare is None else prepare
    reading = Reading(client, target, features, tokens, collate, length, division, coded=wanted != "none",
                      weights=weights)  # fmt: skip
    if not isinstance(wanted, PrepareSettings):
        wanted = PrepareSettings(**wanted) if isinstance(wanted, Mapping) else PrepareSettings()
    table = table_of(read_owners(source, client, cleaning=wanted.cleaning), reading)
    if reading.coded and table.columns is None:
        raise SettingError("prepare is for the columns of pandas tables and files, and these are arrays: leave it out")
    clients = clients_of_table(
        table, division, names=names, classes=classes, common=common, regression=regression, tokens=tokens,
        server_rows=server_rows, public_rows=public_rows, collate=collate,
    )  # fmt: skip
    clients.division = None if split is None else division
    if table.columns is None:
        return clients
    return prepared(clients, wanted, table.target or "target", origin=table.origin)


def cross_validation(
    source: Any, split: SplitSettings | Mapping[str, Any], **arguments: Any
) -> list[PooledClients | PreparedClients]:
    """Make the same clients once for each division of their rows: each fold, or each client that is held out.

    Args:
        source: see `clients_from`.
        split: `SplitSettings` with folds, or with hold_out = "each".
        arguments: the other ones of `clients_from`.

    Raises:
        SettingError: as `clients_from`, or the settings define one division alone.

    Examples:
        >>> import numpy as np
        >>> rows = {name: (np.arange(8.0).reshape(4, 2), [0, 1, 0, 1]) for name in ("north", "south")}
        >>> [clients.size(0, "test") for clients in cross_validation(rows, {"hold_out": "each"})]
        [4, 0]
    """
    settings = SplitSettings.of(split)
    if not settings.several:
        raise SettingError(
            "cross_validation needs folds, or hold_out = 'each', in split: use clients_from for one division"
        )
    names: Sequence[str] = ()
    if settings.hold_out == "each":
        names = clients_from(source, split=settings.with_(hold_out=None), **arguments).names
    return [clients_from(source, split=repeat, **arguments) for repeat in settings.repeats(names)]


def clients_of_table(
    table: ClientTable,
    division: SplitSettings,
    *,
    names: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    common: Any = None,
    regression: bool = False,
    tokens: bool = False,
    server_rows: Any = None,
    public_rows: Any = None,
    collate: Collate = "stack",
    labels: tuple[Any, Sequence[str] | None] | None = None,
    first: int = 0,
) -> PooledClients:
    """Make clients from the rows of a table; the other arguments are those of `clients_from`.

    Args:
        table: the rows.
        division: how each client's rows are divided.
        labels: the targets as numbers and the names of their classes, by default as `labelled` finds them.
        first: number of the first client in its federation.
    """
    names = different_names(table.names if names is None else names)
    y, named = labels or labelled(table, classes, regression, table.origin)
    parts = _parts(table, y if kind(y) == "whole" and y.ndim == 1 else None, division, names, first)
    whole = [client for client in range(len(names)) if not table.lacking.get(client)]
    # rows of clients that lack inputs have zeros in them, which a model would take for values
    tested = [parts["test"][client] for client in whole] if table.lacking else [parts["test"].values]
    pool = Rows(*(pytree.mapped(torch.from_numpy, tree) for tree in (table.x, y)))
    like = Rows(floats(pytree.take(pool.x, slice(1))), pool.y)
    extra = partial(_extra, like=like, classes=named, tokens=tokens, collate=collate)
    clients = PooledClients(
        pool.x,
        pool.y,
        parts,
        names=names,
        classes=named,
        # `concatenate` refuses an empty list, as where all clients lack an input
        common=np.sort(np.concatenate([*tested, np.empty(0, np.int64)])) if common is None else extra("common", common),
        server_rows=None if server_rows is None else extra("server_rows", server_rows),
        public_rows=None if public_rows is None else extra("public_rows", public_rows),
        features=table.features,
        target=table.target,
        columns=table.columns,
        weights=None if table.weights is None else torch.from_numpy(table.weights),
        lacking=table.lacking,
    )
    warn_of_codings(clients, table.target)
    return clients


def clients_of(clients: Any) -> Clients:
    """Any accepted description of clients, as `Clients`.

    Args:
        clients: clients, or a source that `clients_from` takes.

    Raises:
        SettingError: there are none, or it is a data set that is not divided yet.
    """
    if isinstance(clients, DataSet):
        raise SettingError(
            f"the data set {clients.name} is not divided among clients yet: partition it first, "
            "like partition.Iid(clients=10).split(dataset)"
        )
    accepted: Clients = cast(Clients, clients) if isinstance(clients, HoldsRows) else clients_from(clients)
    if len(accepted) == 0:
        raise SettingError("there are no clients: give at least one")
    return accepted


def labelled(
    table: ClientTable, classes: Sequence[str] | None, regression: bool, origin: str = "the data"
) -> tuple[Any, list[str] | None]:
    """Targets as numbers, and the names of the classes where targets are classes that have a name or a number.

    Args:
        table: the rows.
        classes, regression: see `clients_from`.
        origin: the source of the rows, for messages.

    Raises:
        SettingError: targets cannot be used, or are names of classes and not numbers to predict.
    """
    y, named = _labelled(table, classes, regression, origin)
    if classes is None:  # names of classes, as for the rows of one site, leave no doubt
        warn_of_odd_targets(y, origin, named, regression)
    return y, named


def recoded(y: Any, classes: Sequence[str], wanted: Sequence[str], origin: str) -> Any:
    """Return class numbers [n, ...] by the order of other names.

    Args:
        y: the numbers.
        classes: the names of their classes.
        wanted: the names of all classes in the order of the new numbers.
        origin: see `labelled`.

    Raises:
        SettingError: a row has a class that is not among them.
    """
    if [*classes] == [*wanted]:
        return y
    is_known = y != IGNORED
    new = np.full_like(y, IGNORED)
    new[is_known] = target_arrays(np.array(classes, dtype=str)[y[is_known]], origin, wanted)
    return new


def _labelled(
    table: ClientTable, classes: Sequence[str] | None, regression: bool, origin: str
) -> tuple[Any, list[str] | None]:
    if regression:
        if classes is not None:
            raise SettingError("regression predicts numbers, which have no classes: leave out one of both")
        got = kind(table.y) if table.words is None else "text"
        if got not in ("whole", "real"):
            raise SettingError(f"regression needs targets of numbers, got {got} targets in {origin}")
        return target_arrays(table.y.astype(np.float32), origin), None
    if table.words is not None:
        names = [*(classes or in_order(table.words))]
        return target_arrays(np.array(table.words, dtype=str), origin, names)[table.y], [*map(str, names)]
    named, y = classes or table.classes or (in_order(table.y.tolist()) if kind(table.y) == "text" else None), table.y
    if isinstance(table.target, str) and table.classes is None and kind(y) in ("whole", "real"):
        named, y = _of_numbers(table.target, y, classes, origin)
    y = target_arrays(y, origin, named)
    if named is None and kind(y) == "whole":
        named = [str(number) for number in range(int(y.max()) + 1)]
    return y, None if named is None or kind(y) != "whole" else [str(name) for name in named]


def _of_numbers(target: str, y: Any, classes: Sequence[str] | None, origin: str) -> tuple[Sequence[str] | None, Any]:
    """Return the names of the classes, None for amounts, and the targets of a column of numbers, classes by number.

    Args:
        target: the column.
        y: its numbers [n].
        classes: the names of all classes, None where they are not given.
        origin: see `labelled`.
    """
    import pandas as pd

    numbers, known = y.astype(np.float64), y != IGNORED
    if classes is None and not are_classes(numbers[known]):
        if kind(y) == "whole":
            _log.warning(
                "%s: target %r has %d different whole numbers, which are taken as amounts: name the classes in classes "
                "if they are numbers of classes", origin, target, len(np.unique(y)),
            )  # fmt: skip
        return None, numbers
    codes, words = factorized(pd.Series(np.where(known, numbers, np.nan)))
    if classes is not None and not {*words} <= {*classes}:  # they are numbers of classes
        return classes, y if (numbers != np.round(numbers)).any() else y.astype(np.int64)
    named = in_order(words) if classes is None else list(classes)
    if kind(y) == "real":
        _log.warning(
            "%s: target %r has %s, which are taken as classes: set regression = true if they are amounts", origin,
            target, _some(named),
        )  # fmt: skip
    # the last one is for gaps, whose code is -1
    return named, np.array([*map(named.index, words), IGNORED])[codes]


def _parts(
    table: ClientTable, label: Ints | None, division: SplitSettings, names: Sequence[str], first: int
) -> dict[Split, Lists]:
    """Each client's train, validation and test rows: its own, or chosen at random."""
    keys = table.keys
    if keys is None:
        if division.columns or isinstance(division.stratify, str):
            name = next(iter((*division.columns, division.stratify)))
            raise SettingError(f"split names the column {name!r}, and these rows are in no table: leave it out")
        keys = RowKeys(part=table.split)
    if table.split is not None:  # only what names clients counts
        if division.folds or division.columns:
            raise SettingError(
                "split divides rows, and these clients come with parts of their own: leave out one of both"
            )
        division = division.with_(validation=0, test=None)
    lists = Lists.of(table.client, len(table.names))
    return three_ways(lists, label, division, keys, names=names, first=first)


def _division(split: Any, test: float, validation: float, seed: int) -> SplitSettings:
    """Return how rows are divided, which is said in one place alone."""
    if split is None:
        return SplitSettings(test=test, validation=validation, seed=seed)
    for name, value, default in (("test", test, 0.2), ("validation", validation, 0.0), ("seed", seed, 0)):
        if value != default:
            raise SettingError(f"{name} belongs into split, where that is given: split={{'{name}': {value!r}, ...}}")
    return SplitSettings.of(split)


def table_of(owners: Sequence[Owner], reading: Reading) -> ClientTable:
    """Return the rows of owners as one table.

    Args:
        owners: who gave rows, none of them `Clients`.
        reading: what is taken of them.

    Raises:
        SettingError: columns are named of what has none, or rows cannot be used.
    """
    first = owners[0]
    if all(owner.is_frame for owner in owners):
        frames = {str(owner.name): owner.content for owner in owners}
        return from_frame(first.content, reading) if first.name is None else from_frames(frames, reading)
    if all(owner.is_hub for owner in owners):
        return from_hub(owners, reading)
    if first.clients is not None or (first.data_set is not None and reading.owned):
        raise SettingError(f"clients must come from {ALLOWED}, got {type(first.content).__name__}")
    for argument in ("client", "target", "features", "weights"):
        if first.data_set is None and getattr(reading, argument) is not None:
            raise SettingError(f"{argument} names columns of a table, and these rows are arrays: leave {argument} out")
    return from_pairs(owners, reading)


def _extra(who: str, rows: Any, *, like: Rows, classes: Sequence[str] | None, tokens: bool, collate: Collate) -> Rows:
    """Rows besides the clients', which must look like theirs."""
    x, y = pair(rows, who, tokens, lengths_of(like.x, like.y) if collate == "pad" else None)
    own = (pytree.mapped(torch.from_numpy, tree) for tree in (x, target_arrays(y, who, classes)))
    return looking_alike(Rows(floats(next(own)), next(own)), like, who)


_SEVERAL = 50  # classes: of more than that, with hardly two rows each, targets are names rather than classes

_log = logging.getLogger(__name__)


def warn_of_odd_targets(y: Any, origin: str, classes: Sequence[str] | None, amounts: bool) -> None:
    """Log a warning where targets may not be what was meant.

    Args:
        y: targets as models train on them, see `convert.targets`.
        origin: the source of the rows.
        classes: the names of all classes, None where targets are numbers to predict.
        amounts: whether the user has said that they are numbers to predict.
    """
    if (oddity := _oddity(y, classes, amounts)) is not None:
        _log.warning("%s: %s", origin, oddity)


def _oddity(y: Any, classes: Sequence[str] | None, amounts: bool) -> str | None:
    """Return a sentence about targets that look like a mistake, or None."""
    if not isinstance(y, np.ndarray) or y.ndim != 1:
        return None
    values = np.unique(y)
    if len(values) == 1:
        name = values[0] if classes is None else classes[values[0]]
        return f"all {len(y)} targets are the same, {str(name)!r}: there is nothing to learn from them"
    if not amounts and kind(y) == "real" and are_classes(y):
        return (
            f"targets are real numbers and all of them are whole ({_some(values)}), so they are predicted as amounts: "
            "give whole numbers or text to predict classes, or set regression = true if amounts are meant"
        )
    if classes is not None and len(values) > max(_SEVERAL, len(y) // 3):
        return (
            f"targets have {len(values):,} classes in {len(y):,} rows, like {_some([classes[n] for n in values[:2]])}: "
            "take another column, or set regression = true if amounts are meant"
        )
    if classes is not None and 2 * len(values) < len(classes):
        named = _some([classes[number] for number in values.tolist()])
        return (
            f"only {len(values)} of {len(classes)} classes have rows ({named}), and the model has an output for each "
            "of the others as well: number classes from 0, or give their names as text"
        )
    return None


def _some(values: Any) -> str:
    listed = [str(value) for value in values]
    return ", ".join(listed[:4]) + (", ..." if len(listed) > 4 else "")


class MapStyle(Protocol):
    """A map-style data set: it has a length, and an item (x, y) for each place."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int) -> Any: ...


@checked_class
class TorchClients(LazyClients):
    """Clients that each have a map-style data set of `torch.utils.data`, whose items are read only when needed.

    A client's training items are read when it trains, its test items when a model is evaluated on them, and those of a
    client without a task never.  Since no label is known before, items are held out at random and not class by class.
    A data set must return the same item each time: random changes belong into `augmentation`.

    Args:
        datasets: a list, or a dict from client names, of data sets of pairs (x, y).
        classes: names of the classes, None where targets are not classes.
        validation: share of each client's items for validation.
        test: share of each client's items for testing.
        seed: seed of the choice of items.
        cache: number of parts of clients that are kept in memory.
        tokens, collate, length: see `LazyClients`.

    Raises:
        SettingError: a data set is none, or has no items; later, with the client's name, if its items cannot be used.
    """

    def __init__(
        self,
        datasets: Mapping[str, Any] | Sequence[Any],
        *,
        classes: Sequence[str] | None = None,
        validation: Share = 0.0,
        test: Share = 0.2,
        seed: int = 0,
        cache: Count = 64,
        tokens: bool = False,
        collate: Collate = "stack",
        length: Count | None = None,
    ) -> None:
        named = datasets if isinstance(datasets, Mapping) else {str(n): dataset for n, dataset in enumerate(datasets)}
        if not named:
            raise SettingError("there are no clients: give at least one data set")
        for name, dataset in named.items():
            if not isinstance(dataset, torch.utils.data.Dataset) or _size(dataset) == 0:
                raise SettingError(
                    f"client {name!r} must have a map-style torch data set of one item or more, got "
                    f"{type(dataset).__name__}"
                )
        super().__init__(
            # `load` is never called, since `rows` reads items part by part
            len(named), lambda client: None, names=[str(name) for name in named], classes=classes,
            validation=validation, test=test, seed=seed, cache=cache, tokens=tokens, collate=collate, length=length,
        )  # fmt: skip
        self._datasets: list[MapStyle] = list(named.values())
        client = np.repeat(np.arange(len(named)), [_size(dataset) for dataset in named.values()])
        # classes are not known before items are read, so nothing is stratified by them
        self._parts = three_ways(Lists.of(client, len(named)), None, self._division)
        self._starts = np.concatenate([[0], np.cumsum([_size(dataset) for dataset in named.values()])])

    def rows(self, client: int, split: Split) -> Rows:
        """The rows of one part, read unless they are in the cache; empty where the client has none."""
        self._check_part(client, split)
        return self._recent((client, split), lambda: self._read(client, split))

    def size(self, client: int, split: Split) -> int:
        """Return the number of rows; no item is read for that."""
        self._check_part(client, split)
        return len(self._parts[split][client])

    def _read(self, client: int, split: Split) -> Rows:
        places = self._parts[split][client] - self._starts[client]
        if not len(places):  # the form of empty rows is that of the first item
            return self._converted(client, np.zeros(1, dtype=np.int64))[:0]
        return self._converted(client, places)

    def _converted(self, client: int, places: Ints) -> Rows:
        who = f"client {self.names[client]!r}"
        subset: Any = torch.utils.data.Subset(self._datasets[client], places.tolist())  # type: ignore[arg-type]
        return self._rows(given(subset, who), who)


def _size(dataset: Any) -> int:
    """Return the number of items of a data set, 0 where it has no length."""
    try:
        return len(dataset)
    except TypeError:
        return 0
