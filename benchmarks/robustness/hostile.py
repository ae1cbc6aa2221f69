"""Values that no argument expects, and a check of types that owes nothing to the one it tests."""

from __future__ import annotations

import math
import random
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Unprintable:
    """An object whose `repr` fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def _nested(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


VALUES: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: "x",
    lambda: "",
    lambda: "5",
    lambda: "1.5",
    lambda: "a\0b",
    lambda: "x" * 100_000,
    lambda: "line\nline",
    lambda: "\udcff",
    lambda: b"x",
    lambda: bytearray(3),
    lambda: True,
    lambda: False,
    lambda: -1,
    lambda: 0,
    lambda: 2.5,
    lambda: -0.5,
    lambda: math.nan,
    lambda: math.inf,
    lambda: -math.inf,
    lambda: 1e308,
    lambda: 1j,
    lambda: 2**31,
    lambda: 2**63,
    lambda: 10**400,
    lambda: 10**5000,
    lambda: {},
    lambda: {"a": 1},
    lambda: {5: 6},
    lambda: {1, 2},
    lambda: [],
    lambda: [None],
    lambda: [-1],
    lambda: ["x", 5],
    lambda: (),
    lambda: ((((),),),),
    lambda: _nested(1000),
    lambda: range(0),
    lambda: (number for number in range(3)),
    lambda: object(),
    lambda: Unprintable(),
    lambda: Unprintable,
    lambda: int,
    lambda: Ellipsis,
    lambda: lambda *_: None,
    lambda: Path("."),
    lambda: Path("/nowhere/at/all"),
    lambda: np.float64(math.nan),
    lambda: np.zeros((2, 3)),
    lambda: np.array([object()]),
    lambda: np.array("text"),
    lambda: torch.zeros(3),
    lambda: torch.tensor(math.nan),
    lambda: torch.nn.Identity(),
    lambda: {"kind": "nonsense"},
    lambda: {"kind": 5},
    lambda: Exception("x"),
)


def some(draw: random.Random) -> Any:
    """One of them."""
    return draw.choice(VALUES)()


def wrong(value: Any, annotation: Any) -> bool:
    """Whether a value is certainly of no type that an annotation allows: only plain types are judged."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return all(wrong(value, one) for one in inner)
    if origin is typing.Annotated:
        return wrong(value, inner[0])
    if origin is typing.Literal:
        return not any(value is one or (type(value) is type(one) and value == one) for one in inner)
    if annotation is bool:
        return not isinstance(value, bool | np.bool_)
    if annotation is int:
        return isinstance(value, bool) or not isinstance(value, int | np.integer) or abs(int(value)) >= 2**63
    if annotation is float:
        number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
        return not number or (isinstance(value, int) and abs(value) >= 2**63) or not math.isfinite(value)
    if annotation is str:
        return not isinstance(value, str)
    if annotation in (None, type(None)):
        return value is not None
    if annotation is Path:
        return not isinstance(value, Path)
    return False
