"""The runs of the leaderboard, kept as data.

Under the first seed every method is trained with each of its settings, and with the one that is best by validation rows
under the others.  `results/<federation>.jsonl` has a line for each run, written when it has ended, so an interrupted
competition goes on, and a method that is added is trained without the others.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "advise"))

import numpy as np
import torch
import truth
from methods import ALONE, FEW, KNN_PER, POOLED, PUBLIC, ROUNDS, RUN, TOGETHER, TRAINING, Method
from tiers import FEDERATIONS, REAL, SMALL, SURVIVAL, Entrants

import piebald
from piebald import partition, recipes
from piebald.core.errors import RuntimeFault, SettingError
from piebald.core.metrics import Concordance
from piebald.data.clients.pooled_clients import Lists
from piebald.data.partition.leakage import SPLITS
from piebald.runtimes import Simulator
from piebald.storage.schema import packed_values

PUBLIC_ROWS = 100
EVERY = 4  # rounds between evaluations, of which the best by validation rows is kept
BUFFERED = "fedbuff"


def run_one(federation: Any, clients: Any, method: Method, number: int, seed: int) -> dict[str, Any]:
    """One run, as the line that is kept."""
    settings = method.settings()[number]
    line = {"method": method.name, "settings": settings, "seed": seed}
    began, cpu = time.monotonic(), _cpu()
    try:
        found = _trained(federation, clients, method, settings, seed)
    except RuntimeFault as why:  # the setting diverges: nobody would use such a model, so no row of it is right
        if "not finite" not in str(why):
            raise
        none = [0] * len(clients)
        found = {"validation": none, "test": none, "version": 0, "bytes": 0, "steps": 0}
    line |= {"rows": [judged(clients, client, "validation") for client in range(len(clients))]}
    return line | found | {"seconds": round(time.monotonic() - began, 2), "cpu": round(_cpu() - cpu, 2)}


def _cpu() -> float:
    """Seconds that processors worked for this process and the workers that it has had."""
    return sum(os.times()[:4])


def _trained(federation: Any, clients: Any, method: Method, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    held = clients
    if method.recipe == POOLED:
        held = in_one_place(clients)
    elif method.recipe == PUBLIC:
        held = with_public_rows(clients)
    every, length = _length(federation, clients, method)
    run = piebald.run(
        method.make(settings), held, federation.model(seed, method.network), seed=seed, evaluate_every=every,
        keep=KNN_PER if method.recipe == KNN_PER else "best", measure="none", per_class=False,
        runtime=_runtime(federation, len(held)), **federation.options, **length,
    )  # fmt: skip
    if method.recipe == KNN_PER:
        scores = _of_neighbours(run, clients)
    elif federation.metric == "accuracy":
        scores = _of_versions(run, clients, len(held) == 1)
    else:
        scores = _of_patients(run, clients, len(held) == 1)
    final = run.final
    return scores | {
        "bytes": 0 if method.recipe == POOLED else final["bytes_up"] + final["bytes_down"],
        "steps": sum(row["steps"] or 0 for row in run.results if row["kind"] == "train"),
    }


def _runtime(federation: Any, clients: int) -> Simulator:
    """The simulator: small federations all at once on one core, large ones as the machine allows."""
    if federation.tier == "large":
        return Simulator(device="auto")
    return Simulator(engine="batched", stack=clients, workers=0, fleet=federation.fleet())


def _length(federation: Any, clients: Any, method: Method) -> tuple[int, dict[str, Any]]:
    """How often a run is evaluated, and its end: after its rounds or, on unequal devices, their virtual time."""
    fleet = federation.fleet()
    if fleet is None or method.recipe == POOLED:  # one place has no devices
        return EVERY, {"rounds": method.rounds}
    steps = recipes.make(TOGETHER, **TRAINING).training.min_steps  # by which the simulator's clock goes, too
    seconds = max(fleet.device(c).seconds_per_step * steps(clients.size(c, "train")) for c in range(len(clients)))
    every = EVERY if method.recipe == BUFFERED or not method.clock else EVERY * len(clients)
    return every, {"stop": {"seconds": ROUNDS * seconds * 0.999}}


def _of_versions(run: Any, clients: Any, pooled: bool) -> dict[str, Any]:
    """Right rows at the version that is best by validation rows."""
    version = run.best or 0
    single = run.values_of_rows()
    values = np.concatenate([single[client] for client in sorted(single)])
    right = _of_clients(run, "accuracy", "validation", version)
    sizes = [clients.size(client, "validation") for client in range(len(clients))]
    # a client without validation rows has none that are right
    shares = [right.get(0 if pooled else client, 0.0) for client in range(len(sizes))]
    validation = [round(share * size, 2 if pooled else 0) for share, size in zip(shares, sizes, strict=True)]
    return {"validation": validation, "test": packed_values(values), "version": version}


def _of_clients(run: Any, metric: str, split: str, version: int) -> dict[int, float]:
    """The value of each client, by its own model where it has one."""
    found: dict[int, tuple[bool, float]] = {}
    for row in run.scores:
        about = (row["metric"], row["split"], row["version"]) == (metric, split, version)
        if about and row["client"] is not None and row["value"] is not None:
            found[row["client"]] = max(
                found.get(row["client"], (False, 0.0)), (row["model"] == "personal", row["value"])
            )
    return {client: value for client, (_, value) in found.items()}


def _of_patients(run: Any, clients: Any, pooled: bool) -> dict[str, Any]:
    """The concordance of each client's patients, times their number, at the version that is best by validation."""
    version, found = run.best or 0, dict[str, Any]()
    for split in ("validation", "test"):
        values = (
            _of_one_model(run.model(), clients, split) if pooled else _of_clients(run, "concordance", split, version)
        )
        found[split] = [round(values.get(c, 0.0) * judged(clients, c, split), 3) for c in range(len(clients))]
    return found | {"version": version}


def _of_one_model(model: torch.nn.Module, clients: Any, split: Any) -> dict[int, float]:
    """The concordance of a model that was trained in one place, on each client's patients."""
    values = {}
    for client in range(len(clients)):
        rows, metric = clients.rows(client, split), Concordance()
        with torch.no_grad():
            metric.update(model(rows.x), rows.y)
        values[client] = float(metric.compute())
    return {client: value for client, value in values.items() if value == value}


def judged(clients: Any, client: int, split: Any) -> int:
    """The rows of a client that can be judged: none of patients of whom no two are known to die one after the other."""
    y, size = clients.rows(client, split).y, int(clients.size(client, split))
    if isinstance(y, torch.Tensor):
        return size
    pairs = Concordance()
    pairs.update(torch.zeros(size), y)
    return 0 if pairs.compute().isnan() else size


def _of_neighbours(run: Any, clients: Any) -> dict[str, Any]:
    """Right rows of clients that asked their nearest rows; which ones is not recorded."""
    validation, test = [0] * len(clients), [0] * len(clients)
    for choice in run.choices:
        if "judged" in choice:
            client = choice["client"]
            own, judged = choice["candidates"][choice["chosen"]], choice["judged"]["chosen"]
            validation[client] = round(own["accuracy"] * clients.size(client, "validation"))
            test[client] = round(judged["accuracy"] * clients.size(client, "test"))
    return {"validation": validation, "test": test, "version": ROUNDS}


def in_one_place(clients: Any) -> Any:
    """One client that holds all rows, those of the first client first."""
    parts = {split: _joined(clients, split) for split in SPLITS}
    return partition.PooledClients(clients.x, clients.y, parts, names=["all"], classes=clients.classes)


def _joined(clients: Any, split: Any) -> Lists:
    rows = np.concatenate([clients.indices(client, split) for client in range(len(clients))])
    return Lists(rows, np.array([0, len(rows)]))


def with_public_rows(clients: Any) -> Any:
    """The same clients, who all know the inputs of some of the training rows: no other method is given these."""
    rows = np.concatenate([clients.indices(client, "train") for client in range(len(clients))])
    chosen = np.sort(np.random.default_rng(len(rows)).permutation(rows)[:PUBLIC_ROWS])
    parts = {split: clients.lists(split) for split in SPLITS}
    return partition.PooledClients(
        clients.x, clients.y, parts, names=clients.names, classes=clients.classes, public_rows=chosen
    )


def about(clients: Any) -> dict[str, Any]:
    """The clients' names and rows, and what the naive answer is right on.

    It is the most frequent class of a client's training rows; of patients it is their Kaplan-Meier curve, which is the
    same for all of them, so that each pair is a tie.
    """
    numbers = range(len(clients))
    rows = {split: [judged(clients, client, split) for client in numbers] for split in SPLITS}
    known = {"clients": list(map(str, clients.names)), **rows}
    if not isinstance(clients.rows(0, "train").y, torch.Tensor):
        return known | {"naive": [size / 2 for size in rows["test"]]}
    naive = []
    for client in numbers:
        most = torch.bincount(clients.rows(client, "train").y).argmax()
        naive.append((clients.rows(client, "test").y == most).numpy())
    return known | {"naive": packed_values(np.concatenate(naive).astype(float))}


RESULTS = Path(__file__).with_name("results")
SEEDS = (0, 1, 2, 3, 4)
CLIENTS, REFUSED = "clients.json", "refused.json"
Lines = dict[tuple[str, str, int], dict[str, Any]]


def read(federation: str, folder: Path = RESULTS) -> Lines:
    """The lines of a federation by method, setting and seed; those of a setting that is no longer drawn stay unread."""
    return {
        (line["method"], label(line["settings"]), line["seed"]): line for line in truth.kept(folder, federation).read()
    }


def label(settings: dict[str, Any]) -> str:
    """A setting as text."""
    return json.dumps(settings, sort_keys=True)


def table(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """A table of all federations: their clients, or the methods that cannot be trained on them and why."""
    file = folder / name
    return dict(json.loads(file.read_text("utf-8"))) if file.exists() else {}


def keep(name: str, federation: str, values: dict[str, Any], folder: Path) -> None:
    """Keep what is known of a federation in one of the tables."""
    known = table(name, folder) | {federation: table(name, folder).get(federation, {}) | values}
    (folder / name).write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", "utf-8")


def chosen(method: Method, lines: Lines) -> int | None:
    """The setting with the most right validation rows under the first seed; None while some are missing."""
    found = [lines.get((method.name, label(settings), SEEDS[0])) for settings in method.settings()]
    if any(line is None for line in found):
        return None
    # the mean over clients, each of which counts the same
    scores = [_share(line) for line in found if line is not None]
    return scores.index(max(scores))


def _share(line: dict[str, Any]) -> float:
    shares = [right / rows for right, rows in zip(line["validation"], line["rows"], strict=True) if rows]
    return sum(shares) / len(shares)


def fits(federation: Entrants, method: Method) -> bool:
    """Whether a method is compared on a federation: those without rounds, and what they must beat, by the clock."""
    if federation.tier in (REAL, SURVIVAL) and method.name not in FEW:
        return False
    if federation.tier != SMALL and method.network is not None:
        return False
    return method.clock == federation.slow or (federation.slow and method.name in (POOLED, ALONE, TOGETHER))


def missing(federation: Entrants, method: Method, seeds: Sequence[int], folder: Path) -> Iterator[tuple[int, int]]:
    """The settings and seeds that are not there: those of the first seed, then the chosen one with the others."""
    if not fits(federation, method):
        return
    refused = table(REFUSED, folder).get(federation.name, {})
    labels = [label(settings) for settings in method.settings()]
    for number, own in enumerate(labels):
        if method.name not in refused and (method.name, own, SEEDS[0]) not in read(federation.name, folder):
            yield number, SEEDS[0]
            refused = table(REFUSED, folder).get(federation.name, {})
    lines = read(federation.name, folder)
    best = chosen(method, lines)
    for seed in seeds[1:]:
        if best is not None and (method.name, labels[best], seed) not in lines:
            yield best, seed


def compete(
    names: Sequence[str] = (),
    only: Sequence[str] = (),
    seeds: Sequence[int] = SEEDS,
    minutes: float = float("inf"),
    folder: Path = RESULTS,
    tier: str = SMALL,
) -> int:
    """Make the runs that are missing, all of a federation before the next.

    Args:
        names: of federations, all by default.
        only: of methods, all by default.
        seeds: the first one tunes.
        minutes: no run is started after so many.
        folder: where lines are kept.
        tier: of the networks.

    Returns:
        The number of runs that were made.
    """
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    methods = tuple(method for method in RUN if not only or method.name in only)
    began, made = time.monotonic(), 0
    for federation in FEDERATIONS:
        if federation.tier != tier or (names and federation.name not in names):
            continue
        clients: Any = None
        for method in methods:
            for number, seed in missing(federation, method, seeds, folder):
                if time.monotonic() - began > 60 * minutes:
                    return made
                if clients is None:
                    clients = federation.clients()
                    keep(CLIENTS, federation.name, about(clients), folder)
                    gc.freeze()  # else each run ends with a collection of all that torch has, a third of its time
                try:
                    line = run_one(federation, clients, method, number, seed)
                except SettingError as why:  # the method does not fit such rows: a finding, and no end of the others
                    keep(REFUSED, federation.name, {method.name: str(why)}, folder)
                    print(f"{federation.name} {method.name}: {why}", flush=True)
                    continue
                truth.kept(folder, federation.name).add(line)
                made += 1
                print(f"[{time.monotonic() - began:.0f} s] {federation.name} {method.name} {number} {seed}: "
                      f"{100 * _share(line):.1f} of validation rows, {line['seconds']:.1f} s", flush=True)  # fmt: skip
    return made
