"""Which version is the best so far, by the loss on clients' validation rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from piebald.contracts import Checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class ModelSnapshot:
    """Global models [s] by group, and the group of each client that was put into one (others are in `main`)."""

    clusters: Mapping[int, Tensor]
    cluster_of: Mapping[int, int]
    main: int = 0

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ModelSnapshot:
        """Those of a server's checkpoint."""
        names = [name.split("/") for name in checkpoint.tensors]
        clusters = {
            int(name[1]): checkpoint.tensors["/".join(name)] for name in names if name[0::2] == ["group", "model"]
        }
        values = checkpoint.values["cluster_models"]
        return cls(clusters, {int(client): int(group) for client, group in values["cluster_of"]}, values.get("main", 0))


@dataclass(slots=True, eq=False)
class BestVersion:
    """The version of least validation loss (CGAU keeps that one), over all measured rows of all clients.

    Its global models are kept here while the run lasts; a run folder has them, and what clients remembered then, in
    that version's checkpoint.  A client is judged by its personal model where it has one.  The start is no candidate.

    Attributes:
        version: commits made by then, None before the first measurement.
        loss: mean over rows.
        models: the global models at that version, None after a resume.
    """

    version: int | None = None
    loss: float = float("inf")
    models: ModelSnapshot | None = None

    def consider(self, version: int, scores: Sequence[Mapping[str, Any]], models: ModelSnapshot) -> None:
        """Take this version if it is better than all before; of equals the earliest is kept."""
        loss = validation_loss(scores)
        if version and loss is not None and loss < self.loss:
            self.version, self.loss, self.models = version, loss, models

    def state(self) -> list[float] | None:
        """Version and loss as JSON."""
        return None if self.version is None else [self.version, self.loss]

    def restore(self, state: Sequence[float] | None) -> None:
        """Take up what `state` gave."""
        if state is not None:
            self.version, self.loss = int(state[0]), float(state[1])


def validation_loss(scores: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean loss over validation rows, from rows of the table `score`; None where there are none."""
    mine: dict[int, Mapping[str, Any]] = {}
    for row in scores:
        if (
            row["split"] == "validation"
            and row["metric"] == "loss"
            and (row["model"] == "personal" or row["client"] not in mine)
        ):
            mine[row["client"]] = row
    rows = sum(row["examples"] for row in mine.values())
    return sum(row["examples"] * row["value"] for row in mine.values()) / rows if rows else None
