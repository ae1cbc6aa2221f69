"""The sections of an experiment file: tables with fixed keys, and those with the settings of what they name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from piebald.contracts import Split
from piebald.errors import SettingError
from piebald.toml_document import Key


class Section(BaseModel):
    """A table with fixed keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Named(Section):
    """A table with a name; the other keys are the settings of what it names."""

    model_config = ConfigDict(extra="allow")

    name: str


class RecipeSection(Named):
    """A recipe.

    Attributes:
        label: its name in tables, the recipe's name by default.
    """

    label: Any = None

    def settings(self) -> dict[str, Any]:
        """The settings of the recipe with its name."""
        return self.model_dump(exclude={"label"})

    def labels(self, points: Iterable[Mapping[str, Any]]) -> list[str]:
        """The label at each point of the grid."""
        own = str(self.name if self.label is None else self.label)
        return [own + "".join(f" {name}={value}" for name, value in changes.items()) for changes in points]


def _table_of_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class ComparedRecipe(RecipeSection):
    """A recipe of a comparison.

    Attributes:
        model: a model of its own in place of [model]: the name of one, or a table like [model].
    """

    model: Annotated[Named | None, BeforeValidator(_table_of_name)] = None

    def settings(self) -> dict[str, Any]:
        """The settings of the recipe with its name."""
        return self.model_dump(exclude={"label", "model"})


class Kind(Section):
    """A table of a component; the other keys are the component's fields."""

    model_config = ConfigDict(extra="allow")

    kind: str


class RuntimeSection(Kind):
    """The runtime; fields without a kind are those of the simulator."""

    kind: str = "simulator"


class Evaluation(Section):
    """Evaluation of models during a run.

    Attributes:
        every: server steps between two evaluations, 0 for none.
        clients: the number of clients to evaluate on, all by default.
        split: the split to evaluate on.
        metrics: names of metrics, or "module:name", the main metric first; chosen by the targets by default.
    """

    every: int = Field(default=1, ge=0)
    clients: int | None = Field(default=None, ge=1)
    split: Split = "test"
    metrics: list[str] | None = Field(default=None, min_length=1)


def file_text(path: str | Path | None) -> str:
    """The text of an experiment file, or of the built-in experiment."""
    if path is None:
        return resources.files("piebald").joinpath("experiment_default.toml").read_text(encoding="utf-8")
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise SettingError(f"{path} is not a text file in UTF-8") from None
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None


def leaves(table: Mapping[str, Any], key: Key) -> list[tuple[str, Any, Key]]:
    """The values of nested tables: their names below the first key, the values, and their full keys."""
    found: list[tuple[str, Any, Key]] = []
    for name, value in table.items():
        inner = (*key, name)
        if isinstance(value, Mapping):
            found += leaves(value, inner)
        else:
            found.append((".".join(str(word) for word in inner[1:]), value, inner))
    return found
