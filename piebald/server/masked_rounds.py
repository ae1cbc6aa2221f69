"""Rounds of which the server sees only the sum: key agreement before training, unmasking at the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor

from piebald.contracts import KeyAgreement, Result
from piebald.methods.client_work import ClientWork
from piebald.methods.transforms.base import MaskingTransform
from piebald.server.cluster_models import MakeContext


class MaskedRounds:
    """The server's side of a masking transform, round by round.

    Args:
        transform: that transform, or None where individual updates reach the server; then these methods do nothing.
    """

    def __init__(self, transform: MaskingTransform | None) -> None:
        self.transform = transform
        self._agreement: KeyAgreement | None = None
        self.loss: float | None = None  # of the sum that was opened last

    def agree_keys(self, clients: Sequence[int], make_context: MakeContext) -> None:
        """Let clients agree on keys.  An agreement ends with its round, so no checkpoint holds one."""
        if self.transform is not None:
            self._agreement = self.transform.agree_keys(clients, make_context("transforms", 0))

    def vectors(self, client: int) -> Mapping[str, Tensor]:
        """What a client's task brings for masking."""
        return {} if self._agreement is None else self._agreement.vectors(client)

    @property
    def absent(self) -> Mapping[int, str]:
        """The clients that were asked and take no part in the step, with the reason."""
        return {} if self._agreement is None else self._agreement.absent

    def reject_reason(self, result: Result, work: ClientWork) -> str | None:
        """Why a masked update may not count, or None."""
        assert self.transform is not None
        if result.failure is not None or result.update is None:
            return result.failure or "no answer"
        return self.transform.masked_reject_reason(result.update, work)

    def unmask(self, results: list[Result], make_context: MakeContext) -> tuple[list[Result], str | None]:
        """The results with their common sum in place of what was masked, or none of them and the reason."""
        self.loss = None
        if self.transform is None or not results:
            return results, None
        agreement, self._agreement = self._agreement, None
        masked = {result.task.client: result.update for result in results if result.update is not None}
        pool = (
            "no secure aggregation: no client has keys"
            if agreement is None
            else agreement.unmask(masked, make_context("transforms", 0))
        )
        if isinstance(pool, str):
            return [], pool
        self.loss = pool.loss
        opened = []
        for result in results:
            assert result.update is not None
            update = dataclasses.replace(result.update, vectors={}, partial_sum=pool)
            opened.append(dataclasses.replace(result, update=update))
        return opened, None
