"""Finds the components of a package, so that a new file needs no entry in any list.

The modules of such a package are imported when a class of theirs is first asked for: a run needs a dozen components,
and importing all of them takes a third of a second.
"""

from __future__ import annotations

import functools
import gc
import importlib
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any


class NamedLikeModules(ModuleType):
    """A package in which the name of a module is that of the function in it, whoever imports the module."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and callable(function := vars(value).get(name)):
            value = function
        super().__setattr__(name, value)


def imported(module: str) -> ModuleType:
    """Import a module while Python's garbage collector rests.

    Modules make many objects and hardly any garbage, and each look at all objects, of which torch has 200,000, takes
    nearly a tenth of a second.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if collects:
            gc.enable()


@functools.cache
def modules(package: str) -> frozenset[str]:
    """Return the names of a package's modules, empty for a module that is no package."""
    return frozenset(info.name for info in pkgutil.iter_modules(getattr(imported(package), "__path__", ())))


@functools.cache
def public_classes(package: str) -> dict[str, Any]:
    """Import every module of a package, and return the public classes that they define, by name.

    A module that is no package is only imported.
    """
    classes: dict[str, Any] = {}
    for name in sorted(modules(package)):
        module = imported(f"{package}.{name}")
        for public, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == module.__name__ and not public.startswith("_"):
                classes[public] = value
    return dict(sorted(classes.items()))


def lazy_classes(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package that offers the public classes of its modules."""

    def offered(name: str) -> Any:
        if name == "__all__":
            return list(public_classes(package))
        if name[:1].isupper() and name in public_classes(package):  # other names are those of modules
            return public_classes(package)[name]
        return module_of(package, name)

    return offered, lambda: list(public_classes(package))


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package that offers names of its modules.

    Args:
        package: its name.
        homes: the names of each module, which is one of the package, or of another room if it begins with "piebald.".
    """
    sys.modules[package].__class__ = NamedLikeModules
    home_of = {
        name: module if module.startswith("piebald.") else f"{package}.{module}"
        for module, names in homes.items()
        for name in names
    }

    def offered(name: str) -> Any:
        if name == "__all__":
            return sorted(home_of)
        if name in home_of:
            return getattr(imported(home_of[name]), name)
        return module_of(package, name)

    return offered, lambda: sorted(home_of)


def module_of(package: str, name: str) -> ModuleType:
    """Import and return a module of a package, which was asked for as an attribute of it."""
    if name.startswith("_") or name not in modules(package):
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return imported(f"{package}.{name}")
