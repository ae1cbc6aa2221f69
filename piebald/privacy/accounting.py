"""Privacy accounting of Gaussian noise: epsilon by several accountants, with what the number means."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from heapq import heappop, heappush
from typing import Any, Literal

from piebald.core.arguments import Count, Fraction, NotNegative, Whole, checked
from piebald.core.errors import SettingError, import_extra, shown
from piebald.core.plain_text import errors_alone
from piebald.methods.recipe import Recipe
from piebald.methods.training.sgd import Sgd
from piebald.methods.transforms.gaussian import Gaussian

Accountant = Callable[[float, float, int, float], float]  # epsilon from noise, share, releases and delta

USELESS = 100.0  # an epsilon
_FINE = 1e-3  # of the privacy loss: epsilon is above that of the stated budget by less than one in a thousand
_CLOSE = 3e-3  # of epsilon: clients so close to the largest are compared by all accountants
_NARROW = 1.1  # times: ranges of clients whose bound is farther from what they spend are halved at once
_WHOLE = tuple(map(float, (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)))  # quick ones, to compare clients by
_CENTRAL = (
    "Anyone who sees all global models learns little about whether one client's updates counted at all (client-level, "
    "add or remove one client's updates). The server sees every update and must be trusted. The sum of the clipped "
    "updates is divided by the number that a round expects, whoever arrives."
)
_UNCOVERED = (
    "Assumed: the number of clients is no secret, and who can be reached does not depend on their rows. Not covered: "
    "scores, and what is chosen by them, as the best version or the end of the run."
)
_DRAWN = (*map(float, range(2, 41)), *map(float, range(48, 129, 16)))  # fractions would take ten times as long
ORDERS = (*(1 + x / 10 for x in range(1, 100)), *map(float, range(11, 65)), 128.0, 256.0, 512.0)


@dataclass(frozen=True, slots=True)
class PrivacyBudget:
    """The privacy budget that a whole run spends.

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
        noise, share: multiplier of the noise, and the probability with which the unit is in a release.
        drawn: how many of how many clients are drawn without replacement, where that was accounted.
    """

    epsilon_rdp: float
    epsilon_pld: float
    delta: float
    releases: int
    meaning: str
    unit: Literal["client", "updates", "row"] = "client"
    epsilon_prv: float | None = None
    noise: float = 0.0
    share: float = 1.0
    drawn: tuple[int, int] | None = None

    def plain(self) -> dict[str, Any]:
        """As JSON values; infinite becomes None."""
        return {name: None if value == math.inf else value for name, value in asdict(self).items()}


@checked
def central(noise: NotNegative, share: Fraction, rounds: Count, delta: Fraction) -> PrivacyBudget:
    """Clipped updates, noise once on their sum over a fixed number (`gaussian`, where = "server"), Poisson cohorts.

    An update that is there or not moves the result by clip / m, where m is the fixed number (`transforms.Gaussian`),
    and the noise has the deviation noise * clip / m.

    Args:
        noise: multiplier of the noise.
        share: the probability with which each client is asked in a round, independently, in (0, 1].
        rounds: server steps.
        delta: in (0, 1).

    Examples:
        >>> budget = central(noise=1.0, share=0.1, rounds=100, delta=1e-5)
        >>> round(budget.epsilon_rdp, 1), budget.unit
        (7.9, 'client')
    """
    drawn = (
        "It counts as asked in every round, as where all are, or where clients learn who takes part."
        if share == 1
        else f"Each client is asked with probability {share:.3g} in each round, independently of all others, and who "
        "was asked must stay as secret as the noise: at a real server both come from the operating system, in a "
        "simulation the seed tells them, and a run folder names who took part."
    )
    return _spent(noise, share, rounds, delta, f"{_CENTRAL} {drawn} {_UNCOVERED}")


@checked
def fixed_cohorts(
    noise: NotNegative, cohort: Count, known: Count, rounds: Count, delta: Fraction, secret: bool = True
) -> PrivacyBudget:
    """The same with cohorts of a fixed size, drawn without replacement.

    A client that is left out makes room for no other one there, so neighbours are two runs with the same cohorts and
    one client's updates replaced by zeros.  Two bounds hold for these, and the smaller one is stated.  One gains
    nothing from the choice: `rounds` releases of the Gaussian mechanism.  The other is Wang, Balle and Kasiviswanathan
    2019 (theorem 9), by Renyi differential privacy for the replacement of one client, whose updates then differ by up
    to twice the clip.  No bound by the privacy loss distribution is known to compose for such samples (Lebeda et al.
    2024), so where the second is smaller it stands for both.

    Args:
        noise: multiplier of the noise.
        cohort: clients asked in a round.
        known: clients in the federation.
        rounds: server steps.
        delta: in (0, 1).
        secret: nobody knows who was asked, and all clients can be asked in every round; else only the first bound, as a
            client that is often there while others are not is asked more often than by its share.
    """
    # a neighbour has zeros in place of one client's updates, so the clip is the sensitivity
    plain, account = _spent(noise, 1.0, rounds, delta, ""), "nothing is gained from their choice"
    if secret and noise:
        # replacing a client moves the sum by up to twice the clip
        least = epsilon_without_replacement(noise / 2, cohort, known, rounds, delta)
        if least < plain.epsilon_pld:
            account = "accounted as drawn without replacement from clients that can all be asked in every round"
        plain = replace(plain, epsilon_rdp=min(plain.epsilon_rdp, least), drawn=(cohort, known))
        plain = replace(plain, epsilon_pld=min(plain.epsilon_pld, least))
    drawn = f"Cohorts of {cohort} of {known} clients have a fixed size: {account}; sampling = 'poisson' spends less."
    return replace(plain, meaning=f"{_CENTRAL} {drawn} {_UNCOVERED}")


@checked
def local(noise: NotNegative, rounds: Count, delta: Fraction) -> PrivacyBudget:
    """Noise on every clipped update before it leaves (`gaussian`, where = "client").

    Args:
        noise: multiplier of the noise.
        rounds: how often one client sends, at most.
        delta: in (0, 1).

    Examples:
        >>> round(local(noise=10.0, rounds=1, delta=1e-5).epsilon_pld, 1)
        0.7
    """
    meaning = (
        "Whoever sees all changes of the model that one client uploads, the server included, learns little about which "
        "updates it made instead of any others of the allowed length (two updates differ by up to twice the clip). "
        "Nobody needs to be trusted but the client itself: a real site draws the noise of each upload from its "
        "operating system, while in a simulation the seed tells it. Nothing is gained from being one of many, so with "
        f"useful noise this epsilon is large. Said of {rounds:,} uploads; a site counts its own, also those that a "
        "server asks for twice. Loss, numbers of rows and steps go along as they are and are not covered, nor are "
        "answers to queries."
    )
    # two updates within the clip differ by up to twice the clip, so in units of that the noise is half
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
        "Nobody needs to be trusted but the client itself: a real site draws noise and batches of each task from its "
        "operating system, while in a simulation the seed tells them. Assumed: its number of rows is no secret. Said "
        f"of {steps:,} steps; a site counts the updates it sends, also those that a server asks for twice. Scores on "
        "validation and test rows are not covered, which must be other rows, nor are answers to queries."
    )
    budget = replace(_spent(noise, share, steps, delta, " ".join([meaning, also]).strip()), unit="row")
    is_useful = budget.epsilon_rdp <= USELESS
    return replace(budget, epsilon_prv=_by_opacus(noise, share, steps, delta) if is_useful else None)


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
    privacy = trainer.row_privacy()
    delta = min(1e-5, 0.1 / max([1, *sizes])) if delta is None else delta
    if privacy is None or not any(sizes):
        return PrivacyBudget(
            math.inf, math.inf, delta, 0, "Nothing is known: no client's number of rows is known.", "row"
        )
    if not isinstance(trainer, Sgd):
        raise SettingError(f"the budget of {trainer.kind!r} is not known: it is no trainer of batches")
    clients, noise = NoisySteps(trainer, privacy.noise, sizes), privacy.noise
    # any client without noise stands for the others
    most, finalists = clients.most(rounds, delta, LossAccountant().epsilon) if noise else (math.inf, {0: math.inf})
    budgets = []
    for place in (place for place, epsilon in finalists.items() if epsilon >= most * (1 - _CLOSE)):
        steps, size = clients.steps[place], clients.sizes[place]
        also = f"Said of a client with {size:,} rows ({steps:,} steps a round), as if it were asked in every round; "
        budgets.append(rows(noise, clients.shares[place], steps * rounds, delta, f"{also}none spends more."))
    worst = max(budgets, key=lambda budget: budget.epsilon_pld)
    if not noise or worst.epsilon_rdp > USELESS:
        return worst
    by_renyi, _ = clients.most(rounds, delta, partial(renyi_epsilon, orders=ORDERS))
    second = [budget.epsilon_prv for budget in budgets if budget.epsilon_prv is not None]
    return replace(worst, epsilon_rdp=by_renyi, epsilon_prv=max(second, default=None))


class NoisySteps:
    """The steps of DP-SGD of a federation's clients, for which of them spends most of a budget.

    A client with more rows takes more steps, each with a smaller share of them, so that neither end must be the worst.

    Args:
        trainer: of all clients.
        noise: multiplier of the noise.
        sizes: training rows of the clients, 0 where that is not known.

    Attributes:
        sizes: those of them that may spend most, increasing: one that takes no more steps than a smaller one does not.
        steps, shares: of each of these, steps in a round, and the part of its rows that is in a step.
    """

    def __init__(self, trainer: Sgd, noise: float, sizes: Sequence[int]) -> None:
        self.noise = noise
        self.sizes, self.steps = list[int](), list[int]()
        for size in sorted(set(sizes) - {0}):
            if not self.steps or trainer.max_steps(size) > self.steps[-1]:
                self.sizes.append(size)
                self.steps.append(trainer.max_steps(size))
        self.shares = [min(1.0, trainer.step_rows / size) for size in self.sizes]

    def most(self, rounds: int, delta: float, accountant: Accountant) -> tuple[float, dict[int, float]]:
        """Find the largest epsilon of any client after so many rounds, by branch and bound.

        A range of clients spends at most what one does that has the share of its first and the steps of its last.

        Args:
            rounds: in each of which all are asked.
            delta: in (0, 1).
            accountant: epsilon from noise, share, releases and delta.

        Returns:
            Epsilon, above that of any client by less than one in a thousand, and that of each client that was computed.
        """
        bound, computed = 0.0, dict[int, float]()
        # by what a range spends at most, the largest first
        waiting = [(-math.inf, 0, len(self.sizes) - 1)]
        while waiting and -waiting[0][0] > bound:
            most, first, last = heappop(waiting)
            if self._unlike(first, last) < _NARROW:
                value = accountant(self.noise, self.shares[first], self.steps[last] * rounds, delta)
                if first == last:
                    computed[first] = value
                if value <= max(computed.values(), default=0.0) * (1 + _FINE):
                    bound = max(bound, value)
                    continue
                most = max(most, -value)
            middle = (first + last) // 2
            for lo, hi in ((first, middle), (middle + 1, last)):
                quick = renyi_epsilon(self.noise, self.shares[lo], self.steps[hi] * rounds, delta)
                heappush(waiting, (max(most, -quick), lo, hi))
        return bound, computed

    def _unlike(self, first: int, last: int) -> float:
        """About how many times as much as any of its clients a range of them spends by its bound."""
        ends = max(self.shares[index] * math.sqrt(self.steps[index]) for index in (first, last))
        return self.shares[first] * math.sqrt(self.steps[last]) / ends


class LossAccountant:
    """Epsilon by the privacy loss distribution, rounded up; a distribution that was composed is gone on from."""

    def __init__(self) -> None:
        # by noise and share: a single release, then how many were composed, and all of them
        self._composed: dict[tuple[float, float], tuple[Any, int, Any]] = {}

    def epsilon(self, noise: float, share: float, releases: int, delta: float) -> float:
        """Return epsilon of so many releases of a mechanism; above 100, Renyi's bound stands for it."""
        if share == 1:
            return gaussian_epsilon(noise / math.sqrt(releases), delta)
        # the distribution would take minutes to say so; all orders are asked where the quick ones are above
        if (
            renyi_epsilon(noise, share, releases, delta)
            > USELESS
            < renyi_epsilon(noise, share, releases, delta, ORDERS)
        ):
            return renyi_epsilon(noise, share, releases, delta, ORDERS)
        single, count, total = self._composed.get((noise, share)) or (_released(noise, share), 0, None)
        # a distribution can be composed further, never taken apart, so fewer releases begin again from a single one
        if total is None or count > releases:
            count, total = 1, single
        if count < releases:
            total = total.compose(single.self_compose(releases - count))
        self._composed[noise, share] = single, releases, total
        return float(total.get_epsilon_for_delta(delta))


def _released(noise: float, share: float) -> Any:
    """The privacy loss distribution of one release."""
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=share, value_discretization_interval=_FINE
    )


@checked
def of_run(
    recipe: Recipe, sizes: Sequence[Whole], rounds: Count | None, simulated: bool = True, excluded: Whole = 0
) -> list[PrivacyBudget]:
    """All budgets of a run; none where the number of rounds is open.

    Args:
        recipe, rounds, simulated, excluded: as in `of_recipe`.
        sizes: training rows of each client, 0 where that is not known.
    """
    budgets = of_recipe(recipe, len(sizes), rounds, None, simulated, excluded)
    if recipe.training.row_privacy() is not None and rounds is not None:
        if recipe.scheduling.asks_once():
            budgets.append(of_rows(recipe, sizes, rounds))
        else:
            budgets.append(replace(_unknown(min(1e-5, 0.1 / max([1, *sizes])), rounds, _often(recipe)), unit="row"))
    return budgets


@checked
def of_recipe(
    recipe: Recipe,
    known: Count,
    rounds: Count | None,
    delta: Fraction | None = None,
    simulated: bool = True,
    excluded: Whole = 0,
) -> list[PrivacyBudget]:
    """The budgets of a recipe's Gaussian transforms; none where the number of rounds is open.

    Args:
        recipe: what is run.
        known: clients in the federation.
        rounds: server steps.
        delta: by default 1 / (10 known), at most 1e-5.
        simulated: all clients can be asked in every round, and nobody knows who was; where sites come and go, cohorts
            of a fixed size gain nothing from being drawn.
        excluded: how many of the clients were asked in the first rounds at most, so that the others had larger shares.
    """
    if rounds is None:
        return []
    # well below 1 / known: a delta of 1 / known would allow a mechanism that exposes one client at random
    delta = min(1e-5, 0.1 / known) if delta is None else delta
    budgets = []
    for transform in recipe.transforms:
        if isinstance(transform, Gaussian) and transform.overrides(Gaussian.on_client, Gaussian.on_server):
            budgets.append(_unknown(delta, rounds, f"{transform.kind} adds noise in a way of its own"))
        elif isinstance(transform, Gaussian) and transform.where == "client":
            once = recipe.scheduling.asks_once()
            budget = local(transform.multiplier, rounds, delta) if once else _unknown(delta, rounds, _often(recipe))
            budgets.append(replace(budget, unit="updates"))
        elif isinstance(transform, Gaussian):
            budgets.append(_at_server(recipe, transform.multiplier, known, rounds, delta, simulated, excluded))
    return budgets


def _at_server(
    recipe: Recipe, noise: float, total: int, rounds: int, delta: float, simulated: bool, excluded: int
) -> PrivacyBudget:
    """The budget of noise on the mean."""
    if not noise:
        return central(noise, 1.0, rounds, delta)
    if not recipe.clustering.is_single():
        reason = f"{recipe.clustering.kind} forms clusters from updates without noise, and a cluster has fewer clients"
        return _unknown(delta, rounds, reason)
    expected, share = recipe.expected_updates(total), recipe.scheduling.inclusion(total)
    if expected is None:
        reason = "who arrives in time depends on clients' rows, and no step waits for everybody whom it has asked"
        return _unknown(delta, rounds, reason)
    hidden = recipe.masking is None  # in a secure aggregation, clients learn who else takes part
    if expected < total and share is None:
        # those that were left to the end had the largest share in each round
        secret = simulated and hidden and total - excluded > expected
        return fixed_cohorts(noise, int(expected), total - excluded if secret else total, rounds, delta, secret)
    return central(noise, expected / total if hidden else 1.0, rounds, delta)


def _often(recipe: Recipe) -> str:
    in_rounds = recipe.scheduling.round_kind() is not None
    often = "may send more than once between two steps" if in_rounds else "sends as often as it is done"
    return f"with {recipe.scheduling.kind} scheduling, a client {often}; a real site counts that"


def _unknown(delta: float, rounds: int, reason: str) -> PrivacyBudget:
    return PrivacyBudget(math.inf, math.inf, delta, rounds, f"No budget is stated: {reason}.")


def installed() -> bool:
    """Return whether the accountants are there."""
    import importlib.util

    # looked up without an import, which would load all accountants only to say that they are there
    return importlib.util.find_spec("dp_accounting") is not None


def _spent(noise: float, share: float, releases: int, delta: float, meaning: str) -> PrivacyBudget:
    if not 0 < delta < 1:
        raise SettingError(f"delta must be above 0 and below 1, got {delta}")
    if not noise:
        return PrivacyBudget(math.inf, math.inf, delta, releases, "No noise is added, so nothing is hidden.")
    # the quick bound first: the other accountants take minutes where it is useless anyway
    rough = renyi_epsilon(noise, share, releases, delta, ORDERS)
    if rough > USELESS:
        return PrivacyBudget(rough, rough, delta, releases, meaning, noise=noise, share=share)
    exact = _by_loss(noise, share, releases, delta)
    return PrivacyBudget(rough, exact, delta, releases, meaning, noise=noise, share=share)


# What accountants say is kept, since they take seconds and a comparison asks the same of every run.


@cache
def _by_loss(noise: float, share: float, releases: int, delta: float) -> float:
    """Epsilon by the privacy loss distribution, which is a Gaussian where nothing is sampled."""
    event = _event(noise, share, releases)
    if share == 1:
        # Gaussian mechanisms compose exactly (Dong, Roth, Su 2022, corollary 3.3): nothing is discretized
        return gaussian_epsilon(noise / math.sqrt(releases), delta)
    from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

    return float(PLDAccountant().compose(event).get_epsilon(delta))


def composed_epsilon(releases: Mapping[tuple[float, float], int], delta: float) -> float:
    """An upper bound of epsilon of Gaussian mechanisms together, by noise and share how often each was released."""
    events = [_event(noise, share, count) for (noise, share), count in releases.items()]
    for (noise, share), count in releases.items():  # who chose these numbers may want the site to compute for hours
        # one entry alone is beyond every ledger's limit (`ledger.LARGEST`), so the others need not be composed
        if (rough := renyi_epsilon(noise, share, count, delta)) > USELESS:
            return rough
    if not events:
        return 0.0
    import dp_accounting
    from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

    # ten times coarser than the default, as a site waits for this before each task; losses are rounded up, so it
    # stays an upper bound
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    return float(accountant.compose(dp_accounting.ComposedDpEvent(events)).get_epsilon(delta))


@checked
def gaussian_epsilon(noise: NotNegative, delta: Fraction) -> float:
    """Epsilon of one release of the Gaussian mechanism (Balle and Wang 2018, theorem 8), by bisection from above.

    Examples:
        >>> round(gaussian_epsilon(noise=1.0, delta=1e-5), 3)
        4.377
    """
    if not noise:
        return math.inf
    from scipy.special import log_ndtr, ndtr

    def spent(epsilon: float) -> float:
        reach = 1 / (2 * noise)
        # in logarithms, as exp(epsilon) overflows and the tail underflows; since 2 * reach * noise = 1, their
        # product is below 1
        return float(ndtr(reach - epsilon * noise) - math.exp(epsilon + log_ndtr(-reach - epsilon * noise)))

    low, high = 0.0, 1.0
    while spent(high) > delta:
        high *= 2
    # 60 halvings go to the resolution of float64; the upper end is returned, so the value stays a bound
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > delta else (low, middle)
    return high


@checked
@cache
def renyi_epsilon(
    noise: NotNegative, share: Fraction, releases: Count, delta: Fraction, orders: tuple[float, ...] = _WHOLE
) -> float:
    """Epsilon by Renyi differential privacy of these orders, each above 1."""
    if not orders or min(orders) <= 1:
        raise SettingError(f"orders must be numbers above 1, at least one, got {shown(orders)}")
    event = _event(noise, share, releases)
    from dp_accounting.rdp.rdp_privacy_accountant import RdpAccountant

    with errors_alone("absl"):  # it warns of every order that it leaves out
        return float(RdpAccountant(orders).compose(event).get_epsilon(delta))


@checked
@cache
def epsilon_without_replacement(
    noise: NotNegative, cohort: Count, total: Count, releases: Count, delta: Fraction
) -> float:
    """Epsilon of cohorts without replacement, by Renyi differential privacy for the replacement of one client."""
    event = _event(noise, 1.0, 1)  # says so where the accountants are missing
    import dp_accounting
    from dp_accounting.rdp.rdp_privacy_accountant import RdpAccountant

    sampled = dp_accounting.SampledWithoutReplacementDpEvent(total, cohort, event)
    accountant = RdpAccountant(_DRAWN, dp_accounting.NeighboringRelation.REPLACE_ONE)
    composed = accountant.compose(dp_accounting.SelfComposedDpEvent(sampled, releases))
    return float(composed.get_epsilon(delta))


def _event(noise: float, share: float, releases: int) -> Any:
    dp_accounting = import_extra("dp_accounting", "privacy", "the privacy accountants are missing")
    if share == 1:  # so many releases are one with less noise, exactly
        return dp_accounting.GaussianDpEvent(noise / math.sqrt(releases))
    sampled = dp_accounting.PoissonSampledDpEvent(share, dp_accounting.GaussianDpEvent(noise))
    return dp_accounting.SelfComposedDpEvent(sampled, releases)


@cache
def _by_opacus(noise: float, share: float, steps: int, delta: float) -> float | None:
    """Epsilon by opacus' PRV accountant, None where it is not installed."""
    try:
        from opacus.accountants import PRVAccountant
    except ImportError:
        return None
    accountant = PRVAccountant()
    # the accountant's `step` counts a single step at each call, hence the history in one piece
    accountant.history = [(noise, share, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it divides by zero and goes on, and tells of orders it searched in vain
        return float(accountant.get_epsilon(delta))
