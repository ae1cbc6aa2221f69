"""The modules that objects and settings come from, where they are a user's own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from piebald.component import Component, imported


def is_reference(name: object) -> bool:
    """Whether a name has the form "module:name" or "file.py:name"."""
    return isinstance(name, str) and ":" in name


def modules_of(value: Any) -> set[str]:
    """Modules of an object's class, and of the components, classes and functions inside of it."""
    if isinstance(value, Component):
        inner = {module for name in type(value).model_fields for module in modules_of(getattr(value, name))}
        named = {reference.rpartition(":")[0] for reference in value.references()}
        return inner | _foreign(type(value).__module__) | {found for one in named for found in _foreign(one)}
    if isinstance(value, Mapping):
        return {module for one in value.values() for module in modules_of(one)}
    if isinstance(value, list | tuple):
        return {module for one in value for module in modules_of(one)}
    if isinstance(value, partial):  # a loss with settings
        return modules_of(value.func)
    if callable(value) or isinstance(value, type):
        return _foreign(getattr(value, "__module__", None) or type(value).__module__)
    return _foreign(type(value).__module__)


def modules_named_in(value: Any) -> set[str]:
    """The modules that settings of an experiment name, as a plugin, by a kind or a reference, and that are imported."""
    if isinstance(value, Mapping):
        kind = value.get("kind")
        registries = imported() if isinstance(kind, str) else ()
        of_kind = [kinds[kind].__module__ for kinds in registries if kind in kinds]
        plugins = value.get("plugins")
        listed = plugins if isinstance(plugins, list) else []
        inside = [modules_named_in(inner) for inner in value.values()]
        return {found for module in (*of_kind, *listed) for found in _foreign(module)}.union(*inside)
    if isinstance(value, list | tuple):
        return {module for one in value for module in modules_named_in(one)}
    if not is_reference(value):
        return set()
    module = value.rpartition(":")[0]
    module = Path(module).stem if module.endswith(".py") else module
    return _foreign(module) if module in sys.modules else set()


def _foreign(module: str) -> set[str]:
    top = module.partition(".")[0]
    ours = (
        top in {"piebald", "torch", "torchmetrics", "numpy", "builtins", "__main__"} or top in sys.stdlib_module_names
    )
    return set() if ours else {module}
