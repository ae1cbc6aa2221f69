"""Results that arrive: what they must satisfy to count, and the sums that take their place under masks."""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import MOST_ROWS, Component, KeyAgreement, Result, Update, count_reason, described
from piebald.core.errors import TOO_LONG
from piebald.core.machine import raise_if_lost
from piebald.core.metrics import impossible_reason
from piebald.core.parameters import Layout
from piebald.methods.client_work import ClientWork
from piebald.methods.recipe import Recipe
from piebald.methods.transforms.base import MaskingTransform
from piebald.server.cluster_models import MakeContext

LONGEST_STEP = 1000.0
_SUSPECTS = 20  # updates that are left out of a step that failed, one after another, at most
_NEAR = 1e-4  # relative difference of norms that were computed in another order


log = logging.getLogger(__name__)


class ResultChecks(Component):
    """The conditions that an update must satisfy to count.

    Attributes:
        longest_step: a change does not count whose norm is above this many times that of the model (at least of a unit
            vector), and so other vectors that the server adds to those it sends; its client is asked again.
        max_examples: a client's rows count as at most so many, None for no limit.
        max_weight: the largest share of one update in a step, in (0, 1].
    """

    axis = "check"

    longest_step: float = Field(default=LONGEST_STEP, gt=0)
    max_examples: int | None = Field(default=None, ge=1)
    max_weight: float = Field(default=1.0, gt=0, le=1)

    @property
    def limits_weights(self) -> bool:
        """True if what one update counts is limited, so that updates cannot be summed before the server has them."""
        return self.max_examples is not None or self.max_weight < 1

    def unlimited_reason(self, recipe: Recipe) -> str | None:
        """Return why the weights of a recipe's updates cannot be limited as wanted, or None."""
        if self.limits_weights and recipe.masking is not None:
            return (
                f"{recipe.masking.kind} hides what single updates count, so max_examples and max_weight cannot be "
                "held: leave them out, and set the transform's heaviest"
            )
        if self.max_weight < 1 and recipe.server_optimizer.model_memory is not None:
            return (
                f"{recipe.server_optimizer.kind} averages the last models of all clients, so max_weight, a share of "
                "one step, cannot be held: leave it out, or set max_examples"
            )
        return None

    def limit(self, norm: float) -> float:
        """The longest step allowed from a model of this length."""
        return self.longest_step * max(norm, 1.0)

    def reject_reason(
        self,
        result: Result,
        layout: Layout,
        limit: float,
        uploads: Sequence[str] = (),
        own_metrics: Collection[str] = (),
    ) -> str | None:
        """Return why a result may not count, or None.  An update that was summed early was checked where it was summed.

        Args:
            result: what came.
            layout: that of the model.
            limit: the longest step allowed.
            uploads: names of the vectors that the trainer declares besides the model.
            own_metrics: names of metrics of the user's own, see `core.metrics.impossible_reason`.
        """
        if result.failure is not None or result.update is None:
            return result.failure or "no answer"
        update = result.update
        if update.partial_sum is not None:
            return None
        change = update.vectors.get("model")
        if change is None or change.dtype != torch.float32 or change.shape != (layout.shared,):
            return f"must send {layout.shared} float32 numbers, sent {described(change)}"
        if undeclared := sorted(update.vectors.keys() - {"model", *uploads}):
            return f"sent {undeclared[0]!r}, which its trainer does not declare"
        for name in uploads:
            vector, sent = update.vectors.get(name), result.task.vectors.get(name)
            if vector is None:
                return f"must send {name}, sent nothing"
            if sent is not None and (vector.dtype != sent.dtype or vector.shape != sent.shape):
                return f"must send {name} like the {described(sent)} it got, sent {described(vector)}"
        # one pass finds both a number that is not finite and a step that is too long
        norm = self.norm(change)
        if not math.isfinite(norm):
            return "not finite"
        for name in uploads:
            if not bool(torch.isfinite(update.vectors[name]).all()):
                return f"{name} is not finite"
        if norm > limit:
            return f"the step{TOO_LONG}"
        for name in uploads:  # what the server adds to a vector that all clients get next time is as short as a step
            if name in result.task.vectors and self.norm(update.vectors[name]) > limit:
                return f"{name}{TOO_LONG}"
        return self._number_reason(update, own_metrics)

    @staticmethod
    def norm(change: Tensor) -> float:
        """The Euclidean length of a change [s]."""
        return float(torch.linalg.vector_norm(change).item())

    @staticmethod
    def _number_reason(update: Update, own_metrics: Collection[str]) -> str | None:
        """Return why the numbers beside the vectors cannot be, or None.  A loss may be infinite: training can fail."""
        reason = count_reason("examples", update.examples, MOST_ROWS) or count_reason("steps", update.steps, MOST_ROWS)
        for name, value in update.metrics.items():
            if reason is None and name != "loss" and not math.isfinite(value):
                reason = f"sent a metric {name} that is no finite number"
            reason = reason or impossible_reason(name, value, own_metrics)
        return reason


def by_extremes(results: Sequence[Result]) -> list[Result]:
    """Return some results, those first that have a number the most unlike those of the others."""

    def numbers(result: Result) -> dict[str, float]:
        assert result.update is not None
        update = result.update
        return {**update.metrics, "examples": update.examples, "steps": update.steps, "norm": update.norm}

    told = [numbers(result) for result in results]
    # by orders of magnitude: what makes computing fail is too large or too small
    sizes = [{name: math.asinh(value) if math.isfinite(value) else 1e3 for name, value in of.items()} for of in told]
    middle = {name: statistics.median(of.get(name, 0.0) for of in sizes) for name in {*chain(*sizes)}}
    extremes = [max(abs(size - middle[name]) for name, size in of.items()) for of in sizes]
    order = sorted(range(len(results)), key=lambda row: -extremes[row])
    return [results[row] for row in order[:_SUSPECTS]]


class ResultIntake:
    """Decides about training results, one at a time.

    Args:
        check: what an update must satisfy.
        work: what clients do.
        masked: the rounds in which the server sees only sums.
    """

    def __init__(self, check: ResultChecks, work: ClientWork, masked: MaskedRounds) -> None:
        self._check, self._work, self._masked = check, work, masked
        self._uploads, self._own_metrics = work.uploads(), work.objective.own_metrics

    def take(self, result: Result, limit: float) -> tuple[Result, str | None]:
        """A result as it counts, and why it does not count, or None.

        Args:
            result: what came.
            limit: the longest step allowed.
        """
        try:
            if self._masked.transform is not None:
                return result, self._masked.reject_reason(result, self._work)
            reason = self._check.reject_reason(result, self._work.layout, limit, self._uploads, self._own_metrics)
            reason = reason or self._step_reason(result)
            return (result if reason is not None else self._measured(result)), reason
        except Exception as error:  # whatever one result raises is the fault of its client
            raise_if_lost(error)
            log.debug("the result of task %d raised an error", result.task.id, exc_info=True)
            return result, f"raised {type(error).__name__} when it was checked"

    def _step_reason(self, result: Result) -> str | None:
        """Return why a client cannot have taken as many steps as it says on the rows that it says, or None."""
        update, trainer = result.update, self._work.trainer_of(result.task.client)
        # without rows nothing follows from steps
        if update is None or update.partial_sum is not None or not update.steps or not update.examples:
            return None
        least, most = trainer.min_steps(update.examples), trainer.max_steps(update.examples)
        if update.steps < least or (most is not None and update.steps > most):
            bounds = f"at least {least:,}" if update.steps < least else f"at most {most:,}"
            return f"sent {update.steps:,} steps, where {update.examples:,} rows take {bounds}"
        return None

    def _measured(self, result: Result) -> Result:
        """The result with what the server knows in place of what it says: the norm of its vector, numbers that follow
        from settings; and no more rows than may count.
        """
        update = result.update
        if update is None or update.partial_sum is not None:
            return result
        trained = update.vectors["model"][: self._work.layout.shared_trained]  # as in `contracts.Update.norm`
        norm, most = self._check.norm(trained), self._check.max_examples
        limited = update if most is None else update.capped(most)
        known = self._work.trainer_of(result.task.client).known_metrics(result.task.version)
        said = {**dict.fromkeys(known, math.nan), **update.metrics, "norm": update.norm}
        if limited.counts == update.counts and all(
            math.isclose(value, said[name], rel_tol=_NEAR) for name, value in {**known, "norm": norm}.items()
        ):
            return result
        update = dataclasses.replace(limited, norm=norm, metrics={**limited.metrics, **known})
        return dataclasses.replace(result, update=update)

    def split(self, results: Sequence[Result]) -> tuple[list[Result], list[tuple[Result, str]]]:
        """The results whose vectors have the shapes of most, and the others with the reason.

        It concerns vectors whose shape nobody knows beforehand; those of one step are averaged, so they must be alike.
        """
        sound, unlike = list(results), list[tuple[Result, str]]()
        for name in self._uploads:
            updates = {id(result): result.update for result in sound if result.update is not None}
            shapes = {place: update.vectors[name].shape for place, update in updates.items() if name in update.vectors}
            if len({*shapes.values()}) > 1:
                common = Counter(shapes.values()).most_common(1)[0][0]
                reason = f"must send {name} like the {list(common)} of most"
                unlike += [(result, reason) for result in sound if shapes.get(id(result), common) != common]
                sound = [result for result in sound if shapes.get(id(result), common) == common]
        return sound, unlike


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
        """Return what a client's task brings for masking."""
        return {} if self._agreement is None else self._agreement.vectors(client)

    @property
    def absent(self) -> Mapping[int, str]:
        """The clients that were asked and take no part in the step, with the reason."""
        return {} if self._agreement is None else self._agreement.absent

    def reject_reason(self, result: Result, work: ClientWork) -> str | None:
        """Return why a masked update may not count, or None."""
        assert self.transform is not None
        if result.failure is not None or result.update is None:
            return result.failure or "no answer"
        return self.transform.masked_reject_reason(result.update, work)

    def unmask(self, results: list[Result], make_context: MakeContext) -> tuple[list[Result], str | None]:
        """The results with their common sum in place of what was masked, or none of them and the reason."""
        self.loss = None
        if self.transform is None or not results:
            return results, None
        # its keys open one sum: the next one needs keys of its own
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
