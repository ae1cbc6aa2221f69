"""The federations of the leaderboard, in two tiers: a small network on all of them, and real networks on fewer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "advise"))
import federations
from federations import HELD_OUT, SEED, by_owner

from piebald import data, partition
from piebald.contracts.component import build
from piebald.data import DataSet, Owners
from piebald.data.partition import FastSlow
from piebald.data.partition.three_way_split import SPLITS
from piebald.data.sets.download import prepared
from piebald.models import build_model

INPUTS, OWN, LABELS, UNEQUAL = (
    "inputs are unlike",
    "few rows, answers of their own",
    "labels are unlike",
    "unequal devices",
)
KINDS = {
    INPUTS: "Inputs are unlike, one answer would do",
    OWN: "Few rows of each client, and answers of its own",
    LABELS: "Labels are unlike",
    UNEQUAL: "Half of the devices take five times as long",
}
HIDDEN = [32]
Network = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Entrants:
    """A federation of the leaderboard.

    Attributes:
        name: short, for files.
        words: for people.
        kind: of unlikeness.
        rows: the data set, whose federations count as one where federations are compared.
        deal: makes the clients.
        network: makes the network of a seed: of the tier, or the one that a method brings along (small tier only).
        slow: whether half of the devices take five times as long, and the virtual clock is the budget.
        tier: "small" or "real".
    """

    name: str
    words: str
    kind: str
    rows: str
    deal: Callable[[], Any]
    network: Callable[[int, Network | None], nn.Module]
    slow: bool = False
    tier: str = "small"

    def clients(self) -> Any:
        """Its clients."""
        return self.deal()

    def model(self, seed: int, network: Network | None = None) -> nn.Module:
        """Its network, or that of a method."""
        return self.network(seed, network)

    def fleet(self) -> FastSlow | None:
        """Its devices."""
        return FastSlow(fast=0.01, slow_factor=5.0, share_slow=0.5, first="fast") if self.slow else None


def _small(name: str, kind: str, table: federations.Federation | None = None) -> Entrants:
    """A federation of the adviser's benchmark, with one hidden layer and batch norm."""
    known = federations.BY_NAME[name] if table is None else table

    def network(seed: int, own: Network | None) -> nn.Module:
        rows = federations._rows(known.rows)
        kind, settings = own or ("mlp_bn", {"hidden": HIDDEN})
        return build_model(kind, tuple(rows.x.shape[1:]), len(rows.classes), seed=seed, **settings)

    return Entrants(name, known.words, kind, known.rows, known.clients, network, known.slow)


# -- the real tier


class LastCharacter(nn.Module):
    """The kind of the next character: an embedding of 8 numbers and two LSTM layers (McMahan et al. 2017).

    Args:
        letters: different characters.
        outputs: kinds.
        width: units of a layer.
    """

    def __init__(self, letters: int, outputs: int, width: int = 128) -> None:
        super().__init__()
        self.table = nn.Embedding(letters, 8)
        self.layers = nn.LSTM(8, width, 2, batch_first=True)
        self.classifier = nn.Linear(width, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Characters [batch, length] to scores [batch, outputs]."""
        scores: torch.Tensor = self.classifier(self.layers(self.table(x.long()))[0][:, -1])
        return scores


def _real(
    name: str, words: str, kind: str, rows: str, deal: Callable[[], Any], network: str, **settings: Any
) -> Entrants:
    """A federation with a network that fits the form of its inputs."""

    @cache
    def clients() -> Any:
        return deal()

    def make(seed: int, own: Network | None) -> nn.Module:
        shape, outputs = tuple(clients().rows(0, "train").x.shape[1:]), len(clients().classes)
        if network != "lstm":
            return build_model(network, shape, outputs, seed=seed, **settings)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return LastCharacter(LETTERS, outputs)

    return Entrants(name, words, kind, rows, clients, make, tier="real")


def _images() -> Any:
    """Fifty writers of MNIST digits with all of their rows, 28 x 28 pixels."""
    return build("partition", {**HELD_OUT, "seed": SEED, **by_owner("writer", 50)}).split(data.mnist_writers())


def _series() -> Any:
    """All thirty persons of UCI HAR, nine signals of 128 values; of the windows, which overlap by half, each second."""
    rows = data.har()
    part = federations._vectors(rows, rows.x[::2], np.arange(0, len(rows.y), 2))
    return build("partition", {**HELD_OUT, "seed": SEED, **by_owner("subject", 30)}).split(part)


LENGTH, LETTERS = 40, 128  # characters that the next one is told from; codes of characters


def _text() -> Any:
    """The next letter's kind from the forty before it, for thirty roles."""
    import pandas

    frame = pandas.read_csv(prepared("shakespeare", "shakespeare_roles.csv.gz"), keep_default_na=False)
    common, x, y, owner, groups = " etoahsrnil", [], [], [], []
    for role in frame["client"].value_counts().index[:30]:
        text = "\n".join(frame.loc[frame["client"] == role, "text"]).lower()
        codes = [min(ord(letter), LETTERS - 1) for letter in text]
        for place, start in enumerate(range(0, min(len(text) - LENGTH - 1, 8000), 8)):
            x.append(codes[start : start + LENGTH])
            y.append(common.find(text[start + LENGTH]) + 1)
            owner.append(str(role))
            groups.append(len(set(owner)) * 1000 + place // 50)  # passages stay together, since rows overlap
    rows = DataSet(
        "shakespeare", torch.tensor(x, dtype=torch.float32), torch.tensor(y), classes=["other", *common],
        owners={"role": Owners.of(np.array(owner))}, groups=np.array(groups),
    )  # fmt: skip
    return build("partition", {**HELD_OUT, "seed": SEED, **by_owner("role")}).split(rows)


def _tables() -> Any:
    """The four hospitals' table with gaps and codes, as clients prepare it together."""
    import pandas

    frame = pandas.read_csv(prepared("heart", "heart.csv.gz"))
    frame["sick"] = frame.pop("num") > 0
    kinds = {name: "category" for name in ("cp", "restecg", "slope", "thal")}
    tables = partition.clients_from(
        frame, client="site", target="sick", prepare={"columns": kinds}, seed=SEED, **HELD_OUT
    )
    parts = {
        str(name): {split: (rows.x, rows.y) for split in SPLITS if len(rows := tables.rows(number, split))}
        for number, name in enumerate(tables.names)
    }
    return partition.clients_from(parts, classes=list(tables.classes or ()))


LECTURERS = federations.Federation("lecturers", "lecturers (InstEval)", "lecturers", by_owner("site"))
TRAFFIC = federations.Federation("traffic", "app traffic by capture", "traffic", by_owner("capture"), limit=4000)

# one of each kind first, then the most telling: a competition that is stopped has finished these
FEDERATIONS = (
    _small("heart", OWN),
    _small("har-subjects", INPUTS),
    _small("digits-disjoint", LABELS),
    _small("digits-slow", UNEQUAL),
    _small("exam", OWN),
    _small("mnist-writers", INPUTS),
    _small("contraception", OWN),
    _small("lecturers", OWN, LECTURERS),
    _small("office", INPUTS),
    _small("shakespeare", INPUTS),
    _small("cifar10-disjoint", LABELS),
    _small("cifar10-dirichlet", LABELS),
    _small("mnist-dirichlet", LABELS),
    _small("har-slow", UNEQUAL),
    _small("traffic", INPUTS, TRAFFIC),
    _real("writers-leaf-cnn", "MNIST writers, LEAF's CNN", INPUTS, "writers", _images, "leaf_cnn"),
    _real("har-cnn", "HAR subjects, 1D-CNN", INPUTS, "har", _series, "cnn_1d_bn"),
    _real("shakespeare-lstm", "Shakespeare roles, LSTM", INPUTS, "shakespeare", _text, "lstm"),
    _real("heart-table", "heart hospitals, prepared table", OWN, "heart", _tables, "mlp_bn", hidden=[64, 64]),
)  # fmt: skip
