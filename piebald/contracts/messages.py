"""Contracts of the messages between server and clients: tasks, queries, updates, and the form of results."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field
from torch import Tensor

from piebald.contracts.component import Component
from piebald.contracts.data import ModelSpec, Rows, Split
from piebald.contracts.training import ClientContext, TrainInput, TrainOutput, Trains
from piebald.core.metrics import impossible_reason

MOST_ROWS = 1 << 40  # rows of a client, and steps of a task, at most: sums of many still fit 64 bits
_TYPES = ("torch.float32", "torch.uint8", "torch.int32", "torch.int64")  # of vectors that a query checks itself
_PIECE = 1 << 20  # numbers
_LARGEST = 3.5e38  # absolute value of a metric: what a float32 number can be
MOST_REMEMBERED = 20  # vectors of values of rows, of this run and of earlier ones, that a site remembers


@dataclass(frozen=True, slots=True)
class ResultForm:
    """The form of one task's result: whatever does not have it is refused before anything computes with it.

    Attributes:
        vectors: the shape of each vector, by name, float32 but for `types`, and all required; a shape of None is not
            known beforehand.  None for any names and shapes, which the query or the masking transform checks itself.
        metrics: the names of the metrics that may come; None for any.
        examples: rows that it may speak of, at most.
        max_steps: optimizer steps, at most.
        counts: vectors that count rows, with the number of rows that there are.
        types: the type of a vector that is not float32.
        own_metrics: metrics of the user's own, whose values have no known bounds.
        weighted: whether rows may have weights; without them they count by their number at most.

    Examples:
        >>> import torch
        >>> form = ResultForm({"model": (2,)}, ["loss"], examples=10)
        >>> form.reject_reason({"model": torch.zeros(2)}, 10, 1, {"loss": 0.5})
        >>> form.reject_reason({"model": torch.zeros(3)}, 10, 1, {})
        'must send 2 float32 numbers as model, sent torch.float32 [3]'
    """

    vectors: Mapping[str, tuple[int, ...] | None] | None
    metrics: Collection[str] | None = None
    examples: int = MOST_ROWS
    max_steps: int = MOST_ROWS
    counts: Mapping[str, int] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    own_metrics: Collection[str] = ()
    weighted: bool = True

    def reject_reason(
        self, vectors: Mapping[str, Tensor], examples: int, steps: int, metrics: Mapping[str, float]
    ) -> str | None:
        """Return why an update with these parts does not have this form, or None."""
        return (
            self._vector_reason(vectors)
            or self._sum_reason(vectors)
            or count_reason("examples", examples, self.examples)
            or count_reason("steps", steps, self.max_steps)
            or self._metric_reason(metrics)
            or self._weight_reason(examples, metrics)
        )

    def _vector_reason(self, vectors: Mapping[str, Tensor]) -> str | None:
        if self.vectors is None:
            refused = next((name for name, vector in vectors.items() if str(vector.dtype) not in _TYPES), None)
            return f"sent {refused} as {vectors[refused].dtype}" if refused is not None else infinite_reason(vectors)
        for name, shape in self.vectors.items():
            vector, kind = vectors.get(name), self.types.get(name, "torch.float32")
            if vector is None or str(vector.dtype) != kind or shape not in (None, tuple(vector.shape)):
                word = kind.removeprefix("torch.")
                expected = f"{word} numbers" if shape is None else f"{math.prod(shape)} {word} numbers"
                return f"must send {expected} as {name}, sent {described(vector)}"
        if unknown := sorted(vectors.keys() - self.vectors.keys()):
            return f"sent {unknown[0]!r}, which is not asked for"
        return infinite_reason(vectors)

    def _sum_reason(self, vectors: Mapping[str, Tensor]) -> str | None:
        for name, rows in self.counts.items():
            # sums of int64 counts may overflow, float64 is exact up to 2^53, far above MOST_ROWS
            vector = vectors[name].double()
            if bool((vector < 0).any()) or bool((vector != vector.round()).any()) or float(vector.sum()) > rows:
                return f"sent {name} that cannot be counts of the {rows:,} rows it has"
        return None

    def _metric_reason(self, metrics: Mapping[str, float]) -> str | None:
        for name, value in metrics.items():
            if self.metrics is not None and name not in self.metrics:
                return f"sent the metric {name!r}, which is not asked for"
            # written as `not ... <=`, so that NaN is refused, too
            if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= _LARGEST:
                return f"sent a metric {name} that is no finite number"
            if impossible := impossible_reason(name, value, self.own_metrics):
                return impossible
        return None

    def _weight_reason(self, examples: int, metrics: Mapping[str, float]) -> str | None:
        weight = metrics.get(WEIGHT, 0.0)
        if self.weighted or weight <= examples:
            return None
        return f"sent a weight of {weight:.4g} for {examples:,} rows, but the run's [data] names no column of weights"


def infinite_reason(vectors: Mapping[str, Tensor]) -> str | None:
    """Return why vectors are not finite, or None."""
    name = next((name for name, vector in vectors.items() if not _finite(vector)), None)
    return "not finite" if name == "model" else None if name is None else f"{name} is not finite"


def _finite(vector: Tensor) -> bool:
    """Return whether all numbers are finite, looked at in pieces: a long vector is not to be there three times."""
    flat = vector.flatten()
    return all(bool(flat[start : start + _PIECE].isfinite().all()) for start in range(0, len(flat), _PIECE))


def count_reason(name: str, count: object, most: int) -> str | None:
    """Return why something is not a count of at most `most`, or None."""
    # True is an int in Python
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        return f"sent {name} that are no count"
    return f"sent more {name} than the {most:,} that its rows allow" if count > most else None


def described(vector: Tensor | None) -> str:
    """A vector's type and shape."""
    return "nothing" if vector is None else f"{vector.dtype} {list(vector.shape)}"


MASKING = "masking/"  # names of what a task brings for the masking transform, and no trainer is shown
WEIGHT = "weight"  # the name of how much a client's rows count in averages, where that is not their number
SUM = "sum"  # the name of whole numbers that are added up over clients, under masks or not


@dataclass(frozen=True, slots=True)
class Hiding:
    """The protection of single rows in the answer to a query.

    Attributes:
        noise: standard deviation of Gaussian noise, in units of the largest change that the exchange of one row for
            another makes; 0 for none.
        masked: whether the answer leaves under the masks of the run's secure aggregation.
    """

    noise: float
    masked: bool


class Query(Component):
    """A question to a client other than to train.  Its answer is a pure function of what the client holds.

    Attributes:
        asked_of: whose rows it is about: the "clients'", or those that the "server" keeps, which no site answers;
            "itself" where a client asks itself and a site tells nobody.
        trains: whether models are trained to answer it, so that clients are served in stacks as for training.
        by_name: whether a site answers it only where its policy names it.
        reads_model: whether an answer depends on the model that comes with it.
        blurred: whether a site always tells scores with noise (`row_influence`), and not only where it hides rows.
        names_only: whether an answer has names of columns, classes and categories and no number of rows, so that a
            policy that names it allows it beside protections of rows and updates.
        later: arguments, and vectors that come with it, which are chosen after other answers have come; each with what
            it may be, in words, for a person who approves the question before.
    """

    axis = "query"
    asked_of: ClassVar[Literal["clients", "server", "itself"]] = "clients"
    trains: ClassVar[bool] = False
    by_name: ClassVar[bool] = False
    reads_model: ClassVar[bool] = True
    blurred: ClassVar[bool] = False
    names_only: ClassVar[bool] = False
    later: ClassVar[Mapping[str, str]] = {}

    def rows_read(self, personal: bool) -> set[Split]:
        """The rows that an answer depends on; those of training where a query does not say otherwise.

        Args:
            personal: whether clients have models of their own, or private layers, which know their training rows.
        """
        return {"train"}

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        """Answer for a stack of clients."""
        raise NotImplementedError

    def site_answer(
        self, answer: Update, remember: Callable[[Mapping[str, Tensor]], tuple[Mapping[str, int], Mapping[int, Tensor]]]
    ) -> Update:
        """Return what a site sends of an answer; by default all of it.

        Args:
            answer: as `answer` gives it.
            remember: has the site remember values of its rows, by name [n].  It returns their numbers by name, and by
                number the values of the same rows under this run and under earlier ones, the newest first.
        """
        return answer

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        """Return the form of an answer from a client that has `rows` rows of each split.

        A site sends nothing else, and the server refuses what else comes.  By default these are scores of a model.
        """
        return ResultForm({}, None, max(rows.values(), default=0), 0)

    def model_number(self, own: int | None) -> int | None:
        """The number of the model that it is about where clients have unlike ones, by default the client's `own`."""
        return own

    def fewest_rows(self, answer: Update) -> int | None:
        """The smallest number of rows that a number in an answer is about, None where it is about all or none."""
        return None

    def hiding(self) -> Hiding | None:
        """Return how single rows are hidden in an answer, None where they are not."""
        return None

    def topic(self) -> str:
        """Return the name under which a site counts the question, in all runs together; by default its kind."""
        return self.kind

    def most_asked(self, hides: bool) -> int:
        """Return how many different questions about the same rows a site answers in all runs, unless its policy states
        another number.

        Args:
            hides: whether the site hides small numbers of rows: the difference of two answers may be about one row.
        """
        return 1000

    def most_steps(self) -> int:
        """Steps of training that an answer takes, 0 for none."""
        return 0

    def row_influence(self, rows: Rows) -> Mapping[str, float] | None:
        """By how much one row in place of another changes each number, or the length of each vector, of an answer about
        some rows at most.

        So a site can tell them with noise, and nothing else beside them.  None for answers that are no scores of a
        model, whose numbers of rows are told by `fewest_rows`.
        """
        return None

    def stated(self) -> dict[str, Any]:
        """Return what an approval names: all arguments but those of `later`, and how many may differ in these."""
        return self.stated_but(self.later, self.table())

    def stated_but(self, later: Mapping[str, str], table: Mapping[str, Any]) -> dict[str, Any]:
        """Return what an approval names.

        Args:
            later: what is not known before, see `later`; where there is any, at most `most_asked` questions are
                answered after an approval, whatever a policy says.
            table: the question.
        """
        known = {name: value for name, value in table.items() if name not in later}
        return {**known, "later": dict(later), "at_most": self.most_asked(hides=False)} if later else known

    def reject_reason(self, answer: Update, spec: ModelSpec) -> str | None:
        """Return why an answer cannot be used, or None.  Its vectors are known to be finite."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One request of the server to one client.

    Attributes:
        id: unique in the run, increasing.
        client: the client's number.
        version: server steps made when this was sent; with the seed and the client it determines all randomness.
        vectors: named vectors on their way down: "model" [s], "private" [p - s] at the first contact only, what the
            trainer needs (SCAFFOLD's "control") and what the clustering sends ("candidates", other clusters' models).
        query: a question to answer; None means: train.
        free: for the report only, so it costs neither bytes nor virtual time.
        attempt: how often this client was asked at this version before; it enters the randomness too.
        committed: optimizer steps behind the cluster model when this was sent; from two of these a client can compute
            the speed of the others.
    """

    id: int
    client: int
    version: int
    vectors: Mapping[str, Tensor]
    query: Query | None = None
    free: bool = False
    attempt: int = 0
    committed: int = 0

    @property
    def kind(self) -> str:
        """The kind of its query, or "train"."""
        return "train" if self.query is None else self.query.kind

    @property
    def rng_version(self) -> int | str:
        """The version in the task's rng key, which tells it from the client's other tasks."""
        return f"{self.version}.{self.attempt}" if self.attempt else self.version


@dataclass(frozen=True, slots=True, eq=False)
class PartialSum:
    """A sum over updates, made where they were trained: `weight` = sum of weights, `vectors` = weighted sum of "model"
    [s] and plain sums of the other named vectors, in float64 where single updates are float32.

    `masked` where the updates came masked: then no number of a single one is known, and `loss` is their weighted
    mean training loss.  The server takes "model" out of them once it has the average.
    """

    weight: float
    vectors: dict[str, Tensor]
    masked: bool = False
    loss: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """The result of training, or an answer, that one client sends back.

    Attributes:
        vectors: named vectors; "model" [s] is the change of the shared numbers since the task's model.  Empty
            where the update has been summed into `partial_sum`.
        examples: rows with a known target that the client trained on (or rows it answered for).
        steps: optimiser steps taken.
        metrics: named numbers, e.g. "loss"; and, as `WEIGHT`, how much the rows count, where that is not their number.
        norm: Euclidean length of the trained parameters' change, without buffers; not finite where vectors["model"] is
            not.
        partial_sum: the sum that this update is in, shared by all updates in it, or None.
        nbytes: bytes on the wire.
        client: the number of the client that sent it, -1 where that is not known yet.
    """

    vectors: Mapping[str, Tensor]
    examples: int
    steps: int
    metrics: Mapping[str, float]
    norm: float = 0.0
    partial_sum: PartialSum | None = None
    nbytes: int = 0
    client: int = -1

    @property
    def counts(self) -> float:
        """How much it counts in averages over clients: by its rows, their weights or, of survival, their events."""
        weight = self.metrics.get(WEIGHT)  # a claim, like all that a client sends
        return self.examples if weight is None else max(0.0, min(weight, MOST_ROWS))  # in this order NaN counts nothing

    def capped(self, most: float) -> Update:
        """Return the update, which counts for at most so much."""
        if WEIGHT in self.metrics:
            return replace(self, metrics={**self.metrics, WEIGHT: min(self.counts, most)})
        return replace(self, examples=min(self.examples, int(most)))

    @property
    def is_idle(self) -> bool:
        """True if the client had no row to train on, or none with a known target, so that its change is none."""
        return not (
            self.counts or (self.steps and self.norm) or (self.partial_sum is not None and self.partial_sum.masked)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """The end of a task: an update, or the reason why there is none.  Times are seconds of the runtime's
    clock.

    `refused` where something came that is no result, so that its client is not asked again.
    """

    task: Task
    update: Update | None
    sent: float
    time: float
    bytes_down: int = 0
    bytes_up: int = 0
    failure: str | None = None
    refused: bool = False


class WeighsUpdates(Protocol):
    """A weight for one update that does not look at the others, e.g. an `aggregation.Linear`."""

    def weight(self, update: Update, staleness: int = 0) -> float:
        """Return how much one update counts, from its numbers alone, not from its vectors."""

    def table(self) -> dict[str, Any]:
        """The component as plain values."""


@dataclass(frozen=True, slots=True)
class SumRequest:
    """A request to sum updates where they are made.  `weight` computes the weight of one; `limit` is the longest step
    allowed.
    """

    weight: WeighsUpdates
    limit: float


class OwnChoice(Query):
    """The query by which a client finds its own model, by its validation rows, when the run has ended (`keep`).

    The answer is a model [p], as vector "model", and metrics that `record` makes a record of.  It is meant for the
    client itself: a site does not send it.

    Attributes:
        split: the rows on which the chosen model is judged afterwards, None for no judgement.
        tasks: the training tasks that the client made, as `Task.rng_version`.
        passes: passes over its rows in each of them.
        classes: C, to count the judged rows by class and by what the chosen model takes them for, as vector "confusion"
            [C * C]; 0 does not.
    """

    axis = "query"
    asked_of = "itself"
    trains: ClassVar[bool] = True

    split: Split | None = "test"
    tasks: tuple[str, ...] = ()
    passes: tuple[int, ...] = ()
    classes: int = Field(default=0, ge=0)

    def record(self, metrics: Mapping[str, float], rows: int) -> dict[str, Any]:
        """A choice as plain values, for the run folder, a site's file and the page, see `choice.record`.

        Args:
            metrics: those of the answer.
            rows: the client's validation rows.
        """
        raise NotImplementedError

    def is_new(self, chosen: str) -> bool:
        """Return whether a chosen model is none of those that the run has anyway, so that it is kept for the client."""
        raise NotImplementedError

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        counts = {"confusion": (self.classes**2,)} if self.classes and self.split is not None else {}
        return ResultForm({"model": (spec.layout.size,), **counts}, None, rows["validation"], 0)
