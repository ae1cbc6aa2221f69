"""The choice of the normal one of several clusters: its model represents the run, and newcomers start from it."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from piebald.contracts import SERVER_ID, Cohort, QueryRequest, ServerContext
from piebald.core.randomness import select
from piebald.methods.queries.scores import Validate
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
            see `normal_cluster.ballot`), or with the smallest loss on rows that the server holds ("server_rows").
        labels: the cluster of each row of the cohort that was grouped.
        cohort: the uploads of this step.
        known: the cluster of each client before this step.
        voters: with "vote", how many of the step's clients are asked; None asks all.
        context: what puts the questions, and takes a note of the losses.
    """
    if criterion == "largest":
        # clients that were not asked count where they were, or the cluster that a round happens to draw would win
        counts = Counter({**known, **{cohort.clients[row]: number for row, number in labels.items()}}.values())
        return min(counts, key=lambda number: (-counts[number], number))
    models = _models(labels, cohort, context)
    if criterion == "server_rows":
        answers = context.query([QueryRequest(SERVER_ID, RootLoss(), {"model": model}) for model in models.values()])
        losses = dict(
            # an answer that failed must not make its cluster the one with the smallest loss
            zip(models, (math.inf if answer is None else answer.metrics["loss"] for answer in answers), strict=True)
        )
    else:
        losses = ballot(models, [cohort.clients[row] for row in sorted(labels)], voters, context)
    context.note(f"{criterion}_loss", {str(number): loss for number, loss in losses.items()})
    return min(losses, key=lambda number: (losses[number], number))


def _models(labels: Mapping[int, int], cohort: Cohort, context: ServerContext) -> dict[int, Tensor]:
    """The mean model [s] of each cluster; of clusters that are absent, their model."""
    # absent clusters stand for election, too: the normal one may have had no client in this step
    models = dict(context.models)
    for number in set(labels.values()):
        rows = [row for row, label in labels.items() if label == number]
        # the mean of this step, since `context.models` is from before it
        models[number] = torch.stack([cohort.model(row) for row in rows]).mean(0)
    # sorted: answers are matched to models by their order
    return dict(sorted(models.items()))


def ballot(
    models: Mapping[int, Tensor], clients: Sequence[int], voters: int | None, context: ServerContext
) -> dict[int, float]:
    """The median over voters of each model's mean loss on the voter's own validation rows; infinite without a voter.

    Every voter says its loss under every model, and counts once, however many rows it says it has.  Attackers vote,
    too, and say what they like.  Where more than half of those who answer are honest, a median lies between two honest
    losses, whatever the others say: so a model that every honest client does better under than under another has the
    smaller median.  That holds even where honest clients are spread over several clusters, each smaller than that of
    the attackers.  From half on it fails, and must: two halves that call one another poisoned look alike.

    Args:
        models: by number of the cluster, [s] each.
        clients: who may be asked.
        voters: how many of them are, a seeded choice at each step; None asks all.
        context: what puts the questions; a model to each voter for each answer, which is counted as bytes.
    """
    electorate = clients if voters is None else select(clients, voters, "voters", context.spec.seed, context.version)
    order = list(models)
    questions = [
        QueryRequest(client, Validate(), {"model": models[number]}) for client in electorate for number in order
    ]
    answers = context.query(questions)
    losses_by_model: dict[int, list[float]] = {number: [] for number in order}
    for voter in range(len(electorate)):
        votes = answers[voter * len(order) : (voter + 1) * len(order)]
        losses = [vote.metrics["loss"] for vote in votes if vote is not None and vote.examples > 0]
        if len(losses) == len(order) and all(map(math.isfinite, losses)):  # half a vote is none
            for number, loss in zip(order, losses, strict=True):
                losses_by_model[number].append(loss)
    return {number: statistics.median(losses) if losses else math.inf for number, losses in losses_by_model.items()}
