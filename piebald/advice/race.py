"""The race: a portfolio of settings is halved on shared rungs, and what is left is repeated with other seeds.

The field has settings of recipes that have done well elsewhere, the most useful first.  `portfolio.json` was learned
from the truth of `benchmarks/advise`: greedily, each setting adds most to what the best of those before it reaches,
over federations of many kinds (Xu et al. 2010).  So any prefix of it is a portfolio, too.

1. All settings are trained for a quarter of the rounds, the best eight go on to half of them, the best six to the end
   (Jamieson and Talwalkar 2016).  The best setting of Local goes to the end in any case: it is the measure of the
   others.
2. FedAvg, the measure that everybody knows, is trained where the portfolio left it out, if the budget lasts.
3. Local and the two best get a second seed before anybody gets a third: the luck of seeds is as large as what settings
   differ by, and the best of many has had luck.  Only what was repeated may win.

Rounds that FedAvg and its fine-tuned kin share are trained once and scored for each, see `tuning.shared_rounds`.  All
runs of a seed have the same clients, cohorts and first model, so that scores can be paired.  Only validation rows are
looked at.  The same function is replayed on known results in `benchmarks/advise`.

Sources: Jamieson and Talwalkar, *Non-stochastic best arm identification and hyperparameter optimization*, AISTATS 2016;
Xu, Hoos and Leyton-Brown, *Hydra: automatically configuring algorithms for portfolio-based selection*, AAAI 2010.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from piebald.advice.tuning.shared_rounds import FOLDER
from piebald.advice.tuning.space import Budget, Cost, has_setting, setting_of, with_settings
from piebald.advice.tuning.trial_runs import Record, TrialRuns, scores_from_json, scores_to_json, words
from piebald.contracts import Clients, Fleet
from piebald.core.errors import DeviceLost, PiebaldError, SettingError, unknown
from piebald.methods.catalog import recipes
from piebald.methods.recipe import Recipe
from piebald.report.paired import Scores, difference
from piebald.runs.compare import folder_name

ALONE, TOGETHER = "local", "fedavg"
MOST = 20  # settings of the portfolio that are raced
RATES = (0.1, 0.5)  # of what the portfolio does not have; most of its settings have one of these
# of Local, the measure of all others: as many settings as any other recipe has
ALONE_SETTINGS: tuple[Mapping[str, float], ...] = (
    {"lr": 0.1}, {"lr": 0.02}, {"lr": 0.5}, {"lr": 0.005}, {"lr": 0.1, "weight_decay": 0.01},
    {"lr": 0.02, "weight_decay": 0.01},
)  # fmt: skip
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
    # a weak measure flatters everything else
    points: list[tuple[str, Mapping[str, Any]]] = [(ALONE, settings) for settings in ALONE_SETTINGS]
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
    for index, (name, point) in enumerate(points):
        before = len(field) if index == first else before
        label, base = labels.get(name, name), bases.setdefault(name, shared(recipes.make(name), training))
        # asked once for each label, since the answer does not depend on the rate
        if label not in {*reasons, *(entrant.label for entrant in field)}:
            few = len(clients) < FEWEST.get(name, 0) and name not in labels
            reason = f"it needs at least {FEWEST[name]} clients, and there are {len(clients)}" if few else ""
            reasons |= {label: reason} if (reason := reason or refused(base, label)) else {}
        if label in reasons or (index >= first and len(field) - before == MOST):
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


KEPT = (8, 6)  # settings that go on after each rung but the last
SHARES = (0.45, 0.6, 0.75)  # of the budget that may be spent by the end of each rung; the rest is for other seeds
REPEATED = 2  # of the best settings, and Local


@dataclass(frozen=True, eq=False)
class Runner:
    """A recipe with settings, as far as it was trained.

    Attributes:
        entrant: the recipe with its settings.
        scores: of each seed and client after each rung, by server steps.
        folders: of its runs, by seed.
        state: "finished", or "dropped" before, or "failed".
        why: it was dropped or failed.
        run: the cost of a run, the mean over seeds; None if it was not finished.
        stopped: server steps after which validation rows have ended its runs early, None where they have not.
        tried: the number of settings of the same method that were tried.
    """

    entrant: Entrant
    scores: Mapping[int, Scores] = field(default_factory=dict)
    folders: Mapping[int, Path] = field(default_factory=dict)
    state: str = "dropped"
    why: str = ""
    run: Cost | None = None
    stopped: int | None = None
    tried: int = 1

    @property
    def label(self) -> str:
        """The name of its method."""
        return self.entrant.label

    @property
    def name(self) -> str:
        """Its method and its settings."""
        return f"{self.label} {words(self.entrant.settings)}"

    @property
    def recipe(self) -> Recipe:
        """The recipe with its settings."""
        return self.entrant.recipe

    @property
    def reached(self) -> int:
        """Server steps that it was trained for."""
        return max(self.scores, default=0)

    @property
    def last(self) -> Scores:
        """Its scores at the end."""
        return self.scores[self.reached]

    @property
    def mean(self) -> float:
        """The mean of the metric over clients and seeds at the end."""
        return self.last.mean

    def with_run(self, scores: Scores, rung: int, seed: int, folder: Path, cost: Cost, is_last: bool) -> Runner:
        """The same with a run of one more seed, or with one more rung of its run."""
        # a rung that is there already has another seed's scores, which these join; a new rung begins with these
        count = len(self.folders) if rung in self.scores else 0
        if count:
            values, seeds = np.concatenate([self.last.values, scores.values]), [*self.last.seeds, seed]
            scores = replace(self.last, values=values, seeds=seeds, trained=None)
        mean = cost if not count or self.run is None else self.run.averaged(cost, count)
        grown = replace(self, scores={**self.scores, rung: scores}, folders={**self.folders, seed: folder})
        return replace(grown, state="finished", why="", run=mean) if is_last else grown


class Race:
    """A race of recipes with settings.

    Args:
        runs: the settings by which they are trained and scored, with all rungs.
        seeds: the first is raced with, the others repeat the best.
        folder: of all runs, in which an interrupted race goes on.
        budget: of the whole race.  Local and one other are trained to the end whatever they cost.
        say: takes a line for each event.

    Attributes:
        spent: of the budget, which rounds that recipes share count in for each of them: they race as if each had
            trained them.
        shared: what was not trained a second time, see `tuning.shared_rounds`.
    """

    def __init__(
        self, runs: TrialRuns, seeds: Sequence[int], folder: Path, budget: Budget, say: Callable[[str], None]
    ) -> None:
        self.runs, self.seeds, self.folder, self.budget, self.say = runs, seeds, folder, budget, say
        self.runners: list[Runner] = []
        self.spent, self.shared = Cost(), Cost()
        self._paid: dict[tuple[int, int], Cost] = {}
        self._not_repeated: set[int] = set()
        self._kin: dict[int, str | None] = {}  # by number, the name of the rounds that it shares with others
        self._trained_once: dict[tuple[str, int], dict[int, Cost]] = {}  # by that and the seed: costs by rung

    def run(self, field: Sequence[Entrant]) -> tuple[list[Runner], dict[str, str], Cost]:
        """Return what was trained, the reasons why other methods were not, and the cost of the race."""
        self.runners = [Runner(entrant) for entrant in field]
        with closing(Record(self.folder)) as self._record:
            # the order of stages is that of their worth: halving finds the best, an answer without its measure is none,
            # two seeds show that it was not luck, and further seeds have what is left of the budget
            self._halve([number for number, entrant in enumerate(field) if not entrant.late])
            self._train_late()
            for seeds in (2, len(self.seeds)):
                self._repeat(seeds)
        shutil.rmtree(self.folder / FOLDER, ignore_errors=True)
        trained = [runner for runner in self.runners if runner.scores]
        tried = {runner.label for runner in trained}
        left_out = {
            runner.label: runner.why or "the budget was used up" for runner in self.runners if runner.label not in tried
        }
        return trained, left_out, self.spent

    # -- the stages

    def _halve(self, numbers: Sequence[int]) -> None:
        """Train settings from rung to rung, and keep the best of them."""
        rungs = self.runs.rungs
        measures = self._measures(numbers)
        for index, rung in enumerate(rungs):
            later = len(rungs) - 1 - index
            # without other seeds, nothing is kept back for them
            limit = self.budget.part(SHARES[-1 - later] if len(self.seeds) > 1 else SHARES[-1 - later] / SHARES[-1])
            for number in numbers:
                # measures are trained without regard to the budget: without Local and one rival there is no answer
                if number not in measures and not limit.has_room(self.spent, rung - self.runners[number].reached):
                    self._drop(number, "the budget was used up")
                else:
                    self._train(number, self.seeds[0], rung)
            # only those that reached this rung: others failed, or the budget ended before them
            numbers = self._best_first(number for number in numbers if self.runners[number].reached == rung)
            measures = self._measures(numbers)
            if later:
                # a dict keeps the order and drops a measure that is among the best already
                kept = [*dict.fromkeys([*numbers[: KEPT[-later]], *measures])]
                for number in numbers:
                    if number not in kept:
                        lag, _ = lag_behind(self.runners[numbers[0]], self.runners[number], self.runs.higher_is_better)
                        self._drop(number, f"{lag:.3g} behind {self.runners[numbers[0]].name}")
                numbers = kept

    def _repeat(self, most: int) -> None:
        """Repeat the best and Local with other seeds, each once before any twice, until all have so many."""
        while self.budget.has_room(self.spent, self.runs.rungs[-1]):
            order = self._best_first(n for n, runner in enumerate(self.runners) if runner.state == "finished")
            candidates = dict.fromkeys([*order[:REPEATED], *self._alone(order)[:1]])
            counts = {number: len(self.runners[number].folders) for number in candidates}
            needed = min(most, len(self.seeds))
            waiting = [n for n, count in counts.items() if count < needed and n not in self._not_repeated]
            if not waiting:
                return
            # the fewest seeds first, so that those that are compared have seeds in common when the budget ends
            number = min(waiting, key=lambda number: counts[number])
            self._train(number, self.seeds[counts[number]], self.runs.rungs[-1])

    def _train_late(self) -> None:
        """Train what is only a measure with the learning rate of the best, if the budget lasts."""
        order = self._best_first(n for n, runner in enumerate(self.runners) if runner.state == "finished")
        # a grid of learning rates for what only is a measure would cost as much as for a candidate
        for number, runner in enumerate(self.runners):
            if runner.entrant.late and order and self.budget.has_room(self.spent, self.runs.rungs[-1]):
                rate = {k: v for k, v in self.runners[order[0]].entrant.settings.items() if k == "lr"}
                recipe = with_settings(runner.recipe, rate) if rate else runner.recipe
                entrant = replace(runner.entrant, recipe=recipe, settings=rate or runner.entrant.settings)
                self.runners[number] = replace(runner, entrant=entrant)
                self._train(number, self.seeds[0], self.runs.rungs[-1])

    # -- one run

    def _train(self, number: int, seed: int, rung: int) -> None:
        """Train a run to a rung, or read what it has scored before an interruption."""
        runner = self.runners[number]
        folder = self.folder / "runs" / folder_name(runner.label) / str(number) / f"seed-{seed}"
        place = f"{number}/{seed}/{rung}"
        # a recorded rung is not trained again, nor is a recorded failure, so that a resumed race decides alike
        if place not in self._record.entries:
            self._record.add(place, self._trained(number, folder, seed, rung))
        table, cost, reason = self._read(place, seed)
        if table is None:
            self.say(f"{runner.name}: failed with seed {seed}: {reason}")
            self._not_repeated.add(number)
            if seed == self.seeds[0]:
                self.runners[number] = replace(runner, state="failed", why=reason)
            return
        # costs are of a whole run up to its rung: what earlier rungs of it have cost was counted then
        self.spent += cost - self._paid.get((number, seed), Cost())
        self._count_shared(number, seed, rung, cost)
        self._paid[number, seed] = cost
        self.say(f"{runner.name}: {self.runs.metric} {table.mean:.4g} after {rung} rounds, seed {seed}")
        self.runners[number] = runner.with_run(table, rung, seed, folder, cost, rung == self.runs.rungs[-1])

    def _trained(self, number: int, folder: Path, seed: int, rung: int) -> dict[str, Any]:
        runner = self.runners[number]
        try:
            kin = self._kin_of(number)
            kept = None if kin is None else self.folder / FOLDER / kin
            scores, cost = self.runs.at_rung(runner.recipe, {seed: folder}, runner.label, rung, kept)
        except DeviceLost:
            raise  # the next run would fail as well
        except PiebaldError as error:
            return {"why": str(error)}
        return {"scores": scores_to_json(scores), "cost": asdict(cost)}

    def _kin_of(self, number: int) -> str | None:
        """The name of the rounds that a setting shares with others, see `TrialRuns.shared_rounds`."""
        if number not in self._kin:
            runner = self.runners[number]
            self._kin[number] = self.runs.shared_rounds(runner.recipe, runner.label)
        return self._kin[number]

    def _count_shared(self, number: int, seed: int, rung: int, cost: Cost) -> None:
        """Count what others had trained before a run has reached a rung; by the record, so that it can go on."""
        if (kin := self._kin_of(number)) is None:
            return
        trained, before = self._trained_once.setdefault((kin, seed), {}), self._paid.get((number, seed), Cost())
        furthest = max((earlier for earlier in trained if earlier <= rung), default=0)
        if furthest > before.rounds:
            self.shared += trained[furthest] - trained.get(before.rounds, Cost())
        trained.setdefault(rung, cost)

    def _read(self, place: str, seed: int) -> tuple[Scores | None, Cost, str]:
        """Return the scores of a rung, what its run has cost so far, and the reason where there are none."""
        entry = self._record.entries[place]
        try:
            if "why" in entry:
                return None, Cost(), str(entry["why"])
            return scores_from_json(entry["scores"], self.runs, [seed]), Cost(**entry["cost"]), ""
        except (KeyError, TypeError, ValueError, PiebaldError):
            raise self._record.unreadable() from None

    def _drop(self, number: int, reason: str) -> None:
        self.runners[number] = replace(self.runners[number], why=reason)
        self.say(f"{self.runners[number].name}: dropped, {reason}")

    def _best_first(self, numbers: Iterable[int]) -> list[int]:
        sign = -1 if self.runs.higher_is_better else 1
        # stable, so that of equal means the earlier entrant stays ahead
        return sorted(numbers, key=lambda number: sign * self.runners[number].mean)

    def _measures(self, numbers: Sequence[int]) -> list[int]:
        """Return what goes to the end whatever it costs: the first Local, and the first of the others."""
        alone = self._alone(numbers)
        return [*alone[:1], *[number for number in numbers if number not in alone][:1]]

    def _alone(self, numbers: Sequence[int]) -> list[int]:
        return [number for number in numbers if self.runners[number].recipe.name == ALONE]


def methods_of(runners: Sequence[Runner], higher_is_better: bool) -> list[Runner]:
    """The best setting of each method, the simplest method first: those that went furthest, and were repeated, win."""
    sign = 1 if higher_is_better else -1
    by_label: dict[str, list[Runner]] = {}
    for runner in sorted(runners, key=lambda runner: runner.entrant.rank):
        by_label.setdefault(runner.label, []).append(runner)
    return [
        # scores of one seed are flattered by choice, so a repeated setting wins over a lucky one
        replace(max(same_method, key=lambda x: (x.reached, len(x.folders) > 1, sign * x.mean)), tried=len(same_method))
        for same_method in by_label.values()
    ]


def lag_behind(best: Runner, other: Runner, higher_is_better: bool) -> tuple[float, float | None]:
    """Return the lag of a method behind another one on the seeds of both, and its standard error."""
    lead = difference(best.last, other.last)
    if lead is None:
        return 0.0, None
    return (lead.mean if higher_is_better else -lead.mean), lead.error
