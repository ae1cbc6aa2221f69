"""Checks of the settings of networks."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator
from torch import nn

from piebald.core.arguments import Count, checked_class
from piebald.core.errors import SettingError, shown

M = TypeVar("M", bound=nn.Module)


def _two(widths: Sequence[int]) -> Sequence[int]:
    if len(widths) != 2:
        raise ValueError(f"must be a list of 2 widths, like [32, 64], got {shown(widths)}")
    return widths


TwoWidths = Annotated[Sequence[Count], AfterValidator(_two)]


def checked_network(made: type[M]) -> type[M]:
    """Check the settings of a network when it is made; one that torch cannot make is refused, too.

    Raises:
        SettingError: from the class, where a setting is of another type, or the network is too large.
    """
    made = checked_class(made)
    start = made.__init__

    @functools.wraps(start)
    def init(self: M, *args: Any, **settings: Any) -> None:
        try:
            start(self, *args, **settings)
        except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
            reason = str(error).partition("\n")[0]
            raise SettingError(f"{made.__name__} cannot be made with {shown((*args, settings))}: {reason}") from None

    made.__init__ = init  # type: ignore[method-assign,assignment]
    return made


@contextmanager
def bounded_build(what: str, most: int, tensors: int) -> Iterator[list[int]]:
    """Build networks in the block, and no further than a limit: memory is asked for, but no number is written to it.

    Args:
        what: the network, for the error message.
        most: the largest number of parameters.
        tensors: the largest number of tensors that they are in.

    Returns:
        A list with the number of parameters so far.

    Raises:
        SettingError: from the block, as soon as there are more.
    """
    counts, thread = [0, 0], threading.get_ident()

    def counted(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if threading.get_ident() != thread:  # another one builds at the same time
            return
        counts[0], counts[1] = counts[0] + (0 if parameter is None else parameter.numel()), counts[1] + 1
        if counts[0] > most:
            raise SettingError(f"{what} with these settings has more than the {most:,} parameters allowed")
        if counts[1] > tensors:
            raise SettingError(f"{what} with these settings has more than {tensors:,} tensors of parameters")

    # torch has such hooks for all modules of the process only, other threads' included
    handle = nn.modules.module.register_module_parameter_registration_hook(counted)
    try:
        yield counts
    finally:
        handle.remove()


def shape(model: str, input_shape: Sequence[int], axes: str, least: int = 1) -> tuple[int, ...]:
    """Check the shape of one input against the axes that a model reads.

    Args:
        model: name of the model, for the error message.
        input_shape: the shape to check.
        axes: names of the axes, e.g. "channels height width"; empty for any shape.
        least: smallest length of all axes but the first.
    """
    sides = tuple(input_shape)
    if not sides:
        raise SettingError(f"input_shape must be the shape of one input, like [1, 28, 28], got {shown(input_shape)}")
    if axes and len(sides) != len(axes.split()):
        raise SettingError(
            f"{model} reads inputs [{', '.join(axes.split())}], got {list(sides)}: reshape them or choose another model"
        )
    if axes and min(sides[1:]) < least:
        raise SettingError(f"{model} needs sides of at least {least}, got {list(sides)}: choose another model")
    return sides


def size(sides: Sequence[int]) -> int:
    """Number of values in one input."""
    return math.prod(sides)
