"""The choice of the normal one of several clusters: its model represents the run, and newcomers start from it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from piebald.contracts import SERVER_ID, Cohort, QueryRequest, ServerContext
from piebald.methods.clustering.voting import ballot
from piebald.methods.queries.server_rows import RootLoss

Criterion = Literal["largest", "vote", "server_rows"]


def normal_cluster(
    criterion: Criterion,
    labels: Mapping[int, int],
    cohort: Cohort,
    known: Mapping[int, int],
    voters: int | None,
    context: ServerContext,
) -> int:
    """The number of the cluster that is taken for normal; of equals, the smallest number.

    Args:
        criterion: the cluster with the most clients ("largest"), with the smallest loss in a vote of clients ("vote",
            see `voting`), or with the smallest loss on rows that the server holds ("server_rows").
        labels: the cluster of each row of the cohort that was grouped.
        cohort: the uploads of this step.
        known: the cluster of each client before this step.
        voters: with "vote", how many of the step's clients are asked; None asks all.
        context: what puts the questions, and takes a note of the losses.
    """
    if criterion == "largest":
        counts = Counter({**known, **{cohort.clients[row]: number for row, number in labels.items()}}.values())
        return min(counts, key=lambda number: (-counts[number], number))
    models = _models(labels, cohort, context)
    if criterion == "server_rows":
        answers = context.query([QueryRequest(SERVER_ID, RootLoss(), {"model": model}) for model in models.values()])
        losses = dict(
            zip(models, (math.inf if answer is None else answer.metrics["loss"] for answer in answers), strict=True)
        )
    else:
        losses = ballot(models, [cohort.clients[row] for row in sorted(labels)], voters, context)
    context.note(f"{criterion}_loss", {str(number): loss for number, loss in losses.items()})
    return min(losses, key=lambda number: (losses[number], number))


def _models(labels: Mapping[int, int], cohort: Cohort, context: ServerContext) -> dict[int, Tensor]:
    """The mean model [s] of each cluster; of clusters that are absent, their model."""
    models = dict(context.models)
    for number in set(labels.values()):
        rows = [row for row, label in labels.items() if label == number]
        models[number] = torch.stack([cohort.model(row) for row in rows]).mean(0)
    return dict(sorted(models.items()))
