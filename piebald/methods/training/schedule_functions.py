"""Schedules that are functions of the user, named so that workers, sites and a resumed run find them."""

from __future__ import annotations

import math
from typing import Annotated

from piebald.core.errors import SettingError, shown
from piebald.settings import plugins


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


FunctionName = Annotated[str, plugins.function_name("schedule")]
