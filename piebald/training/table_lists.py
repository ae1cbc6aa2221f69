"""Settings that are lists of tables, refused with one sentence about the first table that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from piebald.errors import shown

M = TypeVar("M", bound=BaseModel)


def from_tables(made_of: type[M], given: Any, example: str) -> tuple[M, ...]:
    """Values from their tables.

    Args:
        made_of: what each table becomes.
        given: the list.
        example: a table that is right, for messages.

    Raises:
        ValueError: `given` is no list, or a table in it is wrong.
    """
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ValueError(f"must be a list of tables like {example}, got {shown(given)}")
    made = []
    for number, table in enumerate(given):
        try:
            made.append(made_of.model_validate(table))
        except ValidationError as error:
            first = error.errors()[0]
            where, words = ".".join(str(word) for word in first["loc"]), first["msg"][0].lower() + first["msg"][1:]
            what = f" {where}" if where else ""
            words = words.removeprefix("value error, ")
            raise ValueError(
                f"must be a list of tables like {example}, but in number {number}{what}: {words}"
            ) from None
    return tuple(made)
