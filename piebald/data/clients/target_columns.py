"""The columns that are predicted: one, several, or a pair that is one target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

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
    def by_role(self) -> dict[str, str]:
        """The columns as settings have them."""
        return dict(zip(self.roles, self, strict=True))


class TimeAndEvent(PairOfColumns):
    """The columns of a survival time and of its event."""

    roles, loss = ("time", "event"), "survival"


class CountAndExposure(PairOfColumns):
    """The columns of a count and of how much could be counted, such as days, persons or areas."""

    roles, loss = ("count", "exposure"), "counts"


def target_columns(target: Any) -> Any:
    """Return the columns to predict, those of {"time": ..., "event": ...} and {"count": ..., "exposure": ...} in this
    order, or one column by its name.

    Raises:
        SettingError: it is another mapping.
    """
    if not isinstance(target, Mapping):
        alone = isinstance(target, list | tuple) and not isinstance(target, PairOfColumns) and len(target) == 1
        return target[0] if alone else target
    pair = next((pair for pair in (TimeAndEvent, CountAndExposure) if target.keys() == {*pair.roles}), None)
    if pair is None or not all(isinstance(name, str) for name in target.values()):
        raise SettingError(
            "target must be a column, a list of columns, or { time = 'a column', event = 'a column' } of survival, or "
            f"{{ count = 'a column', exposure = 'a column' }} of rates, got {shown(dict(target))}"
        )
    return pair(target[role] for role in pair.roles)
