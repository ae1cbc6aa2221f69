"""`piebald advise` itself, on federations that its portfolio was not learned from, with 1,000 fresh rows or more.

`product/<federation>.jsonl` has a line for each run of the full grid and for each search.  That of a run has its
accuracy on the rows of each client, in tenths of a thousandth; that of a search has those of what it recommends, of its
ensemble, and of those that are alone, and what it has cost in rounds.  What is there is not repeated.
`product/distilled.jsonl` has a line for each search that distils its ensemble, on some of the federations.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from federations import FRESH, Federation
from grid import GRID, RATES, ROUNDS, TRAINING, Entry, entries
from shared.stored import Lines
from truth import SCALE, SEEDS, trained

import piebald
from piebald.contracts import Split

FOLDER = Path(__file__).parent / "product"
SPLITS: tuple[Split, ...] = ("validation", "test")
ADVISE = "piebald advise"
_DISTILLED, _SCORES = "distilled.jsonl", ("recommended", "ensemble", "distilled")
Job = tuple[Federation, Entry | None, int]  # None is the search


def jobs(seeds: Sequence[int] = SEEDS, names: Sequence[str] = ()) -> Iterator[Job]:
    """All runs: of each seed and federation the search first, then the grid that it is judged by."""
    for seed in seeds:
        for federation in FRESH:
            if not names or federation.name in names:
                grid = [entry for entry in entries(slow=False) if _is_of_grid(entry)]
                yield from ((federation, entry, seed) for entry in (None, *grid))


def run_all(
    folder: Path, seeds: Sequence[int], names: Sequence[str], minutes: float, out: Path | None = None
) -> tuple[int, int]:
    """Run what is not there yet; return how many of the wanted runs there are and how many there should be.

    Args:
        folder: of the lines.
        seeds, names: of the runs; no names are all federations.
        minutes: after which no run is started.
        out: a folder that keeps the searches, and the outputs of the grid's runs on all rows; None keeps none.
    """
    torch.set_num_threads(1)
    wanted, began = list(jobs(seeds, names)), time.monotonic()
    done = {(federation.name, *key) for federation in FRESH for key in _kept(folder, federation).done()}
    keys = [(federation.name, entry.label if entry else ADVISE, seed) for federation, entry, seed in wanted]
    for (federation, entry, seed), key in zip(wanted, keys, strict=True):
        if key in done:
            continue
        if time.monotonic() - began > 60 * minutes:
            break
        with TemporaryDirectory() as temporary:
            path = Path(temporary if out is None else out) / federation.name / f"{seed}-{key[1]}"
            line = _search(federation, seed, path) if entry is None else _run(federation, entry, seed, path)
        _kept(folder, federation).add({"entry": key[1], "seed": seed} | line)
        done.add(key)
        print(f"[{len(done & {*keys})}/{len(keys)}, {time.monotonic() - began:.0f} s] {' '.join(map(str, key))}: "
              f"{np.mean(line['test']) * 100 / SCALE:.1f}", flush=True)  # fmt: skip
    return len(done & {*keys}), len(keys)


def _kept(folder: Path, federation: Federation) -> Lines:
    return Lines(folder / f"{federation.name}.jsonl", "entry", "seed")


def _run(federation: Federation, entry: Entry, seed: int, path: Path) -> dict[str, Any]:
    """The line of a run of the grid."""
    began, clients = time.monotonic(), federation.clients()
    with TemporaryDirectory() as temporary:
        run, _ = trained(federation, clients, entry, seed, keep="last", out=Path(temporary) / "run")
        with run:
            rows = {split: [run.outputs(client, split) for client in range(len(clients))] for split in SPLITS}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(rows, path.with_name(f"{path.name}.pt"))
    right = {split: [round(SCALE * float((x.argmax(1) == y).double().mean())) for x, y in rows[split]]
             for split in SPLITS}  # fmt: skip
    return right | {"wall": round(time.monotonic() - began, 2)}


def _search(federation: Federation, seed: int, path: Path) -> dict[str, Any]:
    """The line of a search with the product's own budget, which races with a seed and repeats with the others."""
    seeds = (seed, *(other for other in SEEDS if other != seed))
    advice = piebald.advise(
        federation.clients(), federation.model, rounds=ROUNDS, seeds=seeds, training=TRAINING, out=path
    )
    tested = {checked.label: _points(checked.scores.of_seeds([seed])) for checked in advice.tested}
    plain, mean, evidence, recipe = advice.plain_alone, advice.ensemble, advice.evidence, advice.recipe
    return {
        "recommended": advice.recommended,
        "settings": {name: recipe.fields[name] for name in ("lr", *GRID.get(recipe.name, {}))},
        "test": tested[advice.recommended],
        "ensemble": None if mean is None else round(SCALE * mean.score),
        "members": [] if mean is None else [[member.name, round(member.shares.mean(), 3)] for member in mean.members],
        "local": tested.get("local"), "plain": None if plain is None else [plain.name, _points(plain.test)],
        "pays": advice.pays, "gain": [evidence.gain, evidence.low, evidence.high], "rounds": advice.spent.rounds,
    }  # fmt: skip


def distil_all(folder: Path = FOLDER, seeds: Sequence[int] = SEEDS, names: Sequence[str] = ()) -> int:
    """Search once more where the ensemble is distilled into one model, of what is not there yet; return the number."""
    torch.set_num_threads(1)
    kept = Lines(folder / _DISTILLED, "entry", "seed")
    for seed in seeds:
        for federation in FRESH:
            if (names and federation.name not in names) or (federation.name, seed) in kept.done():
                continue
            others = (other for other in SEEDS if other != seed)
            advice = piebald.advise(
                federation.clients(),
                federation.model,
                rounds=ROUNDS,
                seeds=(seed, *others),
                training=TRAINING,
                distil=True,
            )
            tested = {checked.label: checked.scores.of_seeds([seed]).mean for checked in advice.tested}
            mean, one = advice.ensemble, advice.distilled
            if mean is not None and one is not None:
                scores = {"recommended": tested[advice.recommended], "ensemble": mean.score, "distilled": one.score}
                line = {name: round(SCALE * score) for name, score in scores.items()}
                kept.add({"entry": federation.name, "seed": seed, **line, "name": one.runner.name})
    return len(kept.done())


def distilled_table(folder: Path = FOLDER) -> str:
    """The accuracy of the recommendation, of the ensemble and of one model distilled from it: means over seeds."""
    kept, rows = Lines(folder / _DISTILLED, "entry", "seed").read(), list[tuple[float, ...]]()
    lines = ["| federation | seeds | recommended recipe | ensemble | distilled into one model |", "|---" * 5 + "|"]
    for federation in FRESH:
        if of_one := [line for line in kept if line["entry"] == federation.name]:
            rows.append(tuple(100 / SCALE * float(np.mean([x[name] for x in of_one])) for name in _SCORES))
            cells = " | ".join(f"{value:.1f}" for value in rows[-1])
            lines.append(f"| {federation.words} | {len(of_one)} | {cells} |")
    if not rows:
        return ""
    cells = " | ".join(f"{value:.1f}" for value in np.mean(rows, axis=0))
    return "\n".join([*lines, f"| **mean** | | {cells} |"]) + "\n"


def _points(scores: Any) -> list[int]:
    return [round(SCALE * value) for value in scores.client_means()]


CONSTANT = "fine_tuned lr=0.1 tune_epochs=4"  # the first of the portfolio
DRAWS = 500  # of random settings
RULES = ("full grid, best by validation", "recommended recipe", "ensemble", "strong alone", "Local",
         f"always {CONSTANT}", "random, same cost")  # fmt: skip


def regrets(lines: Sequence[dict[str, Any]], seed: int) -> tuple[float, dict[str, float], float] | None:
    """Points of the best run of the grid with a seed, how far each rule is below it, and the search's share of a grid.

    None where the search or a run of the grid is missing.  A rule below 0 is better than every single run.
    """
    of_seed = [line for line in lines if line["seed"] == seed]
    search = next((line for line in of_seed if line["entry"] == ADVISE), None)
    grid = {line["entry"]: line for line in of_seed if line is not search}
    if search is None or len(grid) < len([entry for entry in entries(slow=False) if _is_of_grid(entry)]):
        return None
    points = {name: 100 / SCALE * float(np.mean(line["test"])) for name, line in grid.items()}
    chosen_by = {name: float(np.mean(line["validation"])) for name, line in grid.items()}
    best, names = max(points.values()), list(grid)
    rng, count = np.random.default_rng(seed), max(1, round(search["rounds"] / ROUNDS))
    drawn = [max(rng.permutation(names)[:count].tolist(), key=lambda x: chosen_by[x]) for _ in range(DRAWS)]
    own_points = {name: 100 / SCALE * float(np.mean(search[name])) for name in ("test", "local") if search[name]}
    local = own_points.get("local", own_points["test"])
    plain = None if search["plain"] is None else 100 / SCALE * float(np.mean(search["plain"][1]))
    reached = (
        points[max(names, key=lambda name: chosen_by[name])], own_points["test"],
        own_points["test"] if search["ensemble"] is None else 100 / SCALE * search["ensemble"],
        local if plain is None else plain, local, points[CONSTANT], float(np.mean([points[name] for name in drawn])),
    )  # fmt: skip
    cost = search["rounds"] / (len(grid) * ROUNDS * len(SEEDS))
    return best, {rule: best - value for rule, value in zip(RULES, reached, strict=True)}, cost


def table(folder: Path = FOLDER) -> str:
    """The regrets of each federation, means over its seeds; their mean and median, and the worst of all searches."""
    lines, means, every, costs = [], list[dict[str, float]](), list[dict[str, float]](), list[float]()
    for federation in FRESH:
        kept = _kept(folder, federation).read()
        searches = [search for seed in SEEDS if (search := regrets(kept, seed)) is not None]
        if not searches:
            continue
        best, behind, shares = zip(*searches, strict=True)
        every += behind
        costs += shares
        means.append({rule: float(np.mean([row[rule] for row in behind])) for rule in RULES})
        pays = ", ".join(dict.fromkeys(x["pays"] for x in kept if x["entry"] == ADVISE))
        lines.append(f"| {federation.words} | {len(searches)} | {np.mean(best):.1f} | {_cells(means[-1])} | {pays} |")
    if not lines:
        return ""
    for words, of, those in (("mean", np.mean, means), ("median", np.median, means), ("worst search", np.max, every)):
        figures = {rule: float(of([row[rule] for row in those])) for rule in RULES}
        lines.append(f"| **{words}** | | | {_cells(figures)} | |")
    head = f"| federation | seeds | best | {' | '.join(RULES)} | does it pay? |"
    cost = f"A search took {100 * np.mean(costs):.0f} % of the full grid with {len(SEEDS)} seeds."
    return "\n".join([head, "|---" * (len(RULES) + 4) + "|", *lines, "", cost]) + "\n"


def _cells(figures: Mapping[str, float]) -> str:
    return " | ".join(f"{figures[rule]:+.1f}" for rule in RULES)


def _is_of_grid(entry: Entry) -> bool:
    return dict(entry.settings)["lr"] in RATES
