"""Print what a paper's files of settings run otherwise than its benchmark: python benchmarks/papers/files.py PAPER

One line of JSON for each recipe of a file that the benchmark runs as well: the file, its scale, the recipe, and the
conditions that differ, the file's before the benchmark's.  Both are read as `deviations.py` reads a table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from deviations import ROOT, described
from shared.capture import Case, capture
from shared.programs import Listed, listed, without_the_extractor

from piebald.experiments.file import ExperimentSettings

Begin = Callable[[], Any]
Pair = tuple[str, str, str, Begin]  # a file, its scale, a recipe's label there, and what runs it in the benchmark
NAMED = {  # the labels of files, by those of benchmarks
    "distfl": {"DistFL": "distfl", "FedAvg, equal weights": "fedavg", "Local": "local",
               "LG-Net (fine-tuning)": "LG-Net", "K-Cluster (K = 5)": "K-Cluster"}
    | {name: name for name in ("Credit", "IRLS", "GRA", "DistFL, the server's rows")}
    | {name: name for name in (f"K-Cluster (K = {k})" for k in (2, 3, 4))},
    "metis": {"FedAvg": "fedavg", "DVW": "sync_dvw", "SyncFedAvg": "fedavg", "SyncDVW": "sync_dvw",
              "AsyncFedAvg": "async_fedavg", "FedAsync": "fedasync", "AsyncDVW": "async_dvw",
              "AsyncDVW, adaptive": "adaptive_dvw"},
    "hdafl": {"FedAvg": "fedavg", "HDAFL": "hdafl"},
    "cgau": {"CGAU": "CGAU", "gated, no conditioning": "gated, no conditioning", "plain": "ReLU"},
}  # fmt: skip


# the file and its scale for a part of a benchmark, or for a case of HDAFL's
FILES = {
    "distfl": {
        "vgg": ("distfl-table-2", "full"), "resnet": ("distfl-table-2", "resnet18"),
        "people": ("distfl-table-4", "full"),
        "cifar": ("distfl-table-5", "full"), "replacement": ("distfl-table-6", "full"),
    },
    # digits stand for characters in the file and in the benchmark
    "hdafl": {"writer": ("hdafl-table-3", "full"), "same_apps": ("hdafl-table-5", "full")},
    "metis": {"synchronous": ("metis-table-1", "full"), "uneven": ("metis-table-1-right", "full")},
    "cgau": {
        "rare": ("cgau-figure-2a", ""), "paper_rare": ("cgau-figure-2a", "full"),
        "more_rows": ("cgau-figure-2b", ""), "paper_images": ("cgau-figure-2b", "full"),
    },
}  # fmt: skip
WANTED: dict[str, Callable[[Listed], bool]] = {  # what a file has of a part
    "distfl": lambda one: one.part != "cifar" or one.case == "20 of 50",
    "hdafl": lambda one: one.job.cohort in (2, 10) and one.job.model in ("small_cnn", "cnn_1d_small"),
    "metis": lambda one: one.case == "power law Non-IID(3)",
    "cgau": lambda one: one.case == "shuffle 0.0",
}


def pairs(paper: str) -> Iterator[Pair]:
    """Yield the recipes of a paper's files that its benchmark runs as well."""
    if paper == "cgau":
        without_the_extractor()
    every = [*listed(paper, "full", 1990 if paper == "metis" else 0)]
    every += listed(paper, "small") if paper == "cgau" else ()
    for one in every:
        label, files = NAMED[paper].get(one.label), FILES[paper]
        file = files.get(one.part) or files.get(one.case)
        if label and file and WANTED[paper](one):
            yield *file, label, one.begin


@cache
def planned(file: str, scale: str) -> tuple[ExperimentSettings, Any]:
    """Return a file's settings and what they define."""
    path = ROOT / "examples" / "papers" / f"{file}.toml"
    settings = ExperimentSettings.load(path, scale=scale or None)
    return settings, settings.plan()


def of_file(file: str, scale: str, label: str) -> Case:
    """Return the run of one recipe of a file with its first seed."""
    settings, plan = planned(file, scale)
    stop = settings.stop if isinstance(settings.stop, Mapping) else None
    options = {"rounds": None if stop else settings.rounds, "stop": stop, "seed": settings.first_seed}
    model = plan.model_of(label)
    return Case(plan.recipes[label], plan.clients_of(label), model, options)


def conditions(case: Case) -> dict[str, str]:
    """Return what `described` says of a run, without what is of no one run, and all settings of its recipe."""
    left_out = ("data", "rows each", "seeds", "in a round")
    told = {name: text for name, text in described(case, 1).items() if name not in left_out}
    table = {f"{axis}.{name}": str(value) for axis, name, value in settings_of(case)}
    rows = {split: sum(case.clients.size(client, split) for client in range(len(case.clients)))
            for split in ("train", "validation")}  # fmt: skip
    return told | table | {f"{split} rows": str(count) for split, count in rows.items()}


def settings_of(case: Case) -> Iterable[tuple[str, str, Any]]:
    """Yield each setting of a recipe's components."""
    recipe, everyone = case.recipe, len(case.clients)
    if getattr(recipe.scheduling, "cohort", None) == everyone:
        recipe = recipe.with_(scheduling=recipe.scheduling.model_copy(update={"cohort": 1.0}))
    axes = ("training", "sharing", "scheduling", "clustering", "aggregation", "server_optimizer")
    for axis in axes:
        yield from ((axis, name, value) for name, value in getattr(recipe, axis).table().items())
    yield from (("transforms", one.kind, one.table()) for one in recipe.transforms)


def main(paper: str) -> None:
    """Print the lines of one paper."""
    for file, scale, label, begin in pairs(paper):
        if label not in planned(file, scale)[1].recipes:  # the benchmark runs more than the paper's table has
            continue
        ours, theirs = conditions(of_file(file, scale, label)), conditions(capture(begin))
        apart = {name: [ours.get(name), theirs.get(name)] for name in {**ours, **theirs}
                 if ours.get(name) != theirs.get(name)}  # fmt: skip
        print(json.dumps([file, scale, label, apart]), flush=True)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "benchmarks" / sys.argv[1]), str(ROOT)]
    main(sys.argv[1])
