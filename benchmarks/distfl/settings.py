"""Settings of the benchmark: its parts, training, networks and defences; the paper's own beside ours, and its jobs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import federations as fed
from shared.stored import table

from piebald import recipes
from piebald.methods.recipe import Recipe
from piebald.models import build_model

Training = dict[str, Any]
PARTS = (
    "study", "control", "category", "vgg", "resnet", "wide", "domains", "people", "attacks", "helped", "cifar",
    "replacement", "scales", "privacy", "mixed", "environment_privacy", "rows",
)  # fmt: skip
ATTACKED = ("attacks", "helped", "cifar", "replacement", "scales")  # parts with attackers
NOISY = ("privacy", "mixed", "environment_privacy")  # parts with noise on the uploads
NOISY_STEP = 1e9  # the noise of the paper's epsilons alone is longer than an update may be otherwise
TUNED, LOCAL = "FedAvg + one unsent epoch", "Local"  # the two methods without a model for all
WITH_ROWS = ", the server's rows"  # 60 or 100 labelled ones, which the paper's methods do not have
BY_ROWS = "DistFL, clients weighted by rows"
RULES: dict[str, dict[str, Any]] = {  # what else may say who is near (section 4.3 prints no threshold)
    "the authors' rule": {"find": "linked", "first": 5, "every": 0, "statistics": "running", "loss": "published"},
    "single-round gap": {"find": "gap"},
    "linked in each round": {"find": "linked"},
}
LG_NET = "LG-Net (fine-tuning)"  # what the paper runs under this name (section 5.1.4); LG-FedAvg is another method
TRAINING: Training = {"lr": 0.1, "epochs": 3, "batch": 10, "batches": "exact"}
DEEP: Training = {
    "lr": 0.05,
    "epochs": 3,
    "batch": 10,
    "batches": "exact",
}  # a hundred clients with the networks of Table 2
WIDE: Training = {"lr": 0.05, "epochs": 1, "batch": 20, "batches": "exact"}

SCALES = (2.0, 4.0, 8.0, 16.0, 30.0, 50.0)  # of a lone attacker's update
CLIP, DELTA = 5.0, 1e-5
EPSILONS = (0.1, 0.2, 0.3)  # of Figs. 3 and 4
NOISES = (0.0, 0.01, 0.03, 0.1)  # in clips: none, and what the small network still learns under


def noise_of(epsilon: float) -> float:
    """Standard deviation in clips by the classic calibration (Dwork and Roth 2014, theorem A.1), for epsilon < 1."""
    return math.sqrt(2 * math.log(1.25 / DELTA)) / epsilon


# the paper's own setting (section 5.1.5), for one GPU: 50 rounds, 5 local epochs, momentum 0.9, batch not stated
PAPER: dict[str, Training] = {
    "vgg": {"lr": 1e-4, "epochs": 5, "batch": 32, "batches": "exact", "momentum": 0.9},
    "resnet": {"lr": 1e-2, "epochs": 5, "batch": 32, "batches": "exact", "momentum": 0.9},
    "people": {"lr": 1e-2, "epochs": 5, "batch": 32, "batches": "exact", "momentum": 0.9},
}
# of Tables 2, 5 and 6 and of Fig. 4
FULL_NETWORKS = {
    "vgg": "vgg11", "resnet": "resnet18", "mixed": "vgg11", "cifar": "vgg11", "replacement": "resnet18",
}  # fmt: skip
PAPER_ROUNDS, PAPER_PROBES, PAPER_SEEDS = 50, 200, (0, 1, 2)

TABLE_5 = ("IRLS", "GRA", "Credit")  # the aggregations that the paper compares with
DEFENCES: dict[str, Any] = {
    "median": "median",
    "trimmed mean": {"kind": "trimmed_mean", "attackers": 0.4},
    "Krum": {"kind": "krum", "attackers": 0.4},
    "multi-Krum": {"kind": "multi_krum", "attackers": 0.4},
    "Bulyan": {"kind": "bulyan", "attackers": 0.2},
    "geometric median": "geometric_median",
    "norm clipping": "norm_clipping",
    "IRLS": "irls",
    "GRA": "gra",
    "Credit": "credit",
    "FLTrust": "fltrust",
    "FoolsGold": "foolsgold",
}


def network(part: str, shape: tuple[int, ...], full: bool = False) -> Callable[[int], Any]:
    """Return a function that makes the network of one part from a seed; `full` is the paper's network and width."""
    if full and part in FULL_NETWORKS:
        return lambda seed: build_model(FULL_NETWORKS[part], shape, 10, seed=seed)
    if part in ("vgg", "resnet"):  # a quarter of the width, a sixteenth of the work
        return lambda seed: build_model(FULL_NETWORKS[part], shape, 10, seed=seed, width=16)
    if part == "wide":
        return lambda seed: build_model("vgg11", shape, 10, seed=seed)
    if part == "rows":  # no batch norm: it mixes rows
        return lambda seed: build_model("mlp", shape, 10, seed=seed, hidden=(64,))
    return small_network(shape)


def small_network(shape: tuple[int, ...]) -> Callable[[int], Any]:
    """Return a function that makes the small network with batch norm for inputs of this shape."""
    name = {3: "cnn_bn", 2: "cnn_1d_bn", 1: "mlp_bn"}[len(shape)]
    outputs = {3: 10, 2: 6, 1: 10}[len(shape)]
    settings = {"channels": (8, 8)} if shape[-1] == 8 else {}  # the digits are 8 pixels wide
    return lambda seed: build_model(name, shape, outputs, seed=seed, **settings)


CONDITIONS = table(Path(__file__).with_name("conditions.toml"))["rows"]  # part, what, the paper's, small, full


def conditions(scale: str) -> str:
    """Return the paper's conditions beside those of a scale, one line each."""
    noises = ", ".join(f"{noise_of(epsilon):.0f}" for epsilon in EPSILONS)
    head = f"{'part':44} | {'what':32} | {'the paper':76} | {scale}"
    lines = [head, "-" * len(head)]
    for part, what, paper, small, full in CONDITIONS:
        ours = (small if scale == "small" else full).format(noises=noises, clip=CLIP)
        lines.append(f"{part:44} | {what:32} | {paper:76} | {ours}")
    return "\n".join(lines)


def full_jobs(part: str, seed: int) -> Iterator[tuple[str, str, Recipe, Callable[[], Any], int]]:
    """Yield the jobs of one part in the paper's own setting; parts whose data are not public have none here."""
    if part in ("vgg", "resnet", "people"):
        here = PAPER[part]
        methods: dict[str, Recipe] = {
            "DistFL": recipes.distfl(probes=PAPER_PROBES, **here),
            "FedAvg": recipes.fedavg(**here),
            **beside(here),
            LG_NET: recipes.fine_tuned(tune_epochs=5, **here),
            "LG-FedAvg": recipes.lg_fedavg(**here),
        }
        for name, rule in RULES.items():
            methods[f"DistFL, {name}"] = methods["DistFL"].with_(clustering={"kind": "distfl", **rule})
        for k in (5,) if part != "people" else (2, 3, 4):
            methods[f"K-Cluster (K = {k})"] = recipes.ifca(k=k, **here)
        for method, recipe in methods.items():
            yield part, method, recipe, lambda: _federation(part, seed), PAPER_ROUNDS
    if part == "mixed":  # Fig. 4: its clip is not printed, so it is ours
        here = PAPER["vgg"]
        for epsilon in EPSILONS:
            for method, recipe in (
                ("DistFL", recipes.distfl(probes=PAPER_PROBES, **here)), ("FedAvg", recipes.fedavg(**here)),
            ):  # fmt: skip
                noisy = hidden(recipe, noise_of(epsilon))
                yield f"epsilon {epsilon:g}", method, noisy, lambda: _federation("vgg", seed), PAPER_ROUNDS
        for method, recipe in beside(here).items():
            yield "noise 0", method, recipe, lambda: _federation("vgg", seed), PAPER_ROUNDS
    if part in ("cifar", "replacement"):
        here = PAPER["vgg" if part == "cifar" else "resnet"]
        for attackers in (5, 10, 15, 20, 40) if part == "cifar" else (1,):
            attack = [] if part == "cifar" else [{"kind": "model_replacement", "clients": [0], "scale": 50.0}]
            methods = {
                "FedAvg": recipes.fedavg(**here),
                **{rule: recipes.fedavg(**here).with_(aggregation=DEFENCES[rule]) for rule in TABLE_5},
                "DistFL": recipes.distfl(probes=PAPER_PROBES, **here),
                f"DistFL{WITH_ROWS}": recipes.distfl(normal="server_rows", probes=PAPER_PROBES, **here),
            }
            clients = lambda n=attackers: fed.attacked("cifar10", 50, n, each=990, seed=seed, server=100)  # noqa: E731
            for method, recipe in methods.items():
                yield f"{attackers} of 50", method, recipe.with_(transforms=attack), clients, PAPER_ROUNDS
            for method, recipe in beside(here, attack).items():
                yield f"{attackers} of 50", method, recipe, clients, PAPER_ROUNDS


def beside(training: Training, transforms: Any = ()) -> dict[str, Recipe]:
    """Return what every table has beside FedAvg.  Local sends nothing, so that no transform reaches it."""
    sent = {
        "FedAvg, equal weights": recipes.fedavg(**training).with_(aggregation="equal_weighted"),
        TUNED: recipes.fine_tuned(tune_epochs=1, **training),
    }
    return {name: recipe.with_(transforms=transforms) for name, recipe in sent.items()} | {
        LOCAL: recipes.local(**training)
    }


def hidden(recipe: Recipe, noise: float) -> Recipe:
    """Return a recipe with noise on the uploads, in clips.

    No noise hides the running statistics of batch norms, so clients keep them; DistFL, which would read them, compares
    on plain noise then.
    """
    gaussian = [{"kind": "gaussian", "clip": CLIP, "noise": noise, "where": "client"}]
    kept = recipe.with_(transforms=gaussian, sharing={"kind": "all_except", "private_layers": ["*running_*"]})
    if recipe.clustering is None or recipe.clustering.kind != "distfl":
        return kept
    return kept.with_(clustering={**recipe.clustering.table(), "knowledge": "noise"})


def _federation(part: str, seed: int) -> Any:
    return fed.people(seed) if part == "people" else fed.planted([20] * 5, tests=2000, seed=seed)
