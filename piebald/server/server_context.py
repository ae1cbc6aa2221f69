"""What the server loop gives to the components that work at the server."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from piebald.contracts import ChecksSignatures, QueryRequest, Runtime, Update
from piebald.contracts.component import Component
from piebald.contracts.model_spec import ModelSpec
from piebald.methods.recipe import Recipe
from piebald.server.client_pool import ClientPool
from piebald.server.cluster_models import ClusterModels

log = logging.getLogger(__name__)


class LoopState(Protocol):
    """What a context shows of the server loop, and does through it."""

    recipe: Recipe
    client_pool: ClientPool
    cluster_models: ClusterModels
    version: int

    @property
    def work(self) -> ModelSpec: ...
    @property
    def known(self) -> int: ...
    @property
    def runtime(self) -> Runtime: ...
    def query(self, requests: Sequence[QueryRequest]) -> list[Update | None]: ...
    def exclude_update(self, client: int, reason: str) -> None: ...
    def exclude_client(self, client: int, reason: str) -> None: ...
    def note(self, axis: str, cluster: int, name: str, value: Any) -> None: ...


class LoopContext:
    """`contracts.ServerContext` for the component of one axis and one cluster."""

    def __init__(self, server: LoopState, axis: str, cluster: int) -> None:
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

    def exclude_client(self, client: int, reason: str) -> None:
        if client not in self._server.client_pool.excluded:
            self._server.exclude_client(client, reason)
            log.warning("client %d is not asked any more: %s", client, reason)

    def check_signature(self, client: int, text: bytes, signature: bytes) -> bool:
        runtime = self._server.runtime
        return not isinstance(runtime, ChecksSignatures) or runtime.check_signature(client, text, signature)

    def note(self, name: str, value: Any) -> None:
        self._server.note(self._axis, self._cluster, name, value)
