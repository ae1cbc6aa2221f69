"""The federations of the leaderboard, in tiers.

small: one hidden layer on all of them, every method.  real: the same clients of four of them with a network that fits
the form of their inputs, and a few methods of each family; a run of FedAvg takes a processor about 1 second with the
prepared table, 6 with the 1D-CNN, 15 with the LSTM and 30 with LEAF's CNN.  large: all clients of these with such
networks and every method, for a GPU.  survival: patients, scored by concordance, whose points are not added to those of
accuracy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "advise"))
import federations
from federations import HELD_OUT, SEED, by_owner
from shared.networks import CharacterLstm

from piebald import data, partition
from piebald.contracts.component import build
from piebald.data import DataSet, Owners
from piebald.data.partition import FastSlow
from piebald.data.partition.leakage import SPLITS
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
SMALL, REAL, LARGE, SURVIVAL = TIERS = ("small", "real", "large", "survival")
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
        tier: "small", "real", "large" or "survival".
        metric: what is scored; of others than accuracy no single rows are kept.
        options: of `piebald.run`, such as its loss.
    """

    name: str
    words: str
    kind: str
    rows: str
    deal: Callable[[], Any]
    network: Callable[[int, Network | None], nn.Module]
    slow: bool = False
    tier: str = SMALL
    metric: str = "accuracy"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def data_set(self) -> str:
        """The data set that its rows are from."""
        return {"writers": "mnist"}.get(self.rows, self.rows)

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


def _real(
    name: str,
    words: str,
    kind: str,
    rows: str,
    deal: Callable[[], Any],
    network: str,
    tier: str = REAL,
    **settings: Any,
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
            return CharacterLstm(LETTERS, outputs, 128)

    return Entrants(name, words, kind, rows, clients, make, tier=tier)


def _dealt(rows: DataSet, owner: str, clients: int, **more: Any) -> Any:
    return build("partition", {**HELD_OUT, "seed": SEED, **by_owner(owner, clients), **more}).split(rows)


def _images(large: bool = False) -> Any:
    """The writers of the small tier, 28 x 28 pixels; or fifty with all of their rows."""
    rows = data.mnist_writers()
    if large:
        return _dealt(rows, "writer", 50)
    own = rows.owners["writer"]
    keep = np.flatnonzero(np.isin(np.array(own.names)[own.codes], federations._rows("writers").owners["writer"].names))
    return _dealt(federations._vectors(rows, rows.x[keep].float(), keep), "writer", 12, limit=1500)


def _series(large: bool = False) -> Any:
    """The ten persons and rows of the small tier, nine signals of 128 values; or all thirty with each second window."""
    rows, more = data.har(), {} if large else {"limit": 1500}
    # neighbouring windows share half their samples
    part = federations._vectors(rows, rows.x[::2], np.arange(0, len(rows.y), 2))
    return _dealt(part, "subject", 30 if large else 10, **more)


LENGTH, LETTERS = 40, 128  # characters that the next one is told from; codes of characters


def _text(large: bool = False) -> Any:
    """The next letter's kind from the forty before it, for the ten roles of the small tier, or for thirty."""
    import pandas

    frame = pandas.read_csv(prepared("shakespeare", "shakespeare_roles.csv.gz"), keep_default_na=False)
    roles, most = (30, 8000) if large else (10, 1750)
    common, x, y, owner, groups = " etoahsrnil", [], [], [], []
    for number, role in enumerate(frame["client"].value_counts().index[:roles]):
        text = "\n".join(frame.loc[frame["client"] == role, "text"]).lower()
        codes = [min(ord(letter), LETTERS - 1) for letter in text]
        for place, start in enumerate(range(0, min(len(text) - LENGTH - 1, most), 8)):
            x.append(codes[start : start + LENGTH])
            y.append(common.find(text[start + LENGTH]) + 1)
            owner.append(str(role))
            groups.append(number * 1000 + place // 50)  # passages stay together, since rows overlap
    rows = DataSet(
        "shakespeare", torch.tensor(x, dtype=torch.float32), torch.tensor(y), classes=["other", *common],
        owners={"role": Owners.of(np.array(owner))}, groups=np.array(groups),
    )  # fmt: skip
    return _dealt(rows, "role", roles)


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


# -- survival


def _patients() -> Any:
    """Breast cancer patients of six regions (TCGA-BRCA): when they died, or were last seen alive."""
    import pandas

    frame = pandas.read_csv(prepared("tcga_brca", "tcga_brca.csv.gz"))
    inputs = frame.drop(columns=["pid", "tss", "site_id", "site", "split", "event", "time"])
    inputs["age_at_index"] = (inputs["age_at_index"] - 58) / 10  # about the size of the other columns, which are 0 or 1
    target = {name: frame[name].to_numpy(np.float32) for name in ("time", "event")}
    parts = {
        str(site): (inputs[own].to_numpy(np.float32), {name: values[own] for name, values in target.items()})
        for site in frame["site"].unique() for own in [(frame["site"] == site).to_numpy()]
    }  # fmt: skip
    return partition.clients_from(parts, seed=SEED, **HELD_OUT)


def _survival() -> Entrants:
    """Cancer patients, with the network of the small tier."""
    clients = cache(_patients)

    def network(seed: int, own: Network | None) -> nn.Module:
        kind, settings = own or ("mlp_bn", {"hidden": HIDDEN})
        return build_model(kind, tuple(clients().rows(0, "train").x.shape[1:]), 1, seed=seed, **settings)

    return Entrants(
        "cancer", "cancer patients of six regions", OWN, "tcga", clients, network, tier=SURVIVAL,
        metric="concordance", options={"loss": "survival", "metrics": ["concordance"]},
    )  # fmt: skip


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
    _real("heart-table", "heart hospitals, prepared table, two layers of 64", OWN, "heart", _tables, "mlp_bn",
          hidden=[64, 64]),
    _real("har-cnn", "HAR subjects, 1D-CNN", INPUTS, "har", _series, "cnn_1d_bn"),
    _real("shakespeare-lstm", "Shakespeare roles, LSTM", INPUTS, "shakespeare", _text, "lstm"),
    _real("writers-leaf-cnn", "MNIST writers, LEAF's CNN", INPUTS, "writers", _images, "leaf_cnn"),
    _real("writers-50", "50 MNIST writers, LEAF's CNN", INPUTS, "writers", partial(_images, True), "leaf_cnn", LARGE),
    _real("har-30", "30 HAR subjects, 1D-CNN", INPUTS, "har", partial(_series, True), "cnn_1d_bn", LARGE),
    _real("shakespeare-30", "30 Shakespeare roles, LSTM", INPUTS, "shakespeare", partial(_text, True), "lstm", LARGE),
    _survival(),
)  # fmt: skip
