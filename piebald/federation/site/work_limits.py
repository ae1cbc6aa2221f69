"""Limits of the work that a site does for a server, checked from the terms before anything is built, and in work."""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from piebald.core import pytree
from piebald.core.errors import Declined
from piebald.federation.hub.run_terms import RunTerms

_ABSURD = 1e12  # no setting of an experiment is a larger number, except seeds
_TENSORS = 20_000  # tensors of a model, clients of a partition in thousands, and combinations of a grid
_CLIENTS = 1_000_000
_COPIES = 8  # of a model at a site: two engines with gradients, the sent and the trained one, state, upload
_LOOK = 0.1  # seconds between two looks at a task
T = TypeVar("T")
# settings that multiply passes over the rows
_PASSES = ("epochs", "cycles", "personal_epochs", "tune_epochs", "head_epochs", "inner_steps", "first_passes")


class WorkLimits(BaseModel):
    """Limits of one task of a run at this site.

    Attributes:
        epochs: passes over the rows.
        steps: optimizer steps.
        batch: rows of a step.
        lr: learning rate.
        parameters: numbers of the model.
        gigabytes: memory for the model and the rows of a step, as far as it follows from the terms, and by which the
            process may grow while it works on a task; None takes three quarters of the machine's.
        seconds: time of one task; a task that takes longer ends without a result.

    Examples:
        >>> WorkLimits(steps=100).steps_reject_reason(200)
        "a task would take more steps on this site's rows than the 100 that it allows"
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
        """Return why the work of a run is too much for this site, or None.  Nothing is built to find that out."""
        tables = {"training": terms.training, "transforms": terms.transforms, "experiment": terms.experiment}
        for path, number in _numbers(tables):
            if not -_ABSURD <= number <= _ABSURD:  # NaN is not, either
                return f"{path} is {_short(number)}, which is out of the range that this site works with"
        return (
            self._training_reason(terms.training)
            or self._model_reason(terms)
            or _experiment_reason(terms)
            or self._memory_reason(terms)
        )

    def steps_reject_reason(self, steps: int) -> str | None:
        """Return why a task of this many steps is too much, or None."""
        if steps <= self.steps:
            return None
        return f"a task would take more steps on this site's rows than the {self.steps:,} that it allows"

    @property
    def most_gigabytes(self) -> float:
        """Memory that a task may take."""
        return self.gigabytes or 0.75 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9

    def _training_reason(self, training: Mapping[str, Any]) -> str | None:
        # such loops are nested, so their numbers multiply; a 0 must not hide the others
        passes = math.prod(max(training[name], 1) for name in _PASSES if _is_number(training.get(name)))
        settings = {"epochs": passes, **{name: training.get(name) for name in ("steps", "batch", "lr")}}
        limits = {"epochs": self.epochs, "steps": self.steps, "batch": self.batch, "lr": self.lr}
        for name, value in settings.items():
            if _is_number(value) and value > limits[name]:
                return f"the run's {name} are {value:,}, this site allows at most {limits[name]:,}"
        return None

    def _model_reason(self, terms: RunTerms) -> str | None:
        shapes = [*pytree.shapes(pytree.formed(terms.shape)), terms.outputs, *(shape for _, shape in terms.layout)]
        # a negative length would make a product small that others have made large
        if len(shapes) > _TENSORS or any(number < 0 or len(shape) > 16 for shape in shapes for number in shape):
            return f"this site does not work with a model of {len(terms.layout):,} tensors of these shapes"
        size = sum(math.prod(shape) for _, shape in terms.layout)
        largest = max([size, *(number for _, number in _numbers(terms.experiment.get("model")))])
        if largest > self.parameters:
            return f"the model would have {_short(largest)} parameters, this site allows {self.parameters:,}"
        return None

    def _memory_reason(self, terms: RunTerms) -> str | None:
        size, batch = sum(math.prod(shape) for _, shape in terms.layout), terms.training.get("batch", 1)
        row = sum(math.prod(shape) for shape in pytree.shapes(pytree.formed(terms.shape)))
        rows = row * (batch if _is_number(batch) else 1)
        # 4 bytes for a number in float32
        gigabytes, allowed = 4 * (_COPIES * size + 2 * rows) / 1e9, self.most_gigabytes
        if gigabytes <= allowed:
            return None
        return f"a task would take {gigabytes:.3g} gigabytes at least, this site allows {allowed:.3g}"


class _Ended(BaseException):
    """End of a task, raised by its watch in the task's thread: no `except Exception` on the way keeps it."""


class TaskWatch:
    """Ends tasks that take too long or too much memory, whatever they compute.

    A second thread looks at the time and at the memory of the process, and raises an error in the thread of the task,
    which Python lets happen between two of its instructions: between two batches, rounds, columns or questions of any
    kind.  What is inside one call of a library ends with that call.

    Args:
        limits: of a task.
    """

    def __init__(self, limits: WorkLimits) -> None:
        self._seconds, self._gigabytes = limits.seconds, limits.most_gigabytes

    def run(self, work: Callable[[], T], tasks: int = 1) -> T:
        """Return what `work` returns, whose limits are those of `tasks` tasks.

        Raises:
            Declined: it took too much.
        """
        task = _Watched(threading.get_ident(), self._seconds * tasks, self._gigabytes)
        threading.Thread(target=task.watch, daemon=True).start()
        try:
            try:
                # inside the block, as from here on the error may come before any instruction
                task.begun.set()
                result = work()
                task.look()  # what was quick to end and late to be looked at
            finally:
                task.end()
        except _Ended:
            # a second time, as the error may have come before the first had begun
            task.end()
            raise Declined(task.reason) from None
        return result


class _Watched:
    """A task that is watched.

    Args:
        thread: the thread that works on it.
        seconds, gigabytes: the most that it may take.
    """

    def __init__(self, thread: int, seconds: float, gigabytes: float) -> None:
        self._thread, self._seconds, self._gigabytes = thread, seconds, gigabytes
        self._until, self._before = time.monotonic() + seconds, _used_gigabytes()
        self._lock, self._over = threading.Lock(), threading.Event()
        self.begun = threading.Event()  # before, an error would be nobody's
        self.reason = ""

    def watch(self) -> None:
        """Loop of the watching thread."""
        self.begun.wait()
        while not self._over.wait(min(max(self._until - time.monotonic(), 0.0), _LOOK)):
            try:
                self.look()
            except _Ended:
                with self._lock:
                    # under the lock of `end`, so that nothing is raised in a thread that has gone on to other work
                    if not self._over.is_set():
                        _raise_in(self._thread, _Ended)
                self._over.wait(1.0)  # and again, where somebody kept it

    def look(self) -> None:
        """Raise `_Ended` where the task has taken too much."""
        if time.monotonic() > self._until:
            self.reason = f"it took longer than the {self._seconds:g} seconds that this site allows"
        elif _used_gigabytes() - self._before > self._gigabytes:
            self.reason = f"it took more than the {self._gigabytes:.3g} gigabytes of memory that this site allows"
        else:
            return
        raise _Ended

    def end(self) -> None:
        """End the watch: nothing is raised in the thread any more."""
        while True:
            try:
                with self._lock:
                    self._over.set()  # whose first instruction raises what was on its way
                return
            except _Ended:
                continue


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    """Have a thread raise an error before its next instruction.

    It cannot be taken back: CPython 3.11 would look for it for ever in a thread that a tracer follows (coverage).
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def _experiment_reason(terms: RunTerms) -> str | None:
    """Return why an experiment's tables would be too large once they are built, or None."""
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
    """Yield all numbers in nested tables with their paths, except seeds."""
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
    """Yield all lists in nested tables."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if isinstance(inner, Mapping):
                yield from _lists(inner)
            elif isinstance(inner, Sequence) and not isinstance(inner, str):
                yield name, inner


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(number: float) -> str:
    """Return a number in words, which may have any number of digits."""
    return f"{number:g}" if isinstance(number, float) or abs(number) < 10**15 else "more than 10^15"


def _used_gigabytes() -> float:
    """Return the memory of this process in gigabytes; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            # the second number is that of resident pages (proc(5))
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9
    except OSError:
        return 0.0
