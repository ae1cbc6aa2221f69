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

import numpy as np
from deviations import NOWHERE, ROOT, described
from shared.capture import Case, capture

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


def distfl() -> Iterator[Pair]:
    """Tables 2, 4, 5 and 6 in the paper's setting."""
    import run

    parts = {
        "vgg": ("distfl-table-2", "full"), "resnet": ("distfl-table-2", "resnet18"),
        "people": ("distfl-table-4", "full"),
        "cifar": ("distfl-table-5", "full"), "replacement": ("distfl-table-6", "full"),
    }  # fmt: skip
    for part, (file, scale) in parts.items():
        for job in run.full_jobs(part, 0):
            label = NAMED["distfl"].get(job[1])
            if label is not None and (part != "cifar" or job[0] == "20 of 50"):
                yield file, scale, label, lambda part=part, job=job: run.run_job(part, *job, 0, True)


def hdafl() -> Iterator[Pair]:
    """Tables 3 and 5 in the paper's setting; digits stand for characters in both."""
    import jobs
    import settings

    scale = settings.SCALES["full"]
    wanted = {("writer", 10): "hdafl-table-3", ("same_apps", 2): "hdafl-table-5"}
    for job in (*jobs.paper_jobs(scale), *jobs.traffic_jobs(scale)):
        label, file = NAMED["hdafl"].get(job.label), wanted.get((job.setting, job.cohort))
        if label and file and job.seed == 0 and job.model in ("small_cnn", "cnn_1d_small"):
            yield file, "full", label, lambda job=job: jobs.run_job(job, NOWHERE)


def metis() -> Iterator[Pair]:
    """Table I as printed."""
    import run

    scale = run.SCALES["full"]
    files = {"synchronous": "metis-table-1", "uneven": "metis-table-1-right"}
    for job in run.all_jobs(scale, scale.seeds):
        label = NAMED["metis"].get(job.label)
        if label is not None and (job.sizes, job.classes) == ("power law", "Non-IID(3)") and job.part in files:
            yield files[job.part], "full", label, lambda job=job: run.run_job(job, scale, NOWHERE, "cpu")


def cgau() -> Iterator[Pair]:
    """Fig. 2 at both scales; the first pixels stand for the extractor's numbers, as in `deviations.py`."""
    import jobs
    import paper_rows

    paper_rows.embed = lambda network, x, **_: x.flatten(1)[:, :512].numpy().astype(np.float32)
    parts = {
        "rare": ("cgau-figure-2a", None), "paper_rare": ("cgau-figure-2a", "full"),
        "more_rows": ("cgau-figure-2b", None), "paper_images": ("cgau-figure-2b", "full"),
    }  # fmt: skip
    for part, (file, scale) in parts.items():
        for job in jobs.JOBS[part]():
            label = NAMED["cgau"].get(job.method)
            if label is not None and (job.setting, job.seed) == ("shuffle 0.0", 0):
                yield file, scale or "", label, lambda job=job: jobs.run_job(job, NOWHERE)


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
    for file, scale, label, begin in globals()[paper]():
        if label not in planned(file, scale)[1].recipes:  # the benchmark runs more than the paper's table has
            continue
        ours, theirs = conditions(of_file(file, scale, label)), conditions(capture(begin))
        apart = {name: [ours.get(name), theirs.get(name)] for name in {**ours, **theirs}
                 if ours.get(name) != theirs.get(name)}  # fmt: skip
        print(json.dumps([file, scale, label, apart]), flush=True)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "benchmarks" / sys.argv[1]), str(ROOT)]
    main(sys.argv[1])
