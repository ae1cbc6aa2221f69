"""FLTrust: the server trains on a few rows of its own, and trusts updates that point the same way."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from piebald.contracts import SERVER_ID, Cohort, QueryRequest, ServerContext
from piebald.core.cohort_matrix import gram
from piebald.core.errors import RuntimeFault
from piebald.methods.aggregation.robust import Robust
from piebald.methods.queries.server_rows import RootTraining


class Fltrust(Robust):
    """Updates are trusted by their cosine with the one that the server's own rows make, and scaled to its length.

    Cao et al. 2021, algorithm 2.  Needs rows that the server may look at (the partition's `server_rows`), which it
    trains on with the recipe's trainer at every step.  Tolerates any share of attackers as far as its own rows go:
    without a single honest update it still goes no further than these rows say.  Trust is a matter of trained
    parameters; running statistics of batch norms are those that the server's own rows make, since attackers who are
    trusted, or many, could set any mean or median of them.
    """

    on_device: ClassVar[bool] = True
    needs: ClassVar[str] = "a few rows of the server's own"

    def needs_server_rows(self) -> bool:
        return True

    def tolerates(self, count: int) -> int:
        return count

    def aggregate(self, cohort: Cohort, context: ServerContext) -> tuple[Tensor, list[float]]:
        answer = context.query([QueryRequest(SERVER_ID, RootTraining(), {"model": context.model})])[0]
        if answer is None:
            raise RuntimeFault("fltrust could not train on the server's own rows: the results of the run say why")
        root, changes = answer.vectors["model"].to(cohort.parameters), cohort.parameters
        average, shares = trust(changes, root[: changes.shape[1]])
        # where no update is trusted nothing moves, running statistics included
        buffers = root[changes.shape[1] :] * float(bool(shares.any()))
        return torch.cat([average, buffers]), [float(share) for share in shares]


def trust(matrix: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """The average change [s] and each update's share [n] (Cao et al. 2021, algorithm 2).

    Trust is max(0, cosine with the root's own change); each update is scaled to the root's length and averaged by
    trust.  If no update is trusted, nothing changes and all shares are 0.

    Args:
        matrix: changes [n, s].
        root: the change [s] that the server's own rows make.
    """
    inner = gram(torch.cat([root[None], matrix]))
    # squared lengths: an update of zeros gets the length 1e-30 instead of a division by 0
    lengths = inner.diagonal().clamp(min=1e-60).sqrt()
    scores = (inner[0, 1:] / (lengths[0] * lengths[1:])).clamp(min=0)
    whole = float(scores.sum())
    # a root change of 0 has no direction by which to trust
    if whole <= 0 or float(inner[0, 0]) == 0:
        return torch.zeros_like(root), torch.zeros(len(matrix), dtype=torch.float64)
    shares = scores / whole
    return (shares * lengths[0] / lengths[1:]).to(matrix.dtype) @ matrix, shares.cpu()
