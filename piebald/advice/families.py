"""The field of the race: settings of recipes that have done well elsewhere, the most useful first.

`portfolio.json` was learned from the truth of `benchmarks/advise`: greedily, each setting adds most to what the best of
those before it reaches, over federations of many kinds.  So any prefix of it is a portfolio, too.

Source: Xu, Hoos and Leyton-Brown, *Hydra: automatically configuring algorithms for portfolio-based selection*, AAAI
2010.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from piebald.advice.tuning.space import has_setting, setting_of, with_settings
from piebald.contracts import Clients, Fleet
from piebald.core.errors import SettingError, unknown
from piebald.methods.catalog import recipes
from piebald.methods.recipe import Recipe

ALONE, TOGETHER = "local", "fedavg"
MOST = 20  # settings of the portfolio that are raced
RATES = (0.1, 0.5)  # of what the portfolio does not have; most of its settings have one of these
UNEQUAL = 2.0  # times that the slowest device takes longer than the fastest from which rounds cost waiting
FEWEST = {"ifca": 4, "fedbuff": 4}  # clients that a recipe needs to make sense
# in plain words, the simplest first
TITLES = {
    ALONE: "every client alone",
    TOGETHER: "one model for all",
    "fedavgm": "one model for all, with momentum",
    "fedprox": "one model for all, with steps held back",
    "scaffold": "one model, with corrected steps",
    "sync_dvw": "one model, weighted by validation scores",
    "fedbuff": "one model without rounds",
    "fine_tuned": "one model, fine-tuned by each client",
    "hdafl": "a private classifier over shared layers",
    "fedrep": "a private classifier, trained before shared layers",
    "fedrod": "a private classifier beside a shared one",
    "fedbn": "private batch norm",
    "lg_fedavg": "private layers under a shared classifier",
    "ditto": "a personal model beside the shared one",
    "fedala": "one model, of which each client takes over what serves it",
    "per_fedavg": "one model that is meant to be adapted",
    "apfl": "a mixture of the shared model and one's own",
    "pfedme": "a personal model that the shared one follows",
    "fedamp": "a model for each client, drawn towards those alike",
    "ifca": "a model for each group of clients",
}


@dataclass(frozen=True)
class Entrant:
    """A recipe with settings in the race.

    Attributes:
        label: of the method; several settings of one recipe share it.
        recipe: with these settings.
        title: the method in plain words.
        settings: those that were chosen for the race.
        late: whether it is trained when the race has chosen, as a measure only, if the budget lasts.
    """

    label: str
    recipe: Recipe
    title: str
    settings: Mapping[str, Any]
    late: bool = False

    @property
    def rank(self) -> int:
        """Its place by simplicity, the simplest is 0."""
        return list(TITLES).index(self.recipe.name) if self.recipe.name in TITLES else len(TITLES)


@cache
def portfolio() -> tuple[Mapping[str, Any], ...]:
    """Settings in the order of their use, each a table with the name of its recipe.

    `python benchmarks/advise/run.py portfolio` makes the file.
    """
    text = files("piebald.advice").joinpath("portfolio.json").read_text(encoding="utf-8")
    return tuple(json.loads(text)["settings"])


def entrants(
    clients: Clients,
    fleet: Fleet | None,
    training: Mapping[str, Any],
    methods: Mapping[str, Recipe],
    names: Sequence[str] | None = None,
    settings: Sequence[Mapping[str, Any]] | None = None,
    refused: Callable[[Recipe, str], str] = lambda recipe, label: "",
) -> tuple[list[Entrant], dict[str, str]]:
    """The field of the race in its order, and the reasons why methods cannot be in it.

    Args:
        clients: their number decides which recipes make sense.
        fleet: their devices, None where all are instant.
        training: settings that the recipes share, such as the batch size; a recipe takes those that it has.
        methods: recipes by label to race as well, with their own settings and those of the portfolio.
        names: the recipes to race in place of those of the portfolio; Local and FedAvg always are.
        settings: the portfolio, by default the one that comes with the package.
        refused: gives the reason why a recipe with a label cannot be trained by these clients, empty if it can.

    Raises:
        SettingError: there is no such recipe.
    """
    for name in names or ():
        if name not in recipes.names():
            raise unknown("family called", name, recipes.names())
    portfolio_settings = portfolio() if settings is None else settings
    labels = {recipe.name: label for label, recipe in methods.items()}
    bases = {name: shared(recipes.make(name), training) for name in (ALONE, TOGETHER)}
    bases |= {recipe.name: recipe for recipe in methods.values()}
    # Local is tried with more than one rate in any case: a weak measure flatters everything else
    points: list[tuple[str, Mapping[str, Any]]] = [(ALONE, {"lr": rate}) for rate in RATES]
    for recipe in methods.values():
        points += [(recipe.name, {}), *((recipe.name, {"lr": rate}) for rate in RATES)]
    if names is not None and (TOGETHER in names or not {*names} - {ALONE}):
        points += [(TOGETHER, {"lr": rate}) for rate in RATES]
    # fast clients wait for slow ones in each round, which is what a buffered server is for
    waiting = fleet is not None and _ratio(fleet, len(clients)) >= UNEQUAL
    if names is None and waiting:
        points += [("fedbuff", {"lr": rate, "buffer_size": 5}) for rate in RATES]
    # what comes before is raced in any case, and the limit counts settings of the portfolio only
    first = len(points)
    known = [(str(point["recipe"]), {k: v for k, v in point.items() if k != "recipe"}) for point in portfolio_settings]
    points += [(name, point) for name, point in known if names is None or name in names]
    points += [(name, {"lr": rate}) for name in names or () if name not in dict(known) for rate in RATES]
    field, reasons, before = list[Entrant](), dict[str, str](), 0
    for place, (name, point) in enumerate(points):
        before = len(field) if place == first else before
        label, base = labels.get(name, name), bases.setdefault(name, shared(recipes.make(name), training))
        # asked once for each label, since the answer does not depend on the rate
        if label not in {*reasons, *(entrant.label for entrant in field)}:
            few = len(clients) < FEWEST.get(name, 0) and name not in labels
            reason = f"it needs at least {FEWEST[name]} clients, and there are {len(clients)}" if few else ""
            reasons |= {label: reason} if (reason := reason or refused(base, label)) else {}
        if label in reasons or (place >= first and len(field) - before == MOST):
            continue
        # a recipe of the caller may lack a setting that the portfolio has
        taken = {setting: value for setting, value in point.items() if has_setting(base, setting)}
        recipe = with_settings(base, taken) if taken else base
        # the portfolio and the rates above overlap, and the same recipe must not be paid for twice
        if all(recipe != entrant.recipe for entrant in field):
            shown = taken or ({"lr": setting_of(recipe, "lr")} if has_setting(recipe, "lr") else {})
            field.append(Entrant(label, recipe, title_of(name) or name, shown))
    # FedAvg is the measure of one model for all, so it is there even where the portfolio left it out
    if all(entrant.recipe.name != TOGETHER for entrant in field):
        recipe = with_settings(bases[TOGETHER], {"lr": RATES[0]})
        field.append(Entrant(TOGETHER, recipe, TITLES[TOGETHER], {"lr": RATES[0]}, late=True))
    return field, reasons


def title_of(recipe: str) -> str:
    """Return the method of a recipe in plain words, empty where there are none."""
    return TITLES.get(recipe, "")


def shared(recipe: Recipe, training: Mapping[str, Any]) -> Recipe:
    """A recipe with those of the shared settings that it has."""
    fitting = {name: value for name, value in training.items() if has_setting(recipe, name)}
    return with_settings(recipe, fitting) if fitting else recipe


def check_training(training: Mapping[str, Any]) -> None:
    """Refuse a shared setting that FedAvg does not have, or does not take."""
    if "lr" in training:
        raise SettingError("lr is chosen for each method: leave it out of training")
    with_settings(recipes.make(TOGETHER), training)


def _ratio(fleet: Fleet, clients: int) -> float:
    seconds = [fleet.device(client).seconds_per_step for client in range(clients)]
    # an instant device beside a slow one is infinitely faster, and all instant ones are equal
    return max(seconds) / min(seconds) if min(seconds) > 0 else (float("inf") if max(seconds) > 0 else 1.0)
