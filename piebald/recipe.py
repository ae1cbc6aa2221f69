"""One answer for each axis: the value that a method is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, field_serializer, model_validator

from piebald.aggregation.base import Weigh
from piebald.clustering.base import Group
from piebald.component import Part, build, sentence
from piebald.errors import SettingError, unknown
from piebald.scheduling.base import Pace
from piebald.server_optimizer.base import Step
from piebald.sharing.base import Share
from piebald.training.base import Rule
from piebald.transforms.base import Stage


class Recipe(BaseModel):
    """One answer for each axis.  Frozen; equal fields mean the same method; a combination that cannot work is refused
    here.

    `name`, `fields` and `paper` say which named recipe it was made by; `with_` replaces answers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: str = "custom"
    fields: Mapping[str, Any] = {}
    paper: str = ""
    learn: Rule
    share: Share
    update: tuple[Stage, ...] = ()
    pace: Pace
    group: Group
    weigh: Weigh
    step: Step

    axes: ClassVar[tuple[str, ...]] = ("learn", "share", "update", "pace", "group", "weigh", "step")

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise SettingError(sentence(error, "recipe", type(self).model_fields)) from None

    @model_validator(mode="before")
    @classmethod
    def _build_tables(cls, fields: Any) -> Any:
        made = dict(fields)
        for axis in cls.axes:
            if axis == "update":
                stages: Any = made.get(axis) or ()
                alone = isinstance(stages, Part | Mapping | str)
                made[axis] = tuple(build(axis, stage) for stage in ([stages] if alone else stages))
            elif axis in made:
                made[axis] = build(axis, made[axis])
        return made

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        hiding = [stage.kind for stage in self.update if stage.hides_each]
        looking = [part for part in (self.weigh, self.group) if part.needs_each]
        for part in (*looking, *(stage for stage in self.update if stage.colludes)):
            if hiding:
                raise ValueError(
                    f"{hiding[0]} shows the centre only sums but {part.kind} needs single updates: "
                    f"choose another {part.axis}, or drop {hiding[0]}"
                )
        self._check_cached()
        extra = self.learn.uploads()
        for stage in self.update:
            if stage.model_only and extra:
                raise ValueError(
                    f"{stage.kind} protects only the model but {self.learn.kind} also sends {extra[0]!r}: "
                    f"choose another rule, or drop {stage.kind}"
                )
            if why := stage.clash(self):
                raise ValueError(why)
        return self

    def _check_cached(self) -> None:
        if not self.step.cached:
            return
        if not self.weigh.singly():
            raise ValueError(
                f"{self.step.kind} gives every learner's last model a weight of its own but {self.weigh.kind} weighs "
                f"updates together: choose another weigh, or another step"
            )
        for stage in self.update:
            if stage.hides_each or type(stage).receive is not Stage.receive:
                raise ValueError(
                    f"{self.step.kind} needs every learner's own model but {stage.kind} acts on averages: "
                    f"drop {stage.kind}, or choose another step"
                )

    @field_serializer("learn", "share", "pace", "group", "weigh", "step")
    def _part_table(self, part: Part) -> dict[str, Any]:
        return part.table()

    @field_serializer("update")
    def _stage_tables(self, stages: tuple[Stage, ...]) -> list[dict[str, Any]]:
        return [stage.table() for stage in stages]

    @property
    def sealing(self) -> Stage | None:
        """The stage after which the centre sees only sums, or None."""
        return next((stage for stage in self.update if stage.hides_each), None)

    @property
    def needs_each(self) -> bool:
        """Whether single updates must reach the centre."""
        step = self.step.from_now or self.step.cached or any(stage.colludes for stage in self.update)
        return step or self.weigh.needs_each or self.group.needs_each or not self.pace.pools

    def with_(self, **answers: Any) -> Recipe:
        """This recipe with other answers on some axes, each a part or its table."""
        for axis in answers:
            if axis not in self.axes:
                raise unknown("axis", axis, self.axes)
        parts = {axis: getattr(self, axis) for axis in self.axes} | answers
        return Recipe(name=self.name, fields=self.fields, paper=self.paper, **parts)
