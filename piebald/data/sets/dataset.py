"""The class of data sets, and inputs that stay in their files and are decoded on access, as images stored as JPEG."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import SkipValidation
from torch import Tensor

from piebald.core import pytree
from piebald.core.arguments import Whole, checked_class
from piebald.core.errors import SettingError, about, shown
from piebald.core.reading import picture
from piebald.core.targets import IGNORED
from piebald.data.partition.leakage import RowKeys
from piebald.data.preparation.columns import CodedTable

KINDS = {torch.uint8: np.uint8, torch.float32: np.float32}


@checked_class
class Decoded:
    """Inputs that can be indexed like a tensor [n, ...]; rows are decoded on access and not kept.

    A row is decoded at each access, so a pass over the data decodes all rows.  `x[:]` is a tensor with all rows,
    decoded once, if they fit into memory.

    Args:
        count: number of rows.
        shape: shape of one row.
        dtype: type of the decoded rows, uint8 or float32.
        read: function from a row's number to the row [shape].

    Raises:
        IndexError: a row does not exist.
    """

    def __init__(
        self, count: Whole, shape: Sequence[int], dtype: torch.dtype, read: Callable[[int], NDArray[Any]]
    ) -> None:
        self.shape = torch.Size((count, *shape))
        self.dtype = dtype
        self._read = read

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: int | slice | Tensor | NDArray[Any] | Sequence[int]) -> Tensor:
        """One row [...], or rows [m, ...] in the given order."""
        if isinstance(rows, int):
            # `range` takes numbers from the end as well, and raises IndexError as a tensor does
            return self[[range(len(self))[rows]]][0]
        if isinstance(rows, Tensor):
            rows = rows.numpy()
        # masks, slices and numbers all become places, by NumPy's rules
        places = np.arange(len(self))[rows].tolist()
        decoded = np.empty((len(places), *self.shape[1:]), dtype=KINDS[self.dtype])
        for index, row in enumerate(places):
            decoded[index] = self._read(row)
        return torch.from_numpy(decoded)

    def dim(self) -> int:
        """Number of axes, including that of the rows."""
        return len(self.shape)


def lazily(stored: NDArray[np.uint8], offset: NDArray[np.int64], place: str) -> Decoded:
    """The same images as `decode`, decoded on access."""

    def read(row: int) -> NDArray[np.uint8]:
        file = stored[offset[row] : offset[row + 1]]
        image: NDArray[np.uint8] = decode(file, np.array([0, len(file)]), place)[0]
        return image

    return Decoded(len(offset) - 1, read(0).shape, torch.uint8, read)


def decode(stored: NDArray[np.uint8], offset: NDArray[np.int64], place: str) -> NDArray[np.uint8]:
    """Decode RGB images [n, 3, height, width] of one size.

    Args:
        stored: bytes of the files, concatenated.
        offset: start of each file, and the end of the last one [n + 1].
        place: name of the file, for the error message.

    Raises:
        SettingError: an image cannot be decoded, or sizes differ.
    """
    images: NDArray[np.uint8] | None = None
    for number in range(len(offset) - 1):
        file = io.BytesIO(stored[offset[number] : offset[number + 1]].tobytes())
        with about(f"{place}: image {number} cannot be decoded"), picture(file, "JPEG", "it") as image:
            pixels = np.asarray(image.convert("RGB"))
        if images is None:
            images = np.empty((len(offset) - 1, 3, *pixels.shape[:2]), dtype=np.uint8)
        if pixels.shape[:2] != images.shape[2:]:
            raise SettingError(f"{place}: images must be of one size, got {images.shape[2:]} and {pixels.shape[:2]}")
        images[number] = pixels.transpose(2, 0, 1)
    return np.empty((0, 3, 0, 0), dtype=np.uint8) if images is None else images


Ints = NDArray[np.int64]


@checked_class
@dataclass(frozen=True, slots=True, eq=False)
class Owners:
    """The owner of each row: `codes` [n] in range(len(names)).

    Raises:
        SettingError: a code has no name.
    """

    codes: Ints
    names: Sequence[str]

    def __post_init__(self) -> None:
        codes = self.codes
        if codes.ndim != 1 or codes.dtype.kind not in "iu":
            raise SettingError(f"codes of owners must be whole numbers [n], got {codes.dtype} {list(codes.shape)}")
        if len(codes) and not 0 <= codes.min() <= codes.max() < len(self.names):
            raise SettingError(
                f"codes of owners must be in 0..{len(self.names) - 1}, since there are {len(self.names)} names, got "
                f"{codes.min()}..{codes.max()}"
            )

    @classmethod
    def of(cls, labels: NDArray[np.generic], names: Mapping[int, str] | None = None) -> Owners:
        """Make owners from a label for each row [n], sorted; `names` has the names of labels, by default themselves."""
        values, codes = np.unique(labels, return_inverse=True)
        called = [str(value) if names is None else names[value] for value in values.tolist()]
        return cls(codes.astype(np.int64), called)


@checked_class
@dataclass(frozen=True, slots=True, eq=False)
class DataSet:
    """A data set: its rows, their classes and owners, and its source.

    Attributes:
        name: name by which the data set is loaded.
        x: inputs [n, ...], float32, or uint8 images [n, channels, height, width] as stored; clients scale them
            to [0, 1].  `Decoded` if rows stay in their files.  A tuple or dict where inputs are several.
        y: class numbers [n] int64, or numbers to predict [n, ...] float32, or a tuple or dict of targets.
        classes: names of the classes, None if `y` are numbers to predict.
        owners: owners of the rows, by kind ("writer", "capture"): `Owners`, or the name or number of each row's owner
            [n], in a list, an array or a column of a table.
        train: row numbers of the published training part, None for all rows.
        test: row numbers of the published test part, None if there is none.
        groups: group of each row [n], such as a recording; rows of one group are never split between training and
            test.  None without groups.
        features: names of the columns of inputs [n, features], for tables.
        target: name of the column of targets, or of several, for tables.
        columns: how inputs are written as numbers where they are columns of a table that is to be prepared.
        weights: how much each row counts in a mean [n] float32, above 0; None where all count alike.
        keys: what columns of a table say of how its rows are divided.
        source: source of the rows.
        licence: licence of the rows.
        citation: reference to cite.

    Raises:
        SettingError: lengths differ, a class number is out of range, or a row is in both the training and the test
            part.

    Examples:
        >>> import torch
        >>> import piebald as pb
        >>> pb.data.DataSet("toy", torch.zeros(6, 2), torch.tensor([0, 1, 0, 1, 0, 1]), classes=["no", "yes"])
        <DataSet 'toy': 6 rows of [2], 2 classes>
    """

    name: str
    x: pytree.Tree | Decoded
    y: pytree.Tree
    classes: Sequence[str] | None = None
    owners: SkipValidation[Mapping[str, Owners]] = field(default_factory=dict)  # checked below: labels become Owners
    train: Ints | None = None
    test: Ints | None = None
    groups: Ints | None = None
    features: Sequence[str] | None = None
    target: str | Sequence[str] | None = None
    columns: CodedTable | None = None
    weights: Tensor | None = None
    keys: SkipValidation[RowKeys | None] = None
    source: str = ""
    licence: str = ""
    citation: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.owners, Mapping):
            raise SettingError(
                "owners must be a mapping from kinds to the owner of each row, like {'writer': ['ann', 'bob', 'ann']}, "
                f"got {shown(self.owners)}"
            )
        # the only way to set a field of a frozen data class
        object.__setattr__(self, "owners", {name: _owners(name, kind) for name, kind in self.owners.items()})
        trees = [pytree.leaves(tree) for tree in (self.x, self.y)]
        if not all(trees):
            raise SettingError(f"data set {self.name!r}: x and y must hold tensors, got an empty tuple or mapping")
        if any(part.dim() == 0 for tree in trees for part in tree):
            raise SettingError(f"data set {self.name!r}: x and y must have one entry for each row, got a single number")
        n = pytree.count(self.x)
        lengths = {f"x {name!r}": len(part) for name, part in pytree.named_leaves(self.x)}
        lengths |= {f"y {name!r}" if name else "y": len(part) for name, part in pytree.named_leaves(self.y)}
        lengths |= {owner: len(owners.codes) for owner, owners in self.owners.items()}
        for name in ("groups", "weights"):
            if (values := getattr(self, name)) is not None:
                lengths[name] = len(values)
        for part, length in lengths.items():
            if length != n:
                raise SettingError(
                    f"data set {self.name!r}: {part} must have one entry for each of the {n} rows, got {length}"
                )
        if self.classes is not None and n:
            self._check_classes(self.classes)
        if self.features is not None and pytree.form(self.x) != (len(self.features),):
            raise SettingError(
                f"data set {self.name!r}: features must name each number of inputs "
                f"{pytree.plain(pytree.form(self.x))}, got {len(self.features)} names"
            )
        parts = [part for part in (self.train, self.test) if part is not None]
        if parts:
            for held in parts:
                if held.ndim != 1 or held.dtype.kind not in "iu":
                    raise SettingError(
                        f"data set {self.name!r}: train and test must be row numbers [n], got {held.dtype} "
                        f"{list(held.shape)}"
                    )
            rows = np.concatenate(parts)
            if len(np.unique(rows)) != len(rows) or rows.min() < 0 or rows.max() >= n:
                raise SettingError(f"data set {self.name!r}: train and test must be different rows out of 0..{n - 1}")
        if self.test is not None and self.train is None:
            raise SettingError(
                f"data set {self.name!r}: a test part needs a train part: say which rows are for training"
            )

    def __repr__(self) -> str:
        """The content of the data set, in one line."""
        kind = "numbers to predict" if self.classes is None else f"{len(self.classes)} classes"
        parts = "" if self.test is None or self.train is None else f", {len(self.train)} train, {len(self.test)} test"
        owners = f", owners by {', '.join(self.owners)}" if self.owners else ""
        shape = pytree.plain(pytree.form(self.x))
        return f"<DataSet {self.name!r}: {len(self)} rows of {shape}, {kind}{parts}{owners}>"

    def __len__(self) -> int:
        return pytree.count(self.x)

    def _check_classes(self, classes: Sequence[str]) -> None:
        y = self.targets
        # in targets of several classes a row may have unknown ones, such as padding of a text
        counted = y[y != IGNORED] if y.dim() > 1 else y
        least, most = (int(counted.min()), int(counted.max())) if len(counted) else (0, 0)
        if not 0 <= least <= most < len(classes):
            raise SettingError(
                f"data set {self.name!r}: class numbers must be in 0..{len(classes) - 1}, "
                f"got {least}..{most}: name every class in classes"
            )

    @property
    def inputs(self) -> Tensor | Decoded:
        """Inputs of one tensor, for what works with no other ones.

        Raises:
            SettingError: inputs are several.
        """
        if isinstance(self.x, Mapping | tuple):
            got = pytree.rows_of(self.x)
            raise SettingError(f"data set {self.name!r} must have inputs of one tensor here, got {got}")
        return self.x

    @property
    def targets(self) -> Tensor:
        """Targets of one tensor, likewise."""
        return pytree.single(self.y, f"data set {self.name!r}")

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input of one tensor."""
        return tuple(self.inputs.shape[1:])


def _owners(name: str, value: Any) -> Owners:
    """Owners as given, or made from a label for each row."""
    if isinstance(value, Owners):
        return value
    if not isinstance(name, str):
        raise SettingError(f"owners must be called by a text, like 'writer', got {name!r}")
    labels = value.numpy() if isinstance(value, Tensor) else _column(value)
    if labels.ndim != 1 or labels.dtype.kind not in "biuU":
        raise SettingError(
            f"owners {name!r} must be Owners, or the name or number of each row's owner [n], got {shown(value)}"
        )
    return Owners.of(labels)


def _column(value: Any) -> NDArray[Any]:
    """Labels as an array; those that are neither all text nor all whole numbers stay objects, as nan among names."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value
    labels = np.array(value, dtype=object)
    flat = labels.ravel().tolist()
    alike = any(all(isinstance(label, kind) for label in flat) for kind in (str, int | np.integer))
    return np.array(flat).reshape(labels.shape) if alike and flat else labels
