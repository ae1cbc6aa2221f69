"""AUC, F1 and precision of SMMD and its baselines on credit and census, several seeds, with confidence intervals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import baselines
import torch
from shared.intervals import interval
from shared.markdown import table
from shared.stored import Lines

from piebald import data
from piebald import vertical as transfer
from piebald.vertical import party_data
from piebald.vertical.kernels import GaussianKernel, Kernel, LinearKernel, PolynomialKernel
from piebald.vertical.party_data import PartyHolding
from piebald.vertical.protocol import Role
from piebald.vertical.transfer_methods import Smmd
from piebald.vertical.transfer_results import TransferScore, transfer_score
from piebald.vertical.transfer_settings import TransferSettings

KERNELS: dict[str, Kernel] = {
    "linear": LinearKernel(),
    "polynomial (0, 2)": PolynomialKernel(c=0, degree=2),
    "polynomial (0, 3)": PolynomialKernel(c=0, degree=3),
    "Gaussian, sigma 1": GaussianKernel(sigma=1),
    "Gaussian, sigma 2": GaussianKernel(sigma=2),
}
SEVERAL = [GaussianKernel(sigma=sigma) for sigma in (0.5, 1.0, 2.0)]  # as deep adaptation networks (Long et al. 2015)
SETS = ("credit", "census")
SOURCE = "source only, on its own features"
ROWS, WHOLE = "co-occurring rows (eq. 5)", "whole attributes"
ENCRYPTED, PLAIN = "encrypted", "without encryption"


def disjoint(name: str, whole: bool = False) -> dict[str, Any]:
    """Return the data with two disjoint feature spaces (section 5.1), by turns, since the paper prints not how.

    Args:
        name: of the data set.
        whole: give all columns of an attribute to one party.  Otherwise one may have "sex=Male" and the other
            "sex=Female", which tell the same.
    """
    columns = party_data.feature_names(data.load(name))
    attributes = {column: column.partition("=")[0] if whole else column for column in columns}
    turns = list(dict.fromkeys(attributes.values()))[::2]
    source = tuple(column for column in columns if attributes[column] in turns)
    return {"name": name, "overlap": 300, "source": source, "common": ()}


def settings(name: str, seed: int, **changes: Any) -> TransferSettings:
    """What all arms share; chosen on seeds 100 and 101, which are in no table, with features in common."""
    table: dict[str, Any] = {
        "steps": 200, "lr": 0.003, "batch": 256, "overlap_batch": 300, "seed": seed, "backend": "fixed",
        "watch_every": 100, "runtime": {"compare": False},
    }  # fmt: skip
    return TransferSettings(**({"data": disjoint(name)} | table | changes))


def smmd(kernel: Kernel, alpha: float = 1.0, rows: str = "own") -> dict[str, Any]:
    return {"kind": "smmd", "kernel": kernel, "alpha": alpha, "rows": rows}


def arms(name: str, seed: int, backend: str = "fixed") -> Iterator[tuple[str, str, Callable[[], TransferScore]]]:
    """Name, variant and what makes the score of each arm; `backend` encrypts."""
    base = settings(name, seed)
    held = party_data.load(base.data, seed)

    def protocol(method: dict[str, Any]) -> TransferScore:
        made = transfer.run(settings(name, seed, method=method, backend=backend), held, tell=print)
        assert made.score is not None
        return made.score

    def joint(given: TransferSettings, parts: Any = held, *kernels: Kernel) -> TransferScore:
        _, target = baselines.train_jointly(parts, given, kernels)
        return transfer_score(target.predict(target.data.test), target.data.test_y, target.rate)

    def train_jointly(*kernels: Kernel, alpha: float = 1.0) -> TransferScore:
        return joint(settings(name, seed, method=smmd(LinearKernel(), alpha)), held, *kernels)

    for label, kernel in KERNELS.items():
        yield f"SMMD, {label}", ENCRYPTED, lambda kernel=kernel: protocol(smmd(kernel))
        yield f"SMMD, {label}", PLAIN, lambda kernel=kernel: train_jointly(kernel)
    common = smmd(KERNELS["Gaussian, sigma 1"], rows="common")
    yield f"SMMD, Gaussian, sigma 1, {ROWS}", ENCRYPTED, lambda: protocol(common)
    yield "SMMD, several Gaussians (DAN)", PLAIN, lambda: train_jointly(*SEVERAL)
    yield "no alignment (alpha = 0)", PLAIN, lambda: train_jointly(LinearKernel(), alpha=0.0)
    yield "FTL", ENCRYPTED, lambda: protocol({"kind": "ftl", "kappa": 0.01})
    if name == "census":  # credit's columns are its attributes
        whole = settings(name, seed, method=smmd(KERNELS["Gaussian, sigma 1"]), data=disjoint(name, whole=True))
        parts = party_data.load(whole.data, seed)
        for label, alpha in ((f"SMMD, Gaussian, sigma 1, {WHOLE}", 1.0), (f"no alignment (alpha = 0), {WHOLE}", 0.0)):
            given = whole.model_copy(update={"method": Smmd(alpha=alpha)})
            yield label, PLAIN, lambda given=given: joint(given, parts)
        yield f"co-occurring labels only, {WHOLE}", PLAIN, lambda: baselines.overlap_only(parts, whole)
    yield "source only", PLAIN, lambda: baselines.source_only(held, base)
    yield SOURCE, PLAIN, lambda: transfer_score(*source_on_its_features(held, base))
    yield "co-occurring labels only", PLAIN, lambda: baselines.overlap_only(held, base)
    yield "pooled (upper bound)", PLAIN, lambda: _pooled(name, base)


def source_on_its_features(
    held: Mapping[Role, PartyHolding], given: TransferSettings
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return scores, labels and the share of positives of the source's model on its features of the same test rows."""
    source = held["source"]
    assert source.y is not None
    model = baselines.supervised(source.x, source.y, given, "source only")
    return model(source.test), source.test_y, float((source.y > 0).double().mean())


def _pooled(name: str, base: TransferSettings) -> TransferScore:
    table = data.load(name)
    train, test = party_data.train_test_rows(table, base.data.test, base.seed)
    x, y = table.x.double(), 2.0 * table.y.double() - 1
    return baselines.pooled(x[train], y[train], x[test], y[test], base)


def run(seeds: Iterable[int], raw: Path, backend: str = "fixed") -> None:
    """Run what is not in the file yet, and add a line for each."""
    torch.set_num_threads(1)
    kept = Lines(raw, "set", "seed", "arm", "variant")
    done = kept.done()
    for seed in seeds:
        for name in SETS:
            for arm, variant, make in arms(name, seed, backend):
                if (name, seed, arm, variant) in done:
                    continue
                began = time.perf_counter()
                score = asdict(make())
                row = {"set": name, "seed": seed, "arm": arm, "variant": variant, **score}
                kept.add(row | {"seconds": time.perf_counter() - began})


def tables(raw: Path) -> dict[str, str]:
    """Markdown by name: one table a set, and one of differences."""
    rows = Lines(raw).read()
    return {name: _table([row for row in rows if row["set"] == name]) for name in SETS} | {"claims": _claims(rows)}


def _table(rows: list[dict[str, Any]]) -> str:
    found = []
    for arm, variant in dict.fromkeys((row["arm"], row["variant"]) for row in rows):
        mine = [row for row in rows if (row["arm"], row["variant"]) == (arm, variant)]
        cells = [_shown(interval([row[what] for row in mine])) for what in ("f1", "auc", "precision")]
        found.append([arm, variant, *cells, len(mine)])
    return table(["", "", "F-score", "AUC", "precision", "seeds"], found)


def _claims(rows: list[dict[str, Any]]) -> str:
    """Differences on the same seeds."""
    found = []
    for name in SETS:
        auc = {(row["arm"], row["variant"], row["seed"]): row["auc"] for row in rows if row["set"] == name}
        seeds = sorted({key[2] for key in auc})
        pairs = [((f"SMMD, {label}", ENCRYPTED), (f"SMMD, {label}", PLAIN)) for label in KERNELS]
        gaussian = ("SMMD, Gaussian, sigma 1", ENCRYPTED)
        others = ["source only", SOURCE, "co-occurring labels only", "no alignment (alpha = 0)"]
        rivals = [f"SMMD, Gaussian, sigma 1, {ROWS}"]
        rivals += [f"SMMD, {label}" for label in KERNELS if f"SMMD, {label}" != gaussian[0]]
        pairs += [(gaussian, (other, PLAIN)) for other in others]
        pairs += [(gaussian, (other, ENCRYPTED)) for other in (*rivals, "FTL")]
        for one, other in pairs:
            both = [auc[*one, s] - auc[*other, s] for s in seeds if (*one, s) in auc and (*other, s) in auc]
            if both:
                found.append([name, ", ".join(one), ", ".join(other), _shown(interval(both), signed=True)])
    return table(["set", "AUC of", "minus AUC of", "difference"], found)


def _shown(value: tuple[float, float], signed: bool = False) -> str:
    mean, half = value
    return f"{mean:{'+' if signed else ''}.4f} ± {half:.4f}"
