"""Contracts of the secrets of one client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from torch import Tensor


SIGNATURE = 1024  # bytes of a signature with the certificate behind it


class Signer(Protocol):
    """Signatures of a client for what it sends to others through the server, and checks of theirs."""

    def sign(self, text: bytes) -> bytes:
        """A signature of `SIGNATURE` bytes."""

    def check(self, client: int, text: bytes, signature: bytes) -> bool:
        """Whether another client has signed this."""

    def name(self, client: int) -> str:
        """A client in words, for sentences."""


class SumDemands(BaseModel):
    """What a client demands of a sum before it takes part in it.

    The defaults are safe against a server that lies and acts with up to a tenth of the clients.

    Attributes:
        least: fewest clients in a sum; with two, each of them knows the other's update.
        threshold: the least share of a key's shares that opens a mask, and of the clients who sign one list of
            survivors.  Above 1/2 a lying server alone opens one sum of a set of keys; from 2/3 it takes
            a third of the clients with it to open two.
        neighbours: fewest neighbours to mask with, where not all others are; None leaves that to `colluding`.
        colluding: the share of the clients that may act with the server.  What they could open with a chance above
            2^-40 is refused (`privacy.secure_aggregation.security`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    least: int = Field(default=3, ge=2)
    threshold: float = Field(default=2 / 3, ge=0.5, le=1)
    neighbours: int | None = Field(default=None, ge=2)
    colluding: float = Field(default=0.1, ge=0, lt=1)


@dataclass(frozen=True, slots=True, eq=False)
class ClientSecrets:
    """The secrets of one client, for keys and masks.

    Attributes:
        client: its number.
        kept: named tensors; what is in it after a call is kept, on disk in a real federation, before anything leaves.
        draw: so many random bytes: the system's in a real federation, repeatable ones in a simulation.
        signer: signs and checks: with the key of its certificate in a real federation, with a key that follows from
            the seed in a simulation.
        demands: what the client demands of a sum.
        terms: digest of the terms that it was shown, "" in a simulation.
    """

    client: int
    kept: dict[str, Tensor]
    draw: Callable[[int], bytes]
    signer: Signer
    demands: SumDemands = field(default_factory=SumDemands)
    terms: str = ""
