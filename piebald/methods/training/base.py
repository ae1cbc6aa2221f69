"""The base class of trainers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Self

from piebald.contracts import ClientContext, Component, Query, RowPrivacy, StepContext, TrainInput, TrainOutput
from piebald.core.parameters import head

if TYPE_CHECKING:
    from torch import Tensor

    from piebald.contracts.data import ModelSpec
    from piebald.core.client_models import ClientModels


class Trainer(Component):
    """The way in which a client trains.  A pure function: no state but what goes in and out.

    Only `train` must be defined; the other methods have a default for trainers that do no more than that.  A trainer
    whose clients use another model than the one that they were sent is a `contracts.Personalizes`.

    Attributes:
        sends_choice: updates carry as metric "cluster" which of the models offered as "candidates" was trained.
        sends_initial_loss: updates carry as metric "initial_loss" the loss of the model that was sent.
        follows_others: training depends on the steps that other clients have made (`TrainInput.committed`).
        reads_features, anchors: of a trainer that is a `contracts.passes.LocalLoss` as well, see there.
    """

    axis = "training"
    sends_choice: ClassVar[bool] = False
    sends_initial_loss: ClassVar[bool] = False
    follows_others: ClassVar[bool] = False
    reads_features: ClassVar[bool] = False
    anchors: ClassVar[tuple[str, ...]] = ()

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        """Carry out one training task of a stack of clients."""
        raise NotImplementedError

    def of_client(self, name: str) -> Self:
        """Return the trainer of the client of this name: this one, unless clients have settings of their own."""
        return self

    def initial_state(self, model: Tensor, shared: int) -> dict[str, Tensor]:
        """Return the named tensors that a client keeps from task to task, as they are before its first task.

        Args:
            model: [p], the model that the run starts from.
            shared: how many of its numbers are shared.
        """
        return {}

    # -- what travels besides the model

    def uploads(self) -> tuple[str, ...]:
        """Return the names of the vectors that updates carry besides the model.

        A vector that is not declared is refused.
        """
        return ()

    def upload_shapes(self, spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes, by name, of uploaded vectors that the server has not sent."""
        return {}

    def moment_layers(self) -> tuple[str, ...]:
        """Return the layers whose input moments updates carry as "moments"."""
        return ()

    def server_vectors(self, shared: int) -> dict[str, Tensor]:
        """Return the named vectors that the server sends with every training task, as they are before the first step.

        Args:
            shared: the number of shared numbers.
        """
        return {}

    def update_server_vectors(
        self, vectors: Mapping[str, Tensor], means: Mapping[str, Tensor], context: StepContext
    ) -> dict[str, Tensor]:
        """Return the server's vectors after a step, from the plain means of those of the same names in the updates."""
        return dict(vectors)

    # -- what is known of a task beforehand

    def min_steps(self, examples: int) -> int:
        """Return how many steps a task on so many rows takes at least, so that a simulator need not compute before."""
        return 0

    def max_steps(self, examples: int) -> int | None:
        """Return how many steps a task on so many rows takes at most, so that a client can claim no more than that.

        None where that is not known.
        """
        return None

    def known_metrics(self, version: int) -> Mapping[str, float]:
        """Return the metrics of an update that follow from settings, whatever its client says they are.

        Args:
            version: server steps made when the client was asked.
        """
        return {}

    def row_privacy(self) -> RowPrivacy | None:
        """Return how steps hide single rows, or None; the noise must come from numbers that only the client knows."""
        return None

    # -- models of clients

    @property
    def holds_parts(self) -> bool:
        """Whether the shared numbers of some clients are a part of those of the run's model."""
        return False

    @property
    def changes_parts(self) -> bool:
        """Whether a client's part changes from task to task, so that no state of its length can be kept."""
        return False

    def own_models(self, spec: ModelSpec) -> ClientModels | None:
        """Return which clients have which model, made from the run's; None where all have the run's.

        Raises:
            SettingError: such models cannot be made from the run's.
        """
        return None

    def completing_query(self, number: int | None) -> Query | None:
        """Return what clients are asked about a trained model that lacks its buffers, or None if it lacks nothing.

        It is asked before each evaluation, and at the end.  Answers carry "buffers", the shared buffers of that model;
        they are averaged, weighted by examples.

        Args:
            number: the model's number (`ClientModels`), None for the run's.
        """
        return None


def no_features(kind: str, spec: ModelSpec) -> str | None:
    """Return why the features of a model are not known, or None: they are what goes into its last linear layer."""
    if head(spec.model) is not None:
        return None
    return (
        f"{kind} compares features, which are what goes into a model's last linear layer, but this model "
        f"({type(spec.model).__name__}) has no layer before a linear one: take a model that ends with a linear layer"
    )
