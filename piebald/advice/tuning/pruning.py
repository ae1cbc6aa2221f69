"""When a trial is dropped: Optuna's successive halving, but nothing inside one standard error of the best."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from piebald.report.paired import Scores, difference

if TYPE_CHECKING:
    import optuna

ScoresOf = Callable[[Any, int], Scores | None]  # of a trial, after so many server steps


def outside_one_standard_error(
    wrapped: optuna.pruners.BasePruner, scores_of: ScoresOf, higher_is_better: bool
) -> optuna.pruners.BasePruner:
    """A pruner that drops what another one drops, where the paired difference to the best exceeds its standard error.

    Trials are compared on the same validation rows of the same clients and seeds, so what makes a client hard for both
    drops out; what is left is the noise that the choice would be made under (Kuo et al. 2023, On noisy evaluation in
    federated hyperparameter tuning).

    Args:
        wrapped: the pruner whose decisions are checked.
        scores_of: the scores of a trial after so many server steps, None where it has none.
        higher_is_better: whether a larger value of the metric is better.
    """
    import optuna

    class OutsideOneStandardError(optuna.pruners.BasePruner):
        def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
            if not wrapped.prune(study, trial):
                return False
            step = trial.last_step
            own = None if step is None else scores_of(trial, step)
            if step is None or own is None:
                return True
            others = [
                scores_of(other, step) for other in study.get_trials(deepcopy=False) if other.number != trial.number
            ]
            return any(
                lag_beyond_noise(other, own, higher_is_better) is not None for other in others if other is not None
            )

    return OutsideOneStandardError()


def lag_beyond_noise(best: Scores, other: Scores, higher_is_better: bool) -> float | None:
    """How far a method lies behind another one, None where that is within one standard error of the difference.

    Where the standard error is unknown, with a single client, everything is within it.
    """
    found = difference(best, other)
    if found is None or found.error is None:
        return None
    lag = found.mean if higher_is_better else -found.mean
    return lag if lag > found.error else None
