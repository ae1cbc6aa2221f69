"""Metis: the weighted mean of the last models of all clients that ever answered."""

from __future__ import annotations

from pydantic import Field

from piebald.server_optimizer.base import ServerOptimizer


class CachedAverage(ServerOptimizer):
    """To the weighted mean of the last models of all clients that ever answered (Metis, section III).

    A server step swaps one client's contribution for its new one in O(model), see `server.cache`.  Under a synchronous
    pace with all clients this is `ServerSgd`; with some, or asynchronously, those that did not answer still count.

    Attributes:
        memory: bytes of clients' last models kept in RAM; more goes to a temporary file.
    """

    memory: int = Field(default=4 << 30, ge=0)
