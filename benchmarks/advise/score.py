"""Score advice against the truth, and write RESULTS.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np
from federations import BY_NAME, FEDERATIONS, Federation
from grid import GRID, RATES, ROUNDS
from replay import Entry, chosen, entries_of, own_settings, race, tuned
from truth import read

from piebald.advice.unlikeness import KINDS
from piebald.report.paired import Scores, difference

RESULTS = Path(__file__).with_name("RESULTS.md")
NEIGHBOURS = 3  # federations that the rule from the look alone learns from
BEYOND_NOISE = 0.05


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


Rule = Callable[[Known, int, Sequence[Known]], tuple[Entry, float]]  # known, place of the seed, all others


@cache
def _look(words: str) -> tuple[float, ...]:
    """What the look says of a federation, from the reference values: a number for each kind but speed."""
    text = files("piebald.advice").joinpath("references.json").read_text("utf-8")
    row = next(one for one in json.loads(text)["federations"] if one["name"] == words)
    return tuple(float(row[kind] or 0.0) for kind in KINDS if kind != "speed")


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


def _full_grid(known: Known, seeds: list[int]) -> tuple[Entry, float]:
    return chosen(tuned(known.entries), seeds), _cost(known, len(seeds))


def _only(recipe: str) -> Rule:
    def choose(known: Known, seed: int, others: Sequence[Known]) -> tuple[Entry, float]:
        own = [entry for entry in tuned(known.entries) if entry.recipe == recipe]
        return chosen(own, [seed]), len(own) * ROUNDS

    return choose


def _default(recipe: str) -> Rule:
    return lambda known, seed, _: (own_settings(known.entries, recipe), ROUNDS)


def _race(which: str, settings: int | None) -> Rule:
    def choose(known: Known, seed: int, others: Sequence[Known]) -> tuple[Entry, float]:
        found = race(tuned(known.entries), seed, settings=settings)
        return getattr(found, which), found.rounds

    return choose


# name: the entry that is recommended, and what that costs in rounds
RULES: dict[str, Rule] = {
    "full grid, one seed": lambda known, seed, _: _full_grid(known, [seed]),
    "full grid, all seeds": lambda known, *_: _full_grid(known, known.seeds),
    "race, full grid": _race("best", None),
    "race, one setting of each": _race("best", 1),
    "race, full grid, cheapest that ties": _race("recommended", None),
    "by the look alone": lambda known, seed, others: (by_look(known, others), 0.0),
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
    """One rule on one federation: means over seeds.  `pays` is the share of seeds that recommend federating."""

    regret: float
    cost: float
    pays: float


def judged(known: Known, rule: str, others: Sequence[Known]) -> Verdict:
    """A rule, applied with each seed."""
    found = [RULES[rule](known, seed, others) for seed in known.seeds]
    return Verdict(
        regret=float(np.mean([known.best - entry.truth for entry, _ in found])),
        cost=float(np.mean([cost for _, cost in found])) / _cost(known, len(known.seeds)),
        pays=float(np.mean([entry.recipe != "local" for entry, _ in found])),
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

`python benchmarks/advise/run.py truth` trained what is kept in `truth/`, and `python benchmarks/advise/run.py score`
writes this page from it in seconds.

{federations} federations, {recipes} recipes (two of them only where devices are unequal), {rates} learning rates and up
to two values of a main setting, {rounds} rounds.  Seeds of each federation: {seeds}.

*Regret*: points of mean test accuracy below the best of the grid on these test rows.  The best is chosen by the very
test rows that it is scored on, so no choice by validation rows has a regret of 0; the rows "full grid" say what noise
allows.  *Cost*: rounds as a share of the full grid with all seeds.  *Pays*: how often the rule is right about whether
to federate at all, where the truth is beyond noise (paired over clients and seeds, p < 0.05).
"""


def _head(known: Sequence[Known]) -> str:
    seeds = sorted({len(one.seeds) for one in known})
    return HEAD.format(
        federations=len(known), recipes=len(GRID), rates=len(RATES), rounds=ROUNDS, seeds=" to ".join(map(str, seeds))
    )


def _summary(names: Sequence[str], verdicts: dict[str, dict[str, Verdict]], pays: dict[str, bool | None]) -> str:
    lines = ["| rule | regret, mean | worst | cost | pays |", "|---|---|---|---|---|"]
    clear = [name for name in names if pays[name] is not None]
    for rule in RULES:
        own = {name: verdicts[name][rule] for name in names}
        regrets = [one.regret for one in own.values()]
        right = [own[name].pays if pays[name] else 1 - own[name].pays for name in clear]
        share = f"{100 * np.mean(right):.0f} % of {len(clear)}" if clear else "-"
        lines.append(f"| {rule} | {np.mean(regrets):.1f} | {max(regrets):.1f} | "
                     f"{100 * np.mean([one.cost for one in own.values()]):.0f} % | {share} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def _by_federation(
    known: Sequence[Known], verdicts: dict[str, dict[str, Verdict]], pays: dict[str, bool | None]
) -> str:
    shown = ("full grid, one seed", "race, full grid", "race, one setting of each", "by the look alone", "always alone",
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
    return (
        "\nThe rule from the look alone takes what had the smallest regret in the "
        f"{NEIGHBOURS} federations (none that was held back, and not the one itself) whose numbers of step 1 are "
        "nearest.  It trains nothing.\n"
    )
