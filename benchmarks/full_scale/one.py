"""One row in a process of its own: python benchmarks/full_scale/one.py STUDY SEED ABOUT... --out DIR --device cuda

Prints the result as JSON.  The run's folder is below DIR: a run that was stopped goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

import numpy as np
import torch
from rows import STUDIES, folder_name
from shared.capture import capture
from shared.programs import Listed, listed

import piebald
from piebald import recipes
from piebald.data.partition import Dirichlet
from piebald.methods.recipe import Recipe
from piebald.models import build_model

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """What is run, and how it ends.

    Attributes:
        recipe, clients, model: as `piebald.compare` takes them.
        limit: `rounds` or `stop`.
        every: rounds between evaluations.
        options: further ones of `piebald.compare`.
        fleet: simulated devices.
        read: the result, in the paper's unit.
    """

    recipe: Recipe
    clients: Any
    model: Callable[[int], Any]
    limit: Mapping[str, Any]
    every: int
    read: Callable[[piebald.Run], str]
    options: Mapping[str, Any] = field(default_factory=dict)
    fleet: Any = None


def mean_of_clients(run: piebald.Run) -> str:
    """The mean over clients of the accuracy on their own test rows, per cent, in the last evaluation."""
    last = max(row["version"] for row in run.scores)
    own = [r for r in run.scores if r["version"] == last and r["client"] is not None and r["metric"] == "accuracy"]
    kinds = {row["model"] for row in own}
    scored = "personal" if "personal" in kinds else "global"
    return f"{100 * float(np.mean([row['value'] for row in own if row['model'] == scored])):.2f}"


def common_test_rows(run: piebald.Run, metric: str = "accuracy") -> str:
    """A metric of the global model on the common test rows, per cent, in the last evaluation."""
    found = [row for row in run.scores if row["split"] == "common" and row["metric"] == metric]
    return f"{100 * max(found, key=lambda row: row['version'])['value']:.2f}"


def both_on_common_test_rows(run: piebald.Run) -> str:
    """Accuracy and the attack's success."""
    return f"{common_test_rows(run)} / {common_test_rows(run, 'attack_success')}"


def of_paper(study: str, about: Sequence[str], seed: int) -> Case:
    """A run of a paper's benchmark at its full scale, which is evaluated as seldom as its figure allows."""
    sys.path.insert(0, str(HERE.parent / study))
    wanted = next(one for one in listed(study, "full", seed) if names_of(study, one) == tuple(about))
    captured = capture(wanted.begin)
    options = captured.options
    every, read = options["evaluate_every"], mean_of_clients
    if study == "hdafl":
        every = options["rounds"] // 20
    elif study == "metis":
        every, read = options.get("rounds", every), common_test_rows
    elif wanted.part == "replacement":
        read = both_on_common_test_rows
    return Case(
        captured.recipe,
        captured.clients,
        captured.model,
        {name: options[name] for name in ("rounds", "stop") if name in options},
        every,
        read,
        {"metrics": options["metrics"]} if study == "distfl" else {},
        options["runtime"].fleet,
    )


def names_of(study: str, one: Listed) -> tuple[str, ...]:
    """What a row says of a run of a paper's benchmark, see `rows.Row`."""
    if study == "metis":
        return one.part, one.case.removeprefix("power law "), one.label
    if study == "hdafl":
        from settings import NEAREST

        # fewer disjoint clients stand for the paper's where there are fewer classes
        return one.case, str(NEAREST.get(one.job.cohort, one.job.cohort)), one.label
    return (one.part if study == "distfl" else one.case), one.label


def dirichlet(name: str, seed: int) -> Case:
    """CIFAR-10, per-class Dirichlet 0.1 over 100 clients, with the settings of FedSpeed's authors."""
    from shared.networks import with_group_norm

    from piebald.data import cifar10

    clients = Dirichlet(clients=100, alpha=0.1, seed=seed).split(cifar10())
    # as FL-Simulator's README and the defaults of its train.py say; Scaffold's control variates allow no weight decay
    own = {"fedprox": {"mu": 0.1}, "feddyn": {"alpha": 0.1}, "fedadam": {"server_lr": 0.1, "tau": 0.01}}.get(name, {})
    decay = {} if name == "scaffold" else {"weight_decay": 0.001}
    schedule = {"kind": "exponential", "rate": 0.9995 if name == "feddyn" else 0.998}
    recipe = recipes.make(
        name, cohort=10, lr=0.1, batch=50, batches="exact", epochs=5, lr_schedule=schedule,
        augmentation=["random_crop", "horizontal_flip"], **decay, **own,
    )  # fmt: skip
    model = lambda seed: with_group_norm(build_model("resnet18", (3, 32, 32), 10, seed=seed))  # noqa: E731
    return Case(recipe, clients, model, {"rounds": 1000}, 50, common_test_rows)


def brief(case: Case) -> Case:
    """The same for one step of each client and a tiny network, to try the program."""
    shape, classes = case.clients.rows(0, "train").x.shape[1:], len(case.clients.classes)
    if len(shape) != 3:  # CGAU's methods need their own networks, which are small
        return replace(case, limit={"rounds": 1}, every=1)
    model = lambda seed: build_model("cnn_bn", shape, classes, seed=seed, channels=(2, 2))  # noqa: E731
    training = case.recipe.training.model_copy(update={"steps": 1})
    return replace(case, recipe=case.recipe.with_(training=training), model=model, limit={"rounds": 1}, every=1)


def main() -> None:
    """Run, or go on with, one row, and print its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("seed", type=int)
    parser.add_argument("about", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--tf32", action="store_true", help="inputs of products rounded to 10 bits, see Simulator")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    own = options.study == "dirichlet"
    case = dirichlet(*options.about, options.seed) if own else of_paper(options.study, options.about, options.seed)
    case = brief(case) if options.scale == "tiny" else case
    began, label = time.perf_counter(), options.about[-1]
    rounds = case.limit.get("rounds", 100)
    comparison = piebald.compare(
        {label: case.recipe},
        case.clients,
        case.model,
        seeds=(options.seed,),
        out=options.out / folder_name(options.study, options.about),
        evaluate_every=case.every,
        checkpoint_every=max(1, rounds // 4),  # 3.7 GB where 100 clients have a VGG-11 of their own
        measure="none",
        runtime=piebald.Simulator(workers=0, device=options.device, tf32=options.tf32, fleet=case.fleet),
        **case.limit,
        **case.options,
    )
    run = comparison.runs[0]
    chosen = run.meta["runtime"]
    result = {
        "here": case.read(run), "rounds": len(run.rounds), "seconds": round(time.perf_counter() - began, 1),
        "engine": f"{chosen['engine']}, {chosen['stack']}{', TF32' if options.tf32 else ''}",
    }  # fmt: skip
    run.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
