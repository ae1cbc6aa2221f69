"""Parameters with a learning rate or weight decay of their own."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from piebald.contracts.component import Settings, from_tables
from piebald.contracts.data import ModelSpec
from piebald.core.errors import SettingError
from piebald.core.parameters import matching

_EXAMPLE = '{ layers = ["norm", "*.bias"], weight_decay = 0.0 }'


class ParameterGroup(Settings):
    """Parameters with settings of their own, as the groups of `torch.optim`.

    Attributes:
        layers: names of layers, roles, or patterns, see `parameters.matching`; "norm" are all norm layers, "*.bias" all
            biases.
        lr: learning rate, above 0; schedules apply to it as well.
        weight_decay: weight decay, at least 0.

    Examples:
        >>> ParameterGroup(layers="*.bias", weight_decay=0.0).layers
        ('*.bias',)
    """

    layers: Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
    lr: float | None = Field(default=None, gt=0)
    weight_decay: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if not self.layers:
            raise ValueError("layers must name at least one layer")
        if self.lr is None and self.weight_decay is None:
            raise ValueError("give lr or weight_decay, without which a group changes nothing")
        return self


def unsupported(groups: tuple[ParameterGroup, ...], spec: ModelSpec) -> str | None:
    """Return why groups do not fit a model, or None: no tensor may be in two of them, and none may be empty."""
    # a pattern such as "norm" also hits running statistics, which no optimizer steps
    trained = {slot.name for slot in spec.layout.slots if not slot.buffer}
    group_of_tensor = dict[str, int]()
    for number, group in enumerate(groups):
        try:
            tensors = matching(spec.model, group.layers) & trained
        except SettingError as error:
            return f"parameter_groups: {error}"
        if not tensors:
            return f"parameter_groups: number {number} holds no parameter: name other layers"
        # sorted, so that the same error names the same parameter each time
        for name in sorted(tensors):
            if name in group_of_tensor:
                return (
                    f"parameter_groups must name each parameter once, but {name!r} is in numbers "
                    f"{group_of_tensor[name]} and {number}: take it out of one of them"
                )
            group_of_tensor[name] = number
    return None


def _built_groups(value: Any) -> tuple[ParameterGroup, ...]:
    return from_tables(ParameterGroup, value, _EXAMPLE)


ParameterGroups = Annotated[tuple[ParameterGroup, ...], BeforeValidator(_built_groups)]
