"""Settings that are lists of tables, refused with one sentence about the first table that is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from piebald.contracts.component import sentence
from piebald.core.arguments import STRICT, settled
from piebald.core.errors import SettingError, shown

T = TypeVar("T", bound="Table")


class Table(BaseModel):
    """An entry of such a list, which can be made in Python as well.

    Raises:
        SettingError: a setting is unknown or wrong.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", **STRICT)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**{name: settled(value) for name, value in fields.items()})
        except ValidationError as error:
            raise SettingError(sentence(error, "a table", type(self).model_fields)) from None
        except ValueError as error:
            raise SettingError(f"a table: {error}") from None


def from_tables(made_of: type[T], given: Any, example: str) -> tuple[T, ...]:
    """Values from their tables.

    Args:
        made_of: what each table becomes.
        given: the list.
        example: a table that is right, for messages.

    Raises:
        ValueError: `given` is no list, or a table in it is wrong.
    """
    must = f"must be a list of tables like {example}"
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise ValueError(f"{must}, got {shown(given)}")
    made = []
    for number, table in enumerate(given):
        if not isinstance(table, made_of | Mapping) or any(not isinstance(name, str) for name in dict(table)):
            raise ValueError(f"{must}, but number {number} is {shown(table)}")
        try:
            made.append(made_of(**table) if isinstance(table, Mapping) else table)
        except SettingError as error:
            raise ValueError(f"{must}, but in number {number}, {error}") from None
    return tuple(made)
