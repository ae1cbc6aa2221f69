"""What the loop lends to the components that work at the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from piebald.component import Component
from piebald.contracts import QueryRequest, Update
from piebald.model_spec import ModelSpec

if TYPE_CHECKING:
    from piebald.server.loop import ServerLoop


class LoopContext:
    """`contracts.ServerContext` for the component of one axis and one cluster."""

    def __init__(self, server: ServerLoop, axis: str, cluster: int) -> None:
        self._server, self._axis, self._cluster = server, axis, cluster
        self.spec: ModelSpec = server.work
        self.known = server.known
        self.trainer: Component = server.recipe.training
        self.state = server.cluster_models.kept.setdefault((axis, cluster), {})

    @property
    def version(self) -> int:
        return self._server.version

    @property
    def model(self) -> Tensor:
        return self._server.cluster_models.cluster(self._cluster).model

    @property
    def models(self) -> Mapping[int, Tensor]:
        return self._server.cluster_models.models

    @property
    def members(self) -> Sequence[int]:
        here, excluded = self._server.runtime.clients(), self._server.client_pool.excluded
        cluster_of = self._server.cluster_models.cluster_of
        return [c for c in here if c not in excluded and (not cluster_of or cluster_of.get(c, 0) == self._cluster)]

    def query(self, requests: Sequence[QueryRequest]) -> list[Update | None]:
        return self._server.query(requests)

    def exclude_update(self, client: int, reason: str) -> None:
        self._server.exclude_update(client, reason)

    def note(self, name: str, value: Any) -> None:
        self._server.note(self._axis, self._cluster, name, value)
