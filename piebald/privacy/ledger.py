"""The part of a privacy budget that statistics with noise have spent, in all questions together."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from piebald.core.arguments import Fraction, PathLike, Positive, checked, checked_class
from piebald.core.errors import SettingError
from piebald.core.private_files import held_alone, write_private
from piebald.core.reading.files import read_bytes
from piebald.privacy import accounting
from piebald.privacy.accounting import PrivacyBudget

LARGEST = 50.0  # of an epsilon that noise is computed for; a larger one promises nothing
_MEANING = (
    "Whoever sees these statistics learns little about whether one row is among those of the clients (record-level, "
    "{pair}; a person with k rows is protected k times less). {who} No secret are which clients there are, and the "
    "columns, bounds and categories that were stated."
)
_PAIR = {"site": "one row in place of another, since sites state how many rows they have"}
_WHO = {
    "site": "Nobody needs to be trusted but the site itself, which adds noise to its own sums and counts them.",
    "server": "Who sums must be trusted: the noise is added to the sum.",
    "client": "Nobody needs to be trusted but the client itself, which adds noise to its own sums.",
}


class _Record(BaseModel):
    """The file of a ledger."""

    model_config = ConfigDict(extra="forbid", strict=True)

    epsilon: float = Field(gt=0, le=LARGEST)
    delta: float = Field(gt=0, lt=1)
    spent: list[tuple[str, float]]


class OverBudget(SettingError):
    """A question that would spend more than a ledger allows."""


@checked_class
class Ledger:
    """The privacy budget of some rows: what may be spent on them, and what has been.

    Two questions about the same rows tell more than one, for instance by their difference, so each is counted.
    Gaussian mechanisms compose exactly: those with noise z_1, z_2, ... in units of a row's influence are together one
    with noise 1 / sqrt(1/z_1^2 + 1/z_2^2 + ...) (Dong, Roth, Su 2022, corollary 3.3).

    Args:
        epsilon, delta: what may be spent in all questions together.
        path: a file in which it is kept, made if it is not there; None keeps it in memory.
        changeable: take a file that was made for another budget, for who may change the budget; what was spent counts.

    Raises:
        SettingError: the file cannot be read, or was made for another budget.

    Examples:
        >>> ledger = Ledger(epsilon=1.0, delta=1e-6)
        >>> ledger.epsilon, ledger.questions  # none was asked so far
        (1.0, [])
    """

    _counted, _advice = "questions", ": ask with a smaller epsilon, or not at all"

    def __init__(
        self, epsilon: Positive, delta: Fraction, path: PathLike | None = None, changeable: bool = False
    ) -> None:
        if epsilon > LARGEST or delta >= 1:
            raise SettingError(
                f"epsilon must be at most {LARGEST:g} and delta below 1, got {epsilon:g} and {delta:g}: "
                "more promises nothing"
            )
        self.epsilon, self.delta = float(epsilon), float(delta)
        self._path = None if path is None else Path(path)
        self._changeable = changeable
        self._spent: list[tuple[str, float]] = []
        if self._path is not None and self._path.exists():
            self._read(self._path)

    @property
    def spent(self) -> PrivacyBudget:
        """The budget that has been spent."""
        return self._together(self._spent)

    @property
    def questions(self) -> list[tuple[str, float]]:
        """The questions that were asked, each with its noise in units of a row's influence."""
        return list(self._spent)

    @checked
    def spend(self, question: str, noise: Positive) -> None:
        """Count a question, before it is answered.

        Raises:
            SettingError: the budget does not suffice; then nothing is spent.
        """
        with self._alone():
            self._count(question, noise)

    def _count(self, question: str, noise: float) -> None:
        spent = [*self._spent, (question, noise)]
        after = self._together(spent)
        # noise that `noise_for` computes for exactly this budget must not fail by a rounding error
        if after.epsilon_pld > self.epsilon * (1 + 1e-9):
            raise OverBudget(
                f"epsilon would be {after.epsilon_pld:.4g} in all {after.releases} {self._counted} together, the "
                f"ledger allows {self.epsilon:g}{self._advice}"
            )
        if self._path is not None:
            # before it counts in memory: where the file cannot be written, the question is not asked
            self._write(self._path, spent)
        self._spent = spent

    def _together(self, spent: list[tuple[str, float]]) -> PrivacyBudget:
        return budget([noise for _, noise in spent], self.delta)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The file as it is now, and nobody else's while this lasts: two questions at once are counted both."""
        if self._path is None:
            yield
            return
        with ExitStack() as held:
            try:
                held.enter_context(held_alone(self._path))
            except OSError as error:
                raise SettingError(
                    f"{self._path} cannot be written, so nothing is asked: {error.strerror or error}"
                ) from None
            if self._path.exists():
                self._read(self._path)
            yield

    def _read(self, path: Path) -> None:
        try:
            record = _Record.model_validate_json(read_bytes(path))
        except (OSError, ValidationError) as error:
            raise SettingError(
                f"{path} is no ledger of a privacy budget that can be read: what it counted is spent, so keep it, "
                f"and do not begin another one for the same rows ({type(error).__name__})"
            ) from None
        if not self._changeable and (record.epsilon, record.delta) != (self.epsilon, self.delta):
            raise SettingError(
                f"{path} is a ledger of epsilon {record.epsilon:g} and delta {record.delta:g}, got {self.epsilon:g} "
                f"and {self.delta:g}: give the same"
            )
        # written this way round, so that NaN is refused, too
        if any(not noise > 0 for _, noise in record.spent):
            raise SettingError(f"{path} has a question without noise: it is damaged, and nothing more may be asked")
        self._spent = [(str(question), float(noise)) for question, noise in record.spent]

    def _write(self, path: Path, spent: list[tuple[str, float]]) -> None:
        record = {"epsilon": self.epsilon, "delta": self.delta, "spent": spent}
        try:
            write_private(path, json.dumps(record))  # what was spent stays spent after a power failure
        except OSError as error:
            raise SettingError(f"{path} cannot be written, so nothing is asked: {error.strerror or error}") from None


class TrainingLedger(Ledger):
    """The privacy budget of rows that training may spend, over all runs of a site: one entry for each task.

    A task is so many releases of the Gaussian mechanism, in each of which a row is with some probability: the steps of
    `dp_sgd`, or one upload with noise, which hides all rows.  All of them are composed by their privacy loss
    distributions, which `dp-accounting` rounds up.
    """

    _counted, _advice = "training tasks", ""

    def spend_task(self, noise: float, share: float, releases: int) -> None:
        """Count a training task, before it begins.

        Args:
            noise: standard deviation in units of what one row, or one update in place of another, moves.
            share: the probability with which a row is in a release, in (0, 1].
            releases: how many.

        Raises:
            SettingError: the budget does not suffice; then nothing is spent.
        """
        self.spend(json.dumps([share, releases]), noise)

    def _together(self, spent: list[tuple[str, float]]) -> PrivacyBudget:
        composed: dict[tuple[float, float], int] = {}
        for entry, noise in spent:
            share, releases = json.loads(entry)
            # equal mechanisms are counted together: n copies at once are far cheaper to compose than one after another
            composed[noise, float(share)] = composed.get((noise, float(share)), 0) + int(releases)
        epsilon = accounting.composed_epsilon(composed, self.delta)
        return PrivacyBudget(math.inf, epsilon, self.delta, len(spent), "In all runs of the site together.", "row")


def budget(noises: list[float], delta: float, where: str = "server") -> PrivacyBudget:
    """Return what Gaussian mechanisms spend together, whose noises are given in units of a row's influence."""
    if not noises:
        return PrivacyBudget(0.0, 0.0, delta, 0, "Nothing has been asked.", "row")
    together = 1 / math.sqrt(sum(noise**-2 for noise in noises))
    spent = accounting.central(together, 1.0, 1, delta)
    meaning = _MEANING.format(who=_WHO[where], pair=_PAIR.get(where, "add or remove one row"))
    return replace(spent, releases=len(noises), meaning=meaning, unit="row")


@checked
def noise_for(epsilon: Positive, delta: Fraction) -> float:
    """The least noise, in units of a row's influence, with which one question spends at most this epsilon.

    Raises:
        SettingError: epsilon or delta promise nothing.
    """
    if epsilon > LARGEST or delta >= 1:
        raise SettingError(f"epsilon must be at most {LARGEST:g} and delta below 1, got {epsilon:g} and {delta:g}")
    return _noise_for(float(epsilon), float(delta))


@lru_cache(maxsize=64)
def _noise_for(epsilon: float, delta: float) -> float:
    """See `noise_for`; kept, since it takes a second."""

    def spent(noise: float) -> float:
        return budget([noise], delta).epsilon_pld

    low, high = 0.0, 1.0
    while spent(high) > epsilon:
        low, high = high, 2 * high
    # 30 halvings give the noise to nine digits; the upper end is returned, which never spends more than epsilon
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > epsilon else (low, middle)
    return high
