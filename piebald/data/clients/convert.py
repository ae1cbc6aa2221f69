"""Conversion of clients' data to arrays that models train on: inputs float32, targets int64 or float32.

uint8 images and volumes are stored as they are, in a quarter of the memory, and `floats` converts them to float32 in
[0, 1].

Rules by which rows of unequal length become arrays: "stack" refuses them, "pad" fills them up and makes masks.

Under "pad", inputs or targets that are lists of sequences are filled up on the right to the longest one of all clients,
or to a given length: inputs with 0, targets and inputs called "labels" with -100, which no loss counts.  For inputs a
mask is made, 1 for what was there and 0 for padding, under the name that Hugging Face models give it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from piebald.core.errors import SettingError
from piebald.core.pytree import mapped, named_leaves
from piebald.core.targets import IGNORED

Array = NDArray[Any]
_INTENSE = 127  # of a byte, beyond which hardly any measurement of a table goes
_log = logging.getLogger(__name__)
MOST_CLASSES = 100_000  # a class number beyond this is an identifier or a measurement, not a class


def floats(x: Any) -> Any:
    """Stored inputs as float32: uint8 ones are scaled to [0, 1], all else is returned as it is."""
    return mapped(lambda tensor: tensor.float().div_(255) if tensor.dtype == torch.uint8 else tensor, x)


def class_numbers(y: Any) -> NDArray[np.int64] | None:
    """The class of each row [n], -100 where unknown, or None where targets are other than one number for each row."""
    whole = isinstance(y, Tensor) and y.dim() == 1 and not y.dtype.is_floating_point
    return np.asarray(y.numpy(), dtype=np.int64) if whole else None


def count_classes(label: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """Return how many rows each class has [classes], without those whose class is unknown."""
    return np.bincount(label[label != IGNORED], minlength=classes)


def array(value: Any, who: str, role: str) -> Array:
    """A tensor, array, list or column as a NumPy array of numbers or text, [n, ...].

    Args:
        value: the value to convert.
        who: its owner, for the error message.
        role: "inputs" or "targets", for the error message.

    Raises:
        SettingError: rows of different shapes, objects, or no rows at all.
    """
    if isinstance(value, Tensor):
        if value.dtype == torch.bfloat16:  # NumPy does not have it
            value = value.float()
        # conjugates and negatives are flags of a tensor that NumPy cannot read
        value = value.detach().cpu().resolve_conj().resolve_neg().numpy()
    try:
        data = np.asarray(value)
    except ValueError:
        # rows of several shapes, which are refused below with a message of their own
        data = np.empty(1, dtype=object)
    if data.dtype == object and data.ndim == 1 and len(data) and all(isinstance(word, str) for word in data):
        data = data.astype(str)
    if data.dtype.kind == "S":  # text as h5py and older files store it
        data = np.char.decode(data, "utf-8", "replace")
    if data.dtype.kind not in "biufU":
        raise SettingError(
            f"{who}: {role} must be one array of numbers with rows of one shape, got {_describe(value, data)}: "
            "stack or pad the rows to one shape and convert them to numbers, or set collate = 'pad' for sequences"
        )
    if data.ndim == 0:
        raise SettingError(f"{who}: {role} must have one row for each example [n, ...], got the single value {value!r}")
    return data


def _describe(value: Any, converted: Array) -> str:
    if converted.dtype == object:
        first = next(iter(value), None) if isinstance(value, Sequence | np.ndarray) and len(value) else value
        return f"objects like {type(first).__name__}" if not isinstance(first, Sequence | np.ndarray) else "ragged rows"
    return f"{converted.dtype}"


def inputs(value: Any, who: str, tokens: bool = False) -> Array:
    """Inputs [n, ...] as float32, or as uint8 where they are intensities with two axes or more.

    uint8 arrays [n, h, w] get a channel axis.  Other numbers become float32 as they are, also uint8 ones [n, d], which
    may be columns of a table; `tokens` must be whole numbers of at least 0 and become int64.

    Raises:
        SettingError: text, NaN or infinite values, no feature axis, or images with the channels last.
    """
    x = array(value, who, "inputs")
    if x.dtype.kind == "U":
        raise SettingError(
            f"{who}: inputs must be numbers, got text like {str(x.flat[0])!r}: encode it as numbers first"
        )
    if x.ndim == 1 and not len(x):
        raise SettingError(f"{who} has no rows: leave it out")
    if x.ndim == 1:
        raise SettingError(
            f"{who}: inputs must be [n, features] or larger, got [{len(x)}]: reshape them to [{len(x)}, 1]"
        )
    if tokens:
        if x.dtype.kind not in "iu" or (x.size and int(x.min()) < 0):
            got = f"{x.dtype} numbers" if x.dtype.kind not in "iu" else str(int(x.min()))
            raise SettingError(f"{who}: tokens must be whole numbers of at least 0, got {got}: number tokens from 0")
        return np.require(x, dtype=np.int64, requirements=["C", "W"])
    if _are_intensities(x):
        x = x[:, None] if x.ndim == 3 else x
        # a wrong order would train without an error, on columns of pixels as channels
        if x.shape[-1] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
            axes = "channels, height, width" if x.ndim == 4 else "channels, ..."
            raise SettingError(
                f"{who}: images must be [n, {axes}], got {list(x.shape)}: move the channels with np.moveaxis(x, -1, 1)"
            )
        return np.require(x, requirements=["C", "W"])
    if x.size and x.dtype.kind in "iu" and (x.dtype == np.uint8 or x.ndim > 2) and int(x.max()) > _INTENSE:
        _log.warning(
            "%s: %s %s are taken as numbers up to %d: divide them by %s if they are intensities of pixels",
            who, "bytes" if x.dtype == np.uint8 else f"{x.dtype} numbers", list(x.shape), x.max(),
            255 if x.dtype == np.uint8 else "the largest that there may be",
        )  # fmt: skip
    with np.errstate(over="ignore"):  # values that do not fit are refused below
        x = np.require(x, dtype=np.float32, requirements=["C", "W"])
    _finite(x, who, "inputs")
    return x


def _are_intensities(x: Array) -> bool:
    """Return whether an array has bytes of pictures, volumes or films, whatever the number of their axes."""
    return x.dtype == np.uint8 and x.ndim > 2


def _finite(values: Array, who: str, role: str) -> None:
    if not np.isfinite(values).all():
        row = np.argwhere(~np.isfinite(values))[0][0]
        raise SettingError(
            f"{who}: {role} must be finite float32 numbers, got a missing, infinite or too large one in row {row + 1}: "
            f"drop such rows or fill them in"
        )


def is_several(value: Any) -> bool:
    """Return whether inputs or targets are several arrays or tensors, in a tuple or a dict."""
    if isinstance(value, Mapping):
        return True
    return isinstance(value, tuple) and bool(value) and all(isinstance(leaf, np.ndarray | Tensor) for leaf in value)


def input_arrays(value: Any, who: str, tokens: bool = False) -> Any:
    """Inputs as `inputs` returns them; or several of them, in a tuple or dict as they came, each converted by `_leaf`.

    Raises:
        SettingError: as for `inputs`, or several inputs have different numbers of rows.
    """
    return _several(value, who, "inputs") if is_several(value) else inputs(value, who, tokens)


def target_arrays(value: Any, who: str, classes: Sequence[str] | None = None) -> Any:
    """Targets as `targets` returns them; or several of them, in a tuple or dict as they came."""
    return _several(value, who, "targets") if is_several(value) else targets(value, who, classes)


def _several(value: Any, who: str, role: str) -> Any:
    tree = {str(name): leaf for name, leaf in value.items()} if isinstance(value, Mapping) else tuple(value)
    if not tree:
        raise SettingError(f"{who}: {role} must be one array or more, got an empty dict")
    # `mapped` visits leaves in the order of `named_leaves`, but does not pass their names
    names = iter([name for name, _ in named_leaves(tree)])
    arrays = mapped(lambda leaf: _leaf(leaf, f"{who}, {role} {next(names)!r}", role), tree)
    lengths = {name: len(leaf) for name, leaf in named_leaves(arrays)}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{count} of {name!r}" for name, count in lengths.items())
        raise SettingError(f"{who}: {role} must have the same rows in every part, got {counts}")
    return arrays


def _leaf(value: Any, who: str, role: str) -> Array:
    """One of several arrays [n, ...]: whole numbers become int64, booleans stay, real numbers become float32, and
    uint8 intensities stay.
    """
    leaf = array(value, who, role)
    if role == "inputs" and _are_intensities(leaf):
        return inputs(leaf, who)
    if leaf.dtype.kind == "U":
        raise SettingError(f"{who} must be numbers, got text like {str(leaf.flat[0])!r}: encode it as numbers first")
    if leaf.dtype.kind == "f":
        with np.errstate(over="ignore"):
            leaf = np.require(leaf, dtype=np.float32, requirements=["C", "W"])
        _finite(leaf, who, role)
        return leaf
    return np.require(leaf, dtype=bool if leaf.dtype.kind == "b" else np.int64, requirements=["C", "W"])


def kind(y: Any) -> Literal["text", "whole", "real", "several"]:
    """The kind of targets: names of classes, numbers of classes, real numbers, or several arrays."""
    if not isinstance(y, np.ndarray):
        return "several"
    return "text" if y.dtype.kind == "U" else "real" if y.dtype.kind == "f" else "whole"


def targets(value: Any, who: str, classes: Sequence[str] | None = None) -> Array:
    """Targets as int64 class numbers [n, ...] or float32 numbers [n, ...].

    Text is looked up in `classes`; whole numbers are class numbers; real numbers stay real.

    Raises:
        SettingError: a class that is not among `classes`, a negative class number, a missing or infinite number.
    """
    y = array(value, who, "targets")
    if kind(y) == "real":
        with np.errstate(over="ignore"):
            y = np.require(y, dtype=np.float32, requirements=["C", "W"])
        # several labels for each row, each 0 or 1: NaN is one that is not known, which the loss leaves out
        if y.ndim > 1 and (missing := np.isnan(y)).any() and np.isin(y[~missing], (0, 1, IGNORED)).all():
            y = np.where(missing, np.float32(IGNORED), y)  # labels that nobody knows
        _finite(y, who, "targets")
        return y
    if y.ndim == 2 and y.shape[1] == 1:  # a column, as scikit-learn's encoders give it
        y = y[:, 0]
    if kind(y) == "text":
        return _numbered(y, who, classes)
    numbers = y[y != IGNORED]
    if numbers.size and int(numbers.min()) < 0:
        raise SettingError(
            f"{who}: class numbers must be at least 0, got {int(numbers.min())}: "
            "number them from 0, or pass floats, or regression = true, to predict numbers"
        )
    limit = MOST_CLASSES if classes is None else len(classes)
    if y.size and int(y.max()) >= limit:
        advice = (
            "pass floats, or regression = true, to predict numbers"
            if classes is None
            else "name every class in classes"
        )
        raise SettingError(f"{who}: class numbers must be below {limit}, got {int(y.max())}: {advice}")
    return np.require(y, dtype=np.int64, requirements=["C", "W"])


def _numbered(y: Array, who: str, classes: Sequence[str] | None) -> Array:
    if classes is None:
        raise SettingError(
            f"{who}: targets are text like {str(y.flat[0])!r}: pass classes, the names of all classes in order"
        )
    # a search takes log K steps for each row, where a dict would need a Python object for each
    order = np.argsort(np.asarray(classes, dtype=str), kind="stable")
    sorted_classes = np.asarray(classes, dtype=str)[order]
    # a name after all classes would have a place past the end
    index = np.minimum(np.searchsorted(sorted_classes, y), len(sorted_classes) - 1)
    if (sorted_classes[index] != y).any():
        unknown_name = str(y[sorted_classes[index] != y].flat[0])
        raise SettingError(
            f"{who}: target {unknown_name!r} is not one of the {len(sorted_classes)} classes: add it to classes"
        )
    return order[index].astype(np.int64)


Collate = Literal["stack", "pad"]
Raw = tuple[str, Any, Any]  # the client, for messages; inputs; targets

_NAMED = {True: "input_ids", False: "input_values"}  # a single input of whole numbers, or of real ones
_MASK = "attention_mask"


class Lengths(NamedTuple):
    """The lengths of filled-up sequences: of each input and each target by its name, "" for a single one."""

    inputs: Mapping[str, int]
    targets: Mapping[str, int]


def check_lengths(collate: Collate, length: int | None) -> None:
    """Refuse "pad" without a length, or a length without "pad", where clients are loaded one by one."""
    if (collate == "pad") != (length is not None):
        raise SettingError(
            f"collate = 'pad' and length belong together where clients are loaded one by one, got {collate!r} and "
            f"length {length!r}: give both, or none"
        )


def lengths(raws: Sequence[Raw], length: int | None) -> Lengths:
    """The lengths of sequences in the rows of all clients, where they are lists of sequences.

    Raises:
        SettingError: a sequence is longer than `length`.
    """
    longest_by_name: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for who, *both in raws:
        for longest_of, tree, role in zip(longest_by_name, both, ("inputs", "targets"), strict=True):
            for name, leaf in _named_arrays(tree):
                if not _is_sequences(leaf, role):
                    continue
                longest = max(map(len, leaf))
                if length is not None and longest > length:
                    raise SettingError(
                        f"{who}: {role} must be sequences of at most length = {length}, got one of {longest}: raise "
                        "length, or cut the sequences"
                    )
                longest_of[name] = max(longest, longest_of.get(name, 0)) if length is None else length
    return Lengths(*longest_by_name)


def lengths_of(x: Any, y: Any) -> Lengths:
    """The lengths of rows that are filled up already, for others that are to be like them."""
    inputs = {name: leaf.shape[1] for name, leaf in named_leaves(x) if leaf.ndim > 1}
    # rows given as one input have no name yet, and get it when they are filled up
    if (single := next((name for name in _NAMED.values() if name in inputs), None)) is not None:
        inputs[""] = inputs[single]
    return Lengths(inputs, {name: leaf.shape[1] for name, leaf in named_leaves(y) if leaf.ndim > 1})


def padded(raw: Raw, to: Lengths) -> tuple[Any, Any]:
    """Inputs and targets with their sequences filled up, and with masks for inputs."""
    who, x, y = raw
    filled = {name: _filled(leaf, to.targets.get(name), IGNORED, f"{who}, targets") for name, leaf in _named_arrays(y)}
    return _inputs(who, x, to.inputs), filled if isinstance(y, Mapping) else _like(y, filled)


def _inputs(who: str, x: Any, to: Mapping[str, int]) -> Any:
    if not to:
        return x
    if isinstance(x, tuple):
        raise SettingError(f"{who}: inputs with sequences of unequal length need names: give a dict, not a tuple")
    leaves = dict(_named_arrays(x))
    if not isinstance(x, Mapping):
        first = np.asarray(leaves[""][0])  # a single input gets the name that Hugging Face models give it
        leaves = {_NAMED[first.dtype.kind in "iub"]: leaves[""]}
        to = {next(iter(leaves)): to[""]}
    arrays = {}
    for name, leaf in leaves.items():
        fill = IGNORED if name == "labels" else 0
        arrays[name] = _filled(leaf, to.get(name), fill, f"{who}, inputs {name!r}")
    covered = [_sizes(leaf) for name, leaf in leaves.items() if name.endswith(_MASK)]
    for name, leaf in leaves.items():
        sizes = _sizes(leaf)
        # one mask serves all inputs whose sequences have the same lengths, such as ids and their token types
        if name in to and name != "labels" and sizes not in covered:
            arrays[_mask_name(name, not covered)] = (np.arange(to[name]) < np.array(sizes)[:, None]).astype(np.int64)
            covered.append(sizes)
    return arrays


def _mask_name(name: str, first: bool) -> str:
    """The name of a mask: of "decoder_input_ids" it is "decoder_attention_mask"."""
    if name.endswith("input_ids"):
        return name.removesuffix("input_ids") + _MASK
    return _MASK if first else f"{name}_{_MASK}"


def _named_arrays(tree: Any) -> Iterator[tuple[str, Any]]:
    several = isinstance(tree, Mapping) or (isinstance(tree, tuple) and all(_is_rows(leaf) for leaf in tree))
    yield from named_leaves(tree) if several else [("", tree)]


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | Tensor | list)


def _like(y: Any, filled: Mapping[str, Any]) -> Any:
    return tuple(filled.values()) if len(filled) > 1 or "" not in filled else filled[""]


def _is_sequences(leaf: Any, role: str) -> bool:
    """Return whether an array of a tree is a list of sequences; targets of real numbers are vectors to predict."""
    if not isinstance(leaf, list) or not leaf or not all(np.ndim(row) for row in leaf):
        return False
    return role == "inputs" or np.asarray(leaf[0]).dtype.kind in "iub"


def _sizes(leaf: Any) -> list[int]:
    return [len(row) for row in leaf] if isinstance(leaf, list) else []


def _filled(leaf: Any, length: int | None, fill: int, who: str) -> Any:
    """A list of sequences as one array [n, length, ...]; other parts as they are."""
    if length is None or not isinstance(leaf, list):
        return leaf
    rows: list[NDArray[Any]] = [np.asarray(row) for row in leaf]
    if len({row.shape[1:] for row in rows}) > 1:
        raise SettingError(f"{who}: sequences must be alike in all but their length, got rows {_shapes(rows)}")
    array = np.full((len(rows), length, *rows[0].shape[1:]), fill, dtype=np.result_type(*rows))
    for row, whole in zip(rows, array, strict=True):
        whole[: len(row)] = row
    return array


def _shapes(rows: Sequence[NDArray[Any]]) -> str:
    return " and ".join(str(list(shape)) for shape in sorted({row.shape for row in rows})[:2])
