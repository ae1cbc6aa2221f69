"""What becomes of a training result that has arrived: it counts, or it is refused; nothing in it stops the run."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Sequence

from piebald.contracts import Result
from piebald.core.machine import raise_if_lost
from piebald.methods.client_work import ClientWork
from piebald.server.masked_rounds import MaskedRounds
from piebald.server.result_checks import ResultChecks

_NEAR = 1e-4  # relative difference of norms that were computed in another order

log = logging.getLogger(__name__)


class ResultIntake:
    """Decides about training results, one at a time.

    Args:
        check: what an update must satisfy.
        work: what clients do.
        masked: the rounds in which the server sees only sums.
    """

    def __init__(self, check: ResultChecks, work: ClientWork, masked: MaskedRounds) -> None:
        self._check, self._work, self._masked = check, work, masked
        self._uploads = work.uploads()

    def take(self, result: Result, limit: float) -> tuple[Result, str | None]:
        """A result as it counts, and why it does not count, or None.

        Args:
            result: what came.
            limit: the longest step allowed.
        """
        try:
            if self._masked.transform is not None:
                return result, self._masked.reject_reason(result, self._work)
            reason = self._check.reject_reason(result, self._work.layout, limit, self._uploads)
            return (result if reason is not None else self._measured(result)), reason
        except Exception as error:  # whatever one result raises is the fault of its client
            raise_if_lost(error)
            log.debug("the result of task %d raised an error", result.task.id, exc_info=True)
            return result, f"raised {type(error).__name__} when it was checked"

    def _measured(self, result: Result) -> Result:
        """The result with the norm of its vector, whatever it says its norm is, and no more rows than may count."""
        update = result.update
        if update is None or update.partial_sum is not None:
            return result
        trained = update.vectors["model"][: self._work.layout.shared_trained]  # as in `contracts.Update.norm`
        norm, most = self._check.norm(trained), self._check.max_examples
        examples = update.examples if most is None else min(update.examples, most)
        if examples == update.examples and math.isclose(norm, update.norm, rel_tol=_NEAR):
            return result
        return dataclasses.replace(result, update=dataclasses.replace(update, norm=norm, examples=examples))

    def split(self, results: Sequence[Result]) -> tuple[list[Result], list[tuple[Result, str]]]:
        """The results whose vectors have the shapes of most, and the others with the reason.

        It concerns vectors whose shape nobody knows beforehand; those of one step are averaged, so they must be alike.
        """
        sound, odd = list(results), list[tuple[Result, str]]()
        for name in self._uploads:
            updates = {id(one): one.update for one in sound if one.update is not None}
            shapes = {place: one.vectors[name].shape for place, one in updates.items() if name in one.vectors}
            if len({*shapes.values()}) > 1:
                common = Counter(shapes.values()).most_common(1)[0][0]
                reason = f"must send {name} like the {list(common)} of most"
                odd += [(one, reason) for one in sound if shapes.get(id(one), common) != common]
                sound = [one for one in sound if shapes.get(id(one), common) == common]
        return sound, odd
