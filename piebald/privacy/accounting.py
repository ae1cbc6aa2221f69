"""Privacy accounting of Gaussian noise: epsilon by several accountants, with what the number means."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal

from piebald.aggregation.linear import Linear
from piebald.arguments import Count, Fraction, NotNegative, Whole, checked
from piebald.contracts import Clients
from piebald.errors import SettingError
from piebald.recipe import Recipe
from piebald.scheduling.cohort import HasCohort
from piebald.training.base import HidesRows
from piebald.training.sgd import Sgd
from piebald.transforms.gaussian import Gaussian

_USELESS = 100.0  # an epsilon
_WHOLE = tuple(map(float, (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)))  # quick ones, to compare clients by
ORDERS = (*(1 + x / 10 for x in range(1, 100)), *map(float, range(11, 65)), 128.0, 256.0, 512.0)


@dataclass(frozen=True, slots=True)
class PrivacyBudget:
    """What a whole run spends.

    Attributes:
        epsilon_rdp, epsilon_pld: by Renyi differential privacy and by the privacy loss distribution, both upper bounds;
            the second is usually the tighter one.  Infinite without noise.  Above 100 the first stands for both: it
            promises next to nothing, and the others would take minutes to say so.
        delta: the probability left out.
        releases: how often noise was added to something that the unit was in, or could have been.
        meaning: what is protected, from whom, and what was assumed.
        unit: what is hidden: whether a "client" took part, what its "updates" were, or whether it has a "row".
        epsilon_prv: by opacus' own accountant (privacy loss random variables, Gopi et al. 2021), a second opinion of
            another program; None where it was not asked.
    """

    epsilon_rdp: float
    epsilon_pld: float
    delta: float
    releases: int
    meaning: str
    unit: Literal["client", "updates", "row"] = "client"
    epsilon_prv: float | None = None

    def plain(self) -> dict[str, Any]:
        """As JSON values; infinite becomes None."""
        return {name: None if value == math.inf else value for name, value in asdict(self).items()}


@checked
def central(noise: NotNegative, share: Fraction, rounds: Count, delta: Fraction) -> PrivacyBudget:
    """Clipped updates, noise once on their weighted mean (`gaussian`, where = "server").

    Args:
        noise: multiplier of the noise.
        share: of the clients that is asked a round, in (0, 1].
        rounds: server steps.
        delta: in (0, 1).
    """
    meaning = (
        "Anyone who sees all global models learns little about whether one client took part at all (client-level, "
        "add or remove one client). The server sees every update and must be trusted. Assumed: weights that do not "
        "depend on the data (equal), and clients drawn independently with the cohort's share; a cohort of fixed size "
        "is accounted as if it were."
    )
    return _spent(noise, share, rounds, delta, meaning)


@checked
def local(noise: NotNegative, rounds: Count, delta: Fraction) -> PrivacyBudget:
    """Noise on every clipped update before it leaves (`gaussian`, where = "client").

    Args:
        noise: multiplier of the noise.
        rounds: how often one client sends, at most.
        delta: in (0, 1).
    """
    meaning = (
        "Whoever sees all of one client's uploads, the server included, learns little about which updates it made "
        "instead of any others of the allowed length (two updates differ by up to twice the clip). Nobody needs to be "
        "trusted, and nothing is gained from being one of many: with useful noise this epsilon is large."
    )
    return replace(_spent(noise / 2, 1.0, rounds, delta, meaning), unit="updates")


@checked
def rows(noise: NotNegative, share: Fraction, steps: Count, delta: Fraction, also: str = "") -> PrivacyBudget:
    """Rows' gradients clipped, noise on their sum in every step (`dp_sgd`).

    Args:
        noise: multiplier of the noise.
        share: q, of its rows that a client has in a batch in the mean, in (0, 1].
        steps: of one client in the whole run, at most.
        delta: in (0, 1).
        also: what else is assumed.
    """
    meaning = (
        "Whoever sees all that one client ever sends, the server included, learns little about whether one row is in "
        "its training part (record-level, add or remove one row; a person with k rows is protected k times less). "
        "Nobody needs to be trusted but the client itself. Assumed: its number of rows is no secret, and noise and "
        "batches come from numbers that only the client knows, as at a real site; in a simulation the seed tells them. "
        "Scores on validation and test rows are not covered, which must be other rows."
    )
    found = replace(_spent(noise, share, steps, delta, " ".join([meaning, also]).strip()), unit="row")
    wanted = found.epsilon_rdp <= _USELESS
    return replace(found, epsilon_prv=_by_opacus(noise, share, steps, delta) if wanted else None)


@checked
def of_rows(recipe: Recipe, sizes: Sequence[Whole], rounds: Count, delta: Fraction | None = None) -> PrivacyBudget:
    """The budget of a recipe whose trainer hides rows, for the client that spends most if it is asked in every round.

    Args:
        recipe: what is run.
        sizes: training rows of the clients.
        rounds: server steps.
        delta: by default 1 / (10 rows of the largest client), at most 1e-5.
    """
    trainer = recipe.training
    privacy = trainer.row_privacy() if isinstance(trainer, HidesRows) else None
    delta = min(1e-5, 0.1 / max([1, *sizes])) if delta is None else delta
    if privacy is None or not any(sizes):
        return PrivacyBudget(
            math.inf, math.inf, delta, 0, "Nothing is known: no client's number of rows is known.", "row"
        )
    if not isinstance(trainer, Sgd):
        raise SettingError(f"the budget of {trainer.kind!r} is not known: it is no trainer of batches")
    batch, epochs, own = trainer.batch, trainer.epochs, trainer.steps
    smallest: dict[int, int] = {}  # of the clients that take so many steps, the one whose rows are in most batches
    for size in sorted({size for size in sizes if size}):
        smallest.setdefault(epochs * math.ceil(size / batch) if own is None else own, size)

    def spent(steps: int) -> float:
        return _renyi(privacy.noise, min(1.0, batch / smallest[steps]), steps * rounds, delta)

    steps = max(smallest, key=spent) if privacy.noise and len(smallest) > 1 else next(iter(smallest))
    least = smallest[steps]
    also = f"Said of a client with {least:,} rows ({steps:,} steps a round), as if it were asked in every round; "
    also += "none spends more."
    return rows(privacy.noise, min(1.0, batch / least), steps * rounds, delta, also)


@checked
def of_run(recipe: Recipe, clients: Clients, rounds: Count | None) -> list[PrivacyBudget]:
    """All budgets of a run; none where the number of rounds or of asked clients is open."""
    found = of_recipe(recipe, len(clients), rounds)
    if isinstance(recipe.training, HidesRows) and rounds is not None and recipe.scheduling.kind == "synchronous":
        sizes = [clients.size(client, "train") or 0 for client in range(len(clients))]
        found.append(of_rows(recipe, sizes, rounds))
    return found


@checked
def of_recipe(recipe: Recipe, known: Count, rounds: Count | None, delta: Fraction | None = None) -> list[PrivacyBudget]:
    """The budgets of a recipe's Gaussian transforms; none where the number of rounds or of asked clients is open.

    Args:
        recipe: what is run.
        known: clients in the federation.
        rounds: server steps.
        delta: by default 1 / (10 known), at most 1e-5.
    """
    scheduler = recipe.scheduling
    if rounds is None or not isinstance(scheduler, HasCohort) or scheduler.kind != "synchronous":
        return []
    cohort = scheduler.cohort
    share = min(1.0, cohort / known if isinstance(cohort, int) else cohort)
    delta = min(1e-5, 0.1 / known) if delta is None else delta
    found = []
    for transform in recipe.transforms:
        if not isinstance(transform, Gaussian):
            continue
        if transform.where == "client":
            found.append(local(transform.multiplier, rounds, delta))
        elif isinstance(recipe.aggregation, Linear):
            found.append(central(transform.multiplier, share, rounds, delta))
        else:
            why = f"Nothing is known: {recipe.aggregation.kind} is no weighted mean, so one client may move it by more."
            found.append(PrivacyBudget(math.inf, math.inf, delta, rounds, why))
    return found


def installed() -> bool:
    """Whether the accountants are there."""
    import importlib.util

    return importlib.util.find_spec("dp_accounting") is not None


def _spent(noise: float, share: float, releases: int, delta: float, meaning: str) -> PrivacyBudget:
    if not 0 < delta < 1:
        raise SettingError(f"delta must be above 0 and below 1, got {delta}")
    if not noise:
        return PrivacyBudget(math.inf, math.inf, delta, releases, meaning)
    rough = _renyi(noise, share, releases, delta, ORDERS)
    if rough > _USELESS:
        return PrivacyBudget(rough, rough, delta, releases, meaning)
    return PrivacyBudget(rough, _by_loss(noise, share, releases, delta), delta, releases, meaning)


# What accountants say is kept, since they take seconds and a comparison asks the same of every run.


@cache
def _by_loss(noise: float, share: float, releases: int, delta: float) -> float:
    """Epsilon by the privacy loss distribution."""
    event = _event(noise, share, releases)
    from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

    return float(PLDAccountant().compose(event).get_epsilon(delta))


@cache
def _renyi(noise: float, share: float, releases: int, delta: float, orders: tuple[float, ...] = _WHOLE) -> float:
    """Epsilon by Renyi differential privacy of these orders."""
    event = _event(noise, share, releases)
    from dp_accounting.rdp.rdp_privacy_accountant import RdpAccountant

    log = logging.getLogger("absl")  # it warns of every order that it leaves out
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        return float(RdpAccountant(orders).compose(event).get_epsilon(delta))
    finally:
        log.setLevel(level)


def _event(noise: float, share: float, releases: int) -> Any:
    try:
        import dp_accounting
    except ImportError:
        raise SettingError("the privacy accountants are missing: pip install 'piebald[privacy]'") from None
    event = dp_accounting.GaussianDpEvent(noise)
    if share < 1:
        event = dp_accounting.PoissonSampledDpEvent(share, event)
    return dp_accounting.SelfComposedDpEvent(event, releases)


@cache
def _by_opacus(noise: float, share: float, steps: int, delta: float) -> float | None:
    """Epsilon by opacus' PRV accountant, None where it is not installed."""
    try:
        from opacus.accountants import PRVAccountant
    except ImportError:
        return None
    accountant = PRVAccountant()
    accountant.history = [(noise, share, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it divides by zero and goes on, and tells of orders it searched in vain
        return float(accountant.get_epsilon(delta))
