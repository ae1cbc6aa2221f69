"""One run of the leaderboard, as the line that is kept: what was right on validation and on test rows.

A line has the method, its setting, the seed, the number of right validation rows of each
client, the single test rows of all clients one after another as bits (`storage.row_values`), or the number of right
ones where single rows are not known (of another metric than accuracy, its value times the rows), the version whose
validation rows were best, bytes, steps, seconds, and the processor's seconds (`cpu`), which other work on the machine
does not lengthen; the first runs were kept without these.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch
from methods import KNN_PER, POOLED, PUBLIC, ROUNDS, TOGETHER, TRAINING, Method

import piebald
from piebald import partition, recipes
from piebald.core.errors import RuntimeFault
from piebald.core.metrics import Concordance
from piebald.data.clients.pooled_clients import Lists
from piebald.data.partition.three_way_split import SPLITS
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
