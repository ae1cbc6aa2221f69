"""Checks of the settings of networks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from piebald.errors import SettingError


def whole(name: str, value: object, least: int = 1) -> int:
    """Check that a value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingError(f"{name} must be a whole number, at least {least}, got {value!r}")
    return value


def widths(name: str, values: object, count: int | None = None) -> tuple[int, ...]:
    """Check a sequence of layer widths, with a given length if one is given."""
    if isinstance(values, str) or not isinstance(values, Sequence) or (count is not None and len(values) != count):
        how_many = "widths" if count is None else f"{count} widths"
        raise SettingError(f"{name} must be a list of {how_many}, like {[32, 64][: count or 2]}, got {values!r}")
    return tuple(whole(f"each of {name}", width) for width in values)


def shape(model: str, input_shape: object, axes: str, least: int = 1) -> tuple[int, ...]:
    """Check the shape of one input against the axes that a model reads.

    Args:
        model: name of the model, for the error message.
        input_shape: the shape to check.
        axes: names of the axes, e.g. "channels height width"; empty for any shape.
        least: smallest length of all axes but the first.
    """
    if isinstance(input_shape, str) or not isinstance(input_shape, Sequence) or not len(input_shape):
        raise SettingError(f"input_shape must be the shape of one input, like [1, 28, 28], got {input_shape!r}")
    sides = tuple(whole("each side of input_shape", side) for side in input_shape)
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
