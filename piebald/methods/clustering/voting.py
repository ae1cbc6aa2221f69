"""A vote of clients on models, for a context that has no rows of its own."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from torch import Tensor

from piebald.contracts import QueryRequest, ServerContext
from piebald.core.randomness import select
from piebald.methods.queries.validate import Validate


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
