"""The sections of an experiment file: tables with fixed keys, and those with the settings of what they name."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from piebald.contracts import Split


class Section(BaseModel):
    """A table with fixed keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Named(Section):
    """A table with a name; the other keys are the settings of what it names."""

    model_config = ConfigDict(extra="allow")

    name: str


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
