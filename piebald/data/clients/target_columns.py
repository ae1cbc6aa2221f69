"""The columns that are predicted: one, several, or a pair that is one target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from piebald.core.errors import SettingError, shown


class PairOfColumns(list[str]):
    """Two columns that are one target, whose loss is that of the pair unless another one is named.

    Attributes:
        roles: what the columns are.
        loss: the name of the loss.
    """

    roles: ClassVar[tuple[str, str]]
    loss: ClassVar[str]

    @property
    def by_role(self) -> dict[str, Any]:
        """The columns as settings have them."""
        return dict(zip(self.roles, self, strict=True))


class TimeAndEvent(PairOfColumns):
    """The columns of a survival time and of its event."""

    roles, loss = ("time", "event"), "survival"


class CountAndExposure(PairOfColumns):
    """The columns of a count and of how much could be counted, such as days, persons or areas.

    Attributes:
        per: units of exposure that rates are for.
    """

    roles, loss = ("count", "exposure"), "counts"

    def __init__(self, columns: Iterable[str], per: float = 1.0) -> None:
        super().__init__(columns)
        self.per = per

    @property
    def by_role(self) -> dict[str, Any]:
        return super().by_role | ({} if self.per == 1 else {"per": self.per})

    def far_reason(self, pairs: NDArray[Any]) -> str:
        """Return why networks would learn little of these counts and exposures [n, 2], empty where they begin near.

        The first rate of a network is about 1, and a step of the loss is as long as what it expects is wrong.
        """
        counts, exposures = (float(sum) for sum in np.where(np.isnan(pairs).any(1, keepdims=True), 0, pairs).sum(0))
        if counts <= 0 or exposures <= 0 or (tens := round(np.log10(exposures / counts))) in (-1, 0, 1):
            return ""
        count, exposure = self
        written = f"{{ count = {count!r}, exposure = {exposure!r}, per = {self.per * 10.0**tens:g} }}"
        return (
            f"{count!r} comes once in {self.per * exposures / counts:.3g} of {exposure!r}, and networks begin with "
            f"once in {self.per:g}, from where their first steps are far too long: write target = {written}, so that "
            "rates are for as much"
        )


def target_columns(target: Any) -> Any:
    """Return the columns to predict, those of {"time": ..., "event": ...} and {"count": ..., "exposure": ...} in this
    order, or one column by its name; rates are for 1 unit of exposure, or for as many as "per" says.

    Raises:
        SettingError: it is another mapping.
    """
    if not isinstance(target, Mapping):
        alone = isinstance(target, list | tuple) and not isinstance(target, PairOfColumns) and len(target) == 1
        return target[0] if alone else target
    columns = {role: name for role, name in target.items() if role != "per"}
    pair = next((pair for pair in (TimeAndEvent, CountAndExposure) if columns.keys() == {*pair.roles}), None)
    if pair is None or not all(isinstance(name, str) for name in columns.values()):
        raise SettingError(
            "target must be a column, a list of columns, or { time = 'a column', event = 'a column' } of survival, or "
            f"{{ count = 'a column', exposure = 'a column' }} of rates, got {shown(dict(target))}"
        )
    names = [columns[role] for role in pair.roles]
    if "per" not in target:
        return pair(names)
    per = target["per"]
    if pair is not CountAndExposure or not isinstance(per, int | float) or isinstance(per, bool) or not 0 < per < 1e12:
        raise SettingError(
            "per of a target is how many units of exposure rates are for, a number above 0, as in { count = 'falls', "
            f"exposure = 'days', per = 365 }}, got {shown(dict(target))}"
        )
    return CountAndExposure(names, float(per))
