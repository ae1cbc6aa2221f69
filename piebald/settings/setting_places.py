"""The places of settings in a file: each error becomes one sentence with the line or the flag of its value."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from piebald.core.errors import SettingError, shown, unknown
from piebald.core.wording import complaint, first_problem
from piebald.settings.toml_document import Document, Key, dotted

LOCAL_TRAINING = ("epochs", "batch", "lr", "steps", "momentum", "cohort", "mu", "optimizer", "weight_decay")


def of_document(error: ValidationError, document: Document, model: type[BaseModel]) -> SettingError:
    """Return the first error about a document, in one sentence with its place.

    Args:
        error: the errors that pydantic found.
        document: the values that were checked.
        model: the model that they were checked against; its sections are models too.
    """
    problem = first_problem(error)
    section, key = _place(model, document, problem["loc"])
    place, text = document.origin(key), complaint(problem)
    if problem["type"] == "extra_forbidden":
        subject = "setting or section called" if len(key) == 1 else f"setting of [{dotted(key[:-1])}] called"
        elsewhere = {str(key[-1]).replace("_", ""): f"it belongs to the recipe, as recipe.{key[-1]}"}
        of_recipe = elsewhere if len(key) == 1 and key[-1] in LOCAL_TRAINING else None
        return SettingError(f"{place}: {unknown(subject, key[-1], section.model_fields, of_recipe)}")
    if problem["type"] == "value_error":  # a sentence of ours
        return SettingError(f"{place}: {dotted(key)} {text}" if text.startswith("must ") else f"{place}: {text}")
    if problem["type"] == "missing" and len(key) == 1:
        if not _sections(section.model_fields[str(key[0])].annotation):
            return SettingError(f"{document.name} needs a value for {key[0]}")
        wants = "kind" if key[0] == "partition" else "name"
        return SettingError(f"{document.name} needs a section [{key[0]}] with a {wants}")
    if problem["type"] == "missing":
        return SettingError(f"{document.origin(key[:-1])}: [{dotted(key[:-1])}] needs a {key[-1]}")
    if problem["type"] in ("model_type", "model_attributes_type"):
        text = f"must be a table, like [{dotted(key)}], got {shown(problem['input'])}"
    return SettingError(f"{place}: {dotted(key)} {text}")


def _place(model: type[BaseModel], document: Document, path: Key) -> tuple[type[BaseModel], Key]:
    """Return the section that a path is in, and the path without pydantic's names for the branches of unions."""
    key: list[str | int] = []
    values: Any = document.values
    for number, word in enumerate(path):
        last = number == len(path) - 1
        is_given = word in values if isinstance(values, Mapping) else isinstance(word, int)
        if is_given or (last and word in model.model_fields):  # the second where it is missing
            key.append(word)
            values = values[word] if is_given else None
        if not last and str(word) in model.model_fields:
            sections = _sections(model.model_fields[str(word)].annotation)
            model = next((section for section in sections if section.__name__ in path), next(iter(sections), model))
    return model, tuple(key)


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in an annotation, such as the one in `Model | None`."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for kind in get_args(annotation) for model in _sections(kind)]


@dataclass(frozen=True, slots=True)
class SettingPlaces:
    """The file and the lines where settings of a document were given."""

    document: Document

    def at(self, *key: str | int) -> str:
        """Return the place of a key."""
        return self.document.origin(key)

    def check_names(
        self, key: Key, table: Iterable[str], known: Sequence[str], what: str, changes: Container[str] = (),
        elsewhere: Callable[[str], Mapping[str, str] | None] = lambda name: None,
    ) -> None:  # fmt: skip
        """Refuse a setting of a section that `what`, as messages call it, does not have; see `errors.unknown`."""
        for name in table:
            if name not in known:
                error = unknown(f"setting of {what} called", name, known, elsewhere(name))
                raise SettingError(f"{self._of(key, name, changes)}: {error}")

    def placed(
        self, error: SettingError, key: Key, given: BaseModel | Mapping[str, Any], changes: Container[str] = ()
    ) -> SettingError:
        """Return the error with the place and the full name of its key.

        Components know nothing of files, so the key is found in the message by its name, or else by its value.
        """
        table = given.model_dump() if isinstance(given, BaseModel) else given
        message = re.sub(r"^(recipe|\w+ '[^']*'): ", "", str(error))
        words = re.findall(r"\w+", message)
        name = next((word for word in words if word in table), None)
        name = name or next((name for name, value in table.items() if repr(value) in message), None)
        start = f"{dotted(key)}." if words[:1] == [name] else ""
        place = self.at(*key) if name is None else self._of(key, name, changes)
        return SettingError(f"{place}: {start}{message}")

    def _of(self, key: Key, name: str, changes: Container[str]) -> str:
        """Return the place of a setting of a section; `changes` are the settings from the grid."""
        return self.at("grid", f"recipe.{name}") if name in changes else self.at(*key, name)
