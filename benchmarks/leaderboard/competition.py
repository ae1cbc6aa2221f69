"""The runs of the leaderboard, kept as data.

Every method is tuned on the first seed: each of its settings is trained, and the one with the best mean validation
accuracy is trained again with the other seeds.  `results/<federation>.jsonl` has a line for each run, in the form of
`benchmarks/advise/truth`, whose runs of the same recipes with the same settings are taken from there.  A line is
written when its run has ended, so an interrupted competition goes on, and a new method is added without the others.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from methods import METHODS, Method
from runs import run_one

sys.path.append(str(Path(__file__).parents[1] / "advise"))
import truth
from federations import BY_NAME, HELD_OUT, SEED, Federation, by_owner
from grid import Entry

from piebald import partition
from piebald.core.errors import SettingError
from piebald.data.sets.download import prepared
from piebald.models import build_model

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
        only: of methods, all by default.
        seeds: the first one tunes.
        minutes: no run is started after so many.
        folder: where lines are kept.

    Returns:
        The number of runs that were made.
    """
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    methods = tuple(method for method in METHODS if not only or method.name in only)
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


def _mean(values: list[float | None]) -> float:
    """The mean over the clients with a value, in points."""
    found = [value for value in values if value is not None]
    return 100 * sum(found) / len(found) / truth.SCALE
