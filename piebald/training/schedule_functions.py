"""Schedules that are functions of the user, named so that workers, sites and a resumed run find them."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from piebald import plugins
from piebald.component import Component
from piebald.errors import SettingError, shown


def schedule(axis: str, given: Any) -> Component:
    """A schedule from a component, its table, its kind, or a function."""
    return plugins.built(axis, given)


def called(reference: str, *numbers: int) -> float:
    """What the named function returns for these numbers.

    Raises:
        SettingError: it is not there, fails, or returns something other than a finite number of at least 0.
    """
    function = plugins.find(reference, "schedule")
    try:
        found = function(*numbers)
        factor = float(found)
    except Exception as error:  # whatever the user's own code may raise
        raise SettingError(f"the schedule {reference} fails at {numbers}: {type(error).__name__}: {error}") from error
    if not (math.isfinite(factor) and factor >= 0):
        raise SettingError(
            f"the schedule {reference} must return a finite number of at least 0, got {shown(found)} at {numbers}"
        )
    return factor


def _referenced(given: Any) -> Any:
    return plugins.reference(given, "schedule") if callable(given) else given


def _found(reference: str) -> str:
    if not callable(plugins.find(reference, "schedule")):
        raise ValueError(f"must name a function, got {reference!r}")
    return reference


FunctionName = Annotated[str, BeforeValidator(_referenced), AfterValidator(_found)]
