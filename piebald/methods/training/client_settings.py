"""Settings of single clients in place of a trainer's, by their names or by patterns of names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from piebald.contracts.component import Settings
from piebald.core.client_models import fitting_patterns
from piebald.core.errors import SettingError, shown


class ClientSettings(Settings):
    """Settings of some clients.

    Attributes:
        epochs: passes over the client's rows.
        steps: exactly this many steps instead.
        batch: rows in each step.
        lr: learning rate, above 0.

    Examples:
        >>> ClientSettings(epochs=5).batch is None
        True
    """

    epochs: int | None = Field(default=None, ge=1)
    steps: int | None = Field(default=None, ge=1)
    batch: int | None = Field(default=None, ge=1)
    lr: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("epochs and steps both say how long a client trains: leave one out")
        if not self.model_dump(exclude_none=True):
            raise ValueError("give epochs, steps, batch or lr, without which nothing changes")
        return self


def settings_of(tables: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return the settings of the client of this name, each of the most particular table that has it.

    Epochs in place of steps, and steps in place of epochs, leave the other one out as None.

    Examples:
        >>> settings_of({"ward 1": {"epochs": 5}, "ward *": {"steps": 9, "lr": 0.1}}, "ward 1")
        {'epochs': 5, 'steps': None, 'lr': 0.1}
    """
    settings: dict[str, Any] = {}
    for pattern in fitting_patterns(tables, name):
        for setting, value in tables[pattern].items():
            # patterns come from the most particular on, so the first value stays
            settings.setdefault(setting, value)
        if settings.keys() & {"epochs", "steps"}:  # one of them says how long
            # after the first table that says how long: a vaguer one must not add steps to its epochs
            settings = {"epochs": None, "steps": None} | settings
    return settings


def _built(value: Any) -> dict[str, ClientSettings]:
    if not isinstance(value, Mapping):
        raise ValueError(f'must be a table by clients, like {{"ward *" = {{ epochs = 5 }}}}, got {shown(value)}')
    tables = {}
    for name, table in value.items():
        if not isinstance(table, Mapping | ClientSettings):
            raise ValueError(f"{name!r} must have a table like {{ epochs = 5 }}, got {shown(table)}")
        try:
            tables[str(name)] = table if isinstance(table, ClientSettings) else ClientSettings(**dict(table))
        except SettingError as error:
            raise ValueError(f"{name!r}: {str(error).removeprefix('a table: ')}") from None
    return tables


ClientTable = Annotated[dict[str, ClientSettings], BeforeValidator(_built)]
