"""The settings of a recipe when one of its components is replaced: those that are recorded are those that train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from piebald.contracts.component import Component, build
from piebald.core.errors import SettingError, shown
from piebald.settings import plugins

# Settings of recipes that have another name in the component that they end up in, and those that choose a component.
ALIASES = {
    "private": ("sharing", "private_layers"),
    "shared": ("sharing", "shared_layers"),
    "server_lr": ("server_optimizer", "lr"),
}
CHOICES = {"aggregation": "aggregation", "inference": "training", "shared_matrix": "sharing"}
_NAMES = {place: name for name, place in ALIASES.items()}


def replace(
    name: str, fields: Mapping[str, Any], axis: str, old: Component, new: Component | Mapping[str, Any] | str
) -> tuple[Component, dict[str, Any]]:
    """Replace a component of a recipe, and hand the recipe's settings down to the new one.

    A setting of the recipe that the old component held goes to the new component, where that has such a setting and
    was not given a value of its own.  A value of its own counts, and is recorded.

    Args:
        name: the recipe's name.
        fields: the settings that the recipe was made with.
        axis: the component's axis.
        old: the component that the recipe had.
        new: its successor, as a component, as its table, or by its kind.

    Returns:
        The new component, and the settings to record.

    Raises:
        SettingError: the new component has no place for a setting.
    """
    component = build(axis, new)
    given_fields = component.model_fields_set  # what it was given, and not what it has by default
    fields_by_setting = {setting_name(axis, field): field for field in type(component).model_fields}
    recorded, handed = dict(fields), {}
    for setting, value in fields.items():
        # a component in the place of the one that the setting chose would silently undo the setting
        if CHOICES.get(setting) == axis:
            raise SettingError(_lost(name, setting, value, f"{axis} {component.kind!r} replaces what it chooses"))
        # the setting belongs to another axis, and stays with it
        if not holds(old, setting, value):
            continue
        if setting not in fields_by_setting:
            raise SettingError(
                _lost(
                    name, setting, value, f"{axis} {component.kind!r}, which replaces {old.kind!r}, has no such setting"
                )
            )
        if fields_by_setting[setting] in given_fields:
            recorded[setting] = plain(getattr(component, fields_by_setting[setting]))
        else:
            handed[fields_by_setting[setting]] = getattr(old, fields_by_setting[setting])
    if handed:
        # built anew, so that validators see the handed settings together with its own
        component = type(component)(**{field: getattr(component, field) for field in given_fields} | handed)
    return component, recorded


def check_once(name: str, axis: str, fields: Mapping[str, Any], table: Mapping[str, Any]) -> None:
    """Refuse a file that gives a setting twice, to the recipe and to a component of it, with different values."""
    for field, value in table.items():
        setting = setting_name(axis, field)
        if setting in fields and plain(fields[setting]) != plain(value):
            raise SettingError(
                f"{setting} is {shown(fields[setting])} in recipe {name!r} and {field} is {shown(value)} in its {axis}"
                ": give it once"
            )


def setting_name(axis: str, field: str) -> str:
    """The name of a component's setting among the settings of a recipe."""
    return _NAMES.get((axis, field), field)


def holds(component: Component, setting: str, value: Any) -> bool:
    """Return whether a component holds a recipe's setting: under its name there, with the same value."""
    field = next(
        (field for field in type(component).model_fields if setting_name(component.axis, field) == setting), None
    )
    return field is not None and plain(getattr(component, field)) == _plain_like(getattr(component, field), value)


def plain(value: Any) -> Any:
    """A setting as a plain value, as it is recorded."""
    if isinstance(value, Component):
        return value.table()
    if isinstance(value, BaseModel):
        return plain(value.model_dump())
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if callable(value):  # a schedule that is a function
        return {"kind": "function", "function": plugins.reference(value, "a setting")}
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


def _plain_like(held: Any, value: Any) -> Any:
    """A recorded value in the form of the one that a component holds: a table may leave out what is the default."""
    # both sides are written out with their defaults before they are compared
    if isinstance(held, Component) and isinstance(value, Mapping | str):
        return plain(build(held.axis, value))
    if isinstance(held, Mapping) and isinstance(value, Mapping) and held.keys() == value.keys():
        return {name: _plain_entry(held[name], item) for name, item in value.items()}
    if isinstance(held, tuple) and isinstance(value, str):
        return [value]
    if isinstance(held, tuple) and isinstance(value, list | tuple) and len(held) == len(value):
        return [_plain_entry(held_item, item) for held_item, item in zip(held, value, strict=True)]
    return plain(value)


def _plain_entry(held: Any, value: Any) -> Any:
    """An entry of a list in the form of the one that a component holds."""
    if isinstance(held, Component):
        return plain(build(held.axis, value))
    table = isinstance(held, BaseModel) and isinstance(value, Mapping)
    return plain(type(held).model_validate(value)) if table else plain(value)


def _lost(name: str, setting: str, value: Any, reason: str) -> str:
    return f"{setting} = {shown(value)} of recipe {name!r} would have no effect: {reason}; leave one of them out"
