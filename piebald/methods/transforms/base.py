"""The base class of transforms of updates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from piebald.contracts import ClientSecrets, Component, KeyAgreement, ServerContext, StepContext, Task, Update
from piebald.contracts.data import ModelSpec
from piebald.core.parameters import moving_norm


class Transform(Component):
    """Applied to every update before it leaves its client, and to the average at the server.

    Attributes:
        protects_model_only: the transform protects the change of the model and no other vector of an update, so it is
            refused beside trainers that send others.
        takes_statistics: whether it gets all s shared numbers of a change; by default it gets the trained parameters,
            and running statistics pass it by.
    """

    axis = "transforms"
    protects_model_only: ClassVar[bool] = False
    takes_statistics: ClassVar[bool] = False

    def on_client(
        self, vectors: Mapping[str, Tensor], keys: Sequence[int], clients: Sequence[int]
    ) -> Mapping[str, Tensor]:
        """Transform the named vectors [c, ...] of these clients, with one random key for each.

        "model" is the change of the trained parameters that are shared.

        At a real site a key has 256 bits, which nobody else knows and which belong to one task; in a simulation it has
        64 and follows from the run's seed.  Noise that protects is drawn by `randomness.NoiseSource.repeatable(key)`.
        """
        return vectors

    def on_server(self, average: Tensor, context: StepContext) -> Tensor:
        """Transform the averaged change, which is as long as the clients'."""
        return average

    def hides(self) -> bool:
        """Return whether it promises that what leaves a client tells little of its rows.

        What passes it by must not leave then: changes of statistics become 0, and norms that share theirs are refused.
        """
        return self.protects

    def unsupported_model(self, spec: ModelSpec) -> str | None:
        norm = moving_norm(spec.model, spec.layout) if self.hides() and not self.takes_statistics else None
        if norm is None:
            return None
        return (
            f"{self.kind} hides trained parameters and not the running statistics of the norm {norm!r}, which would "
            "leave clients as they are: take group norm (nn.GroupNorm) in its place, freeze it, or keep them private "
            "(sharing = { kind = 'all_except', private_layers = ['*running_*'] })"
        )

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

    def noises_update(self) -> bool:
        """Return whether noise on each update is to hide it, which covers no number beside it."""
        return False

    def nbytes(self, vectors: Mapping[str, Tensor]) -> int:
        """Bytes on the wire of one client's vectors, if this transform is the last one."""
        return sum(vector.numel() * vector.element_size() for vector in vectors.values())


class MaskingTransform(Transform):
    """The last transform of a recipe whose server sees sums of updates and no single one."""

    axis = "transforms"
    protects = True
    takes_statistics: ClassVar[bool] = True

    @abstractmethod
    def agree_keys(self, clients: Sequence[int], context: ServerContext) -> KeyAgreement:
        """Let the clients of a round agree on keys, before any of them trains."""

    def bounded(self, vectors: Mapping[str, Tensor], trained: int) -> Mapping[str, Tensor]:
        """The vectors of an update, shortened to what one client may contribute.

        Args:
            vectors: by name; "model" [s] is the change.
            trained: how many of its numbers are parameters, the first ones; the rest are running statistics.
        """
        return vectors

    @abstractmethod
    def mask(self, update: Update, task: Task, secrets: ClientSecrets) -> Update:
        """Return what one client sends instead of its update.

        Raises:
            Declined: the client sends nothing.
        """

    @abstractmethod
    def masked_reject_reason(self, update: Update, spec: ModelSpec) -> str | None:
        """Return why a masked update cannot be one, or None."""
