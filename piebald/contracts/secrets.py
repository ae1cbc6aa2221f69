"""Contracts of what one client keeps secret."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


SIGNATURE = 1024  # bytes of a signature with the certificate behind it


class Signer(Protocol):
    """How a client vouches for what it tells others through the server, and checks what they tell it."""

    def sign(self, text: bytes) -> bytes:
        """A signature of `SIGNATURE` bytes."""

    def check(self, client: int, text: bytes, signature: bytes) -> bool:
        """Whether another client has signed this."""


@dataclass(frozen=True, slots=True, eq=False)
class ClientSecrets:
    """What one client keeps secret, for keys and masks.

    Attributes:
        client: its number.
        kept: named tensors; what is in it after a call is kept, on disk in a real federation, before anything leaves.
        draw: so many random bytes: the system's in a real federation, repeatable ones in a simulation.
        signer: signs and checks, in a real federation; None in a simulation.
    """

    client: int
    kept: dict[str, Tensor]
    draw: Callable[[int], bytes]
    signer: Signer | None = None
