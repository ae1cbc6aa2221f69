"""The meaning, type and range of a setting, read from the component that checks it."""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from typing import Any

from pydantic import BaseModel

from piebald.contracts.component import Component
from piebald.methods.recipe import Recipe
from piebald.methods.recipe_settings import ALIASES


def home(recipe: Recipe, setting: str) -> tuple[type[Component], str] | None:
    """The component and the field that hold a recipe's setting; None for one that chooses between components."""
    axis, field = ALIASES.get(setting, (None, setting))
    for place in [axis] if axis else [place for place in Recipe.axes if place != "transforms"]:
        part = type(getattr(recipe, place))
        if field in part.model_fields:
            return part, field
    return None


@functools.cache
def documented(part: type[BaseModel]) -> dict[str, str]:
    """The meaning of each field in the docstrings of a component, or of a section of a file, and of its parents."""
    found: dict[str, str] = {}
    # parents first, so that a subclass may describe a field anew
    for base in reversed(part.__mro__):
        if not base.__module__.startswith("piebald.") or not issubclass(base, BaseModel) or "__doc__" not in vars(base):
            continue
        _, _, text = (inspect.getdoc(base) or "").partition("Attributes:")
        text = re.split(r"\n\s*(?:Raises|Returns|Examples?):", text)[0]
        # docstrings put short entries on one line, two spaces apart
        entries = re.split(r"(?:\n|\s{2,})\s*(?=[a-z_0-9]+(?:, [a-z_0-9]+)*: )", "\n" + text.strip())
        for entry in entries:
            names, colon, description = entry.strip().partition(": ")
            if colon:
                # a closing full stop goes, but "..." stays
                description = re.sub(r"(?<!\.)\.$", "", " ".join(description.split()))
                found |= {name: description for name in names.split(", ")}
    return found


@functools.cache
def allowed(part: type[BaseModel], field: str) -> str:
    """The type and range of a field, in words."""
    info = part.model_fields[field]
    limits = {"Gt": "above {}", "Ge": "at least {}", "Lt": "below {}", "Le": "at most {}"}
    ranges = []
    for rule in info.metadata:
        name = type(rule).__name__
        if name in limits:
            ranges.append(limits[name].format(f"{getattr(rule, name.lower()):g}"))
    return ", ".join([kind(info.annotation), *ranges])


def kind(annotation: Any) -> str:
    """A type in words."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f'"{value}"' for value in inner)
    if origin in (typing.Union, types.UnionType):
        # None means that a setting is left out, which no file can write
        return " or ".join(kind(inner_kind) for inner_kind in inner if inner_kind is not type(None))
    if origin is typing.Annotated:
        return kind(inner[0])
    if origin in (tuple, list) or annotation is tuple:
        return "list"
    words = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    return words.get(annotation, "table")
