"""Rows of more than one tensor: inputs, targets and outputs may be a tensor, or a tuple or dict of tensors.

The first axis of every tensor of such a tree counts the same rows, so that rows are still picked by their number: what
picks, joins and moves them is here, and nothing else need know which form they have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from piebald.core import machine
from piebald.core.errors import SettingError

Tree: TypeAlias = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]
Form: TypeAlias = tuple[int, ...] | tuple[tuple[int, ...], ...] | Mapping[str, tuple[int, ...]]


def mapped(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """The tree of a function's results for each tensor (or array), together with those at the same place in others."""
    if isinstance(tree, Mapping):
        results = {name: mapped(function, leaf, *(sibling[name] for sibling in others)) for name, leaf in tree.items()}
        return results if type(tree) is dict else type(tree)(**results)  # a Hugging Face output is a mapping of its own
    if isinstance(tree, tuple):
        parts = [mapped(function, *group) for group in zip(tree, *others, strict=True)]
        return tuple(parts) if type(tree) is tuple else type(tree)(*parts)
    return function(tree, *others)


def named_leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """The tensors (or arrays, or shapes) of a tree with their names: a key, a number, or nothing for a single one."""
    if isinstance(tree, Mapping):
        yield from tree.items()
    elif isinstance(tree, tuple):
        yield from ((str(index), leaf) for index, leaf in enumerate(tree))
    else:
        yield "", tree


def leaves(tree: Any) -> list[Any]:
    """The tensors (or arrays) of a tree, also of trees inside of it."""
    if isinstance(tree, Mapping | tuple):
        return [leaf for _, part in named_leaves(tree) for leaf in leaves(part)]
    return [tree]


def count(tree: Any) -> int:
    """Return the number of rows of a tree.

    >>> count({"image": torch.zeros(3, 2), "length": torch.ones(3)})
    3
    """
    return len(leaves(tree)[0])


def take(tree: Any, index: Any) -> Any:
    """Rows at some positions: a slice, an array, or a tensor of any shape on the tree's own device.

    Examples:
        >>> take((torch.tensor([10, 20, 30]), torch.tensor([1, 2, 3])), slice(0, 2))
        (tensor([10, 20]), tensor([1, 2]))
    """
    if isinstance(index, Tensor) and index.dim() == 1 and index.dtype == torch.int64:  # much quicker than indexing
        return mapped(lambda leaf: leaf.index_select(0, index) if isinstance(leaf, Tensor) else leaf[index], tree)
    return mapped(lambda leaf: leaf[index], tree)


def joined(trees: Sequence[Any]) -> Any:
    """The rows of several trees of one form, one after another."""
    # cat would copy even a single tree
    return trees[0] if len(trees) == 1 else mapped(lambda *parts: torch.cat(parts), *trees)


def stacked(trees: Sequence[Any]) -> Any:
    """Trees of one form on a new first axis."""
    return mapped(lambda *parts: torch.stack(parts), *trees)


def flattened(tree: Any) -> Any:
    """The tree with its first two axes as one."""
    return mapped(lambda leaf: leaf.flatten(0, 1), tree)


def split(tree: Any, sizes: Sequence[int]) -> list[Any]:
    """Rows divided into trees of these numbers of rows.

    Examples:
        >>> split(torch.arange(5), [2, 3])
        [tensor([0, 1]), tensor([2, 3, 4])]
    """
    # slices are views, so nothing is copied
    ends = itertools.accumulate(sizes)
    return [take(tree, slice(end - size, end)) for end, size in zip(ends, sizes, strict=True)]


def moved(tree: Any, device: torch.device) -> Any:
    """The tree on a device."""
    return mapped(lambda leaf: machine.moved(leaf, device), tree)


def form(tree: Any) -> Form:
    """The shape of one row: of each tensor, in a tuple or a dict as the tensors are."""
    if isinstance(tree, Mapping):
        return {name: tuple(leaf.shape[1:]) for name, leaf in tree.items()}
    return tuple(tuple(leaf.shape[1:]) for leaf in tree) if isinstance(tree, tuple) else tuple(tree.shape[1:])


def formed(value: Any) -> Form:
    """A form that was written as JSON, where every tuple is a list."""
    if isinstance(value, Mapping):
        return {str(name): tuple(shape) for name, shape in value.items()}
    return tuple(tuple(side) if isinstance(side, list | tuple) else side for side in value)


def plain(value: Form) -> Any:
    """A form as plain values, with lists in place of tuples."""
    if isinstance(value, Mapping):
        return {name: list(shape) for name, shape in value.items()}
    return [list(side) if isinstance(side, tuple) else side for side in value]


def shapes(value: Form) -> list[tuple[int, ...]]:
    """The shapes of a form, one for each tensor."""
    if isinstance(value, Mapping):
        return list(value.values())
    nested = [side for side in value if isinstance(side, tuple)]
    return nested or [tuple(side for side in value if isinstance(side, int))]


def is_single(value: Form) -> bool:
    """Return whether a form is that of one tensor."""
    return isinstance(value, tuple) and not any(isinstance(side, tuple) for side in value)


def kinds(tree: Any) -> list[tuple[str, tuple[int, ...], Any]]:
    """Name, shape of a row and type of each tensor: equal for trees whose rows can be joined."""
    return [(name, tuple(leaf.shape[1:]), leaf.dtype) for name, leaf in named_leaves(tree)]


def described(tree: Any) -> str:
    """Types and shapes in words: "float32 [8, 3]", or "input_ids int64 [8, 12] and attention_mask int64 [8, 12]".

    Examples:
        >>> described({"input_ids": torch.zeros(8, 12, dtype=torch.int64), "length": torch.zeros(8)})
        'input_ids int64 [8, 12] and length float32 [8]'
    """
    parts = [f"{name} {_kind(leaf)} {list(leaf.shape)}".strip() for name, leaf in named_leaves(tree)]
    return " and ".join(parts)


def rows_of(tree: Any) -> str:
    """Types and shapes of single rows in words: "float32 rows [3]", or "input_ids int64 [12] and mask bool [12]"."""
    if isinstance(tree, Mapping | tuple):
        return " and ".join(f"{name} {_kind(leaf)} {list(leaf.shape[1:])}" for name, leaf in named_leaves(tree))
    return f"{_kind(tree)} rows {list(tree.shape[1:])}"


def _kind(leaf: Any) -> str:
    return str(leaf.dtype).removeprefix("torch.")


def single(tree: Tree, who: str) -> Tensor:
    """The one tensor that a tree is.

    Raises:
        SettingError: it has several; `who` begins the message and says what needs one, e.g. ``"distfl"``.
    """
    if not isinstance(tree, Tensor):
        raise SettingError(f"{who} needs rows of one tensor, got {described(tree)}")
    return tree


# -- models


def arguments(x: Tree) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return a model's arguments: a tensor is one, a tuple holds several, a dict holds them by name."""
    if isinstance(x, Mapping):
        return (), dict(x)
    return (tuple(x), {}) if isinstance(x, tuple) else ((x,), {})


def run(module: nn.Module, x: Tree) -> Any:
    """Run a model on some inputs."""
    positional, named = arguments(x)
    return module(*positional, **named)


def logits(outputs: Any) -> Tensor:
    """The scores in what a model returned: a tensor, the first one of a tuple, or "logits" of a dict or of a Hugging
    Face output.

    Raises:
        SettingError: there are none.
    """
    if isinstance(outputs, Tensor):
        return outputs
    scores = outputs.get("logits") if isinstance(outputs, Mapping) else None
    if isinstance(outputs, tuple) and outputs:
        scores = outputs[0]
    if not isinstance(scores, Tensor):
        got = "nothing: end forward with return" if outputs is None else f"a {type(outputs).__name__}"
        if isinstance(outputs, Mapping):
            got += f" with {', '.join(map(str, outputs)) or 'nothing'}: rename them"
        raise SettingError(f"a model must return a tensor, or a tuple or dict with 'logits', got {got}")
    return scores


def by_row(outputs: Any, rows: int) -> Any:
    """Return a model's outputs with a value for each row: one mean stands for every row, and what is no tensor with
    these rows, such as a cache, is left out.
    """
    if isinstance(outputs, Tensor):
        return _by_row(outputs, rows)
    if isinstance(outputs, tuple):
        return tuple(_by_row(leaf, rows) for leaf in outputs if _has_rows(leaf, rows))
    values = {name: _by_row(leaf, rows) for name, leaf in outputs.items() if _has_rows(leaf, rows)}
    return values if type(outputs) is dict else type(outputs)(**values)


def _has_rows(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, Tensor) and (leaf.dim() == 0 or len(leaf) == rows)


def _by_row(leaf: Tensor, rows: int) -> Tensor:
    """In float32 where it is a real number."""
    whole = leaf.expand(rows) if leaf.dim() == 0 else leaf
    return whole.float() if whole.dtype.is_floating_point else whole
