"""The places of settings in an experiment file, for messages about them."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from piebald.core.errors import SettingError, unknown
from piebald.settings.setting_errors import plain, subject
from piebald.settings.toml_document import Document, Key, dotted


@dataclass(frozen=True, slots=True)
class SettingPlaces:
    """The file and the lines where settings of a document were given."""

    document: Document

    def at(self, *key: str | int) -> str:
        """The place of a key."""
        return self.document.origin(key)

    def check_names(
        self, key: Key, table: Iterable[str], known: Sequence[str], what: str, changes: Container[str] = ()
    ) -> None:
        """Refuse a setting of a section that `what`, as messages call it, does not have."""
        for name in table:
            if name not in known:
                error = unknown(f"setting of {what} called", name, known)
                raise SettingError(f"{self._of(key, name, changes)}: {error}")

    def placed(
        self, error: SettingError, key: Key, given: BaseModel | Mapping[str, Any], changes: Container[str] = ()
    ) -> SettingError:
        """The error with the place and the full name of its key.

        Components know nothing of files, so the key is found in the message by its name, or else by its value.
        """
        table = given.model_dump() if isinstance(given, BaseModel) else given
        message = plain(re.sub(r"^(recipe|\w+ '[^']*'): ", "", str(error)))
        name = subject(message, table)
        start = f"{dotted(key)}." if re.findall(r"\w+", message)[:1] == [name] else ""
        place = self.at(*key) if name is None else self._of(key, name, changes)
        return SettingError(f"{place}: {start}{message}")

    def _of(self, key: Key, name: str, changes: Container[str]) -> str:
        """The place of a setting of a section; `changes` are the settings from the grid."""
        return self.at("grid", f"recipe.{name}") if name in changes else self.at(*key, name)
