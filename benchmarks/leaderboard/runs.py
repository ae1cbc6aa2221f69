"""One run of the leaderboard, as the line that is kept; those of some methods are made in a way of their own."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from methods import CENTRALISED, KNN_PER, PUBLIC, TOGETHER

sys.path.append(str(Path(__file__).parents[1] / "advise"))
import truth
from federations import SEED, Federation
from grid import ROUNDS, RUNGS, TRAINING, Entry

import piebald
from piebald import partition, recipes
from piebald.core.errors import RuntimeFault
from piebald.core.metrics import Concordance
from piebald.data.partition.three_way_split import SPLITS
from piebald.runtimes import Simulator

PUBLIC_ROWS = 100


def run_one(federation: Federation, clients: Any, entry: Entry, seed: int) -> dict[str, Any]:
    """One run, as the line that is kept."""
    if entry.recipe == CENTRALISED:
        return centralised(federation, clients, entry, seed)
    try:
        if entry.recipe == KNN_PER:
            return with_neighbours(federation, clients, entry, seed)
        held = with_public_rows(clients) if entry.recipe == PUBLIC else clients
        return truth.run_one(federation, held, entry, seed)
    except RuntimeFault as why:  # the setting diverges: nobody would use such a model, so it has no accuracy
        if "not finite" not in str(why):
            raise
        none = [0] * len(clients)
        line = _begun(entry, seed)
        return line | {"validation": [none] * len(RUNGS), "test": none, "bytes": 0, "wall": 0.0, "steps": 0}


def with_public_rows(clients: Any) -> Any:
    """The same clients, who all know the inputs of some of the training rows: no other method is given these."""
    rows = np.concatenate([clients.indices(client, "train") for client in range(len(clients))])
    chosen = np.sort(np.random.default_rng([SEED, len(rows)]).permutation(rows)[:PUBLIC_ROWS])
    parts = {split: clients.lists(split) for split in SPLITS}
    return partition.PooledClients(
        clients.x, clients.y, parts, names=clients.names, classes=clients.classes, common=clients.common,
        public_rows=chosen,
    )  # fmt: skip


def with_neighbours(federation: Federation, clients: Any, entry: Entry, seed: int) -> dict[str, Any]:
    """FedAvg, whose clients ask their nearest rows at the end; before that, their models are FedAvg's."""
    line = truth.run_one(federation, clients, Entry(TOGETHER, entry.settings), seed)
    began = time.monotonic()
    run = piebald.run(
        recipes.make(TOGETHER, **TRAINING, **dict(entry.settings)), clients, federation.model(seed), seed=seed,
        rounds=ROUNDS, evaluate_every=ROUNDS, measure="none", keep=KNN_PER, loss=federation.loss,
        runtime=Simulator(engine="batched", stack=len(clients), workers=0),
    )  # fmt: skip
    for choice in run.choices:
        if "judged" in choice:
            own = choice["candidates"][choice["chosen"]], choice["judged"]["chosen"]
            validation, test = (round(truth.SCALE * one[federation.metric]) for one in own)
            line["validation"][-1][choice["client"]], line["test"][choice["client"]] = validation, test
    wall = round(line["wall"] + time.monotonic() - began, 2)
    return line | _begun(entry, seed) | {"wall": wall}


def _begun(entry: Entry, seed: int) -> dict[str, Any]:
    """The head of a line."""
    return {"entry": entry.label, "recipe": entry.recipe, "settings": dict(entry.settings), "seed": seed}


def centralised(federation: Federation, clients: Any, entry: Entry, seed: int) -> dict[str, Any]:
    """A run on all rows in one place, as the line that is kept."""
    began = time.monotonic()
    pooled = [clients.rows(client, "train") for client in range(len(clients))]
    rows = torch.cat([one.x for one in pooled]), _joined([one.y for one in pooled])
    alone = partition.clients_from({"all": rows}, classes=clients.classes, test=0.0)
    recipe = recipes.make(TOGETHER, **TRAINING, **dict(entry.settings))
    here = Simulator(engine="batched", stack=1, workers=0)
    scores: dict[str, list[list[float]]] = {"validation": [], "test": []}
    for rounds in RUNGS:  # a longer run begins with the steps of a shorter one
        run = piebald.run(
            recipe, alone, federation.model(seed), seed=seed, rounds=rounds, runtime=here, measure="none",
            loss=federation.loss,
        )  # fmt: skip
        model = run.model().eval()
        for split, table in scores.items():
            table.append([score(model, clients.rows(client, split)) for client in range(len(clients))])
    line = _begun(entry, seed) | {"validation": scores["validation"], "test": scores["test"][-1], "bytes": 0}
    line["wall"] = round(time.monotonic() - began, 2)
    return line | {"steps": sum(row["steps"] or 0 for row in run.results if row["kind"] == "train")}


@torch.no_grad()
def score(model: torch.nn.Module, rows: Any) -> int | None:
    """The accuracy or the concordance of a model in the unit of the lines, None where it is undefined."""
    if not len(rows):
        return None
    if not isinstance(rows.y, dict):
        return round(truth.SCALE * float((model(rows.x).argmax(1) == rows.y).float().mean()))
    metric = Concordance()
    metric.update(model(rows.x), rows.y)
    found = float(metric.compute())
    return None if math.isnan(found) else round(truth.SCALE * found)


def _joined(targets: list[Any]) -> Any:
    """The targets of several clients as one."""
    if not isinstance(targets[0], dict):
        return torch.cat(targets)
    return {name: torch.cat([one[name] for one in targets]) for name in targets[0]}
