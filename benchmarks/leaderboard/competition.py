"""The runs of the leaderboard, kept as data.

Every method is tuned on the first seed: each of its settings is trained, and the one with the best mean validation
accuracy is trained again with the other seeds.  `results/<federation>.jsonl` has a line for each run, in the form of
`benchmarks/advise/truth`, whose runs of the same recipes with the same settings are taken from there.  A line is
written when its run has ended, so an interrupted competition goes on, and a new method is added without the others.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from methods import CENTRALISED, METHODS, TOGETHER, Method

sys.path.append(str(Path(__file__).parents[1] / "advise"))
import truth
from federations import BY_NAME, HELD_OUT, SEED, Federation, by_owner
from grid import RUNGS, TRAINING, Entry

import piebald
from piebald import partition, recipes
from piebald.data.prepared_files import prepared
from piebald.errors import RuntimeFault, SettingError
from piebald.metrics import Concordance
from piebald.models import build_model
from piebald.runtimes import Simulator

RESULTS = Path(__file__).with_name("results")
SEEDS = (0, 1, 2)
REFUSED = "refused.json"
FEWEST_DEATHS = 9  # of a region: with fewer, a concordance is made of a handful of pairs


class Survival(Federation):
    """Time to death of patients with breast cancer (TCGA-BRCA), by region, scored by Harrell's concordance."""

    def clients(self) -> Any:
        """The regions with enough deaths."""
        import pandas

        frame = pandas.read_csv(prepared("tcga_brca", "tcga_brca.csv.gz"))
        inputs = frame.drop(columns=["pid", "tss", "site_id", "site", "split", "event", "time"]).astype("float32")
        inputs["age_at_index"] = (inputs["age_at_index"] - 58) / 13  # about the mean and deviation of patients
        parts = {}
        for region, rows in frame.groupby("site").indices.items():
            own = frame.iloc[rows]
            if own["event"].sum() >= FEWEST_DEATHS:
                target = {name: own[name].to_numpy("float32") for name in ("time", "event")}
                parts[str(region)] = (inputs.iloc[rows].to_numpy(), target)
        return partition.clients_from(parts, seed=SEED, **HELD_OUT)

    def model(self, seed: int) -> torch.nn.Module:
        """A network with one output, the log hazard."""
        return build_model("mlp_bn", (39,), 1, seed=seed, hidden=[32])


FEDERATIONS = (
    *(BY_NAME[name] for name in ("mnist-writers", "har-subjects", "shakespeare", "office", "heart", "exam")),
    BY_NAME["contraception"],
    Federation("lecturers", "lecturers (InstEval)", "lecturers", by_owner("site")),
    Survival("tcga-brca", "breast cancer regions (survival)", "", {}, loss="survival", metric="concordance"),
    Federation("traffic", "app traffic by capture", "traffic", by_owner("capture"), limit=4000),
    *(BY_NAME[name] for name in ("cifar10-dirichlet", "cifar10-disjoint")),
)


def read(federation: str, folder: Path = RESULTS) -> dict[tuple[str, int], dict[str, Any]]:
    """The lines of a federation, by entry and seed."""
    lines = [*truth.read(truth.FOLDER, federation), *truth.read(folder, federation)]
    return {(line["entry"], line["seed"]): line for line in lines}


def refused(federation: str, folder: Path = RESULTS) -> dict[str, str]:
    """The recipes that cannot be trained on a federation, and why."""
    file = folder / REFUSED
    known: dict[str, dict[str, str]] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return known.get(federation, {})


def refuse(federation: str, recipe: str, why: str, folder: Path = RESULTS) -> None:
    """Keep that a recipe cannot be trained on a federation."""
    file = folder / REFUSED
    known = json.loads(file.read_text("utf-8")) if file.exists() else {}
    known.setdefault(federation, {})[recipe] = why
    file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", "utf-8")


def chosen(method: Method, lines: dict[tuple[str, int], dict[str, Any]]) -> Entry | None:
    """The setting with the best mean validation accuracy under the first seed; None while some are missing."""
    found = [(entry, lines.get((entry.label, SEEDS[0]))) for entry in method.entries()]
    if any(line is None for _, line in found):
        return None
    return max(found, key=lambda one: _mean(one[1]["validation"][-1]))[0]  # type: ignore[index]


def missing(
    federation: Federation, methods: tuple[Method, ...], seeds: tuple[int, ...], folder: Path
) -> Iterator[tuple[Entry, int]]:
    """The runs that are not there: those of the first seed, then the chosen ones with the others."""
    for method in methods:
        lines = read(federation.name, folder)
        if method.recipe in refused(federation.name, folder):
            continue
        for entry in method.entries():
            if (entry.label, SEEDS[0]) not in lines and method.recipe not in refused(federation.name, folder):
                yield entry, SEEDS[0]
        best = chosen(method, read(federation.name, folder))
        for seed in seeds:
            if best is not None and (best.label, seed) not in lines and seed != SEEDS[0]:
                yield best, seed


def compete(
    names: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
    seeds: tuple[int, ...] = SEEDS,
    minutes: float = float("inf"),
    folder: Path = RESULTS,
) -> int:
    """Make the runs that are missing.

    Args:
        names: of federations, all by default.
        only: of recipes, all by default.
        seeds: the first one tunes.
        minutes: no run is started after so many.
        folder: where lines are kept.

    Returns:
        The number of runs that were made.
    """
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    methods = tuple(method for method in METHODS if not only or method.recipe in only)
    began, made = time.monotonic(), 0
    for federation in FEDERATIONS:
        if names and federation.name not in names:
            continue
        clients: Any = None
        for entry, seed in missing(federation, methods, seeds, folder):
            if time.monotonic() - began > 60 * minutes:
                return made
            clients = federation.clients() if clients is None else clients
            try:
                line = run_one(federation, clients, entry, seed)
            except SettingError as why:  # the method does not fit such rows: a finding, and no end of the others
                refuse(federation.name, entry.recipe, str(why), folder)
                print(f"{federation.name} {entry.recipe}: {why}", flush=True)
                continue
            truth.append(folder, federation.name, line)
            made += 1
            print(f"[{time.monotonic() - began:.0f} s] {federation.name} {entry.label} {seed}: "
                  f"{_mean(line['test']):.1f}", flush=True)  # fmt: skip
    return made


def run_one(federation: Federation, clients: Any, entry: Entry, seed: int) -> dict[str, Any]:
    """One run, as the line that is kept."""
    if entry.recipe != CENTRALISED:
        try:
            return truth.run_one(federation, clients, entry, seed)
        except RuntimeFault as why:  # the setting diverges: nobody would use such a model, so it has no accuracy
            if "not finite" not in str(why):
                raise
            none = [0] * len(clients)
            line = {"entry": entry.label, "recipe": entry.recipe, "settings": dict(entry.settings), "seed": seed}
            return line | {"validation": [none] * len(RUNGS), "test": none, "bytes": 0, "wall": 0.0, "steps": 0}
    return centralised(federation, clients, entry, seed)


def centralised(federation: Federation, clients: Any, entry: Entry, seed: int) -> dict[str, Any]:
    """A run on all rows in one place, as the line that is kept."""
    began = time.monotonic()
    pooled = [clients.rows(client, "train") for client in range(len(clients))]
    rows = torch.cat([one.x for one in pooled]), _joined([one.y for one in pooled])
    alone = partition.clients_from({"all": rows}, classes=clients.classes, test=0.0)
    recipe = recipes.make(TOGETHER, **TRAINING, **dict(entry.settings))
    here = Simulator(engine="batched", stack=1, workers=0, onednn=False)
    scores: dict[str, list[list[float]]] = {"validation": [], "test": []}
    for rounds in RUNGS:  # a longer run begins with the steps of a shorter one
        run = piebald.run(
            recipe, alone, federation.model(seed), seed=seed, rounds=rounds, runtime=here, measure="none",
            loss=federation.loss,
        )  # fmt: skip
        model = run.model().eval()
        for split, table in scores.items():
            table.append([score(model, clients.rows(client, split)) for client in range(len(clients))])
    line: dict[str, Any] = {"entry": entry.label, "recipe": entry.recipe, "settings": dict(entry.settings)}
    line |= {"seed": seed, "validation": scores["validation"], "test": scores["test"][-1], "bytes": 0}
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


def _mean(values: list[float | None]) -> float:
    """The mean over the clients with a value, in points."""
    found = [value for value in values if value is not None]
    return 100 * sum(found) / len(found) / truth.SCALE
