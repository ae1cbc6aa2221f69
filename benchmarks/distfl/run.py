"""Check DistFL's claims: python benchmarks/distfl/run.py --only category attacks --seeds 0 1 --out runs/distfl

Each run adds one line to OUT/results.jsonl, and is not run again.  `results.py` prints the tables of RESULTS.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

import federations as fed
import numpy as np
from prose import BOUND
from screened import Screened
from settings import (
    ATTACKED,
    BY_ROWS,
    DEEP,
    DEFENCES,
    EPSILONS,
    LG_NET,
    LOCAL,
    NOISES,
    NOISY,
    NOISY_STEP,
    PARTS,
    RULES,
    SCALES,
    TABLE_5,
    TRAINING,
    TUNED,
    WIDE,
    WITH_ROWS,
    Training,
    beside,
    conditions,
    full_jobs,
    hidden,
    network,
    noise_of,
)
from shared.options import reader
from shared.stored import Lines
from sklearn.metrics import adjusted_rand_score

import piebald
from piebald import recipes
from piebald.core.metrics import AttackSuccess, accuracy
from piebald.methods.recipe import Recipe
from piebald.server.result_checks import LONGEST_STEP


def distfl(training: Training = TRAINING, **clustering: Any) -> Recipe:
    """Return DistFL with other settings of its clustering."""
    made = recipes.distfl(**training)
    return made.with_(clustering={**made.clustering.table(), **clustering})


def kcluster(k: int, warm: int = 1, training: Training = TRAINING) -> Recipe:
    """Return K-Cluster: k-means with ten restarts after the first round, or a cold start."""
    return recipes.ifca(k=k, warm=warm, **training)


def fedavg(aggregation: Any = "example_weighted", transforms: Any = ()) -> Recipe:
    """Return FedAvg with another aggregation, and with attacks."""
    return recipes.fedavg(**TRAINING).with_(aggregation=aggregation, transforms=transforms)


def baselines(training: Training) -> dict[str, Recipe]:
    """Return the methods without clusters that every table of accuracies has."""
    return {
        "FedAvg": recipes.fedavg(**training),
        **beside(training),
        LG_NET: recipes.fine_tuned(tune_epochs=int(training["epochs"]), **training),
        "LG-FedAvg": recipes.lg_fedavg(**training),
    }


def by_normal_cluster(**clustering: Any) -> dict[str, Recipe]:
    """Return DistFL by what chooses the normal cluster; only the recipe's own rule needs no labelled rows."""
    rows = {"normal": "server_rows", **clustering}
    return {
        "DistFL": distfl(**clustering),
        "DistFL, clients vote": distfl(normal="vote", **clustering),
        f"DistFL{WITH_ROWS}": distfl(**rows),
        f"DistFL on plain noise{WITH_ROWS}": distfl(**rows, knowledge="noise"),
    }


def with_server_rows() -> dict[str, Recipe]:
    """Return the baselines of Table 5 with the rows by which DistFL may choose its cluster."""
    rules = {"FedAvg": "example_weighted"} | {name: DEFENCES[name] for name in TABLE_5}
    return {f"{name}{WITH_ROWS}": fedavg(Screened(rule=rule)) for name, rule in rules.items()}


def jobs(part: str, seed: int) -> Iterator[tuple[str, str, Recipe, Callable[[], Any], int]]:
    """Yield (case, method, recipe, federation, rounds) of one part."""
    if part == "study":
        cases: dict[str, Callable[[], Any]] = {
            "5 equal clusters": lambda: fed.planted([10] * 5, seed=seed),
            "5 unequal clusters": lambda: fed.planted([20, 12, 9, 6, 3], seed=seed),
            "one cluster": lambda: fed.attacked("cifar10", 50, 0, seed=seed),
            "20 % attack": lambda: fed.attacked("cifar10", 50, 10, seed=seed),
            "40 % attack": lambda: fed.attacked("cifar10", 50, 20, seed=seed),
            "80 % attack": lambda: fed.attacked("cifar10", 50, 40, seed=seed),
        }
        for case, federation in cases.items():
            yield case, "DistFL", distfl(), federation, 12
    if part == "control":  # one distribution: every split is a false one
        for name, count, each in (("digits", 50, 25), ("digits", 20, 25), ("cifar10", 50, 40)):
            alike = lambda n=name, c=count, e=each: fed.attacked(n, c, 0, each=e, seed=seed)  # noqa: E731
            yield f"{name}, {count} IID clients", "DistFL", distfl(), alike, 12
    if part == "scales":
        bound = lambda: fed.honest("digits", 30, 1, each=30, seed=seed, server=60)  # noqa: E731
        yield BOUND, "FedAvg", fedavg(), bound, 8
        for scale in SCALES:
            one = [{"kind": "model_replacement", "clients": [0], "scale": scale}]
            struck = lambda: fed.attacked("digits", 30, 1, each=30, seed=seed, server=60)  # noqa: E731
            yield f"scale {scale:g}", "DistFL", distfl().with_(transforms=one), struck, 8
            for method in ("FedAvg", "median", "IRLS", "GRA", "Credit"):
                aggregation = "example_weighted" if method == "FedAvg" else DEFENCES[method]
                yield f"scale {scale:g}", method, fedavg(aggregation, one), struck, 8
            for method, recipe in beside(TRAINING, one).items():
                if method != LOCAL or scale == SCALES[0]:  # it is the same at every scale
                    yield f"scale {scale:g}", method, recipe, struck, 8
    if part == "category":
        methods = {
            "DistFL": distfl(),
            "DistFL, every third round": distfl(every=3),
            "K-Cluster (K = 5)": kcluster(5),
            "K-Cluster (K = 5), cold start": kcluster(5, warm=0),
            **{f"DistFL, {name}": distfl(**rule) for name, rule in RULES.items()},
            "DistFL, loss as published": distfl(loss="published"),
            "CFL": recipes.cfl(eps1=0.6, eps2=0.2, **TRAINING),
            "CFL, gamma_max = 0.7": recipes.cfl(eps1=0.6, eps2=0.2, gamma_max=0.7, **TRAINING),
            **baselines(TRAINING),
        }
        for method, recipe in methods.items():
            yield "CIFAR-10, 25 clients, 5 types", method, recipe, lambda: fed.planted([5] * 5, seed=seed), 6
    if part in ("domains", "people"):
        epochs = 3 if part == "domains" else 1  # a person has six times the rows
        here = {**TRAINING, "epochs": epochs}
        methods = {"DistFL": distfl(here)}
        methods |= {f"DistFL, {name}": distfl(here, **rule) for name, rule in RULES.items()}
        methods |= {BY_ROWS: distfl(here).with_(aggregation="example_weighted"), **baselines(here)}
        methods |= {f"K-Cluster (K = {k})": kcluster(k, training=here) for k in (2, 3, 4)}
        for method, recipe in methods.items():
            yield part, method, recipe, lambda: getattr(fed, part)(seed), 15
    if part == "attacks":
        for attackers in (6, 12, 24):
            case = f"digits, {attackers} of 30 flip labels"
            bound = lambda n=attackers: fed.honest("digits", 30, n, each=30, seed=seed)  # noqa: E731
            attack = lambda n=attackers: fed.attacked("digits", 30, n, each=30, seed=seed, server=60)  # noqa: E731
            yield case, BOUND, fedavg(), bound, 15
            yield case, "FedAvg", fedavg(), attack, 15
            yield case, f"DistFL{WITH_ROWS}", distfl(normal="server_rows"), attack, 15
            yield case, f"DistFL on plain noise{WITH_ROWS}", distfl(normal="server_rows", knowledge="noise"), attack, 15
            for method, recipe in beside(TRAINING).items():
                yield case, method, recipe, attack, 15
            for method, aggregation in DEFENCES.items():
                yield case, method, fedavg(aggregation), attack, 15
    if part == "helped":  # most clients attack, with clients who have validation rows to vote by
        case, more = "digits, 24 of 30 flip labels", {"each": 30, "seed": seed, "server": 60, "held": 5}
        attack = lambda: fed.attacked("digits", 30, 24, **more)  # noqa: E731
        yield case, BOUND, fedavg(), lambda: fed.honest("digits", 30, 24, **more), 15
        rules = {name: fedavg(DEFENCES[name]) for name in (*TABLE_5, "FLTrust")}
        methods = {"FedAvg": fedavg(), **by_normal_cluster(), **beside(TRAINING), **rules, **with_server_rows()}
        for method, recipe in methods.items():
            yield case, method, recipe, attack, 15
    if part == "replacement":
        attack_settings = {"kind": "model_replacement", "clients": [0], "scale": 30.0}
        for name, count, each in (("digits", 30, 30), ("cifar10", 50, 40)):
            case = f"{name}, 1 of {count} flips labels and replaces the model"
            bound = lambda n=name, c=count, e=each: fed.honest(n, c, 1, each=e, seed=seed, server=60)  # noqa: E731
            attack = lambda n=name, c=count, e=each: fed.attacked(n, c, 1, each=e, seed=seed, server=60)  # noqa: E731
            yield case, BOUND, fedavg(), bound, 8
            yield case, "FedAvg", fedavg(transforms=[attack_settings]), attack, 8
            yield case, "DistFL", distfl().with_(transforms=[attack_settings]), attack, 8
            for method, recipe in beside(TRAINING, [attack_settings]).items():
                yield case, method, recipe, attack, 8
            for method in ("IRLS", "GRA", "Credit", "median", "norm clipping", "multi-Krum"):
                yield case, method, fedavg(DEFENCES[method], [attack_settings]), attack, 8
    if part == "cifar":
        for attackers in (10, 20, 40):
            case = f"CIFAR-10, {attackers} of 50 flip labels"
            more = {"seed": seed, "server": 100, "held": 10}
            bound = lambda n=attackers: fed.honest("cifar10", 50, n, **more)  # noqa: B023, E731
            attack = lambda n=attackers: fed.attacked("cifar10", 50, n, **more)  # noqa: B023, E731
            yield case, BOUND, fedavg(), bound, 12
            yield case, "FedAvg", fedavg(), attack, 12
            for method, recipe in {**by_normal_cluster(probes=100), **beside(TRAINING), **with_server_rows()}.items():
                yield case, method, recipe, attack, 12
            for method in ("median", "multi-Krum", "FLTrust", "IRLS", "GRA", "Credit"):
                yield case, method, fedavg(DEFENCES[method]), attack, 12
    if part in NOISY:
        yield from private_jobs(part, seed)
    if part == "rows":
        for noise in (0.0, 0.6, 1.0, 2.0, 4.0):
            recipe = recipes.dp_sgd(lr=2.0, epochs=1, batch=100, clip=1.0, noise=noise)
            yield f"noise {noise:g}", "FedAvg of DP-SGD", recipe, lambda: fed.writers(seed), 5
        usual = recipes.fedavg(lr=0.5, epochs=1, batch=100, batches="exact")
        yield "not hidden", "FedAvg", usual, lambda: fed.writers(seed), 5
    if part in ("vgg", "resnet"):
        methods = {"DistFL": distfl(DEEP, probes=100), **baselines(DEEP), "K-Cluster (K = 5)": kcluster(5, 1, DEEP)}
        for method, recipe in methods.items():
            yield f"{part}, 100 clients, 5 types", method, recipe, lambda: fed.planted([20] * 5, seed=seed), 12
    if part == "wide":  # clusters only: training to the end takes a GPU
        case, recipe = "VGG-11 at full width, 100 clients", distfl(WIDE, probes=50, steps=20)
        yield case, "DistFL", recipe, lambda: fed.planted([20] * 5, seed=seed), 3


def private_jobs(part: str, seed: int) -> Iterator[tuple[str, str, Recipe, Callable[[], Any], int]]:
    """Yield the jobs of Figs. 3 and 4: noise on the uploads of clients whose domains, or classes, differ.

    "mixed" is Fig. 4 at the paper's epsilons, "environment_privacy" Fig. 3, both with smaller noises besides; "privacy"
    is Fig. 4 with the smaller ones only.  K-Cluster is not among them: its clients tell which model fits their rows,
    which no noise hides, so it is refused beside noise.
    """
    domains = part == "environment_privacy"
    federation = fed.domains if domains else lambda s: fed.planted([5] * 5, seed=s)
    rounds, probes = (8, 100) if domains else (6, 50)  # types are as in the part "category"
    levels = [(f"noise {noise:g}", noise) for noise in NOISES]
    if part != "privacy":
        levels += [(f"epsilon {epsilon:g}", noise_of(epsilon)) for epsilon in EPSILONS]
    for case, noise in levels:
        methods = {"DistFL": distfl(probes=probes), "FedAvg": fedavg()}
        for method, recipe in methods.items():
            yield case, method, hidden(recipe, noise), lambda: federation(seed), rounds
    for method, recipe in baselines(TRAINING).items():
        if method != "FedAvg":  # which is among the above
            yield "noise 0", method, recipe, lambda: federation(seed), rounds


def run_job(
    part: str, case: str, method: str, recipe: Recipe, federation: Any, rounds: int, seed: int, full: bool = False
) -> Any:
    """Run one job and return what the tables need of it; `full` takes the paper's networks."""
    clients, truth = federation()
    metrics: dict[str, Any] = {"accuracy": accuracy}
    if part in ATTACKED:
        metrics["attack_success"] = AttackSuccess.of_pairs(fed.PAIRS)
    model = network(part, tuple(clients.rows(0, "train").x.shape[1:]), full)
    began = time.perf_counter()
    run = piebald.run(
        recipe, clients, model, rounds=rounds, seed=seed, metrics=metrics, evaluate_every=rounds,
        longest_step=NOISY_STEP if part in NOISY else LONGEST_STEP, runtime=piebald.Simulator(workers=0),
    )  # fmt: skip
    seconds = time.perf_counter() - began
    main = run.main
    last = [row for row in run.scores if row["version"] == rounds]
    scored = "personal" if any(row["model"] == "personal" for row in last) else "global"
    own = {
        r["client"]: r["value"]
        for r in last
        if r["client"] is not None and r["metric"] == "accuracy" and r["model"] == scored
    }
    common = {r["metric"]: r["value"] for r in last if r["split"] == "common"}
    if part in ATTACKED and method in (TUNED, LOCAL):
        common = of_honest(last, truth, metrics)
    found, history = [], []
    labels = dict.fromkeys(range(len(truth)), 0)
    for version in range(1, rounds + 1):
        labels |= {
            r["client"]: r["cluster"] for r in run.results if r["version"] == version and r["cluster"] is not None
        }
        history.append([labels[client] for client in range(len(truth))])
        found.append(adjusted_rand_score(truth, history[-1]))
    extraction = sum(row["value"]["seconds"] for row in run.notes if row["name"] == "clustering")
    steps = [row["value"]["steps"] for row in run.notes if row["name"] == "clustering"]
    return {
        "part": part, "case": case, "method": method, "seed": seed, "rounds": rounds,
        "accuracy": float(np.mean([*own.values()])), "by_client": [own[client] for client in sorted(own)],
        "honest": float(np.mean([v for c, v in own.items() if truth[c] >= 0])) if own else None,
        "common": common, "ari": found, "clusters": [len(set(one)) for one in history], "labels": history,
        "seconds": seconds, "extraction": extraction,
        "truth": truth.tolist(), "privacy": run.meta["privacy"], "engine": run.meta["runtime"]["engine"],
        "main": main, "steps": steps, "mb": sum(r["bytes_up"] + r["bytes_down"] for r in run.results) / 1e6,
    }  # fmt: skip


def of_honest(last: Sequence[Mapping[str, Any]], truth: Any, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean of honest clients' own models on their own test rows, which all are drawn from the same ones."""
    rows = [r for r in last if r["client"] is not None and r["model"] == "personal" and truth[r["client"]] >= 0]
    return {name: float(np.mean([r["value"] for r in rows if r["metric"] == name])) for name in metrics}


def main() -> None:
    """Run the jobs that have not been run."""
    options = reader(
        __doc__, only=PARTS, seeds=[0], cases=[""], methods=[""], scale=("small", "full"), dry_run=False,
        out=Path("runs/distfl"),
    ).parse_args()  # fmt: skip
    if options.dry_run:
        print(conditions(options.scale))
        return
    full = options.scale == "full"
    fed.torch_threads()
    kept = Lines(options.out / "results.jsonl", "part", "case", "method", "seed")
    done = kept.done()
    for seed in options.seeds:
        for part in options.only:
            for case, method, recipe, federation, rounds in (full_jobs if full else jobs)(part, seed):
                wanted = any(text in case for text in options.cases) and any(text in method for text in options.methods)
                if not wanted or (part, case, method, seed) in done:
                    continue
                line = run_job(part, case, method, recipe, federation, rounds, seed, full)
                kept.add(line)
                brief = f"{line['accuracy']:.3f} common {line['common']} ARI {line['ari'][-1]:.2f}"
                took = (
                    f"{line['clusters'][-1]} clusters, {line['seconds']:.0f} s ({line['extraction']:.0f} s extraction)"
                )
                print(part, case, method, seed, brief, took, flush=True)


if __name__ == "__main__":
    main()
