"""What a run spends of a privacy budget, and what several runs on the same rows spend together.

Nothing that clients send decides how much noise they add, so that both are known before the run.

Budgets add up whatever the runs have to do with one another, be it other seeds, settings or methods, or a run that goes
on from another: what is (epsilon_1, delta_1) and (epsilon_2, delta_2) private is (epsilon_1 + epsilon_2, delta_1 +
delta_2) private together (Dwork and Roth 2014, theorem 3.16), also where the second was chosen by the first's result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from piebald.core.errors import SettingError, install
from piebald.methods.client_work import ClientWork
from piebald.methods.recipe import Recipe
from piebald.methods.training.sgd import Sgd
from piebald.methods.transforms.gaussian import Gaussian
from piebald.privacy import accounting
from piebald.privacy.accounting import LossAccountant, NoisySteps, PrivacyBudget

_EACH = 100  # rounds of which each is told; of later ones every second, third, ...
_MOST = 1 << 20  # rounds


class Spending:
    """The budgets of a run as functions of its rounds.

    Args:
        recipe, sizes, simulates: as in `accounting.of_run`.
        before: the plain budgets of the runs that this one goes on from.
    """

    def __init__(
        self, recipe: Recipe, sizes: Sequence[int], simulates: bool, before: Sequence[Sequence[Mapping[str, Any]]] = ()
    ) -> None:
        self._recipe, self._sizes, self._simulates, self._before = recipe, sizes, simulates, before
        self._excluded = 0
        self._losses = LossAccountant()
        self._spent: dict[int, list[dict[str, Any]]] = {}
        self._rounds: int | None = None

    def after_runs(self, lineage: Mapping[str, Any]) -> Spending:
        """The same where a run goes on from others."""
        return Spending(self._recipe, self._sizes, self._simulates, lineage_budgets(lineage))

    def learn(self, sizes: Sequence[int]) -> None:
        """Take note of how many training rows each client has, which sites say when they join, 0 where one has not."""
        if sizes != self._sizes:
            self._sizes = sizes
            self._forget()

    def learn_excluded(self, asked: int) -> int:
        """Take note of how many clients can still be asked, and return how many were excluded during the run.

        Those that are left are asked more often than by their share of all, in cohorts of a fixed size.
        """
        excluded = max(0, len(self._sizes) - asked)
        if excluded != self._excluded:
            self._excluded = excluded
            self._forget()
        return excluded

    def _forget(self) -> None:
        self._spent.clear()
        for name in ("_once", "_steps"):  # where cached_property keeps its value
            self.__dict__.pop(name, None)

    @cached_property
    def _once(self) -> list[PrivacyBudget]:
        """The mechanisms of a single round: budgets of some rounds, whose releases are those of one."""
        if not accounting.installed():
            return []
        rounds = self._rounds or 1  # what was computed before is kept
        return [replace(budget, releases=budget.releases // rounds) for budget in self.budgets(rounds)]

    @property
    def hides(self) -> bool:
        """True if there is a budget to speak of."""
        return bool(self._once)

    def budgets(self, rounds: int | None) -> list[PrivacyBudget]:
        """The budgets after so many rounds, by all accountants; none where their number is open."""
        self._rounds = rounds or self._rounds
        if self._recipe.training.row_privacy() is None:  # then nobody looks at the rows of a million clients
            known = len(self._sizes)
            return accounting.of_recipe(self._recipe, known, rounds, None, self._simulates, self._excluded)
        return accounting.of_run(self._recipe, self._sizes, rounds, self._simulates, self._excluded)

    def after(self, rounds: int) -> list[dict[str, Any]]:
        """Unit, epsilon (None where none is known) and delta after so many rounds, of all runs up to this one."""
        if rounds not in self._spent:
            self._spent[rounds] = self._after(rounds)
        return self._spent[rounds]

    def _after(self, rounds: int) -> list[dict[str, Any]]:
        entries = []
        for budget in self._once:
            epsilon, delta = self._epsilon(budget, rounds), budget.delta
            for run in self._before:
                earlier = next((other for other in run if other["unit"] == budget.unit), None)
                known = earlier is not None and earlier["epsilon_pld"] is not None
                # a run before that hid nothing of this unit leaves no budget for all of them together
                epsilon += float(earlier["epsilon_pld"]) if known and earlier is not None else math.inf
                delta += float(earlier["delta"]) if earlier is not None else 0.0
            entries.append({"unit": budget.unit, "epsilon": epsilon if epsilon < math.inf else None, "delta": delta})
        return entries

    def is_told(self, rounds: int) -> bool:
        """Return whether what was spent is recorded after so many rounds."""
        return self.hides and rounds % (1 + (rounds - 1) // _EACH) == 0

    def most_rounds(self, epsilon: float) -> int | None:
        """The number of rounds that end before one that would spend more than epsilon.

        None where sites have yet to say how many rows they have: then each round is to be looked at before it begins.

        Raises:
            SettingError: nothing is known of what is spent, or a single round would spend more.
        """
        hides_rows = self._recipe.training.row_privacy() is not None
        if hides_rows and not self._simulates and not any(self._sizes) and accounting.installed():
            return None
        self.check_first(epsilon)
        low, high = 1, 2
        # epsilon only grows with the rounds, so doubling and bisection find the last that fits
        while not self.exceeds(high, epsilon):
            low, high = high, 2 * high
            if high > _MOST:
                return _MOST
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.exceeds(middle, epsilon) else (middle, high)
        return low

    def check_first(self, epsilon: float) -> None:
        """Refuse an epsilon of which nothing is known, or which a single round would exceed.

        Raises:
            SettingError: it is so.
        """
        if not accounting.installed():
            raise SettingError(f"the privacy accountants are missing: {install('privacy')}")
        if not self._once:
            raise SettingError(
                f"epsilon = {epsilon:g} of stop has no effect, as {self._recipe.name} adds no noise: choose recipe "
                "'dp_sgd' or add transform 'gaussian', or leave epsilon out"
            )
        for budget, entry in zip(self._once, self.after(1), strict=True):
            if entry["epsilon"] is None:
                raise SettingError(f"epsilon of stop needs a budget that is known.  {budget.meaning}")
        if self.exceeds(1, epsilon):
            most = max(entry["epsilon"] for entry in self.after(1))
            raise SettingError(
                f"one round would spend an epsilon of {most:.4g}, more than epsilon = {epsilon:g} of stop: add more "
                "noise, or allow more"
            )

    def exceeds(self, rounds: int, epsilon: float) -> bool:
        """Return whether so many rounds would spend more than epsilon, or nobody knows what they would spend."""
        return any(entry["epsilon"] is None or entry["epsilon"] > epsilon for entry in self.after(rounds))

    def _epsilon(self, first: PrivacyBudget, rounds: int) -> float:
        """Epsilon after so many rounds, given the budget of one."""
        if first.epsilon_pld == math.inf:
            return math.inf
        noise, delta, releases = first.noise, first.delta, first.releases * rounds
        if first.unit == "row":  # who spends most may be another client after more rounds
            return self._steps.most(rounds, delta, self._losses.epsilon)[0]
        epsilon = self._losses.epsilon(noise, first.share, releases, delta)
        if first.drawn is None:
            return epsilon
        return min(epsilon, accounting.epsilon_without_replacement(noise / 2, *first.drawn, releases, delta))

    @cached_property
    def _steps(self) -> NoisySteps:
        """The noisy steps of the clients, where single rows are hidden."""
        trainer, privacy = self._recipe.training, self._recipe.training.row_privacy()
        assert isinstance(trainer, Sgd)
        assert privacy is not None
        return NoisySteps(trainer, privacy.noise, self._sizes)


def task_mechanism(work: ClientWork, size: int) -> tuple[float, float, int] | None:
    """The noise, the share and the releases of one training task at a client of so many rows, None without noise.

    Noise at steps is in units of a row's gradient, and that on an upload in units of two updates' distance.
    """
    trainer, privacy = work.trainer, work.row_privacy
    if privacy is not None and privacy.noise and isinstance(trainer, Sgd):
        return privacy.noise, min(1.0, trainer.step_rows / max(size, 1)), trainer.max_steps(size)
    for transform in work.transforms:
        is_plain = not transform.overrides(Gaussian.on_client) if isinstance(transform, Gaussian) else False
        if isinstance(transform, Gaussian) and transform.noises_update() and is_plain:
            return transform.multiplier / 2, 1.0, 1
    return None


Budget = Mapping[str, Any]  # the plain values of a `PrivacyBudget`
UNITS = {"client": "whether a client took part", "updates": "a client's updates", "row": "whether a row is present"}
NOT_COVERED = (
    "Not covered is what was chosen by scores on validation rows: settings, methods, versions, and the end of a run."
)


def together(metas: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The budgets of several runs on the same rows together, one for each unit that any of them hides.

    Args:
        metas: what describes each run.

    Returns:
        Tables of unit, runs (how many), epsilon and delta (None where a run hides nothing of this unit, so that no
        budget holds for all of them) and meaning (in words); nothing where no run adds noise.
    """
    runs = list(metas)
    spent = [{budget.get("unit", "client"): budget for budget in meta.get("privacy") or ()} for meta in runs]
    sums = []
    for unit in UNITS:
        budgets = [budgets.get(unit) for budgets in spent]
        if not any(budgets):
            continue
        epsilon, delta = _sum(budgets)
        if epsilon is None:
            none = sum(budget is None or budget["epsilon_pld"] is None for budget in budgets)
            meaning = (
                f"Of {UNITS[unit]}: {none} of {len(runs)} runs hide nothing, so nothing is hidden by all together."
            )
        else:
            scope = "in this run" if len(runs) == 1 else f"in all {len(runs)} runs on the same rows together, the sums"
            meaning = f"Of {UNITS[unit]}: epsilon is at most {epsilon:.4g} at delta {delta:.2g} {scope}."
        if any(meta.get("lineage") for meta in runs):
            meaning += " What the runs spent that these go on from comes on top."
        table = {"unit": unit, "runs": len(runs), "epsilon": epsilon, "delta": delta}
        sums.append({**table, "meaning": f"{meaning} {NOT_COVERED}"})
    return sums


def _sum(budgets: Sequence[Budget | None]) -> tuple[float | None, float | None]:
    """Epsilon and delta of all together; None where one is not known, or promises nothing."""
    stated = [budget for budget in budgets if budget is not None and budget["epsilon_pld"] is not None]
    delta = sum(budget["delta"] for budget in stated)
    # with a delta of 1 anything may be disclosed, so its epsilon says nothing
    if len(stated) < len(budgets) or delta >= 1:
        return None, None
    return sum(budget["epsilon_pld"] for budget in stated), delta


def lineage_budgets(lineage: Mapping[str, Any] | None) -> list[Sequence[Budget]]:
    """The budgets of the runs that a run goes on from, the last one first."""
    before = list[Sequence[Budget]]()
    while lineage is not None:
        before.append(lineage.get("privacy") or ())
        lineage = lineage.get("before")
    return before


def told_together(own: Sequence[Budget] | None, lineage: Mapping[str, Any] | None) -> list[dict[str, Any]] | None:
    """The budgets of a run that goes on from others, which say what is known of all of them together.

    Args:
        own: those of this run, as plain values.
        lineage: what it goes on from (`lineage.Inheritance.about`), None for nothing.
    """
    if own is None or lineage is None:
        return None if own is None else [dict(budget) for budget in own]
    before, budgets = lineage_budgets(lineage), []
    for budget in own:
        alike = [next((earlier for earlier in run if earlier["unit"] == budget["unit"]), None) for run in before]
        epsilon, delta = _sum([budget, *alike])
        what_before = "another run" if len(before) == 1 else f"{len(before)} others, one after another"
        meaning = f"Said of this run alone, which goes on from {what_before}: of all that was told in all of them "
        if epsilon is None:
            meaning += "no budget is known, and what was told before may be what is hidden now."
        else:
            meaning += f"epsilon is at most {epsilon:.4g} at delta {delta:.2g}, the sums."
        budgets.append({**budget, "meaning": f"{budget['meaning']} {meaning}"})
    return budgets
