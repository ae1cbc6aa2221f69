"""The description of a run in its folder: the values of the table `meta` and their types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from piebald.core.errors import RunFolderError, shown


class RunMeta(TypedDict, total=False):
    """What describes a run.  Other names may come along; none of these has to be there."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]

    id: str
    created: str
    finished: str
    status: str
    piebald: str
    torch: str
    python: str
    machine: dict[str, Any]
    recipe: dict[str, Any]
    paper: str | None
    label: str | None
    seed: int | None
    rounds: int | None
    stop: dict[str, Any] | None
    evaluate: list[Any]
    keep: str | dict[str, Any]
    best: int | None
    unseen: float
    newcomers: list[dict[str, Any]] | None
    loss: str | dict[str, Any] | None
    objective: str | None
    metric: str
    metrics: list[str] | None
    per_class: bool | None
    higher_is_better: bool
    model: str
    layout: list[list[Any]]
    parameters: int
    shared: int
    clients: int
    classes: list[str] | None
    plugins: list[list[str | None]] | None
    privacy: list[dict[str, Any]] | None
    runtime: dict[str, Any]
    checkpoint_every: int | None
    settings: dict[str, Any] | None
    longest_step: float
    max_examples: int | None
    max_weight: float
    measure: str
    units: dict[str, str]
    trackers: list[dict[str, Any]]
    lineage: dict[str, Any] | None


_CHECK = TypeAdapter(RunMeta)


def check_meta(meta: Mapping[str, Any], folder: str) -> None:
    """Refuse values of another type than a run writes.

    Raises:
        RunFolderError: with the first such value.
    """
    try:
        _CHECK.validate_python(dict(meta))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"][:1]))
        raise RunFolderError(
            f"{folder} is damaged: the value of {name} in its table meta is {shown(first['input'])}, and no run "
            "writes that"
        ) from None
