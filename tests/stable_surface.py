"""What releases of one major number keep, as plain values: `python -m tests.stable_surface` writes the listing."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

import piebald
from piebald.experiments.recipes import ExperimentFields
from piebald.federation.hub.run_terms import RunTerms
from piebald.federation.link import wire_format
from piebald.methods.recipe import Recipe
from piebald.storage.schema import COLUMNS

MADE_BY_USERS = {piebald.FederatedClassifier, piebald.FederatedRegressor, piebald.LazyClients, piebald.Ledger,
                 piebald.Ray, piebald.Recipe, piebald.Simulator}  # fmt: skip
LISTING = Path(__file__).with_name("stable_surface.json")


def surface() -> dict[str, Any]:
    """The root names with their arguments, the seven base classes, the TOML, the run folder and the wire."""
    axes = [Recipe.model_fields[axis].annotation for axis in Recipe.axes]
    bases = [next((part for part in get_args(base) if inspect.isclass(part)), base) for base in axes]
    messages = [kind for kind in vars(wire_format).values() if _is_message(kind)]
    return {
        "names": {name: _arguments(getattr(piebald, name)) for name in dir(piebald)},
        "base classes": {base.__name__: sorted(_methods(base)) for base in bases if inspect.isclass(base)},
        "toml": sorted(_keys(ExperimentFields)),
        "run folder": {table: list(columns) for table, columns in COLUMNS.items()},
        "wire": {
            "protocol": wire_format.PROTOCOL,
            "messages": {kind.__name__: sorted(kind.model_fields) for kind in messages},
            "terms": sorted(RunTerms.model_fields),
        },
    }


def _is_message(kind: Any) -> bool:
    bases = (wire_format.Message, wire_format.Release)
    return inspect.isclass(kind) and issubclass(kind, wire_format.Message) and kind not in bases


def _arguments(value: Any) -> list[str] | None:
    """The arguments of a function, or of a class that users make: those with places in order, then the keywords.

    None for a module, for an error, and for a class of results, which functions make.
    """
    if not callable(value) or (inspect.isclass(value) and value not in MADE_BY_USERS):
        return None
    parameters = inspect.signature(value).parameters.values()
    keywords = sorted(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
    return [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY] + keywords


def _methods(base: type[Any]) -> Iterator[str]:
    """The methods that a subclass from outside may define or call."""
    for name, value in inspect.getmembers(base, inspect.isfunction):
        if not name.startswith("_") and name not in vars(BaseModel) and value.__module__.startswith("piebald."):
            yield f"{name}({', '.join(inspect.signature(value).parameters)})"


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The keys of an experiment file, of tables inside as well."""
    for name, field in model.model_fields.items():
        name = field.alias or name
        yield f"{prefix}{name}"
        parts = (field.annotation, *get_args(field.annotation))
        for inner in parts:
            if inspect.isclass(inner) and issubclass(inner, BaseModel) and inner is not model:
                yield from _keys(inner, f"{prefix}{name}.")


if __name__ == "__main__":
    LISTING.write_text(json.dumps(surface(), indent=1, sort_keys=True) + "\n", "utf-8")
