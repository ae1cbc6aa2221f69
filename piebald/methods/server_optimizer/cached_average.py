"""Metis: the weighted mean of the last models of all clients that ever answered."""

from __future__ import annotations

from pydantic import Field

from piebald.methods.server_optimizer.base import ServerOptimizer


class CachedAverage(ServerOptimizer):
    """The weighted mean of the last models of all clients that ever answered (Metis, section III).

    A step replaces one client's contribution by its new one in O(model), see `server.cluster_state`.  With all clients
    and a synchronous scheduler this equals `ServerSgd`; otherwise clients that did not answer still count.

    Attributes:
        memory: bytes of clients' last models kept in RAM; more goes to a temporary file.
    """

    memory: int = Field(default=4 << 30, ge=0)

    @property
    def model_memory(self) -> int | None:
        return self.memory
