"""Rules by which rows of unequal length become arrays: "stack" refuses them, "pad" fills them up and makes masks.

Under "pad", inputs or targets that are lists of sequences are filled up on the right to the longest one of all clients,
or to a given length: inputs with 0, targets and inputs called "labels" with -100, which no loss counts.  For inputs a
mask is made, 1 for what was there and 0 for padding, under the name that Hugging Face models give it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from piebald.core.errors import SettingError
from piebald.core.pytree import named_leaves
from piebald.core.targets import IGNORED

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
            for name, part in _parts(tree):
                if not _is_sequences(part, role):
                    continue
                longest = max(map(len, part))
                if length is not None and longest > length:
                    raise SettingError(
                        f"{who}: {role} must be sequences of at most length = {length}, got one of {longest}: raise "
                        "length, or cut the sequences"
                    )
                longest_of[name] = max(longest, longest_of.get(name, 0)) if length is None else length
    return Lengths(*longest_by_name)


def lengths_of(x: Any, y: Any) -> Lengths:
    """The lengths of rows that are filled up already, for others that are to be like them."""
    inputs = {name: part.shape[1] for name, part in named_leaves(x) if part.ndim > 1}
    # rows given as one input have no name yet, and get it when they are filled up
    if (single := next((name for name in _NAMED.values() if name in inputs), None)) is not None:
        inputs[""] = inputs[single]
    return Lengths(inputs, {name: part.shape[1] for name, part in named_leaves(y) if part.ndim > 1})


def padded(raw: Raw, to: Lengths) -> tuple[Any, Any]:
    """Inputs and targets with their sequences filled up, and with masks for inputs."""
    who, x, y = raw
    filled = {name: _filled(part, to.targets.get(name), IGNORED, f"{who}, targets") for name, part in _parts(y)}
    return _inputs(who, x, to.inputs), filled if isinstance(y, Mapping) else _like(y, filled)


def _inputs(who: str, x: Any, to: Mapping[str, int]) -> Any:
    if not to:
        return x
    if isinstance(x, tuple):
        raise SettingError(f"{who}: inputs with sequences of unequal length need names: give a dict, not a tuple")
    parts = dict(_parts(x))
    if not isinstance(x, Mapping):
        first = np.asarray(parts[""][0])  # a single input gets the name that Hugging Face models give it
        parts = {_NAMED[first.dtype.kind in "iub"]: parts[""]}
        to = {next(iter(parts)): to[""]}
    arrays = {}
    for name, part in parts.items():
        fill = IGNORED if name == "labels" else 0
        arrays[name] = _filled(part, to.get(name), fill, f"{who}, inputs {name!r}")
    covered = [_sizes(part) for name, part in parts.items() if name.endswith(_MASK)]
    for name, part in parts.items():
        sizes = _sizes(part)
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


def _parts(tree: Any) -> Iterator[tuple[str, Any]]:
    several = isinstance(tree, Mapping) or (isinstance(tree, tuple) and all(_is_rows(part) for part in tree))
    yield from named_leaves(tree) if several else [("", tree)]


def _is_rows(part: Any) -> bool:
    return isinstance(part, np.ndarray | Tensor | list)


def _like(y: Any, filled: Mapping[str, Any]) -> Any:
    return tuple(filled.values()) if len(filled) > 1 or "" not in filled else filled[""]


def _is_sequences(part: Any, role: str) -> bool:
    """Return whether a part is a list of sequences; targets of real numbers are vectors to predict."""
    if not isinstance(part, list) or not part or not all(np.ndim(row) for row in part):
        return False
    return role == "inputs" or np.asarray(part[0]).dtype.kind in "iub"


def _sizes(part: Any) -> list[int]:
    return [len(row) for row in part] if isinstance(part, list) else []


def _filled(part: Any, length: int | None, fill: int, who: str) -> Any:
    """A list of sequences as one array [n, length, ...]; other parts as they are."""
    if length is None or not isinstance(part, list):
        return part
    rows: list[NDArray[Any]] = [np.asarray(row) for row in part]
    if len({row.shape[1:] for row in rows}) > 1:
        raise SettingError(f"{who}: sequences must be alike in all but their length, got rows {_shapes(rows)}")
    array = np.full((len(rows), length, *rows[0].shape[1:]), fill, dtype=np.result_type(*rows))
    for row, whole in zip(rows, array, strict=True):
        whole[: len(row)] = row
    return array


def _shapes(rows: Sequence[NDArray[Any]]) -> str:
    return " and ".join(str(list(shape)) for shape in sorted({row.shape for row in rows})[:2])
