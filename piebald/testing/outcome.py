"""The outcome of a run, by which two runs are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from piebald.runs.finished_run import Run


class Outcome(NamedTuple):
    """The global model of a run, all scores, and all results of clients."""

    model: Tensor
    scores: Sequence[Mapping[str, Any]]
    results: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, run: Run) -> Self:
        """The outcome of a finished run."""
        return cls(run.work.layout.flatten(run.model()), run.scores, run.results)


def assert_same(first: Run | Outcome, second: Run | Outcome, atol: float = 1e-5) -> None:
    """Check that two runs came to the same: the global model, every score, every loss, every byte.

    Args:
        first, second: the runs, or their outcomes.
        atol: how far numbers of the model may be apart; ten times as far for those in tables.

    Raises:
        AssertionError: they differ; the message names the first difference.
    """
    outcome, other_outcome = (run if isinstance(run, Outcome) else Outcome.of(run) for run in (first, second))
    torch.testing.assert_close(outcome.model, other_outcome.model, atol=atol, rtol=1e-4)
    for rows, theirs in ((outcome.scores, other_outcome.scores), (outcome.results, other_outcome.results)):
        assert len(rows) == len(theirs), f"{len(rows)} and {len(theirs)} rows"
        for a, b in zip(rows, theirs, strict=True):
            for name, value in a.items():
                alike = _close(value, b[name], 10 * atol) if isinstance(value, float) else value == b[name]
                assert alike, f"{name}: {value!r} and {b[name]!r}, in {a} and {b}"


def _close(first: float, second: Any, atol: float) -> bool:
    return isinstance(second, float | int) and math.isclose(first, second, rel_tol=1e-3, abs_tol=atol)
