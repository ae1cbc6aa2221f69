"""The wording of errors in an experiment file: one sentence each, with the line or the flag of the value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from piebald.core.errors import SettingError, shown, unknown
from piebald.settings.toml_document import Document, Key, dotted

_WORDING = (
    (r"^(\w+)\.(int|float|str|bool)\b", r"\1"),  # pydantic's name for one branch of a union
    (r"\bValue error, ", ""),
    (r"\bInput should be ", "must be "),
    (r"greater than or equal to ", "at least "),
    (r"less than or equal to ", "at most "),
    (r"greater than ", "above "),
    (r"less than ", "below "),
    (r"must be an? (valid )?integer[^']*?(?=,? got|$)", "must be a whole number"),
    (r"must be an? (valid )?number(, unable to parse[^']*)?(?=,? got|$)", "must be a number"),
    (r"must be an? (valid )?string", "must be text"),
    (r"must be an? (valid )?boolean[^']*?(?=,? got|$)", "must be true or false"),
    (r"must be an? (valid )?(dictionary|mapping)[^']*?(?=,? got|$)", "must be a table"),
    (r"must be an? (valid )?(list|tuple|set)\b", "must be a list"),
)


def plain(message: str) -> str:
    """Replace pydantic's wording by the wording of the package."""
    for theirs, ours in _WORDING:
        message = re.sub(theirs, ours, message)
    return message


def of_document(error: ValidationError, document: Document, model: type[BaseModel]) -> SettingError:
    """The first error about a document, in one sentence with its place.

    Args:
        error: the errors that pydantic found.
        document: the values that were checked.
        model: the model that they were checked against; its sections are models too.
    """
    # An unknown name comes first: a setting that seems to be missing may be misspelt.
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    section, key = _place(model, document, first["loc"])
    place = document.origin(key)
    if first["type"] == "extra_forbidden":
        what = "setting or section called" if len(key) == 1 else f"setting of [{dotted(key[:-1])}] called"
        return SettingError(f"{place}: {unknown(what, key[-1], section.model_fields)}")
    if first["type"] == "value_error":  # a sentence of ours
        said = first["msg"].removeprefix("Value error, ")
        return SettingError(f"{place}: {dotted(key)} {said}" if said.startswith("must ") else f"{place}: {said}")
    if first["type"] == "missing" and len(key) == 1:
        wants = "kind" if key[0] == "partition" else "name"
        return SettingError(f"{document.name} needs a section [{key[0]}] with a {wants}")
    if first["type"] == "missing":
        return SettingError(f"{document.origin(key[:-1])}: [{dotted(key[:-1])}] needs a {key[-1]}")
    if first["type"] in ("model_type", "model_attributes_type"):
        return SettingError(
            f"{place}: {dotted(key)} must be a table, like [{dotted(key)}], got {shown(first['input'])}"
        )
    if first["type"] == "too_short":
        return SettingError(f"{place}: {dotted(key)} needs at least one entry")
    return SettingError(f"{place}: {dotted(key)} {plain(first['msg'])}, got {shown(first['input'])}")


def _place(model: type[BaseModel], document: Document, found: Key) -> tuple[type[BaseModel], Key]:
    """The section that a place is in, and the place without pydantic's names for the branches of unions."""
    key: list[str | int] = []
    values: Any = document.values
    for number, word in enumerate(found):
        last = number == len(found) - 1
        there = word in values if isinstance(values, Mapping) else isinstance(word, int)
        if there or (last and word in model.model_fields):  # the second where it is missing
            key.append(word)
            values = values[word] if there else None
        if not last and str(word) in model.model_fields:
            inner = _sections(model.model_fields[str(word)].annotation)
            model = next((one for one in inner if one.__name__ in found), next(iter(inner), model))
    return model, tuple(key)


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The models in an annotation, such as the one in `Model | None`."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for one in get_args(annotation) for model in _sections(one)]


def subject(message: str, table: Mapping[str, Any]) -> str | None:
    """The setting in a table that a message is about: found by its name, or else by its value."""
    words: Iterable[str] = re.findall(r"\w+", message)
    named = next((word for word in words if word in table), None)
    return named or next((name for name, value in table.items() if repr(value) in message), None)
