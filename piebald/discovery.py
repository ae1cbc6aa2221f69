"""Finds the components of a package, so that a new file needs no entry in any list."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Any


def public_classes(package: str) -> dict[str, Any]:
    """Import every module of a package, and return the public classes that they define, by name."""
    found: dict[str, Any] = {}
    for info in pkgutil.iter_modules(sys.modules[package].__path__):
        module = importlib.import_module(f"{package}.{info.name}")
        for name, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == module.__name__ and not name.startswith("_"):
                found[name] = value
    return dict(sorted(found.items()))
