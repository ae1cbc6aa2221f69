"""The studies: who the clients are, what they train, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from results import METHODS
from shared.networks import CharacterLstm, with_group_norm
from torch import Tensor, nn

from piebald import partition, recipes
from piebald.core.metrics import survival_loss
from piebald.data import cifar10
from piebald.data.sets.download import prepared
from piebald.methods.recipe import Recipe
from piebald.models import build_model


class CharacterTransformer(nn.Module):
    """A decoder with learned places and normalisation in front of each part.

    Args:
        letters: different characters.
        length: longest sequence.
        width: numbers for each character.
        blocks: number of blocks.
    """

    def __init__(self, letters: int, length: int, width: int, blocks: int) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(letters, width), nn.Embedding(length, width)
        make = lambda: nn.TransformerEncoderLayer(  # noqa: E731
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.ModuleList([make() for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters)

    def forward(self, x: Tensor) -> Tensor:
        """Characters [batch, length] to scores [batch, length, letters]."""
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        seen = self.table(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            seen = block(seen, src_mask=later)
        scores: Tensor = self.head(self.norm(seen))
        return scores


_RECIPES = dict(zip(METHODS, ("local", "fedavg", "fine_tuned"), strict=True))


@dataclass(frozen=True)
class Study:
    """What is trained where.

    Attributes:
        title: for people.
        clients: who has which rows.
        networks: from a seed to a network, by name.
        plans: a recipe and a number of rounds for each method.
        metric: what is scored.
        options: further ones of `piebald.run`.
    """

    title: str
    clients: Any
    networks: Mapping[str, Callable[[int], nn.Module]]
    plans: Mapping[str, tuple[Recipe, int]]
    metric: str
    options: Mapping[str, Any] = field(default_factory=dict)


def seeded(make: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """A network from a seed."""

    def made(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make()

    return made


def alike(rounds: int, **training: Any) -> dict[str, tuple[Recipe, int]]:
    """All methods with the same settings."""
    return {method: (recipes.make(name, **training), rounds) for method, name in _RECIPES.items()}


def pooled(x: Any, y: Any, owner: np.ndarray, names: list[str], test: np.ndarray) -> partition.PooledClients:
    """Clients whose test rows are known: the number of each row's client, and which rows test."""
    parts = {
        split: partition.Lists.of(np.where(kept, owner, -1), len(names))
        for split, kept in (("train", ~test), ("test", test))
    }
    return partition.PooledClients(x, y, parts, names=names)


# -- heart


def heart(scale: str) -> Study:
    """Fed-Heart-Disease of FLamby, whose rows, split and settings these are."""
    import pandas
    from sklearn.model_selection import train_test_split

    frame = pandas.read_csv(prepared("heart", "heart.csv.gz")).drop(columns=["slope", "ca", "thal"]).dropna()
    names = ["cleveland", "hungarian", "switzerland", "va"]
    owner = frame["site"].map({name: number for number, name in enumerate(names)}).to_numpy(np.int64)
    sick = (frame["num"] > 0).to_numpy()
    table = pandas.get_dummies(frame.drop(columns=["site", "num"]), columns=["cp", "restecg"], drop_first=True)
    x, test = torch.tensor(table.to_numpy(np.float32)), np.zeros(len(frame), dtype=bool)
    for number in range(len(names)):
        rows = np.flatnonzero(owner == number)
        counts = np.bincount(sick[rows], minlength=2)
        held = train_test_split(
            np.arange(len(rows)), test_size=1 - 0.66, train_size=0.66, random_state=43,
            stratify=sick[rows] if counts.min() > 2 else None,
        )[1]  # fmt: skip
        test[rows[held]] = True
        mine = x[rows[~test[rows]]]
        x[rows] = (x[rows] - mine.mean(0)) / (mine.std(0) + 1e-9)
    target = torch.tensor(sick, dtype=torch.float32).unsqueeze(1)
    return Study(
        "Heart disease, four hospitals (FLamby's Fed-Heart-Disease)",
        pooled(x, target, owner, names, test),
        {"logistic": seeded(lambda: nn.Linear(x.shape[1], 1))},
        {
            "Local": (recipes.local(optimizer="adam", lr=0.001, batch=4, epochs=50), 1),
            "FedAvg": (recipes.fedavg(lr=0.001, batch=4, steps=100), 15),
            "fine-tuned": (recipes.fine_tuned(lr=0.00316227, batch=4, steps=100, tune_epochs=2), 15),
        },
        "label_accuracy",
        {"loss": "multilabel"},
    )  # fmt: skip


# -- breast cancer


def mean_cox(outputs: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
    """Cox's partial likelihood divided by the rows of the batch, as FLamby does; Piebald's loss divides by events."""
    return survival_loss(outputs, targets) * targets["event"].mean()


def tcga(scale: str, scaled: bool = False) -> Study:
    """Fed-TCGA-BRCA of FLamby, whose rows, split and settings these are; or ages in decades from 58 years."""
    import pandas

    frame = pandas.read_csv(prepared("tcga_brca", "tcga_brca.csv.gz"))
    known = frame.drop_duplicates("site_id").sort_values("site_id")
    inputs = frame.drop(columns=["pid", "tss", "site_id", "site", "split", "event", "time"]).astype("float32")
    if scaled:
        inputs["age_at_index"] = (inputs["age_at_index"] - 58) / 10
    target = {name: torch.tensor(frame[name].to_numpy(np.float32)) for name in ("time", "event")}
    clients = pooled(
        torch.tensor(inputs.to_numpy()), target, frame["site_id"].to_numpy(np.int64), list(known["site"]),
        (frame["split"] == "test").to_numpy(),
    )  # fmt: skip
    ages = "ages in decades" if scaled else "ages in years, as there"
    return Study(
        f"Survival with breast cancer, six regions (FLamby's Fed-TCGA-BRCA), {ages}",
        clients,
        {"linear": seeded(lambda: nn.Linear(inputs.shape[1], 1))},
        {
            "Local": (recipes.local(optimizer="adam", lr=0.1, batch=8, epochs=30), 1),
            "FedAvg": (recipes.fedavg(lr=0.1, batch=8, steps=100), 5),
            "fine-tuned": (recipes.fine_tuned(lr=0.1, batch=8, steps=100, tune_epochs=1), 5),
        },
        "concordance",
        {"loss": mean_cox, "metrics": ["concordance"]},
    )


def tcga_scaled(scale: str) -> Study:
    """The same rows with ages of about the size of the other columns."""
    return tcga(scale, scaled=True)


# -- Shakespeare

LENGTH = 80


def shakespeare(scale: str) -> Study:
    """Next character by role, in windows that do not overlap; the last fifth of each role's text tests."""
    import pandas

    frame = pandas.read_csv(prepared("shakespeare", "shakespeare_roles.csv.gz"), keep_default_na=False)
    texts = {f"{play}: {role}": "\n".join(lines) for (play, role), lines in frame.groupby(["play", "role"])["text"]}
    longest = sorted(texts, key=lambda name: -len(texts[name]))
    names = [name for name in longest if len(texts[name]) >= 1000] if scale == "full" else longest[:10]
    letters = {letter: number for number, letter in enumerate(sorted(set("".join(texts.values()))))}
    x, owner, test = list[list[int]](), list[int](), list[bool]()
    for number, name in enumerate(names):
        codes = [letters[letter] for letter in texts[name]]
        starts = range(0, len(codes) - LENGTH + 1, LENGTH)
        x += [codes[start : start + LENGTH] for start in starts]
        owner += [number] * len(starts)
        test += [place >= 0.8 * len(starts) for place in range(len(starts))]
    tokens = torch.tensor(x)
    width, blocks = (256, 4) if scale == "full" else (64, 2)
    return Study(
        "Shakespeare by role, next character",
        pooled(tokens, tokens, np.array(owner), names, np.array(test)),
        {
            "lstm": seeded(lambda: CharacterLstm(len(letters), len(letters), 256 if scale == "full" else 128, True)),
            "transformer": seeded(lambda: CharacterTransformer(len(letters), LENGTH, width, blocks)),
        },
        alike(100 if scale == "full" else 6, optimizer="adamw", lr=0.005, batch=16, clip=1.0),
        "accuracy",
        {"loss": "language_modelling"},
    )


# -- CIFAR-10

IMAGES = 3000  # for training, at small scale


def images(scale: str) -> Study:
    """ResNet-18 with group norm, crops and flips, each class divided by Dirichlet 0.1 between the clients."""
    full, rows = scale == "full", cifar10()
    if not full:
        assert rows.train is not None
        rows = replace(rows, train=np.random.default_rng(0).permutation(rows.train)[:IMAGES])
    dealt = partition.Dirichlet(clients=100 if full else 10, alpha=0.1, by="class", seed=0).split(rows)
    network = lambda seed: with_group_norm(  # noqa: E731
        build_model("resnet18", (3, 32, 32), 10, seed=seed, width=64 if full else 8)
    )
    training = {
        "batch": 50, "lr": 0.1, "weight_decay": 0.001, "augmentation": ["random_crop", "horizontal_flip"],
        "lr_schedule": {"kind": "exponential", "rate": 0.998},
    }  # fmt: skip
    if full:
        training |= {"epochs": 5, "cohort": 0.1}
    return Study(
        "CIFAR-10, Dirichlet 0.1 for each class, ResNet-18 with group norm and augmentation",
        dealt, {"resnet18": network}, alike(1000 if full else 6, **training), "accuracy",
    )  # fmt: skip


STUDIES = {"heart": heart, "tcga": tcga, "tcga-scaled": tcga_scaled, "shakespeare": shakespeare, "cifar10": images}


@cache
def study(name: str, scale: str) -> Study:
    """A study by name."""
    return STUDIES[name](scale)
