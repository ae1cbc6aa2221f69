"""The methods that the adviser tries: for each family a recipe, and its main setting besides the learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from piebald.advice.tuning.space import has_setting, setting_of, with_settings
from piebald.contracts import Clients, Fleet
from piebald.core.errors import SettingError, unknown
from piebald.methods import recipes
from piebald.methods.recipe import Recipe

ALONE, TOGETHER = "local", "fedavg"
RATES = (0.1, 0.5, 0.02, 0.25, 0.05)  # in this order: benchmarks/advise measures what another order costs
UNEQUAL = 2.0  # times that the slowest device takes longer than the fastest from which rounds cost waiting


@dataclass(frozen=True)
class Family:
    """A kind of method.

    Attributes:
        recipe: the recipe that stands for it, by name.
        title: the method in plain words.
        space: the values of its main setting besides the learning rate.
        fewest: clients that it needs.
        unequal: whether it is tried only where devices are unequal.
        by_name_only: whether it is tried only where it is named.
    """

    recipe: str
    title: str
    space: Mapping[str, Any] = field(default_factory=dict)
    fewest: int = 2
    unequal: bool = False
    by_name_only: bool = False


# The simplest first.  Those that are only tried where they are named take a share of the budget from the others, and
# benchmarks/advise has measured the race with the defaults; docs/leaderboard.md has them all.
FAMILIES = (
    Family(ALONE, "every client alone", fewest=1),
    Family(TOGETHER, "one model for all"),
    Family("fine_tuned", "one model, fine-tuned by each client", {"tune_epochs": [1, 4]}),
    Family("scaffold", "one model, with corrected steps"),
    Family("hdafl", "a private classifier over shared layers"),
    Family("fedrep", "a private classifier, trained before shared layers", by_name_only=True),
    Family("fedrod", "a private classifier beside a shared one", by_name_only=True),
    Family("fedbn", "private batch norm"),
    Family("lg_fedavg", "private layers under a shared classifier"),
    Family("ditto", "a personal model beside the shared one", {"lam": [0.1, 1.0]}),
    Family("fedala", "one model, of which each client takes over what serves it", by_name_only=True),
    Family("per_fedavg", "one model that is meant to be adapted", {"alpha": [0.01, 0.1]}, by_name_only=True),
    Family("apfl", "a mixture of the shared model and one's own", by_name_only=True),
    Family("pfedme", "a personal model that the shared one follows", {"lam": [2.0, 15.0]}, by_name_only=True),
    Family("fedamp", "a model for each client, drawn towards those alike", {"sigma": [1.0, 100.0]}, by_name_only=True),
    Family("ifca", "a model for each group of clients", {"k": [2, 3]}, fewest=4),
    Family("sync_dvw", "one model, weighted by validation scores"),
    Family("fedbuff", "one model without rounds", {"buffer_size": [2, 5]}, fewest=4, unequal=True),
)


def title_of(recipe: str) -> str:
    """Return the method of a recipe in plain words, empty where it has no family."""
    return next((family.title for family in FAMILIES if family.recipe == recipe), "")


@dataclass(frozen=True)
class Entrant:
    """A method in the race.

    Attributes:
        label: its name in the race.
        recipe: with the shared settings.
        title: the method in plain words.
        rank: its place by simplicity, the simplest is 0.
        space: the values of its settings.
        first: the settings that are tried first.
    """

    label: str
    recipe: Recipe
    title: str
    rank: int
    space: Mapping[str, Any]
    first: tuple[Mapping[str, Any], ...]


def entrants(
    clients: Clients,
    fleet: Fleet | None,
    training: Mapping[str, Any],
    methods: Mapping[str, Recipe],
    names: Sequence[str] | None = None,
) -> list[Entrant]:
    """The methods of the race, the simplest first.

    Args:
        clients: their number decides which families make sense.
        fleet: their devices, None where all are instant.
        training: settings that the families' recipes share, such as the batch size; a recipe takes those that it has.
        methods: recipes by label to race as well; one with the name of a family's recipe stands for that family.
        names: of the families' recipes to race, by default all but those that are only tried where they are named;
            Local and FedAvg always are.

    Raises:
        SettingError: there is no such family.
    """
    recipe_names = [family.recipe for family in FAMILIES]
    for name in names or ():
        if name not in recipe_names:
            raise unknown("family called", name, recipe_names)
    # methods that do not wait for slow devices are tried only where there are some
    unequal = fleet is not None and _ratio(fleet, len(clients)) >= UNEQUAL
    label_of = {recipe.name: label for label, recipe in methods.items()}
    methods_raced: list[tuple[str, Recipe, str, Mapping[str, Any]]] = []
    for family in FAMILIES:
        always = family.recipe in (ALONE, TOGETHER) or family.recipe in label_of
        fits = len(clients) >= family.fewest and (unequal or not family.unequal)
        chosen = not family.by_name_only if names is None else family.recipe in names
        if not always and not (fits and chosen):
            continue
        label = label_of.get(family.recipe, family.recipe)
        recipe = methods[label] if family.recipe in label_of else shared(recipes.make(family.recipe), training)
        methods_raced.append((label, recipe, family.title, family.space))
    raced = {label for label, *_ in methods_raced}
    methods_raced += [(label, recipe, recipe.name, {}) for label, recipe in methods.items() if label not in raced]
    return [_entrant(rank, *method) for rank, method in enumerate(methods_raced)]


def shared(recipe: Recipe, training: Mapping[str, Any]) -> Recipe:
    """A recipe with those of the shared settings that it has."""
    fitting = {name: value for name, value in training.items() if has_setting(recipe, name)}
    return with_settings(recipe, fitting) if fitting else recipe


def check_training(training: Mapping[str, Any]) -> None:
    """Refuse a shared setting that FedAvg does not have, or does not take."""
    if "lr" in training:
        raise SettingError("lr is chosen for each method: leave it out of training")
    with_settings(recipes.make(TOGETHER), training)


def _entrant(rank: int, label: str, recipe: Recipe, title: str, space: Mapping[str, Any]) -> Entrant:
    rate = float(setting_of(recipe, "lr"))
    # wider than the rates that are tried first, so that the best of them is not at an end of the range
    values: dict[str, Any] = {"lr": {"low": min(rate, *RATES) / 2, "high": 2 * max(rate, *RATES), "log": True}}
    main = {}
    for name, choices in space.items():
        default = setting_of(recipe, name)
        # the recipe's own value first: it is what users would run
        main[name] = [*([] if default in choices else [default]), *choices]
    first = tuple(
        {"lr": rate} | {name: choices[number % len(choices)] for name, choices in main.items()}
        for number, rate in enumerate(RATES)
    )
    return Entrant(label, recipe, title, rank, values | main, first)


def _ratio(fleet: Fleet, clients: int) -> float:
    seconds = [fleet.device(client).seconds_per_step for client in range(clients)]
    return max(seconds) / min(seconds) if min(seconds) > 0 else (float("inf") if max(seconds) > 0 else 1.0)
