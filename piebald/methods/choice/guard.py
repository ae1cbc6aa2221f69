"""The guard against choosing a model by luck: the one standard error rule on paired losses.

A client compares models on the same validation rows, so the loss of one row is compared with the loss of the same row
under another model: whatever makes a row hard for both cancels out.  The rule (Breiman et al. 1984, section 3.4.3)
takes the simplest model that is at most one standard error worse than the best one; simpler is here what more clients
share, and of models that nobody shares the one that the client would have without the others: it is left only for what
is better beyond one standard error, so that nobody loses by joining where luck decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

FEWEST_ROWS = 10  # with fewer rows a standard error is itself a matter of luck


@dataclass(frozen=True, slots=True)
class Verdict:
    """The guard's verdict about one client.

    Attributes:
        chosen: the number of the chosen model.
        best: the number of the model with the lowest mean loss, that of the fallback where there are too few rows.
        difference: mean over rows of the fallback's loss minus that of the best model.
        error: its standard error; both are NaN where there are too few rows.
    """

    chosen: int
    best: int
    difference: float = math.nan
    error: float = math.nan


def judge(losses: Tensor, shared: int, errors: float = 1.0, alone: int | None = None) -> Verdict:
    """Choose among models by their losses on the same rows.

    Args:
        losses: [models, rows]; the models that several clients share come first, the most widely shared one before the
            others.  A model whose loss of any row is not finite is never chosen by its loss.
        shared: how many of the models are shared.  The last of them, the one that fits the client best, is the
            fallback.  With 0 there is nothing to guard, and the lowest mean loss decides.
        errors: how many standard errors a shared model may be worse than the best one and still be chosen.  Of two
            equally good models, luck passes by one standard error once in six times (a normal variable above 1), in
            which case nothing is lost.
        alone: the number of the model that the client would have trained alone, if it is among them.  Where no shared
            model is chosen, it is, unless another one is better by more than `errors` standard errors.

    Examples:
        >>> import torch
        >>> shared, tuned = torch.full((20,), 1.0), torch.linspace(0.4, 0.6, 20)
        >>> judge(torch.stack([shared, tuned]), shared=1).chosen
        1
    """
    fallback, rows = max(shared - 1, 0), losses.shape[1]
    means = losses.double().mean(1).nan_to_num(math.inf, posinf=math.inf, neginf=math.inf)
    # with nothing shared there is nothing to keep instead, and any row is better than none
    enough = rows >= (FEWEST_ROWS if shared else 1)
    if not enough or not math.isfinite(float(means.min())):
        return Verdict(fallback, fallback)
    best = int(means.argmin())
    gaps = {number: paired(losses[number], losses[best]) for number in range(max(shared, 1))}
    preferred = range(shared) if alone is None else [*range(shared), alone]
    near = (n for n in preferred if _within(gaps.get(n) or paired(losses[n], losses[best]), errors))
    chosen = next(near, best)
    return Verdict(chosen, best, *gaps[fallback])


def paired(losses: Tensor, others: Tensor) -> tuple[float, float]:
    """The mean of the differences of two models' losses on the same rows, and its standard error (NaN for one row)."""
    differences = losses.double() - others.double()
    if len(differences) < 2:
        return float(differences.mean()) if len(differences) else math.nan, math.nan
    return float(differences.mean()), float(differences.std()) / math.sqrt(len(differences))


def _within(gap: tuple[float, float], errors: float) -> bool:
    return math.isfinite(gap[0]) and math.isfinite(gap[1]) and gap[0] <= errors * gap[1]
