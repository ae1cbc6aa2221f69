"""Score advice against the truth, and write RESULTS.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import simulated
from federations import BY_NAME, FEDERATIONS, HELD_BACK, MADE_UP
from grid import GRID, LEADERS, RATES, ROUNDS
from known import Entry, Known, chosen, known_federations, own_settings, tuned
from portfolio import learned, without
from product import distilled_table
from product import table as product_table
from shared.stored import texts
from truth import SEEDS

from piebald.advice.unlikeness import KINDS
from piebald.report.page.wording import plural
from piebald.report.paired import Scores, difference

if TYPE_CHECKING:
    from adviser import Advised

RESULTS = Path(__file__).with_name("RESULTS.md")
TEXTS = texts(Path(__file__).with_name("page.md"))
ADVICE = Path(__file__).with_name("advice.json")
NEIGHBOURS = 3  # federations that the rule from the look alone learns from
BEYOND_NOISE = 0.05
LITTLE = 1.0  # points: where less than that is to be gained, federating does not pay
ADVISER, RANDOM, LOOK = "piebald advise", "random settings, same race", "by the look alone"
NAIVE = "the most frequent class of each client"
WITH_LEADERS = f"{ADVISER}, with leaders"
BUDGET = 0.1  # of the adviser, as a share of the full grid with all seeds


@dataclass(frozen=True)
class Choice:
    """What a rule recommends with one seed.

    Attributes:
        entry: the recommendation.
        cost: in rounds.
        pays: whether federating pays; None where the rule does not say.
        points: on test rows, where clients take different methods.
    """

    entry: Entry
    cost: float
    pays: bool | None
    points: float | None = None

    @classmethod
    def of(cls, entry: Entry, cost: float) -> Choice:
        """The choice of a rule that says by its recommendation whether federating pays."""
        return cls(entry, cost, entry.recipe != "local")


Rule = Callable[[Known, int, Sequence[Known]], Choice]  # known, place of the seed, all others


@cache
def _look(words: str) -> tuple[float, ...]:
    """What the look says of a federation, from the reference values: a number for each kind but speed."""
    text = files("piebald.advice").joinpath("references.json").read_text("utf-8")
    row = next(one for one in json.loads(text)["federations"] if one["name"] == words)
    return tuple(float(row[kind] or 0.0) for kind in KINDS if kind != "speed")


@cache
def advice() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """What the adviser said of each federation with each seed, by the portfolio that was raced."""
    return dict(json.loads(ADVICE.read_text("utf-8")))


def races(folder: Path) -> Iterator[tuple[str, Known, list[Advised]]]:
    """Run each race on the truth, with each seed first, and yield what it says of a federation."""
    from adviser import advised

    for name in (ADVISER, RANDOM, WITH_LEADERS):
        leaders = name == WITH_LEADERS
        learned_from = known_federations(folder, leaders=leaders)
        for one in [*learned_from, *known_federations(folder, HELD_BACK, leaders)]:
            yield (
                name,
                one,
                [advised(one, seed, budget_of(one), settings_of(name, one, learned_from, seed)) for seed in one.seeds],
            )


def finished(folder: Path) -> dict[str, list[tuple[str, int]]]:
    """The entries and seeds that the races train to the end, by federation, those of the adviser first."""
    runs: dict[str, dict[tuple[str, int], None]] = {}
    for name, one, answers in races(folder):
        runs.setdefault(one.name, {}).update(dict.fromkeys(run for answer in answers for run in answer.finished))
        print(name, one.name, flush=True)
    return {name: list(own) for name, own in runs.items()}


def write_advice(folder: Path) -> str:
    """Keep what the races say."""
    said: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, one, answers in races(folder):
        rows = [
            {"entry": answer.entry.label, "pays": answer.pays.pays, "before": answer.before.pays,
             "rounds": answer.rounds, "each": round(answer.each, 2)} for answer in answers
        ]  # fmt: skip
        said.setdefault(name, {})[one.name] = rows
        print(name, one.name, rows, flush=True)
    parts = []
    for name, federations in said.items():
        rows = ",\n".join(
            f"  {json.dumps(federation)}: {json.dumps(found)}" for federation, found in federations.items()
        )
        parts.append(f" {json.dumps(name)}: {{\n{rows}\n }}")
    ADVICE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
    return str(ADVICE)


def settings_of(name: str, known: Known, federations: Sequence[Known], seed: int) -> list[dict[str, Any]]:
    """The settings that are raced: learned from other data sets, or drawn from the grid."""
    if name != RANDOM:
        return learned(without(federations, known.federation.data_set))
    grid = [{"recipe": entry.recipe, **entry.settings} for entry in tuned(known.entries)]
    order = np.random.default_rng([seed, *known.name.encode()]).permutation(len(grid))
    return [grid[place] for place in order]


def budget_of(known: Known) -> int:
    """The adviser's budget, in rounds."""
    return round(BUDGET * _cost(known, len(SEEDS)))


def by_look(known: Known, others: Sequence[Known]) -> Entry:
    """The rule from the look alone: what was best, on the average, in the federations that look most alike."""
    own = np.array(_look(known.federation.words))
    learned = [one for one in others if one.federation.data_set != known.federation.data_set]
    learned.sort(key=lambda one: float(np.abs(np.array(_look(one.federation.words)) - own).sum()))
    regret: dict[str, list[float]] = {}
    for one in learned[:NEIGHBOURS]:
        for entry in tuned(one.entries):
            regret.setdefault(entry.label, []).append(one.best - entry.truth)
    usable = {entry.label: entry for entry in tuned(known.entries)}
    everywhere = [label for label, found in regret.items() if len(found) == NEIGHBOURS and label in usable]
    return usable[min(everywhere, key=lambda label: float(np.mean(regret[label])))]


def _two_looks(known: Known, seed: int) -> Choice:
    """The best of the full grid with one seed, by the mean of the last two rungs."""
    best = max(tuned(known.entries), key=lambda one: one.validation[seed, -2:].mean())
    return Choice.of(best, _cost(known, 1))


def _full_grid(known: Known, seeds: list[int]) -> Choice:
    return Choice.of(chosen(tuned(known.entries), seeds), _cost(known, len(seeds)))


def _raced(name: str, each: bool = False) -> Rule:
    def choose(known: Known, seed: int, others: Sequence[Known]) -> Choice:
        found = advice()[name][known.name][seed]
        entry = next(one for one in known.entries if one.label == found["entry"])
        pays = {"yes": True, "no": False}.get(found["pays"])
        return Choice(entry, found["rounds"], pays, found["each"] if each else None)

    return choose


def _only(recipe: str) -> Rule:
    def choose(known: Known, seed: int, others: Sequence[Known]) -> Choice:
        own = [entry for entry in tuned(known.entries) if entry.recipe == recipe]
        return Choice.of(chosen(own, [seed]), len(own) * ROUNDS)

    return choose


def _default(recipe: str) -> Rule:
    return lambda known, seed, _: Choice.of(own_settings(known.entries, recipe), ROUNDS)


# name: the entry that is recommended, and what that costs in rounds
RULES: dict[str, Rule] = {
    "full grid, one seed": lambda known, seed, _: _full_grid(known, [seed]),
    "full grid, one seed, two looks": lambda known, seed, _: _two_looks(known, seed),
    "full grid, all seeds": lambda known, *_: _full_grid(known, known.seeds),
    ADVISER: _raced(ADVISER),
    f"{ADVISER}, each client its own": _raced(ADVISER, each=True),
    RANDOM: _raced(RANDOM),
    LOOK: lambda known, seed, others: Choice.of(by_look(known, others), 0.0),
    NAIVE: lambda known, *_: Choice(known.entries[0], 0.0, None, known.naive),
    "always alone": _only("local"),
    "always FedAvg": _only("fedavg"),
    "always fine-tuned": _only("fine_tuned"),
    "always Ditto": _only("ditto"),
    "FedAvg, default settings": _default("fedavg"),
    "Ditto, default settings": _default("ditto"),
}  # fmt: skip


def _cost(known: Known, seeds: int) -> float:
    """Rounds of the full grid."""
    return sum(entry.recipe in GRID for entry in tuned(known.entries)) * ROUNDS * seeds


@dataclass(frozen=True)
class Verdict:
    """One rule on one federation: means over seeds.

    `pays` has the share of seeds in which the rule says that federating pays, and `silent` in which it does not say.
    """

    regret: float
    cost: float
    pays: float
    silent: float


def judged(known: Known, rule: str, others: Sequence[Known]) -> Verdict:
    """A rule, applied with each seed."""
    found = [RULES[rule](known, seed, others) for seed in known.seeds]
    points = [one.entry.truth if one.points is None else one.points for one in found]
    return Verdict(
        regret=float(np.mean([known.best - value for value in points])),
        cost=float(np.mean([one.cost for one in found])) / _cost(known, len(SEEDS)),
        pays=float(np.mean([one.pays is True for one in found])),
        silent=float(np.mean([one.pays is None for one in found])),
    )


def federating_pays(known: Known) -> bool | None:
    """The truth: whether the best federated entry beats the best local one on test rows; None within noise.

    Both are the best of their kind by validation rows and all seeds, so that neither is the luckiest of many on test
    rows.  It does not pay either where the interval of the gain ends below a point.
    """
    federated = chosen([entry for entry in tuned(known.entries) if entry.recipe != "local"], known.seeds)
    alone = chosen([entry for entry in tuned(known.entries) if entry.recipe == "local"], known.seeds)
    names = [str(client) for client in range(federated.test.shape[1])]
    found = difference(Scores(federated.test, names), Scores(alone.test, names))
    if found is None or (found.p >= BEYOND_NOISE and found.high >= LITTLE):
        return None
    return found.p < BEYOND_NOISE and found.mean > 0


def write(folder: Path) -> str:
    """Write the results; return the summary."""
    known = known_federations(folder)
    if not known:
        return "no federation is complete yet: run the part truth first"
    held = known_federations(folder, HELD_BACK)
    # the look's numbers are kept of the federations that it learns from
    rules = {
        one.name: [rule for rule in RULES if one.federation not in HELD_BACK or rule != LOOK] for one in (*known, *held)
    }
    verdicts = {one.name: {rule: judged(one, rule, known) for rule in rules[one.name]} for one in (*known, *held)}
    pays = {one.name: federating_pays(one) for one in (*known, *held)}
    parts = [_head(known), "## Summary\n", _summary([one.name for one in known], verdicts, pays)]
    parts += [TEXTS["product"], product] if (product := product_table()) else []
    parts += [TEXTS["distilled"], distilled] if (distilled := distilled_table()) else []
    parts += ["## Goals\n", _goals(known, held, verdicts, pays)]
    parts += ["## Regret by federation\n", _by_federation(known, verdicts, pays)]
    if held:
        parts += [
            TEXTS["held"],
            _summary([one.name for one in held], verdicts, pays),
            _by_federation(held, verdicts, pays),
        ]
        unclear = [one.name for one in held if pays[one.name] is None]
        parts.append(TEXTS["held note"].format(unclear=len(unclear), count=len(held), said=_counted(unclear)))
    leaders = ", ".join(f"`{name}`" for name in LEADERS)
    parts += [TEXTS["leaders head"].format(leaders=leaders), _leaders(folder)] if WITH_LEADERS in advice() else []
    parts += [TEXTS["generated"], simulated.table()] if simulated.KEPT.exists() else []
    parts.append(TEXTS["notes"].format(neighbours=NEIGHBOURS, budget=100 * BUDGET, runs=len(SEEDS), **_said(known)))
    RESULTS.write_text("\n".join(parts), encoding="utf-8")
    return "\n".join(parts[:5])


def _head(known: Sequence[Known]) -> str:
    seeds = sorted({len(one.seeds) for one in known})
    return TEXTS["head"].format(
        federations=len(known), recipes=len(GRID), rates=len(RATES), rounds=ROUNDS, seeds=" to ".join(map(str, seeds))
    )


def _summary(names: Sequence[str], verdicts: dict[str, dict[str, Verdict]], pays: dict[str, bool | None]) -> str:
    clear = [name for name in names if pays[name] is not None]
    lines = [f"| rule | regret, mean | worst | cost | pays: wrong, silent (of {len(clear)}) |", "|---|---|---|---|---|"]
    for rule in verdicts[names[0]]:
        own = {name: verdicts[name][rule] for name in names}
        regrets = [one.regret for name, one in own.items() if name not in MADE_UP]
        wrong = [1 - own[name].pays - own[name].silent if pays[name] else own[name].pays for name in clear]
        silent = [own[name].silent for name in clear]
        share = f"{100 * np.mean(wrong):.0f} %, {100 * np.mean(silent):.0f} %" if clear else "-"
        lines.append(f"| {rule} | {np.mean(regrets):.1f} | {max(regrets):.1f} | "
                     f"{100 * np.mean([one.cost for one in own.values()]):.0f} % | {share} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def _by_federation(
    known: Sequence[Known], verdicts: dict[str, dict[str, Verdict]], pays: dict[str, bool | None]
) -> str:
    shown = ["full grid, one seed", ADVISER, f"{ADVISER}, each client its own", RANDOM, NAIVE]
    shown += ["always alone", "always FedAvg"]
    lines = [f"| federation | best | points | federating pays | {' | '.join(shown)} |", "|---" * (len(shown) + 4) + "|"]
    words = {None: "within noise", True: "yes", False: "no"}
    for one in known:
        best = max(tuned(one.entries), key=lambda entry: entry.truth)
        name = one.federation.name
        regrets = " | ".join(f"{verdicts[name][rule].regret:.1f}" for rule in shown)
        lines.append(f"| {BY_NAME[name].words} | {best.label} | {best.truth:.1f} | {words[pays[name]]} | {regrets} |")
    return "\n".join(lines) + "\n"


def _goals(
    known: Sequence[Known], held: Sequence[Known], verdicts: dict[str, dict[str, Verdict]], pays: dict[str, bool | None]
) -> str:
    """The goals of the adviser, with what was measured where its numbers were chosen, and on what was held back."""
    heading = ["goal", "measured", "held back"]
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    columns = [_reached([one.name for one in part], verdicts, pays) for part in (known, held)]
    for (goal, bound, form), *values in zip(GOALS, *columns, strict=True):
        cells = []
        for value in values:
            met = value >= bound if "at least" in goal else value <= bound
            cells.append("-" if np.isnan(value) else f"{value:{form}}, {'met' if met else '**missed**'}")
        lines.append(f"| {goal} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _reached(
    names: Sequence[str], verdicts: dict[str, dict[str, Verdict]], pays: dict[str, bool | None]
) -> list[float]:
    """What the adviser reaches on some federations, in the order of `GOALS`; NaN where that cannot be said."""
    own = {name: verdicts[name][ADVISER] for name in names}
    right = [own[x].pays if pays[x] else 1 - own[x].pays - own[x].silent for x in names if pays[x] is not None]
    regrets = [one.regret for name, one in own.items() if name not in MADE_UP]
    costs = [one.cost for one in own.values()]
    nothing = float("nan")
    return [
        float(np.mean(regrets)) if names else nothing, max(regrets, default=nothing),
        float(np.mean(costs)) if names else nothing, float(np.mean(right)) if right else nothing,
    ]  # fmt: skip


def _leaders(folder: Path) -> str:
    """The gain of a race with leaders of the leaderboard, on federations where they have been trained."""
    lines = ["| federations | of them | recommendation | each client its own |", "|---|---|---|---|"]
    for words, federations in (("leaving out data sets", FEDERATIONS), ("held back", HELD_BACK)):
        known, cells = known_federations(folder, federations, leaders=True), list[str]()
        for figure in (_recommended, _each):
            gains = np.array([figure(one, WITH_LEADERS) - figure(one, ADVISER) for one in known])
            cells.append(f"{gains.mean():+.2f} ± {gains.std(ddof=1) / len(gains) ** 0.5:.2f}")
        lines.append(f"| {words} | {len(known)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _recommended(known: Known, name: str) -> float:
    truth = {entry.label: entry.truth for entry in known.entries}
    return float(np.mean([truth[row["entry"]] for row in advice()[name][known.name]]))


def _each(known: Known, name: str) -> float:
    return float(np.mean([row["each"] for row in advice()[name][known.name]]))


def _said(known: Sequence[Known]) -> dict[str, str]:
    """Whether federating pays: what was said before the check where the truth is clear, and where it is not."""
    clear = {one.federation.name: truth for one in known if (truth := federating_pays(one)) is not None}
    words = {True: "yes", False: "no"}
    cases = [(words[truth], row) for name, truth in clear.items() for row in advice()[ADVISER][name]]
    unclear = [one.name for one in known if one.name not in clear]
    before = [row["before"] == truth for truth, row in cases]
    wrong = [row["before"] not in (truth, "cannot be told") for truth, row in cases]
    return {
        "before": f"{100 * np.mean(before):.0f} % of {len(cases)} cases, and wrong in {100 * np.mean(wrong):.0f} %",
        "unclear": _counted(unclear),
        "noes": plural(sum(not truth for truth in clear.values()), "federation"),
        "rows": plural(sum(len(one.right) for one in known), "run"),
    }


def _counted(names: Sequence[str]) -> str:
    """What the adviser says of some federations on whether federating pays, in words."""
    said = [row["pays"] for name in names for row in advice()[ADVISER][name]]
    return (
        f"{said.count('yes')} times yes, {said.count('no')} times no, and {said.count('cannot be told')} times that it "
        "cannot be told"
    )


GOALS = (
    ("regret, mean: at most 1.0 points", 1.0, ".2f"),
    ("regret, worst: at most 3.5 points", 3.5, ".2f"),
    ("cost: at most 10% of the full grid", 0.1, ".0%"),
    ("whether federating pays, right where it is clear: at least 90%", 0.9, ".0%"),
)
