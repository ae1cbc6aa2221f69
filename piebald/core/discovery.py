"""Finds the components of a package, so that a new file needs no entry in any list.

The modules of such a package are imported when a class of theirs is first asked for: a run needs a dozen components,
and importing all of them takes a third of a second.
"""

from __future__ import annotations

import functools
import gc
import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any


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
            # classes that a module only imports are offered by the one that defines them
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


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package that offers what its `if TYPE_CHECKING:` imports.

    A name is imported when it is first used, so that `import piebald` and `piebald --help` are quick.
    """

    def offered(name: str) -> Any:
        homes = typed_imports(package)
        if name == "__all__":
            return sorted(homes)
        if name in homes and homes[name] != (package, name):
            module, there = homes[name]
            home = imported(module)
            return getattr(home, there) if hasattr(home, there) else imported(f"{module}.{there}")
        return module_of(package, name)

    return offered, lambda: sorted(typed_imports(package))


@functools.cache
def typed_imports(package: str) -> dict[str, tuple[str, str]]:
    """Return, for each name that a package imports for type checkers, its module and its name there."""
    import ast  # not before a name is asked for, since `import piebald` is to be quick

    tree = ast.parse(pkgutil.get_data(package, "__init__.py") or b"")
    imports = [node for block in tree.body if isinstance(block, ast.If) for node in block.body]
    return {
        name.asname or name.name: (str(node.module), name.name)
        for node in imports
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }


def module_of(package: str, name: str) -> ModuleType:
    """Import and return a module of a package, which was asked for as an attribute of it."""
    if name.startswith("_") or name not in modules(package):
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return imported(f"{package}.{name}")
