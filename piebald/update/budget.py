"""What Gaussian noise buys: epsilon by two accountants, with what the number means."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from piebald.errors import SettingError
from piebald.recipe import Recipe
from piebald.update.gaussian import Gaussian

ORDERS = [1 + x / 10 for x in range(1, 100)] + [float(order) for order in range(11, 65)] + [128.0, 256.0, 512.0]


@dataclass(frozen=True, slots=True)
class Budget:
    """What a whole run spends.

    Attributes:
        epsilon_rdp, epsilon_pld: by Renyi differential privacy and by the privacy loss distribution, both upper bounds;
            the second is usually the tighter one.  Infinite without noise.
        delta: the probability left out.
        releases: how often noise was added to something that one client was in.
        meaning: what is protected, from whom, and what was assumed.
    """

    epsilon_rdp: float
    epsilon_pld: float
    delta: float
    releases: int
    meaning: str

    def plain(self) -> dict[str, Any]:
        """As JSON values; infinite becomes None."""
        return {name: None if value == math.inf else value for name, value in asdict(self).items()}


def central(noise: float, share: float, rounds: int, delta: float) -> Budget:
    """Clipped updates, noise once on their weighted mean (`gaussian`, where = "centre").

    Args:
        noise: multiplier of the noise.
        share: of the clients that is asked a round, in (0, 1].
        rounds: commits.
        delta: in (0, 1).
    """
    meaning = (
        "Anyone who sees all community models learns little about whether one client took part at all (client-level, "
        "add or remove one client). The centre sees every update and must be trusted. Assumed: weights that do not "
        "depend on the data (equal), and clients drawn independently with the cohort's share; a cohort of fixed size "
        "is accounted as if it were."
    )
    return _spent(noise, share, rounds, delta, meaning)


def local(noise: float, rounds: int, delta: float) -> Budget:
    """Noise on every clipped update before it leaves (`gaussian`, where = "client").

    Args:
        noise: multiplier of the noise.
        rounds: how often one client sends, at most.
        delta: in (0, 1).
    """
    meaning = (
        "Whoever sees all of one client's uploads, the centre included, learns little about which updates it made "
        "instead of any others of the allowed length (two updates differ by up to twice the clip). Nobody needs to be "
        "trusted, and nothing is gained from being one of many: with useful noise this epsilon is large."
    )
    return _spent(noise / 2, 1.0, rounds, delta, meaning)


def of_recipe(recipe: Recipe, known: int, rounds: int | None, delta: float | None = None) -> list[Budget]:
    """The budgets of a recipe's Gaussian stages; none where the number of rounds or of asked clients is open.

    Args:
        recipe: what is run.
        known: clients in the federation.
        rounds: commits.
        delta: by default 1 / (10 known), at most 1e-5.
    """
    cohort = getattr(recipe.pace, "cohort", None)
    if rounds is None or cohort is None or recipe.pace.kind != "synchronous":
        return []
    share = min(1.0, cohort / known if isinstance(cohort, int) else cohort)
    delta = min(1e-5, 0.1 / known) if delta is None else delta
    found = []
    for stage in recipe.update:
        if not isinstance(stage, Gaussian):
            continue
        if stage.where == "client":
            found.append(local(stage.multiplier, rounds, delta))
        elif recipe.weigh.singly():
            found.append(central(stage.multiplier, share, rounds, delta))
        else:
            why = f"Nothing is known: {recipe.weigh.kind} is no weighted mean, so one client may move it by more."
            found.append(Budget(math.inf, math.inf, delta, rounds, why))
    return found


def installed() -> bool:
    """Whether the accountants are there."""
    import importlib.util

    return importlib.util.find_spec("dp_accounting") is not None


def _spent(noise: float, share: float, releases: int, delta: float, meaning: str) -> Budget:
    if not 0 < delta < 1:
        raise SettingError(f"delta must be above 0 and below 1, got {delta}")
    if not noise:
        return Budget(math.inf, math.inf, delta, releases, meaning)
    try:
        import dp_accounting
        from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
        from dp_accounting.rdp.rdp_privacy_accountant import RdpAccountant
    except ImportError:
        raise SettingError("the privacy accountants are missing: pip install 'piebald[privacy]'") from None
    event = dp_accounting.GaussianDpEvent(noise)
    if share < 1:
        event = dp_accounting.PoissonSampledDpEvent(share, event)
    whole = dp_accounting.SelfComposedDpEvent(event, releases)
    found = [accountant.compose(whole).get_epsilon(delta) for accountant in (RdpAccountant(ORDERS), PLDAccountant())]
    return Budget(float(found[0]), float(found[1]), delta, releases, meaning)
