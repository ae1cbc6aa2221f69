"""Another aggregation of those uploads only that do well on the server's rows: what these rows alone are worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import BeforeValidator, PlainSerializer
from torch import Tensor

from piebald.contracts import SERVER_ID, Cohort, QueryRequest, ServerContext
from piebald.contracts.component import build
from piebald.methods.aggregation.base import Aggregator, aggregated
from piebald.methods.queries.server_rows import RootLoss

AnyAggregator = Annotated[
    Any,
    BeforeValidator(lambda table: build("aggregation", table)),
    PlainSerializer(lambda aggregator: aggregator.table()),
]


class Screened(Aggregator):
    """Another aggregation, of the uploads below the largest gap between their losses on the server's labelled rows.

    It gives a method without clusters the rows by which DistFL with `normal = "server_rows"` chooses its cluster.

    Attributes:
        rule: the other aggregation.
    """

    takes_statistics: ClassVar[bool] = True

    rule: AnyAggregator

    def needs_server_rows(self) -> bool:
        return True

    def aggregate(self, cohort: Cohort, context: ServerContext) -> tuple[Tensor, list[float]]:
        models = [cohort.model(row) for row in range(len(cohort.clients))]
        answers = context.query([QueryRequest(SERVER_ID, RootLoss(), {"model": model}) for model in models])
        kept = below_the_gap([math.inf if answer is None else answer.metrics["loss"] for answer in answers])
        average, shares = aggregated(self.rule, cohort.rows(kept), context)
        return average, [dict(zip(kept, shares, strict=True)).get(row, 0.0) for row in range(len(models))]


def below_the_gap(losses: Sequence[float]) -> list[int]:
    """Return the rows of the losses below the largest gap between two that follow one another; those not finite never.

    Examples:
        >>> below_the_gap([0.5, 2.0, 0.4, 2.2, float("nan")])
        [0, 2]
    """
    finite = torch.tensor(losses, dtype=torch.float64).nan_to_num(nan=math.inf).numpy()
    ordered = np.sort(finite[np.isfinite(finite)])
    last = ordered[int(np.diff(ordered).argmax())] if len(ordered) > 1 else math.inf
    return [row for row, loss in enumerate(finite) if loss <= last and math.isfinite(loss)] or [0]
