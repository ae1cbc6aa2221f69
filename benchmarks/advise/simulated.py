"""Federations that were made up, with known truth: what does the adviser say of them, and whom does it name?

`python benchmarks/advise/run.py simulated` trains small models on a few, and draws the scores of 300 others in which
nobody gains, or some lose; it writes simulated.json, which the part `score` puts into RESULTS.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import piebald
from piebald import models, partition
from piebald.advice.evidence import losers, whether_it_pays
from piebald.report.paired import Scores

KEPT = Path(__file__).with_name("simulated.json")
FEATURES = 12
COUNT = 300  # federations whose scores are drawn
Parts = dict[str, tuple[Any, Any]]


@dataclass(frozen=True)
class Made:
    """A federation that was made up.

    Attributes:
        truth: what is true of it, in words.
        pays: what may be said of whether training together pays.
        named: the sites that must be named.
        clients: makes the rows of each site, by split, from a generator of random numbers.
    """

    truth: str
    pays: tuple[str, ...]
    clients: Callable[[np.random.Generator], Mapping[str, Parts]]
    named: tuple[str, ...] = ()


def site(
    rng: np.random.Generator, weights: Any, train: int, held: int = 100, flip: bool = False, noise: float = 0.5
) -> Parts:
    """The rows of a site: two classes on the two sides of a plane, with noise; by chance where noise is infinite."""
    parts = {}
    for split, count in (("train", train), ("validation", held), ("test", held)):
        x = rng.normal(size=(count, FEATURES))
        margin = rng.normal(size=count) if np.isinf(noise) else x @ weights + noise * rng.normal(size=count)
        y = (margin > 0) != flip
        parts[split] = x.astype("float32"), y.astype("int64")
    return parts


def plane(rng: np.random.Generator) -> Any:
    """A random direction."""
    weights = rng.normal(size=FEATURES)
    return weights / np.linalg.norm(weights)


def sites(count: int, **usual: Any) -> Callable[..., Callable[[np.random.Generator], Mapping[str, Parts]]]:
    """So many sites with one rule, some of them with other properties, by number."""

    def of(odd: Mapping[int, Mapping[str, Any]] | None = None, own_rules: bool = False) -> Any:
        def make(rng: np.random.Generator) -> Mapping[str, Parts]:
            shared = plane(rng)
            return {
                f"s{number}": site(rng, plane(rng) if own_rules else shared, **{**usual, **(odd or {}).get(number, {})})
                for number in range(count)
            }

        return make

    return of


MADE = {
    "alike, few rows": Made("everybody gains", ("yes",), sites(8, train=16)()),
    "a rule for each site, plenty of rows": Made(
        "nobody has anything to learn from others", ("no",), sites(6, train=400, held=400, noise=0.02)(own_rules=True)
    ),
    "one site contradicts": Made(
        "the others gain, and s3 must not follow them", ("yes",), sites(8, train=16)({3: {"flip": True}}), ("s3",)
    ),
    "a site of twenty rows contradicts": Made(
        "the others gain little, and s7 must not follow them", ("yes", "cannot be told"),
        sites(8, train=150)({7: {"train": 10, "held": 5, "flip": True}}), ("s7",)
    ),
    "two groups": Made(
        "a model for each group", ("yes",), sites(8, train=24)({n: {"flip": True} for n in range(4, 8)})
    ),
    "one site with random labels": Made(
        "the others gain, and the labels of s5 follow from nothing", ("yes",),
        sites(8, train=16)({5: {"noise": np.inf}}), ("s5",)
    ),
    "one huge among tiny": Made("the tiny ones gain", ("yes",), sites(8, train=10)({0: {"train": 500}})),
    "pure noise": Made("there is nothing to learn", ("cannot be told",), sites(8, train=30, noise=np.inf)()),
    "hardly any rows to judge by": Made("everybody gains, and nobody can see it", ("cannot be told",),
                                        sites(4, train=16, held=3)()),
}  # fmt: skip


def advise(made: Made, seed: int = 0, **options: Any) -> piebald.advice.Advice:
    """Ask the adviser about a federation."""
    clients = partition.clients_from(made.clients(np.random.default_rng([seed, 49])))
    asked: dict[str, Any] = {"rounds": 8, "training": {"batch": 16, "epochs": 2}, "more_data": False}
    return piebald.advise(clients, models.build_model("logistic", (FEATURES,), 2), **(asked | options))


def sites_named(answer: piebald.advice.Advice, sites: Any) -> list[str]:
    """The sites that a sentence of the answer names as odd, or as losing."""
    said = " ".join([*answer.reasons, *answer.odd, *(loser.client for loser in answer.losers)])
    said = said.replace(",", " ").replace(":", " ")
    return [name for name in sites if name in said.split()]


def drawn(rng: np.random.Generator, gains: Any, rows: int) -> tuple[str, list[str]]:
    """What is said of sites with these true gains, from scores that are drawn: whether it pays, and who loses."""
    names = [f"s{number}" for number in range(len(gains))]
    level = rng.uniform(0.5, 0.9, len(gains))

    def scores() -> tuple[Scores, Scores]:
        right = {"local": level, "joined": np.clip(level + gains, 0.01, 0.99)}
        single = {label: {(seed, name): (rng.random(rows) < share).astype(float)
                          for seed in (0, 1) for name, share in zip(names, shares, strict=True)}
                  for label, shares in right.items()}  # fmt: skip
        tables = [
            Scores([[single[label][seed, name].mean() for name in names] for seed in (0, 1)], names, (0, 1),
                   sizes=[rows] * len(names), rows=single[label], counted=True)
            for label in ("joined", "local")
        ]  # fmt: skip
        return tables[0], tables[1]

    ours, theirs = scores()
    joined, local = SimpleNamespace(label="joined", last=ours), SimpleNamespace(label="local", last=theirs, mean=0.7)
    runs: Any = SimpleNamespace(higher_is_better=True, names=names, metric="accuracy")
    tested = [
        SimpleNamespace(label=label, scores=table) for label, table in zip(("joined", "local"), scores(), strict=True)
    ]
    finished: Any = [local, joined]
    pays = whether_it_pays(finished, finished[0], finished[1], tested, runs).pays  # type: ignore[arg-type]
    return pays, [loser.client for loser in losers(finished[1], finished[0], finished, True)]


def without_gain(count: int = COUNT) -> dict[str, Any]:
    """What is said of federations in which nobody gains: half of them alike, half with gains and losses that cancel."""
    rng = np.random.default_rng(49)
    said: dict[str, int] = {"federations": count, "pays": 0, "does not pay": 0, "sites": 0, "wrongly named": 0}
    for number in range(count):
        clients, rows = int(rng.integers(4, 13)), int(rng.choice([30, 100, 300]))
        gains = rng.normal(0, 0.05, clients) if number % 2 else np.zeros(clients)
        gains = gains - gains.mean()
        pays, lose = drawn(rng, gains, rows)
        said["pays"] += pays == "yes"
        said["does not pay"] += pays == "no"
        said["sites"] += clients
        said["wrongly named"] += sum(bool(gains[int(name[1:])] >= 0) for name in lose)
    return said


def write() -> str:
    """Ask about all federations, and keep what was said."""
    said: dict[str, Any] = {"trained": {}, "drawn": without_gain()}
    for name, made in MADE.items():
        answers = [advise(made, seed) for seed in (0, 1, 2)]
        clients = made.clients(np.random.default_rng(0))
        said["trained"][name] = [
            {"pays": answer.pays, "recommended": answer.recommended, "named": sites_named(answer, clients)}
            for answer in answers
        ]
        print(name, said["trained"][name], flush=True)
    KEPT.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    return str(KEPT)


def table() -> str:
    """The table of what was said, with a sentence on the federations that were drawn."""
    said = json.loads(KEPT.read_text("utf-8"))
    lines = ["| federation | truth | does it pay? | recommended | named | right |", "|---" * 6 + "|"]
    for name, answers in said["trained"].items():
        made = MADE[name]
        right = sum(a["pays"] in made.pays and set(made.named) <= set(a["named"]) for a in answers)
        named = [site for a in answers for site in a["named"]] or ["-"]
        columns = ([a["pays"] for a in answers], [a["recommended"] for a in answers], named)
        cells = [", ".join(dict.fromkeys(column)) for column in columns]
        lines.append(f"| {name} | {made.truth} | {' | '.join(cells)} | {right} of {len(answers)} |")
    of = said["drawn"]
    lines.append(
        f"\nOf {of['federations']} federations whose scores were drawn, with no gain in the mean, {of['pays']} were "
        f"told that it pays and {of['does not pay']} that it does not; {of['wrongly named']} of {of['sites']} sites "
        "were named as losing that do not lose."
    )
    return "\n".join(lines) + "\n"
