"""The terms of a run: all that a site needs to rebuild its work from what it has installed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from piebald import __version__
from piebald.client_work import Work
from piebald.component import build
from piebald.errors import SettingError
from piebald.training.base import Rule
from piebald.transforms.base import Stage


class Terms(BaseModel):
    """What a site is told before its first assignment.

    Attributes:
        piebald: the server's version.
        experiment: the experiment's settings.
        rule, stages: how clients learn, and what befalls updates, as tables.
        private: names of the tensors that stay with the client.
        layout: names and shapes of the model's tensors, in order.
        task: what the model is for; metrics: by which it is judged.
        seed: of the run.
        shape, outputs: of one input, and of what comes out.
        classes: names of the classes, None where targets are not classes.
        clients: names of the clients, by number.
        sites: names of their sites.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    piebald: str
    experiment: dict[str, Any]
    rule: dict[str, Any]
    stages: list[dict[str, Any]]
    private: list[str]
    layout: list[tuple[str, list[int]]]
    task: str
    metrics: list[str]
    seed: int
    shape: list[int]
    outputs: list[int]
    classes: list[str] | None = None
    clients: list[str]
    sites: list[str]

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Terms:
        """Terms as they came.

        Raises:
            SettingError: they are of another version, or cannot be read.
        """
        theirs = str(values.get("piebald"))[:40]
        if theirs != __version__:
            raise SettingError(f"this site has Piebald {__version__}, the server {theirs}: install the same on both")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            raise SettingError(f"the run's terms cannot be read: {first['loc']}: {first['type']}") from None

    def learning(self) -> tuple[Rule, tuple[Stage, ...]]:
        """The rule and the stages, from what is installed here."""
        rule = build("learn", self.rule)
        stages = tuple(build("update", stage) for stage in self.stages)
        assert isinstance(rule, Rule)
        return rule, stages  # type: ignore[return-value]


def terms(
    work: Work, experiment: Mapping[str, Any], clients: Sequence[str], sites: Sequence[str],
    classes: Sequence[str] | None = None,
) -> bytes:  # fmt: skip
    """The terms as bytes."""
    made = Terms(
        piebald=__version__,
        experiment=dict(experiment),
        rule=work.rule.table(),
        stages=[stage.table() for stage in work.stages],
        private=sorted(work.layout.private),
        layout=[(slot.name, list(slot.shape)) for slot in work.layout.slots],
        task=work.task.name,
        metrics=list(work.task.metrics),
        seed=work.seed,
        shape=list(work.shape),
        outputs=list(work.outputs),
        classes=None if classes is None else list(classes),
        clients=list(clients),
        sites=list(sites[: len(clients)]),
    )
    return json.dumps(made.model_dump(), sort_keys=True).encode()
