"""Score advice against the truth, and write RESULTS.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from federations import BY_NAME, FEDERATIONS, Federation
from grid import GRID, RATES, ROUNDS
from known import Entry, chosen, entries_of, own_settings, tuned
from truth import SEEDS, read

from piebald.advice.unlikeness import KINDS
from piebald.report.paired import Scores, difference

RESULTS = Path(__file__).with_name("RESULTS.md")
ADVICE = Path(__file__).with_name("advice.json")
NEIGHBOURS = 3  # federations that the rule from the look alone learns from
BEYOND_NOISE = 0.05
BUDGET = 0.1  # of the adviser, as a share of the full grid with all seeds


@dataclass(frozen=True)
class Known:
    """A federation with its truth: the entries that were run, and the seeds that all of them have."""

    federation: Federation
    entries: list[Entry]

    @property
    def seeds(self) -> list[int]:
        """Places of the seeds."""
        return list(range(len(self.entries[0].test)))

    @property
    def best(self) -> float:
        """Points of the best on test rows."""
        return max(entry.truth for entry in tuned(self.entries))


@dataclass(frozen=True)
class Choice:
    """What a rule recommends with one seed.

    Attributes:
        entry: the recommendation.
        cost: in rounds.
        pays: whether federating pays; None where the rule does not say.
    """

    entry: Entry
    cost: float
    pays: bool | None

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
def advice() -> dict[str, list[dict[str, Any]]]:
    """What the adviser said of each federation with each seed."""
    return dict(json.loads(ADVICE.read_text("utf-8")))


def write_advice(folder: Path) -> str:
    """Run the adviser on the truth, with each seed first, and keep what it says."""
    from adviser import advised  # with Optuna, which scores do not need

    said = {}
    for known in known_federations(folder):
        found = []
        for seed in known.seeds:
            seeds = [seed, *(other for other in known.seeds if other != seed)]
            budget = round(BUDGET * _cost(known, len(SEEDS)))
            one = advised(known.federation, tuned(known.entries), seeds, budget)
            found.append({"entry": one.entry.label, "pays": one.pays, "rounds": one.rounds})
            print(known.federation.name, found[-1], flush=True)
        said[known.federation.name] = found
    rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(found)}" for name, found in said.items())
    ADVICE.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")
    return str(ADVICE)


def by_look(known: Known, others: Sequence[Known]) -> Entry:
    """The rule from the look alone: what was best, on the average, in the federations that look most alike."""
    own = np.array(_look(known.federation.words))
    learned = [one for one in others if one.federation.words != known.federation.words and not one.federation.held_back]
    learned.sort(key=lambda one: float(np.abs(np.array(_look(one.federation.words)) - own).sum()))
    regret: dict[str, list[float]] = {}
    for one in learned[:NEIGHBOURS]:
        for entry in tuned(one.entries):
            regret.setdefault(entry.label, []).append(one.best - entry.truth)
    usable = {entry.label: entry for entry in tuned(known.entries)}
    everywhere = [label for label, found in regret.items() if len(found) == NEIGHBOURS and label in usable]
    return usable[min(everywhere, key=lambda label: float(np.mean(regret[label])))]


def _full_grid(known: Known, seeds: list[int]) -> Choice:
    return Choice.of(chosen(tuned(known.entries), seeds), _cost(known, len(seeds)))


def _adviser(known: Known, seed: int, others: Sequence[Known]) -> Choice:
    found = advice()[known.federation.name][seed]
    entry = next(one for one in known.entries if one.label == found["entry"])
    return Choice(entry, found["rounds"], {"yes": True, "no": False}.get(found["pays"]))


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
    "full grid, all seeds": lambda known, *_: _full_grid(known, known.seeds),
    "piebald advise": _adviser,
    "by the look alone": lambda known, seed, others: Choice.of(by_look(known, others), 0.0),
    "always alone": _only("local"),
    "always FedAvg": _only("fedavg"),
    "always fine-tuned": _only("fine_tuned"),
    "always Ditto": _only("ditto"),
    "FedAvg, default settings": _default("fedavg"),
    "Ditto, default settings": _default("ditto"),
}  # fmt: skip


def _cost(known: Known, seeds: int) -> float:
    """Rounds of the full grid."""
    return len(tuned(known.entries)) * ROUNDS * seeds


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
    return Verdict(
        regret=float(np.mean([known.best - one.entry.truth for one in found])),
        cost=float(np.mean([one.cost for one in found])) / _cost(known, len(SEEDS)),
        pays=float(np.mean([one.pays is True for one in found])),
        silent=float(np.mean([one.pays is None for one in found])),
    )


def federating_pays(known: Known) -> bool | None:
    """The truth: whether the best federated entry beats the best local one on test rows; None within noise.

    Both are the best of their kind by validation rows and all seeds, so that neither is the luckiest of many on test
    rows.
    """
    federated = chosen([entry for entry in tuned(known.entries) if entry.recipe != "local"], known.seeds)
    alone = chosen([entry for entry in tuned(known.entries) if entry.recipe == "local"], known.seeds)
    names = [str(client) for client in range(federated.test.shape[1])]
    found = difference(Scores(federated.test, names), Scores(alone.test, names))
    return None if found is None or found.p >= BEYOND_NOISE else found.mean > 0


def known_federations(folder: Path) -> list[Known]:
    """The federations whose grid is complete for at least one seed, in the order of the benchmark."""
    found = [Known(one, entries_of(read(folder, one.name))) for one in FEDERATIONS]
    return [one for one in found if one.entries and _complete(one)]


def _complete(known: Known) -> bool:
    from grid import entries

    return {one.label for one in entries(known.federation.slow)} <= {one.label for one in known.entries}


def write(folder: Path) -> str:
    """Write the results; return the summary."""
    known = known_federations(folder)
    if not known:
        return "no federation is complete yet: run the part truth first"
    verdicts = {one.federation.name: {rule: judged(one, rule, known) for rule in RULES} for one in known}
    pays = {one.federation.name: federating_pays(one) for one in known}
    parts = [_head(known), "## Summary\n"]
    groups = {"used while building": False, "held back": True}
    for title, held_back in groups.items():
        names = [one.federation.name for one in known if one.federation.held_back == held_back]
        if names:
            parts += [f"{len(names)} federations {title}.\n", _summary(names, verdicts, pays)]
    parts += ["## Regret by federation\n", _by_federation(known, verdicts, pays), _notes()]
    RESULTS.write_text("\n".join(parts), encoding="utf-8")
    return "\n".join(parts[:6])


HEAD = """# How far advice can be trusted

`python benchmarks/advise/run.py truth` trained what is kept in `truth/`, `python benchmarks/advise/run.py advise` ran
the adviser on it (some minutes; nothing is trained), and `python benchmarks/advise/run.py score` writes this page.

{federations} federations, {recipes} recipes (two of them only where devices are unequal), {rates} learning rates and up
to two values of a main setting, {rounds} rounds.  Seeds of each federation: {seeds}.

*Regret*: points of mean test accuracy below the best of the grid on these test rows.  The best is chosen by the very
test rows that it is scored on, so no choice by validation rows has a regret of 0; the rows "full grid" say what noise
allows.  *Cost*: rounds as a share of the full grid with three seeds.  *Pays*: how often the rule is wrong, or says
nothing, about whether to federate at all, where the truth is beyond noise (paired over clients and seeds, p < 0.05).
"""


def _head(known: Sequence[Known]) -> str:
    seeds = sorted({len(one.seeds) for one in known})
    return HEAD.format(
        federations=len(known), recipes=len(GRID), rates=len(RATES), rounds=ROUNDS, seeds=" to ".join(map(str, seeds))
    )


def _summary(names: Sequence[str], verdicts: dict[str, dict[str, Verdict]], pays: dict[str, bool | None]) -> str:
    clear = [name for name in names if pays[name] is not None]
    lines = [f"| rule | regret, mean | worst | cost | pays: wrong, silent (of {len(clear)}) |", "|---|---|---|---|---|"]
    for rule in RULES:
        own = {name: verdicts[name][rule] for name in names}
        regrets = [one.regret for one in own.values()]
        wrong = [1 - own[name].pays - own[name].silent if pays[name] else own[name].pays for name in clear]
        silent = [own[name].silent for name in clear]
        share = f"{100 * np.mean(wrong):.0f} %, {100 * np.mean(silent):.0f} %" if clear else "-"
        lines.append(f"| {rule} | {np.mean(regrets):.1f} | {max(regrets):.1f} | "
                     f"{100 * np.mean([one.cost for one in own.values()]):.0f} % | {share} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def _by_federation(
    known: Sequence[Known], verdicts: dict[str, dict[str, Verdict]], pays: dict[str, bool | None]
) -> str:
    shown = ("full grid, one seed", "piebald advise", "by the look alone", "always alone",
             "always FedAvg", "always Ditto")  # fmt: skip
    lines = [f"| federation | best | points | federating pays | {' | '.join(shown)} |", "|---" * (len(shown) + 4) + "|"]
    words = {None: "within noise", True: "yes", False: "no"}
    for one in known:
        best = max(tuned(one.entries), key=lambda entry: entry.truth)
        name = one.federation.name
        regrets = " | ".join(f"{verdicts[name][rule].regret:.1f}" for rule in shown)
        held = " (held back)" if one.federation.held_back else ""
        lines.append(
            f"| {BY_NAME[name].words}{held} | {best.label} | {best.truth:.1f} | {words[pays[name]]} | {regrets} |"
        )
    return "\n".join(lines) + "\n"


def _notes() -> str:
    return NOTES.format(neighbours=NEIGHBOURS, budget=100 * BUDGET)


NOTES = """
## Reading

- The adviser had {budget:.0f} % of the full grid with three seeds as its budget, and one seed to race with.  It is never
  wrong about whether federating pays, but is silent in more than half of the clear cases: ten clients and one seed are
  few, and it asks for 5 % after as many comparisons as there are methods.
- Its regret beyond that of the full grid comes from learning rates: with this budget most methods are tried with two,
  and 0.5, often the best here, is the third.
- The rule from the look alone takes what had the smallest regret in the {neighbours} federations (none that was held
  back, and not the one itself) whose numbers of step 1 are nearest.  It trains nothing.  It is better than the race on
  the federations that were held back, which have siblings of the same data among the others, and clearly worse on
  those used while building.  So it does not predict as well as racing, and is not offered.
- Always FedAvg is the worst rule but for federations that are nearly alike, and its default learning rate costs more.
"""
