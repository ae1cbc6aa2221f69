"""The base class of transforms of updates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from piebald.contracts import ClientSecrets, KeyAgreement, ServerContext, StepContext, Task, Update
from piebald.contracts.component import Component

if TYPE_CHECKING:
    from torch import Tensor

    from piebald.contracts.model_spec import ModelSpec


class Transform(Component):
    """Applied to every update before it leaves its client, and to the average at the server.

    Attributes:
        protects_model_only: the transform protects the change of the model and no other vector of an update, so it is
            refused beside trainers that send others.
    """

    axis = "transforms"
    protects_model_only: ClassVar[bool] = False

    def on_client(
        self, vectors: Mapping[str, Tensor], keys: Sequence[int], clients: Sequence[int]
    ) -> Mapping[str, Tensor]:
        """Transform the named vectors [c, ...] of these clients, with one random key for each.

        At a real site a key has 256 bits, which nobody else knows and which belong to one task; in a simulation it has
        64 and follows from the run's seed.  Noise that protects is drawn by `noise.NoiseSource.repeatable(key)`.
        """
        return vectors

    def on_server(self, average: Tensor, context: StepContext) -> Tensor:
        """Transform the averaged change [s]."""
        return average

    def collude(self, matrix: Tensor, clients: Sequence[int], key: int) -> Tensor:
        """Replace what colluding clients send in the changes [n, s] of a step; in simulations only.

        Attackers who know one another's updates define it.
        """
        return matrix

    def colludes(self) -> bool:
        """Return whether it needs the updates of a step side by side."""
        return self.overrides(Transform.collude)

    def noises_mean(self) -> bool:
        """Return whether noise on the average is to hide clients.  Their weights must then not depend on their data."""
        return False

    def nbytes(self, vectors: Mapping[str, Tensor]) -> int:
        """Bytes on the wire of one client's vectors, if this transform is the last one."""
        return sum(vector.numel() * vector.element_size() for vector in vectors.values())


class MaskingTransform(Transform):
    """The last transform of a recipe whose server sees sums of updates and no single one."""

    axis = "transforms"
    protects = True

    @abstractmethod
    def agree_keys(self, clients: Sequence[int], context: ServerContext) -> KeyAgreement:
        """Let the clients of a round agree on keys, before any of them trains."""

    @abstractmethod
    def mask(self, update: Update, task: Task, secrets: ClientSecrets) -> Update:
        """Return what one client sends instead of its update.

        Raises:
            Declined: the client sends nothing.
        """

    @abstractmethod
    def masked_reject_reason(self, update: Update, spec: ModelSpec) -> str | None:
        """Return why a masked update cannot be one, or None."""
