"""The base classes of what makes updates take fewer bytes, and the memory of what was not sent."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from piebald.contracts.component import RecipeComponents
from piebald.contracts.data import ModelSpec
from piebald.core.parameters import Layout
from piebald.methods.transforms.base import MaskingTransform, Transform
from piebald.methods.transforms.bit_fields import Bytes, Whole

Numbers = np.ndarray[Any, np.dtype[np.float32]]

COMPRESSION = "compression/"  # names of what client state keeps for a compressor, and no trainer is shown
MEMORY = f"{COMPRESSION}memory"
_SLACK = 1024  # bytes by which a packed change may be longer than twice the change


@dataclass(frozen=True, slots=True)
class WireContext:
    """The facts about an update that both ends know, and so need not send.

    Attributes:
        layout: that of the model.
        seed: of the run.
        client: who sends it.
        version: `Task.rng_version` of its task.
    """

    layout: Layout
    seed: int
    client: int
    version: int | str

    @property
    def trained(self) -> int:
        """t, how many of the shared numbers are trained parameters; buffers follow."""
        return self.layout.shared_trained


@dataclass(frozen=True, slots=True, eq=False)
class Compressed:
    """A compressed change.

    Attributes:
        packed: the bytes [n] that are sent in its place.
        change: [s], what the receiver makes of them.
        state: the client's new state for the compressor.
    """

    packed: Tensor
    change: Tensor
    state: Mapping[str, Tensor] = field(default_factory=dict)


class Compressor(Transform):
    """A compressed form of changes, which takes fewer bytes.  It is the last transform of a recipe.

    The client packs its change, behind all other transforms, and the server unpacks it where it arrives, so everything
    else in a recipe sees changes [s] as ever.  Only vectors["model"] is packed; private layers are not in it, and other
    vectors of an update go as they are.

    Attributes:
        keeps_clip: whether no change becomes longer, so that a clip before it still holds for what is sent.
        why_not_summed: why packed updates cannot be added under a mask, a part of a sentence.
        remedy: what could be set so that it keeps a clip, a part of a sentence.
    """

    axis = "transforms"
    why_not_summed: ClassVar[str] = "what clients pack must be unpacked one by one:"
    remedy: ClassVar[str] = ""

    @property
    @abstractmethod
    def keeps_clip(self) -> bool: ...

    @property
    def keeps_state(self) -> bool:
        """True if a client keeps anything for it between tasks."""
        return False

    def initial_state(self, spec: ModelSpec) -> dict[str, Tensor]:
        """Return what a client keeps for it, before the first task; names begin with `COMPRESSION`."""
        return {}

    @abstractmethod
    def compress(self, change: Tensor, state: Mapping[str, Tensor], context: WireContext) -> Compressed:
        """Pack a change [s] of finite float32 numbers on the CPU."""

    @abstractmethod
    def unpack(self, packed: Bytes, context: WireContext) -> Numbers:
        """The change [s] that was packed.

        Raises:
            ValueError: these bytes are no packed change.
        """

    def decompress(self, packed: Tensor, context: WireContext) -> Tensor:
        """Return what the receiver makes of packed bytes: the change [s].

        Raises:
            ValueError: these bytes are no packed change; memory is never taken for what they claim.
        """
        # twice the change as float32: whoever claims more wants memory
        most = 8 * context.layout.shared + _SLACK
        if packed.dtype != torch.uint8 or packed.dim() != 1 or packed.numel() > most:
            raise ValueError(f"at most {most:,} bytes are due, sent {packed.dtype} {list(packed.shape)}")
        return torch.from_numpy(self.unpack(packed.numpy(), context))

    def incompatible_with(self, recipe: RecipeComponents) -> str | None:
        masking = next((transform for transform in recipe.transforms if isinstance(transform, MaskingTransform)), None)
        # numbers that are sent as they are at the same places add up under a mask, packed ones do not
        summed = isinstance(self, SendsSameNumbers) and self.same_for_all
        if masking is not None and not summed:
            return f"{masking.kind} adds masked updates number by number, but {self.why_not_summed} drop {self.kind}"
        transforms = [transform for transform in recipe.transforms if isinstance(transform, Transform)]
        alone = [
            transform
            for transform in transforms
            if not (isinstance(transform, MaskingTransform) or transform.colludes())
        ]
        if alone[-1] is not self:
            return f"{self.kind} packs an update, so nothing can be done to it afterwards: put it last, once"
        noising = [transform for transform in transforms if transform.noises_mean()]
        # the noise is scaled to the clip, so a longer update would be hidden by less than the budget says
        if noising and not self.keeps_clip:
            return (
                f"{noising[0].kind} at the server counts on updates no longer than its clip, but what {self.kind} "
                f"sends may be longer: set {self.remedy}where = 'client', or drop {self.kind}"
            )
        return None

    def unsupported_model(self, spec: ModelSpec) -> str | None:
        if spec.layout.shared_trained == 0:
            return f"{self.kind} has nothing to pack: no trained parameter of the model is shared"
        return None


@runtime_checkable
class SendsSameNumbers(Protocol):
    """A compressor that sends some of an update's numbers as they are, perhaps the same ones at all clients of a round.

    Then they can be added under a mask: sums of such numbers are such numbers of sums.
    """

    @property
    def same_for_all(self) -> bool:
        """True if all clients of a round send the same ones."""

    def sent_numbers(self, layout: Layout) -> int:
        """Return how many numbers are sent of the shared ones."""

    def sent_places(self, context: WireContext) -> Whole:
        """Return which of the shared numbers these are, in increasing order; the same for all clients of a version."""


class LossyCompressor(Compressor):
    """Sends the trained parameters approximately.  Buffers, which have another scale, follow them whole."""

    axis = "transforms"

    @property
    def remembers(self) -> bool:
        """True if the client keeps what it did not send, and adds it to its next change."""
        return False

    @abstractmethod
    def encode(
        self, wanted: Numbers, state: Mapping[str, Tensor], context: WireContext
    ) -> tuple[Bytes, Mapping[str, Tensor]]:
        """The bytes for numbers [t], and new client state besides the memory."""

    @abstractmethod
    def decode(self, body: Bytes, context: WireContext) -> Numbers:
        """The numbers [t] that these bytes stand for.

        Raises:
            ValueError: they stand for none.
        """

    @property
    def keeps_state(self) -> bool:
        return self.remembers

    def initial_state(self, spec: ModelSpec) -> dict[str, Tensor]:
        return {MEMORY: torch.zeros(spec.layout.shared_trained)} if self.remembers else {}

    def compress(self, change: Tensor, state: Mapping[str, Tensor], context: WireContext) -> Compressed:
        due, buffers = change[: context.trained], change[context.trained :]
        if self.remembers:
            due = due + state[MEMORY]
        with np.errstate(all="ignore"):  # numbers near the largest ones become infinite, and are refused as such
            body, memory = self.encode(due.numpy(), state, context)
            sent = torch.from_numpy(self.decode(body, context))
        if self.remembers:
            # of what the receiver makes of it, not of what was meant: rounding of the wire form is made up for as well
            memory = {**memory, MEMORY: due - sent}
        packed = np.concatenate([body, buffers.numpy().view(np.uint8)])
        return Compressed(torch.from_numpy(packed), torch.cat([sent, buffers]), memory)

    def unpack(self, packed: Bytes, context: WireContext) -> Numbers:
        # from the end, since buffers have a known length and the body need not
        start = len(packed) - 4 * (context.layout.shared - context.trained)
        if start < 0:
            raise ValueError(f"{len(packed):,} bytes, fewer than the buffers take")
        with np.errstate(all="ignore"):
            return np.concatenate([self.decode(packed[:start], context), as_floats(packed[start:])])


class WithErrorFeedback(LossyCompressor):
    """Sends part of what is wanted, and keeps the rest for the next time.

    A client adds to its change what it has not sent so far, sends the compressed sum, and keeps the difference in its
    state (Stich et al. 2018, "Sparsified SGD with memory", algorithm 1; Karimireddy et al. 2019, "Error feedback fixes
    SignSGD", algorithm 2; with local steps Basu et al. 2019, "Qsparse-local-SGD", algorithm 1):

        p = change + memory,   sent = C(p),   memory <- p - sent

    so that what was sent and what is kept add up to all changes.  The memory is that of the last update that counted
    at the client: one that was lost or refused leaves it as it was.

    Attributes:
        error_feedback: whether what is not sent is kept; without that it is lost.
    """

    axis = "transforms"
    remedy: ClassVar[str] = "error_feedback = false, "

    error_feedback: bool = True

    @property
    def remembers(self) -> bool:
        return self.error_feedback

    @property
    def keeps_clip(self) -> bool:
        return not self.error_feedback


def as_floats(data: Bytes) -> Numbers:
    """Bytes [4 n] as float32 numbers [n].

    Raises:
        ValueError: their number is no multiple of four.
    """
    if len(data) % 4:
        raise ValueError(f"{len(data):,} bytes are no float32 numbers")
    # little-endian on every machine; a copy, since memory of bytes is read-only
    return np.frombuffer(data.tobytes(), dtype="<f4").copy()


def as_bytes(numbers: Any) -> Bytes:
    """Numbers [n] as float32, in bytes [4 n]."""
    return np.frombuffer(np.asarray(numbers, dtype="<f4").tobytes(), dtype=np.uint8).copy()
