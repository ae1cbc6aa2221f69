"""Ground truth: every recipe with every setting on every federation, kept as data.

`truth/<federation>.jsonl` has a line for each run: recipe and settings, seed, the accuracy of each client's validation
rows after each rung and of its test rows at the end (in tenths of a thousandth), bytes sent, steps made, and seconds of
this machine.  A line is written when its run has ended, so an interrupted run of the benchmark goes on where it ended,
and a new recipe is added to `grid.GRID` without running the others again.  `truth/rows.json` has the number of rows of
each client's validation and test parts, and the test accuracy of its most frequent training label.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from federations import BY_NAME, Federation
from grid import ROUNDS, RUNGS, WITHOUT_ROUNDS, Entry, entries
from shared.stored import Lines

import piebald
from piebald.report.tables import History
from piebald.runtimes import Simulator

FOLDER = Path(__file__).parent / "truth"
SEEDS = (0, 1, 2)
SCALE = 10_000
ROWS = "rows.json"


def jobs(seeds: tuple[int, ...] = SEEDS, names: tuple[str, ...] = ()) -> Iterator[tuple[Federation, Entry, int]]:
    """All runs, the most useful first: one seed of everything, the middle learning rate of each before the others."""
    chosen = [one for one in BY_NAME.values() if not names or one.name in names]
    for seed in seeds:
        entries_of = {one.name: [*entries(one.slow), *entries(one.slow, leaders=True)] for one in chosen}
        for place in range(max(map(len, entries_of.values()))):
            for federation in chosen:
                own = entries_of[federation.name]
                if place < len(own):
                    yield federation, own[place], seed


def run_all(folder: Path, seeds: tuple[int, ...], names: tuple[str, ...], minutes: float) -> tuple[int, int]:
    """Run what is not there yet; return how many of the wanted runs there are and how many there should be."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    lines = {
        (one.name, line["entry"], line["seed"]): line
        for one in BY_NAME.values()
        for line in kept(folder, one.name).read()
    }
    walls = {key[:2]: float(line["wall"]) for key, line in lines.items()}  # of the same run with another seed
    wanted = list(jobs(seeds, names))
    keys = [(federation.name, entry.label, seed) for federation, entry, seed in wanted]
    done = lines.keys() & {*keys}
    began, spent, expected = time.monotonic(), 0.0, 0.0
    clients: dict[str, Any] = {}
    for (federation, entry, seed), key in zip(wanted, keys, strict=True):
        if key in done:
            continue
        if time.monotonic() - began > 60 * minutes:
            break
        if federation.name not in clients:
            clients[federation.name] = federation.clients()
            keep_rows(folder, federation.name, clients[federation.name])
        line = run_one(federation, clients[federation.name], entry, seed)
        kept(folder, federation.name).add(line)
        done.add(key)
        spent, expected = spent + line["wall"], expected + walls.get(key[:2], line["wall"])
        left = sum(walls.get(other[:2], 0.0) for other in keys if other not in done) * spent / max(expected, 1e-9)
        known = [value for value in line["test"] if value is not None]
        print(f"[{len(done)}/{len(wanted)}, {time.monotonic() - began:.0f} s, {left / 60:.0f} minutes left] "
              f"{' '.join(map(str, key))}: {sum(known) / max(len(known), 1) / 100:.1f} in {line['wall']:.1f} s",
              flush=True)  # fmt: skip
    return len(done), len(wanted)


def run_one(federation: Federation, clients: Any, entry: Entry, seed: int) -> dict[str, Any]:
    """One run, as the line that is kept."""
    began = time.monotonic()
    run, timed = trained(federation, clients, entry, seed)
    line = {"entry": entry.label, "recipe": entry.recipe, "settings": dict(entry.settings), "seed": seed}
    line |= scores_of(run, len(clients), federation.metric, timed)
    final = run.final
    return line | {"bytes": final["bytes_up"] + final["bytes_down"], "wall": round(time.monotonic() - began, 2),
                   "steps": sum(row["steps"] or 0 for row in run.results if row["kind"] == "train")}  # fmt: skip


def trained(federation: Federation, clients: Any, entry: Entry, seed: int, **options: Any) -> tuple[piebald.Run, bool]:
    """Train one entry; return the run, and whether it was given a time in place of rounds."""
    fleet = federation.fleet()
    without_rounds = entry.recipe in WITHOUT_ROUNDS
    every, length = RUNGS[0], {"rounds": ROUNDS}
    if fleet is not None:
        # Everybody gets the time of `ROUNDS` synchronous rounds; asynchronous steps are shorter and more.
        seconds = max(
            fleet.device(c).seconds_per_step * 2 * -(-clients.size(c, "train") // 20) for c in range(len(clients))
        )
        length = {"stop": {"seconds": ROUNDS * seconds * 0.999}}
        every = len(clients) * 2 if entry.recipe == "async_fedavg" else 4
    run = piebald.run(
        entry.make(), clients, federation.model(seed), seed=seed, evaluate_every=every, measure="none",
        loss=federation.loss, runtime=Simulator(engine="batched", stack=len(clients), workers=0, fleet=fleet),
        **({"keep": "best"} | length | options),
    )  # fmt: skip
    return run, fleet is not None and without_rounds


def scores_of(run: History, clients: int, metric: str, timed: bool) -> dict[str, Any]:
    """Validation scores of each client after each rung, test scores at the last one."""
    table: dict[tuple[str, int], dict[int, tuple[bool, float]]] = {}
    for row in run.scores:
        if row["metric"] != metric or row["client"] is None or row["value"] is None:
            continue
        own = table.setdefault((row["split"], row["version"]), {})
        personal = row["model"] == "personal"
        if personal or not own.get(row["client"], (False, 0.0))[0]:
            own[row["client"]] = (personal, row["value"])
    versions = sorted(version for split, version in table if split == "validation" and version)
    rungs = [versions[-1] * rung / ROUNDS for rung in RUNGS] if timed else [float(rung) for rung in RUNGS]
    nearest = [min(versions, key=lambda version: abs(version - rung)) for rung in rungs]

    def of(split: str, version: int) -> list[int | None]:
        found = table.get((split, version), {})
        return [round(SCALE * found[c][1]) if c in found else None for c in range(clients)]

    return {"validation": [of("validation", version) for version in nearest], "test": of("test", nearest[-1])}


def keep_rows(folder: Path, name: str, clients: Any) -> None:
    """Keep how many rows each client of a federation has, and how good its most frequent label is."""
    rows = {part: [clients.size(c, part) for c in range(len(clients))] for part in ("validation", "test")}
    known = known_rows(folder) | {name: rows | {"naive": [_naive(clients, c) for c in range(len(clients))]}}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known))
    (folder / ROWS).write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def _naive(clients: Any, client: int) -> int:
    """The test accuracy of a client's most frequent training label."""
    label = clients.rows(client, "train").y.bincount().argmax()
    return round(SCALE * float((clients.rows(client, "test").y == label).double().mean()))


def known_rows(folder: Path) -> dict[str, dict[str, list[int]]]:
    """What `keep_rows` has kept, by federation."""
    path = folder / ROWS
    return dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}


def kept(folder: Path, name: str) -> Lines:
    """Return the lines of a federation."""
    return Lines(folder / f"{name}.jsonl")
