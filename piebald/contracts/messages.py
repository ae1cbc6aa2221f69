"""Contracts of the messages between server and clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from piebald.contracts.component import Component
from piebald.contracts.data import Rows, Split
from piebald.contracts.result_form import ResultForm
from piebald.contracts.training import ClientContext, TrainInput, TrainOutput, Trains

if TYPE_CHECKING:
    from torch import Tensor

    from piebald.contracts.model_spec import ModelSpec


MASKING = "masking/"  # names of what a task brings for the masking transform, and no trainer is shown
SUM = "sum"  # the name of whole numbers that are added up over clients, under masks or not


@dataclass(frozen=True, slots=True)
class Hiding:
    """How single rows are hidden in the answer to a query.

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
    """

    axis = "query"
    asked_of: ClassVar[Literal["clients", "server", "itself"]] = "clients"
    trains: ClassVar[bool] = False
    by_name: ClassVar[bool] = False
    reads_model: ClassVar[bool] = True
    blurred: ClassVar[bool] = False

    def rows_read(self, personal: bool) -> set[Split]:
        """The rows that an answer depends on; those of training where a query does not say otherwise.

        Args:
            personal: whether clients have models of their own, or private layers, which know their training rows.
        """
        return {"train"}

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        """Answer for a stack of clients."""
        raise NotImplementedError

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        """What an answer may hold, from a client that has so many rows of each split.

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
        """How single rows are hidden in an answer, None where they are not."""
        return None

    def topic(self) -> str:
        """What a site counts it as, in all runs together; by default its kind."""
        return self.kind

    def most_asked(self, hides: bool) -> int:
        """How many different questions about the same rows a site answers in all runs, unless its policy says another
        number.

        Args:
            hides: whether the site hides small numbers of rows: the difference of two answers may be about one row.
        """
        return 1000

    def most_steps(self) -> int:
        """Steps of training that an answer takes, 0 for none."""
        return 0

    def row_influence(self, rows: Rows) -> Mapping[str, float] | None:
        """By how much one row changes each number, or each number of a vector, of an answer about some rows at most.

        So a site can tell them with noise, and nothing else beside them.  None for answers that are no scores of a
        model, whose numbers of rows are told by `fewest_rows`.
        """
        return None

    def stated(self) -> dict[str, Any]:
        """What of the question is known before it is asked, which an approval names; by default all of it."""
        return self.table()

    def reject_reason(self, answer: Update, spec: ModelSpec) -> str | None:
        """Why an answer cannot be used, or None.  Its vectors are known to be finite."""
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
    def rng_version(self) -> int | str:
        """The version in the task's rng key, which tells it from the client's other tasks."""
        return f"{self.version}.{self.attempt}" if self.attempt else self.version


@dataclass(frozen=True, slots=True, eq=False)
class PartialSum:
    """A sum over updates, made where they were trained: `weight` = sum of weights, `vectors` = weighted sum of "model"
    [s] and plain sums of the other named vectors, in float64 where single updates are float32.

    `masked` where the updates came masked: then no number of a single one is known, and `loss` is their weighted
    mean training loss.
    """

    weight: float
    vectors: Mapping[str, Tensor]
    masked: bool = False
    loss: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What one client sends back.

    Attributes:
        vectors: named vectors; "model" [s] is the change of the shared numbers since the task's model.  Empty
            where the update has been summed into `partial_sum`.
        examples: rows the client trained on (or answered for).
        steps: optimiser steps taken.
        metrics: named numbers, e.g. "loss".
        norm: Euclidean length of the trained parameters' change, without buffers; not finite where vectors["model"] is
            not.
        partial_sum: the sum that this update is in, shared by all updates in it, or None.
        nbytes: bytes on the wire.
    """

    vectors: Mapping[str, Tensor]
    examples: int
    steps: int
    metrics: Mapping[str, float]
    norm: float = 0.0
    partial_sum: PartialSum | None = None
    nbytes: int = 0


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
    """What weighs one update without looking at the others, e.g. an `aggregation.Linear`."""

    def weight(self, update: Update, staleness: int = 0) -> float:
        """How much one update counts, from its numbers alone, not from its vectors."""

    def table(self) -> dict[str, Any]:
        """The component as plain values."""


@dataclass(frozen=True, slots=True)
class SumRequest:
    """A request to sum updates where they are made.  `weight` computes the weight of one; `limit` is the longest step
    allowed.
    """

    weight: WeighsUpdates
    limit: float
