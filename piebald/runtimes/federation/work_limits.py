"""How much work a site does for a server: checked from the run's terms, before anything is built for them."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from piebald import pytree
from piebald.errors import Declined
from piebald.parameters import copied
from piebald.runtimes.federation.run_terms import RunTerms

_ABSURD = 1e12  # no setting of an experiment is a larger number, except seeds
_TENSORS = 20_000  # tensors of a model, clients of a partition in thousands, and combinations of a grid
_CLIENTS = 1_000_000
_COPIES = 8  # of a model at a site: two engines with gradients, the sent and the trained one, state, upload
# settings that multiply passes over the rows
_PASSES = ("epochs", "cycles", "personal_epochs", "tune_epochs", "head_epochs", "inner_steps", "first_passes")


class WorkLimits(BaseModel):
    """What one task of a run may cost this site.

    Attributes:
        epochs: passes over the rows.
        steps: optimizer steps.
        batch: rows of a step.
        lr: learning rate.
        parameters: numbers of the model.
        gigabytes: memory for the model and the rows of a step, as far as it follows from the terms; None takes three
            quarters of the machine's.
        seconds: time of one task; a task that takes longer ends without a result.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    epochs: int = Field(default=1000, ge=1)
    steps: int = Field(default=1_000_000, ge=1)
    batch: int = Field(default=1_000_000, ge=1)
    lr: float = Field(default=1000.0, gt=0)
    parameters: int = Field(default=1_000_000_000, ge=1)
    gigabytes: float | None = Field(default=None, gt=0)
    seconds: float = Field(default=86_400.0, gt=0)

    def terms_reject_reason(self, terms: RunTerms) -> str | None:
        """Why the work of a run is too much for this site, or None.  Nothing is built to find that out."""
        tables = {"training": terms.training, "transforms": terms.transforms, "experiment": terms.experiment}
        for path, number in _numbers(tables):
            if not -_ABSURD <= number <= _ABSURD:  # NaN is not, either
                return f"{path} is {_short(number)}, which is no setting that this site works with"
        return (
            self._training_reason(terms.training)
            or self._model_reason(terms)
            or _experiment_reason(terms)
            or self._memory_reason(terms)
        )

    def steps_reject_reason(self, steps: int) -> str | None:
        """Why a task of so many steps is too much, or None."""
        if steps <= self.steps:
            return None
        return f"a task would take more steps on this site's rows than the {self.steps:,} that it allows"

    def _training_reason(self, training: Mapping[str, Any]) -> str | None:
        passes = math.prod(max(training[name], 1) for name in _PASSES if _is_number(training.get(name)))
        asked = {"epochs": passes, **{name: training.get(name) for name in ("steps", "batch", "lr")}}
        limits = {"epochs": self.epochs, "steps": self.steps, "batch": self.batch, "lr": self.lr}
        for name, value in asked.items():
            if _is_number(value) and value > limits[name]:
                return f"the run's {name} are {value:,}, this site allows at most {limits[name]:,}"
        return None

    def _model_reason(self, terms: RunTerms) -> str | None:
        shapes = [*pytree.shapes(pytree.formed(terms.shape)), terms.outputs, *(shape for _, shape in terms.layout)]
        if len(shapes) > _TENSORS or any(number < 0 or len(shape) > 16 for shape in shapes for number in shape):
            return f"a model of {len(terms.layout):,} tensors is none that this site works with"
        size = sum(math.prod(shape) for _, shape in terms.layout)
        largest = max([size, *(number for _, number in _numbers(terms.experiment.get("model")))])
        if largest > self.parameters:
            return f"the model would have {_short(largest)} parameters, this site allows {self.parameters:,}"
        return None

    def _memory_reason(self, terms: RunTerms) -> str | None:
        size, batch = sum(math.prod(shape) for _, shape in terms.layout), terms.training.get("batch", 1)
        row = sum(math.prod(shape) for shape in pytree.shapes(pytree.formed(terms.shape)))
        rows = row * (batch if _is_number(batch) else 1)
        wanted, allowed = 4 * (_COPIES * size + 2 * rows) / 1e9, self.gigabytes or 0.75 * _machine_gigabytes()
        if wanted <= allowed:
            return None
        return f"a task would take {wanted:.3g} gigabytes at least, this site allows {allowed:.3g}"


class TaskClock:
    """Ends tasks that take too long, at the next batch that the model sees.

    Args:
        seconds: the longest time of a task.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._own = seconds, threading.local()

    def watched(self, module: nn.Module) -> nn.Module:
        """A copy of a module that looks at the time whenever it runs, and so do its own copies."""
        module = copied(module)

        def check(*_: object) -> None:
            if time.monotonic() > self._own.__dict__.get("until", math.inf):
                raise Declined(f"it took longer than the {self._seconds:g} seconds that this site allows")

        module.register_forward_pre_hook(check)
        return module

    @contextmanager
    def task(self) -> Iterator[None]:
        """One task of this thread."""
        self._own.until = time.monotonic() + self._seconds
        try:
            yield
        finally:
            self._own.until = math.inf


def _experiment_reason(terms: RunTerms) -> str | None:
    """Why an experiment's tables would be too large once they are built, or None."""
    experiment = terms.experiment
    grid = experiment.get("grid")
    lists = [values for _, values in _lists(grid)]
    if math.prod(len(values) for values in lists) > _TENSORS:
        return "the experiment's grid has too many combinations for this site"
    clients = dict(_numbers(experiment.get("partition"))).get("clients", 0)
    if max(clients, len(terms.clients)) > _CLIENTS:
        return f"the experiment has {_short(max(clients, len(terms.clients)))} clients, this site works with a million"
    return None


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """All numbers in nested tables with their paths, except seeds."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in ("seed", "seeds"):
                yield from _numbers(inner, f"{path}.{name}".strip("."))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            yield from _numbers(inner, path)
    elif _is_number(value):
        yield path, value


def _lists(value: Any) -> Iterator[tuple[str, Sequence[Any]]]:
    """All lists in nested tables."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if isinstance(inner, Mapping):
                yield from _lists(inner)
            elif isinstance(inner, Sequence) and not isinstance(inner, str):
                yield name, inner


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(number: float) -> str:
    """A number that may have any number of digits."""
    return f"{number:g}" if isinstance(number, float) or abs(number) < 10**15 else "more than 10^15"


def _machine_gigabytes() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
