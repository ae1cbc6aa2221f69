"""The federations of the benchmark: eight data sets, each divided in several ways, small enough for one CPU core.

Inputs are vectors (averaged pixels, statistics of signals, one-hot characters), so that one small network with batch
norm serves all and every recipe can train it.  How rows are held out follows the traps of the data: HAR by recording,
Shakespeare in time, all others at random inside a client.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import adaptive_avg_pool2d

from piebald import data
from piebald.contracts import Clients
from piebald.contracts.component import build
from piebald.data import DataSet, Owners
from piebald.data.partition import FastSlow
from piebald.models import build_model

SEED = 7  # of rows and partitions; runs have seeds of their own
HELD_OUT = {"validation": 0.2, "test": 0.4}
TABLES = tomllib.loads(Path(__file__).with_name("tables.toml").read_text("utf-8"))
PIXELS = 8


@dataclass(frozen=True)
class Federation:
    """One federation.

    Attributes:
        name: short, for files.
        words: for people: "MNIST writers".
        rows: the name of a function of this file that gives the data set.
        partition: the table of the partition.
        labels_of: clients whose labels are swapped in all their rows, test rows too: their truth is another.
        slow: whether half of the devices take five times as long.
        loss, metric: what is trained and what is scored; higher is better.
    """

    name: str
    words: str
    rows: str
    partition: dict[str, Any]
    labels_of: tuple[int, ...] = ()
    slow: bool = False
    limit: int = field(default=1500)
    loss: str | None = None
    metric: str = "accuracy"

    @property
    def data_set(self) -> str:
        """The data set that its rows are from."""
        return {"writers": "mnist"}.get(self.rows, self.rows)

    def clients(self) -> Clients:
        """Its clients."""
        rows = swapped(_rows(self.rows), self) if self.labels_of else _rows(self.rows)
        table = {**HELD_OUT, "seed": SEED, **self.partition}
        if self.labels_of:
            return rows
        if len(rows) > self.limit:
            table["limit"] = self.limit
        return build("partition", table).split(rows)

    def model(self, seed: int) -> torch.nn.Module:
        """Its network."""
        rows = _rows(self.rows)
        return build_model("mlp_bn", tuple(rows.x.shape[1:]), len(rows.classes), seed=seed, hidden=[32])

    def fleet(self) -> FastSlow | None:
        """Its devices."""
        return FastSlow(fast=0.01, slow_factor=5.0, share_slow=0.5, first="fast") if self.slow else None


def swapped(rows: DataSet, federation: Federation) -> Clients:
    """Clients of which some call class k what the others call k + 5, in all their rows."""
    from piebald.data.partition import clients_from

    table = {"seed": SEED, "test": 0.0, **federation.partition}
    if len(rows) > federation.limit:
        table["limit"] = federation.limit
    dealt = build("partition", table).split(rows)
    half = len(rows.classes) // 2
    parts = {}
    for client in range(len(dealt)):
        own = dealt.rows(client, "train")
        y = (own.y + half) % (2 * half) if client in federation.labels_of else own.y
        parts[str(client)] = (own.x.numpy(), y.numpy())
    return clients_from(parts, seed=SEED, classes=list(rows.classes), **HELD_OUT)


def _folder() -> Path:
    """The folder of prepared data sets."""
    return Path(os.environ.get("PIEBALD_DATA", "data"))


@cache
def _rows(name: str) -> DataSet:
    makers: dict[str, Callable[[], DataSet]] = {
        "digits": _digits, "mnist": _mnist, "writers": _writers, "cifar10": _cifar10, "har": _har, "office": _office,
        "shakespeare": _shakespeare, "traffic": _traffic, "tumours": data.breast_cancer, "rules": _rules,
    }  # fmt: skip
    return table_rows(name) if name in TABLES else makers[name]()


def _vectors(rows: DataSet, x: torch.Tensor, keep: np.ndarray | None = None) -> DataSet:
    """A data set with other inputs, standardised, and without published parts."""
    kept = np.arange(len(x)) if keep is None else keep
    x = (x - x.mean(0)) / x.std(0).clamp_min(1e-3)
    owners = {name: Owners.of(np.array(own.names)[own.codes[kept]]) for name, own in rows.owners.items()}
    groups = None if rows.groups is None else rows.groups[kept]
    return DataSet(name=rows.name, x=x.float(), y=rows.y[kept], classes=rows.classes, owners=owners, groups=groups)


def _pixels(rows: DataSet, keep: np.ndarray) -> torch.Tensor:
    images = rows.x[keep].float() / 255
    images = images if images.dim() == 4 else images[:, None]
    return adaptive_avg_pool2d(images, PIXELS).flatten(1)


def _some(count: int, most: int, name: str) -> np.ndarray:
    return np.sort(np.random.default_rng([SEED, *name.encode()]).permutation(count)[:most])


def _digits() -> DataSet:
    rows = data.digits()
    return _vectors(rows, rows.x.float().flatten(1))


def _mnist() -> DataSet:
    rows = data.mnist_writers()
    keep = _some(len(rows.y), 3000, "mnist")
    return _vectors(rows, _pixels(rows, keep), keep)


def _writers() -> DataSet:
    """Twelve writers with at least 110 digits."""
    rows = data.mnist_writers()
    codes = rows.owners["writer"].codes
    chosen = np.flatnonzero(np.bincount(codes) >= 110)[::20][:12]
    keep = np.flatnonzero(np.isin(codes, chosen))
    return _vectors(rows, _pixels(rows, keep), keep)


def _cifar10() -> DataSet:
    rows = data.cifar10()
    keep = _some(len(rows.y), 3000, "cifar10")
    return _vectors(rows, _pixels(rows, keep), keep)


def _har() -> DataSet:
    """Statistics of each signal: mean, deviation, and the size of eight frequencies."""
    rows = data.har()
    keep = np.arange(0, len(rows.y), 2)  # neighbouring windows share half their samples
    x = rows.x[keep]
    spectrum = torch.fft.rfft(x - x.mean(2, keepdim=True), dim=2).abs()[:, :, 1:9]
    return _vectors(rows, torch.cat([x.mean(2), x.std(2), spectrum.log1p().flatten(1)], 1), keep)


def table_rows(name: str) -> DataSet:
    """The rows of a table of tables.toml."""
    import pandas

    table = TABLES[name]
    if "statsmodels" in table:
        import statsmodels.datasets

        frame = getattr(statsmodels.datasets, table["statsmodels"]).load_pandas().data
    else:
        frame = pandas.read_csv(_folder() / f"{table['file']}.csv.gz")
    frame = frame.query(table["rows"]) if "rows" in table else frame
    if "largest" in table:
        most = frame[table["client"]].value_counts().index[: table["largest"]]
        frame = frame[frame[table["client"]].isin(most)].reset_index(drop=True)
    for column in table.get("no_zeros", ()):
        frame[column] = frame[column].where(frame[column] > 0)
    for column in table.get("words", ()):
        frame[column] = frame[column].astype("string")
    return _encoded(table.get("file", name), frame, table["client"], frame.eval(table["target"]), table["columns"])


def _encoded(name: str, frame: Any, client: str, y: Any, columns: Sequence[str]) -> DataSet:
    """A data frame as numbers: categories one by one, gaps filled, all of them standardised."""
    import pandas

    x = pandas.get_dummies(frame[list(columns)], dtype=float)
    gaps = x.isna()
    x = x.fillna(x.median())
    x = pandas.concat([x, gaps.loc[:, gaps.any()].astype(float).add_prefix("no ")], axis=1)
    values = torch.tensor(x.to_numpy(np.float32))
    values = (values - values.mean(0)) / values.std(0).clamp_min(1e-3)
    own = frame[client].astype(str).to_numpy()
    return DataSet(name=name, x=values, y=torch.tensor(np.asarray(y, np.int64)), classes=["no", "yes"],
                   owners={"site": Owners.of(own)})  # fmt: skip


def _rules() -> DataSet:
    """Eight sites that were made up, each with a rule of its own, so that nobody has anything to learn from others.

    The signs of three of six numbers give one of eight classes: of other three at each site, in another order.
    """
    draw = np.random.default_rng([SEED, 49])
    sites, each = 8, 500
    x = draw.normal(size=(sites, each, 6))
    signs = np.stack([x[site, :, draw.permutation(6)[:3]] > 0 for site in range(sites)])
    cells = (signs * np.array([1, 2, 4])[:, None]).sum(1)
    y = np.stack([draw.permutation(8)[cell] for cell in cells])
    owner = np.repeat([f"site {site}" for site in range(sites)], each)
    return DataSet(name="rules", x=torch.tensor(x.reshape(-1, 6), dtype=torch.float32), y=torch.tensor(y.ravel()),
                   classes=[str(number) for number in range(8)], owners={"site": Owners.of(owner)})  # fmt: skip


def _traffic() -> DataSet:
    """The flows of the ten apps with the most; those of one session stay together."""
    rows = data.traffic()
    largest = torch.bincount(rows.y).argsort(descending=True)[:10]
    keep = np.flatnonzero(torch.isin(rows.y, largest).numpy())
    keep = keep[_some(len(keep), 4000, "traffic")]
    place = torch.full((len(rows.classes),), -1).index_copy(0, largest, torch.arange(10))
    found = _vectors(rows, rows.x[keep].flatten(1), keep)
    return replace(found, y=place[found.y], classes=[rows.classes[int(one)] for one in largest])


def _office() -> DataSet:
    rows = data.office_caltech10(form="squeezenet")
    return _vectors(rows, rows.x[:, ::4])


def _shakespeare() -> DataSet:
    """The next letter's kind from the four before it, for the ten longest roles; rows are 7 characters apart."""
    import pandas

    frame = pandas.read_csv(_folder() / "shakespeare/shakespeare_roles.csv.gz", keep_default_na=False)
    longest = frame["client"].value_counts().index[:10]
    text = {str(role): "\n".join(frame.loc[frame["client"] == role, "text"]).lower() for role in longest}
    letters = sorted({letter for one in text.values() for letter in one})
    code = {letter: number for number, letter in enumerate(letters)}
    common = " etoahsrnil"
    x, y, own, groups = [], [], [], []
    for role, one in text.items():
        for start in range(0, min(len(one) - 5, 1750), 7):
            x.append([code[letter] for letter in one[start : start + 4]])
            y.append(common.find(one[start + 4]) + 1)
            own.append(role)
            groups.append(len(groups) // 20)  # passages: rows next to one another stay together
    hot = torch.nn.functional.one_hot(torch.tensor(x), len(letters)).float().flatten(1)
    owners = {"role": Owners.of(np.array(own))}
    groups = np.array(groups, dtype=np.int64)
    return DataSet(
        name="shakespeare", x=hot, y=torch.tensor(y), classes=["other", *common], owners=owners, groups=groups
    )


def by_owner(owner: str, clients: int | None = None) -> dict[str, Any]:
    return {"kind": "by_owner", "owner": owner} | ({} if clients is None else {"clients": clients})


def _listed(group: str) -> tuple[Federation, ...]:
    rows = tomllib.loads(Path(__file__).with_name("federations.toml").read_text("utf-8"))[group]
    return tuple(Federation(**row | {"labels_of": tuple(row.get("labels_of", ()))}) for row in rows)


FEDERATIONS, HELD_BACK, FRESH = (_listed(group) for group in ("learned", "held_back", "fresh"))
MADE_UP = ("rules",)  # of those held back: what is said of them is judged, and no mean of regrets has them
BY_NAME = {federation.name: federation for federation in (*FEDERATIONS, *HELD_BACK)}
