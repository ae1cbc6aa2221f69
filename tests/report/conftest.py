"""Runs with numbers from a formula, so that every figure of a report can be computed by hand."""

from __future__ import annotations

import math

import pytest

from piebald.storage.store import RunStore

# final mean accuracy, rounds to two thirds of it, kilobytes per client and round, each way, personal models or not
RECIPES = {
    "local": (0.78, 6.0, 0, False),
    "fedavg": (0.71, 9.0, 412, False),
    "fedprox": (0.72, 8.0, 412, False),
    "hdafl": (0.86, 5.0, 131, True),
    "distfl": (0.83, 7.0, 412, False),
}


def wobble(*numbers):
    """A fixed number in [-1, 1] that looks random."""
    return math.sin(sum((i + 1) * 12.9898 * (number + 1) for i, number in enumerate(numbers)) * 43.758)


def accuracy(recipe, seed, client, version):
    top, scale, _, personal = RECIPES[recipe]
    own = (0.05 if personal else 0.12) * wobble(client, len(recipe))
    noise = 0.01 * wobble(seed, client, version) + 0.012 * wobble(seed, len(recipe))
    return min(1.0, max(0.0, 0.1 + (top - 0.1 + own) * (1 - math.exp(-version / scale)) + noise))


def make_run(
    path, recipe="fedavg", seed=1, *, clients=20, rounds=30, classes=10, label=None, every=1, finish=True, **meta
):
    """A run folder; `path` None keeps it in memory.  Client c holds classes c and c + 1, and some of a third."""
    _, _, kilobytes, personal = RECIPES[recipe]
    described = {
        "piebald": "0.1.0",
        "torch": "2.13.0",
        "python": "3.11.2",
        "recipe": {
            "name": recipe,
            "fields": {"lr": 0.05, "epochs": 1},
            "table": {
                "training": {"kind": "sgd", "lr": 0.05, "epochs": 1},
                "sharing": {"kind": "all_except", "layers": ["classifier"]} if personal else {"kind": "full"},
                "transforms": [],
                "scheduling": {"kind": "synchronous", "cohort": 10},
                "clustering": {"kind": "single_cluster"},
                "aggregation": {"kind": "example_weighted"},
                "server_optimizer": {"kind": "average"},
            },
        },
        "label": label or recipe,
        "seed": seed,
        "rounds": rounds,
        "objective": "classification",
        "metric": "accuracy",
        "higher_is_better": True,
        "model": "Cnn",
        "parameters": 103_018,
        "shared": 32_800 if personal else 103_018,
        "classes": [str(i) for i in range(classes)],
        "settings": {"data": {"name": "digits"}, "partition": {"kind": "by_label", "classes": 2}, "seed": seed},
    } | meta
    store = RunStore.create(path, described)
    counts = [[0] * classes for _ in range(clients)]
    for client in range(clients):
        for step, share in enumerate((60, 30, 8)):
            counts[client][(client + step) % classes] = share + round(10 * (1 + wobble(client, step)))
    store.clients(
        [
            {
                "client": c,
                "name": f"client {c}",
                "train": sum(counts[c]),
                "validation": 10,
                "test": 20,
                "counts": counts[c],
            }
            for c in range(clients)
        ]
    )
    for version in range(1, rounds + 1):
        asked = [(version * 7 + i) % clients for i in range(min(10, clients))]
        seconds = version * (2.0 + 0.1 * wobble(seed, len(recipe)))
        size = 1000 * kilobytes
        store.commit(
            {
                "version": version,
                "time": seconds,
                "wall": 0.3 * version,
                "arrived": len(asked),
                "failed": 0,
                "clusters": 1,
            }
            | {
                "bytes_down": size * len(asked),
                "bytes_up": size * len(asked),
                "loss": 2 / version,
                "norm": 1 / version,
            },
            [
                {
                    "id": 100 * version + c,
                    "client": c,
                    "kind": "train",
                    "bytes_down": size,
                    "bytes_up": size,
                    "status": "ok",
                }
                for c in asked
            ],
            None,
        )
        if version % every == 0:
            row = {"version": version, "split": "test", "metric": "accuracy", "examples": 20}
            values = [accuracy(recipe, seed, client, version) for client in range(clients)]
            model = "personal" if personal else "global"
            store.scores([row | {"client": c, "model": model, "value": value} for c, value in enumerate(values)])
            common = {"client": None, "model": "global", "value": accuracy("fedavg", seed, 0, version)}
            store.scores([row | common])
    if finish:
        store.finish("finished")
    return store


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A folder with five recipes of three seeds each."""
    folder = tmp_path_factory.mktemp("runs")
    for recipe in RECIPES:
        for seed in (1, 2, 3):
            make_run(folder / recipe / f"seed-{seed}", recipe, seed).close()
    return folder


@pytest.fixture(scope="session")
def run():
    """`make_run`, for tests that need a run of their own."""
    return make_run
