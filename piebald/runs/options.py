"""The settings of a run besides its recipe, clients, model and folder, as one value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np

from piebald.contracts import Split
from piebald.contracts.component import Component
from piebald.core.errors import SettingError
from piebald.methods.choice.final_models import Keep
from piebald.report.callbacks import Tracker
from piebald.server import StoppingCriteria
from piebald.server.result_checks import LONGEST_STEP

Metrics = Mapping[str, Any] | Sequence[str | Mapping[str, Any]]

_ALWAYS_RECORDED = ("rounds", "seed", "runtime", "checkpoint_every", "label", "settings")
# Folders of earlier versions lack some of these.
_RECORDED = (
    "stop", "keep", "unseen", "longest_step", "max_examples", "max_weight", "trackers", "per_class", "threshold",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The settings of a run, which `piebald.run` documents under the same names."""

    rounds: int | None = None
    stop: StoppingCriteria | Mapping[str, Any] | None = None
    seed: int = 0
    runtime: str | Component | Mapping[str, Any] = "simulator"
    loss: Any = None
    metrics: Metrics | None = None
    evaluate_every: int = 1
    evaluate_clients: int | None = None
    evaluate_split: Split = "test"
    keep: Keep | Mapping[str, Any] = "last"
    unseen: float | Sequence[str] = 0
    checkpoint_every: int | None = None
    label: str | None = None
    settings: Mapping[str, Any] | None = None
    longest_step: float = LONGEST_STEP
    max_examples: int | None = None
    max_weight: float = 1.0
    trackers: Sequence[str | Tracker | Mapping[str, Any]] = ()
    per_class: bool | None = None
    threshold: str | None = None

    @classmethod
    def among(cls, arguments: Mapping[str, Any], **settings: Any) -> Self:
        """Pick the options of a run from the keyword arguments of `piebald.run`, with `settings` in their place."""
        chosen = {field.name: arguments[field.name] for field in fields(cls) if field.name in arguments}
        return cls(**chosen | settings)

    @classmethod
    def of_folder(cls, meta: Mapping[str, Any], objective: Mapping[str, Any]) -> Self:
        """Read the options of the run in a folder.

        Args:
            meta: what the folder says of its run.
            objective: loss and metrics, which are no plain values, as the user gives them again.
        """
        interval, clients, split = meta["evaluate"]
        return cls(
            evaluate_every=interval,
            evaluate_clients=clients,
            evaluate_split=split,
            loss=objective.get("loss") or meta.get("loss"),
            metrics=objective.get("metrics") or meta.get("metrics"),
            **{name: meta[name] for name in _ALWAYS_RECORDED},
            **{name: meta[name] for name in _RECORDED if meta.get(name) is not None},
        )

    def length(self) -> tuple[int | None, StoppingCriteria | None]:
        """Return the number of rounds and the stopping criteria; ten rounds if neither is given."""
        criteria = StoppingCriteria(**self.stop) if isinstance(self.stop, Mapping) else self.stop
        if criteria is not None and not isinstance(criteria, StoppingCriteria):
            raise SettingError(
                f"stop must be a StoppingCriteria or a table like {{'seconds': 3600}}, got {self.stop!r}"
            )
        return (10 if self.rounds is None and criteria is None else self.rounds), criteria

    def with_whole_counts(self) -> Self:
        """Return these options with their counts as Python integers, since NumPy's are not written to the folder."""
        counts: dict[str, Any] = {}
        for name, value, least in (
            ("rounds", self.length()[0], 1),
            ("seed", self.seed, 0),
            ("checkpoint_every", self.checkpoint_every, 1),
        ):
            if value is None and name != "seed":
                continue
            # A bool is an int in Python, and True rounds would be one.
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
                raise SettingError(f"{name} must be a whole number of at least {least}, got {value!r}")
            counts[name] = int(value)
        return replace(self, **counts)

    def recorded(self) -> dict[str, Any]:
        """Return the options that influence the results of a run, as plain values for its folder."""
        rounds, stop = self.length()
        return {
            "rounds": rounds,
            "stop": None if stop is None else stop.model_dump(exclude_none=True),
            "evaluate": [self.evaluate_every, self.evaluate_clients, self.evaluate_split],
            "keep": self.keep if isinstance(self.keep, str) else dict(self.keep),
            "unseen": self.unseen if isinstance(self.unseen, int | float) else list(self.unseen),
            "longest_step": self.longest_step,
            "threshold": self.threshold,
            "max_examples": self.max_examples,
            "max_weight": self.max_weight,
        }
