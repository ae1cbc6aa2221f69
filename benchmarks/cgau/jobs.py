"""Jobs: one run each, whose result is saved as a small JSON file, so that nothing is run twice."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import federations
import numpy as np
import settings
import torch
from settings import METHODS, SWITCHES, TaskSettings

import piebald
from piebald.data.clients.pooled_clients import PooledClients
from piebald.runtimes import Simulator


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        part: one of `settings.PARTS`.
        setting: the partition, e.g. "shuffle 0.2".
        method: a key of `METHODS` or `SWITCHES`.
        seed: seed of the rows, the partition, the first model and the batches.
        unseen: number of clients that are held out until the end.
        rate: learning rate; None means that of the task.
        rounds: number of rounds; None means that of the task.
    """

    part: str
    setting: str
    method: str
    seed: int
    unseen: int = 0
    rate: float | None = None
    rounds: int | None = None

    def file(self, out: Path) -> Path:
        """Path of the result."""
        rate = "" if self.rate is None else f" rate {self.rate}"
        name = f"{self.method} {self.setting}{rate} seed {self.seed}".replace(",", "").replace(" ", "-")
        return out / self.part / f"{name}.json"


SHUFFLED = tuple(f"shuffle {share}" for share in (0.0, 1.0, 0.4, 0.2, 0.8, 0.6))  # the ends first
NO_MATRIX = [method for method in METHODS if method != settings.MATRIX]


def each(part: str, where: Iterable[str], seeds: Iterable[int], methods: Iterable[str], **more: Any) -> Iterator[Job]:
    """Yield the jobs of a part, all methods of a seed and a setting before the next seed."""
    for seed in seeds:
        for setting in where:
            for method in methods:
                yield Job(part, setting, method, seed, **more)


def images() -> Iterator[Job]:
    for seed in settings.SEEDS:
        for setting in SHUFFLED:
            yield from each("images", [setting], [seed], METHODS if setting in SHUFFLED[:2] else NO_MATRIX)
        yield from each("images", SHUFFLED[:1], [seed], SWITCHES)


def more_rows() -> Iterator[Job]:
    for share in settings.MORE_SHUFFLES:
        yield from each("more_rows", [f"shuffle {share}"], settings.MORE_SEEDS, settings.SHORT)


def rare() -> Iterator[Job]:
    for setting in SHUFFLED:
        yield from each("rare", [setting], settings.RARE_SEEDS, settings.SHORT)


def paper_images() -> Iterator[Job]:
    return each("paper_images", sorted(SHUFFLED), settings.PAPER_IMAGE_SEEDS, settings.SHORT)


def paper_rare() -> Iterator[Job]:
    return each("paper_rare", sorted(SHUFFLED), settings.PAPER_RARE_SEEDS, settings.SHORT)


def tuning() -> Iterator[Job]:
    for method in (settings.CGAU, settings.BLIND, settings.RELU):
        for rate in settings.TUNED_RATES:
            yield Job("tuning", SHUFFLED[0], method, settings.TUNING_SEED, rate=rate)


def newcomers() -> Iterator[Job]:
    unseen = {SHUFFLED[0]: 2, "label-free": 2, "by domain": 1, "by subject": 6}
    for seed in settings.SEEDS[:3]:
        for method in (settings.CGAU, settings.BLIND, settings.HEAD):
            yield from (Job("newcomers", setting, method, seed, unseen=count) for setting, count in unseen.items())


GATED_AND_PLAIN = (settings.CGAU, settings.BLIND, settings.RELU)
JOBS: dict[str, Callable[[], Iterator[Job]]] = {
    "tuning": tuning,
    "office": lambda: each("office", ["by domain"], settings.SEEDS, METHODS),
    "signals": lambda: each("signals", ["by subject"], settings.REPETITIONS, NO_MATRIX),
    "images": images,
    "more_rows": more_rows,
    "rare": rare,
    "paper_images": paper_images,
    "paper_rare": paper_rare,
    "longer": lambda: each("longer", SHUFFLED[:1], settings.SEEDS[:3], GATED_AND_PLAIN, rounds=settings.LONGER),
    "controls": lambda: each("controls", ["label-free"], settings.SEEDS, NO_MATRIX),
    "newcomers": newcomers,
}


@lru_cache(maxsize=2)
def federation(setting: str, seed: int, part: str = "images") -> tuple[PooledClients, TaskSettings]:
    """Return the clients of a setting, and the settings of its runs; parts differ in rows and tasks."""
    if setting == "by domain":
        return federations.by_domain(seed), settings.OFFICE_TASK
    if setting == "by subject":
        return federations.by_subject(seed), settings.SIGNAL_TASK
    if setting == "label-free":
        return federations.by_blind_clusters(0.0, seed), settings.IMAGE_TASK
    shuffle = float(setting.removeprefix("shuffle "))
    match part:
        case "rare":
            return federations.rare_by_clusters(shuffle, seed), settings.RARE_TASK
        case "paper_rare":
            return federations.rare_by_clusters(shuffle, seed), settings.PAPER_RARE_TASK
        case "paper_images":
            return federations.published_by_clusters(shuffle, seed), settings.PAPER_IMAGE_TASK
        case "more_rows":
            return federations.by_clusters(shuffle, seed, settings.MORE_ROWS), settings.IMAGE_TASK
    return federations.by_clusters(shuffle, seed), settings.IMAGE_TASK


def run_job(job: Job, out: Path) -> str:
    """Run one job; do nothing if its result exists."""
    file = job.file(out)
    if file.exists():
        return f"{job}: already finished"
    torch.set_num_threads(1)  # jobs run in parallel
    clients, task = federation(job.setting, job.seed, job.part)
    began = time.perf_counter()
    run = run_of(job, clients, task)
    table = measured(run) | {"took": time.perf_counter() - began}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(table | {"job": vars(job)}, indent=1))
    return f"{job.part} {job.setting} {job.method} seed {job.seed}: {table['mean']:.4f}, {table['took']:.0f} s"


def run_of(job: Job, clients: PooledClients, task: TaskSettings, out: Path | None = None) -> piebald.Run:
    """Run one job and return its run."""
    method = (METHODS | SWITCHES)[job.method]
    rate = task.rates[method.family] if job.rate is None else job.rate
    recipe = method.recipe(lr=rate, batch=task.batch, batches="exact", momentum=settings.MOMENTUM, **task.local)
    shape, outputs = tuple(clients.x.shape[1:]), len(clients.classes)
    network = method.network(shape, outputs, task.units, len(clients))
    return piebald.run(
        recipe,
        clients,
        network,
        rounds=job.rounds or task.rounds,
        seed=job.seed,
        runtime=Simulator(engine="vmapped", stack=30, workers=0),
        metrics=["auc", "accuracy"] if outputs == 2 else ["accuracy"],
        evaluate_every=task.every,
        keep="best",
        unseen=job.unseen,
        out=out,
        label=job.method,
    )


def measured(run: piebald.Run) -> dict[str, Any]:
    """Return the part of a run's result that is saved."""
    final = run.final
    kept = ("mean", "sd", "worst_decile", "best", "rounds", "bytes_up", "bytes_down", "wall")
    last = [point["mean"] for point in run.curve][-1]
    return {
        **{name: final[name] for name in kept},
        "last": last,
        "metric": run.metric,
        "numbers": run.meta["parameters"],
        "shared": run.meta["shared"],
        "per_client": list(final["per_client"].values()),
        "curve": [[point["version"], point["mean"]] for point in run.curve],
        "newcomers": run.newcomers,
    }


def load(out: Path, part: str) -> list[dict[str, Any]]:
    """Return all results of a part."""
    return [json.loads(file.read_text()) for file in sorted((out / part).glob("*.json"))]


def by_method(out: Path, part: str, setting: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the results of one setting by method, then by seed."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for one in load(out, part):
        if one["job"]["setting"] == setting and one["job"]["rate"] is None:
            found.setdefault(one["job"]["method"], {})[one["job"]["seed"]] = one
    return found


def describe(out: Path) -> None:
    """Save distances between clients, and how well client and position predict the label, for each image federation."""
    from sklearn.decomposition import PCA
    from sklearn.neighbors import KNeighborsClassifier

    for seed in settings.SEEDS:
        for setting in [*(f"shuffle {shuffle}" for shuffle in settings.SHUFFLES), "label-free"]:
            file = out / "federations" / f"{setting.replace(' ', '-')}-seed-{seed}.json"
            if file.exists():
                continue
            clients, _ = federation(setting, seed)
            train = np.concatenate([clients.indices(client, "train") for client in range(len(clients))])
            places = PCA(2, random_state=0).fit(clients.x.numpy()[train]).transform(clients.x.numpy())
            y = clients.y.numpy()
            pooled = KNeighborsClassifier(25).fit(places[train], y[train])
            known: dict[str, list[float]] = {"client and position": [], "position": [], "client": []}
            for client in range(len(clients)):
                mine, test = clients.indices(client, "train"), clients.indices(client, "test")
                own = KNeighborsClassifier(min(25, len(mine))).fit(places[mine], y[mine])
                known["client and position"].append(own.score(places[test], y[test]))
                known["position"].append(pooled.score(places[test], y[test]))
                known["client"].append(float((y[test] == np.bincount(y[mine]).argmax()).mean()))
            table = {
                "setting": setting,
                "seed": seed,
                "sizes": [clients.size(client, "train") for client in range(len(clients))],
                "frechet": float(federations.frechet(clients, settings.FRECHET_COMPONENTS).mean()),
                "frechet_512": float(federations.frechet(clients, 512).mean()) if seed == 0 else None,
                "prior": {name: float(np.mean(values)) for name, values in known.items()},
            }
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(table))
