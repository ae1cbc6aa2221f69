"""The paper's own setting beside ours, and the jobs that remake it on one GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import federations as fed
from settings import CLIP, EPSILONS, LG_NET, LOCAL, PAPER, PAPER_PROBES, PAPER_ROUNDS, RULES, TUNED, Training, noise_of

from piebald import recipes
from piebald.methods.recipe import Recipe

CONDITIONS = (  # part, what, the paper's, small, full
    ("category, vgg, resnet (Table 2, Fig. 4)", "clients, images", "100 clients, 4,000 images, 5 types",
     "25 clients of 40 (category), 100 clients of 40 (vgg, resnet)", "100 clients of 40, 5 types"),
    ("category, vgg, resnet", "network", "VGG-11 with pooling, ResNet-18", "two convolutions; both at a quarter width",
     "VGG-11, ResNet-18 at full width"),
    ("category, vgg, resnet", "test images", "10,000, 2,000 for each type", "40 a client, drawn with replacement",
     "2,000 for each type"),
    ("all", "rounds, local epochs, momentum", "50, 5, 0.9", "6 to 15, 1 to 3, 0", "50, 5, 0.9"),
    ("all", "learning rate", "1e-4 (VGG-11), 1e-2 (others)", "0.1; 0.05 (vgg, resnet)", "1e-4 (vgg), 1e-2 (others)"),
    ("all", "batch", "not stated; 32 in the authors' program", "10", "32"),
    ("all", "z, E", "200, 50 %", "50 to 200, 50 %", "200, 50 %"),
    ("all", "threshold", "not stated; KL < 0.2, once after five rounds in the authors' program", "silhouette",
     "silhouette, and the authors' rule"),
    ("all", "repetitions", "3", "3, which redraw the partition", "3, which redraw the partition"),
    ("domains (Table 3, Figs. 3 and 5)", "data", "Office-Home, 65 classes, ResNet-50 trained on ImageNet",
     "Office-Caltech10 through a frozen SqueezeNet", "Office-Home must be there, see docs/papers/distfl.md"),
    ("people (Table 4, Fig. 7)", "data", "HAR, 20 people, a two-layer CNN", "the same data, whole segments for testing",
     "the same"),
    ("mixed, environment_privacy (Figs. 3 and 4)", "epsilon", "0.1 to 0.3; clip, delta and unit not stated",
     "{noises} clips of {clip:g} for epsilon 0.1, 0.2, 0.3 at delta = 1e-5; 0.01 to 0.1 besides", "the same"),
    ("attacks, cifar (Table 5)", "attackers", "5, 10, 15, 20, 40 of 50; labels 0 to 3 and 4 to 7 swapped",
     "6, 12, 24 of 30; 10, 20, 40 of 50; the same labels", "the same, 990 images each: the server keeps 100"),
    ("replacement, scales (Table 6)", "attack", "1 of 50, ResNet-18, factor not stated", "1 of 30 and of 50, 2 to 50",
     "1 of 50, ResNet-18, factor 50"),
)  # fmt: skip


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
            for method in ("FedAvg", "credit", "irls", "gra", "DistFL"):
                recipe = recipes.fedavg(**here)
                if method == "DistFL":
                    recipe = recipes.distfl(normal="server_rows", probes=PAPER_PROBES, **here)
                if method not in ("FedAvg", "DistFL"):
                    recipe = recipe.with_(aggregation=method)
                clients = lambda n=attackers: fed.attacked("cifar10", 50, n, each=990, seed=seed, server=100)  # noqa: E731
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
