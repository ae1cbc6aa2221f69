"""The best version so far, by the loss on clients' validation rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from piebald.contracts import Checkpoint
from piebald.core.machine import on_host


@dataclass(frozen=True, slots=True, eq=False)
class ModelSnapshot:
    """Global models [s] by cluster, and the cluster of each client that was assigned to one (others are in `main`).

    `own_buffers` are those of clients' own models, by cluster and by the number of the model as text.
    """

    clusters: Mapping[int, Tensor]
    cluster_of: Mapping[int, int]
    main: int = 0
    own_buffers: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)

    def on_host(self) -> ModelSnapshot:
        """The same, with all tensors on the host."""
        buffers = {number: on_host(tensors) for number, tensors in self.own_buffers.items()}
        clusters = {number: model.cpu() for number, model in self.clusters.items()}
        return ModelSnapshot(clusters, self.cluster_of, self.main, buffers)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ModelSnapshot:
        """The models in a checkpoint of the server."""
        names = [name.split("/") for name in checkpoint.tensors]
        clusters = {
            int(name[1]): checkpoint.tensors["/".join(name)] for name in names if name[0::2] == ["cluster", "model"]
        }
        buffers: dict[int, dict[str, Tensor]] = {}
        for name in names:
            if name[0::2] == ["cluster", "own_buffers"]:
                buffers.setdefault(int(name[1]), {})[name[3]] = checkpoint.tensors["/".join(name)]
        values = checkpoint.values["cluster_models"]
        cluster_of = {int(client): int(cluster) for client, cluster in values["cluster_of"]}
        return cls(clusters, cluster_of, values.get("main", 0), buffers)


@dataclass(slots=True, eq=False)
class BestVersion:
    """The version with the lowest validation loss over all evaluated rows of all clients (CGAU keeps that one).

    Its global models are kept here during the run; a run folder has them, with the state of clients at that time, in
    that version's checkpoint.  A client is judged by its personal model where it has one.  The initial model is not a
    candidate.

    Attributes:
        version: server steps made by then, None before the first evaluation.
        loss: mean over rows.
        models: the global models at that version, None after a resume.
    """

    version: int | None = None
    loss: float = float("inf")
    models: ModelSnapshot | None = None

    def consider(self, version: int, scores: Sequence[Mapping[str, Any]], models: ModelSnapshot) -> bool:
        """Keep this version if it is better than all earlier ones, and say so; the earliest of equals is kept."""
        loss = validation_loss(scores)
        better = bool(version) and loss is not None and loss < self.loss
        if better and loss is not None:
            self.version, self.loss, self.models = version, loss, models
        return better

    def state(self) -> list[float] | None:
        """Version and loss as JSON."""
        return None if self.version is None else [self.version, self.loss]

    def restore(self, state: Sequence[float] | None) -> None:
        """Restore what `state` returned."""
        if state is not None:
            self.version, self.loss = int(state[0]), float(state[1])


def validation_loss(scores: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean loss over validation rows, from rows of the table `score`; None where there are none."""
    by_client: dict[int, Mapping[str, Any]] = {}
    for row in scores:
        if (
            row["split"] == "validation"
            and row["metric"] == "loss"
            and (row["model"] == "personal" or row["client"] not in by_client)
        ):
            by_client[row["client"]] = row
    rows = sum(row["examples"] for row in by_client.values())
    return sum(row["examples"] * row["value"] for row in by_client.values()) / rows if rows else None
