"""The base class of trainers, and what some of them do besides training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from piebald.contracts import ClientContext, Query, RowPrivacy, StepContext, TrainInput, TrainOutput
from piebald.contracts.component import Component
from piebald.core.parameters import head

if TYPE_CHECKING:
    from torch import Tensor

    from piebald.contracts.model_spec import ModelSpec
    from piebald.core.client_models import OwnModels


class Trainer(Component):
    """The way in which a client trains.  A pure function: no state but what goes in and out.

    What some trainers do besides is asked for by type: `KeepsClientState`, `KeepsServerVectors`, `HidesRows`,
    `BoundsSteps`, `LimitsSteps`, `ShapesUploads`, `GivesOwnModels`, `contracts.Personalizes`.
    """

    axis = "training"

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        """Carry out one training task of a stack of clients."""
        raise NotImplementedError

    def uploads(self) -> tuple[str, ...]:
        """Names of the vectors that updates carry besides the model.  A vector that is not declared is refused."""
        return ()


@runtime_checkable
class KeepsClientState(Protocol):
    """A trainer whose clients keep named tensors from task to task."""

    def initial_state(self, model: Tensor, shared: int) -> dict[str, Tensor]:
        """A client's state before its first task.

        Args:
            model: [p], the model that the run starts from.
            shared: how many of its numbers are shared.
        """


@runtime_checkable
class KeepsServerVectors(Protocol):
    """A trainer for which the server keeps named vectors: sent with every training task, renewed at every step."""

    def server_vectors(self, shared: int) -> dict[str, Tensor]:
        """The vectors before the first step; `shared` is the number of shared numbers."""

    def update_server_vectors(
        self, vectors: Mapping[str, Tensor], means: Mapping[str, Tensor], context: StepContext
    ) -> dict[str, Tensor]:
        """The new vectors, from the plain means of the vectors of these names in the updates."""


@runtime_checkable
class HidesRows(Protocol):
    """A trainer whose steps hide single rows; the noise must come from numbers that only the client knows."""

    def row_privacy(self) -> RowPrivacy:
        """Return how its steps hide them."""


@runtime_checkable
class LimitsSteps(Protocol):
    """A trainer that knows how many steps a task takes at most, so that a client can claim no more than that."""

    def max_steps(self, examples: int) -> int:
        """Steps of a task on so many rows, at most."""


@runtime_checkable
class ShapesUploads(Protocol):
    """A trainer that uploads vectors which the server has not sent, and knows their shapes beforehand."""

    def upload_shapes(self, spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        """The shapes of such vectors, by name."""


@runtime_checkable
class GivesOwnModels(Protocol):
    """A trainer that may give some clients another model than the run's, made from it."""

    @property
    def holds_parts(self) -> bool:
        """True if the shared numbers of some clients are a part of those of the run's model."""

    @property
    def changes_parts(self) -> bool:
        """True if a client's part is another one from task to task, so that no state of its length can be kept."""

    def own_models(self, spec: ModelSpec) -> OwnModels | None:
        """Return which client has which model, None where all have the run's.

        Raises:
            SettingError: such models cannot be made from the run's.
        """


@runtime_checkable
class CompletesModels(Protocol):
    """A trainer whose models lack their buffers until clients are asked for them, which happens once they are trained:
    before each evaluation, and at the end.
    """

    def completing_query(self, number: int | None) -> Query | None:
        """Return the question to all clients about the model of this number, None for the run's (`OwnModels`); None
        where models lack nothing.

        Answers carry "buffers", the shared buffers of that model; they are averaged, weighted by examples.
        """


@runtime_checkable
class BoundsSteps(Protocol):
    """A trainer that knows how many steps a task takes at least, so that a simulator need not compute before that."""

    def min_steps(self, examples: int) -> int:
        """Steps of a task on so many rows, at least."""


def no_features(kind: str, spec: ModelSpec) -> str | None:
    """Return why the features of a model are not known, or None: they are what goes into its last linear layer."""
    if head(spec.model) is not None:
        return None
    return (
        f"{kind} compares features, which are what goes into a model's last linear layer, but this model "
        f"({type(spec.model).__name__}) has no layer before a linear one: take a model that ends with a linear layer"
    )
