"""The paper's conditions beside those of a run, for `run.py --dry-run`; ours are read from the settings."""

from __future__ import annotations

from collections.abc import Sequence

import tables
from shared.conditions import LEGEND, beside

from piebald import data

BACKENDS = {"small": "fixed", "full": "bfv"}  # of the encrypted arms
SEEDS = 5  # of the full scale; the paper does not print its number


def rows(scale: str, seeds: int) -> list[tuple[str, str, str]]:
    """Return what is set, the paper's and ours at a scale."""
    given = tables.settings(tables.SETS[0], 0, backend=BACKENDS[scale])
    shown = f"128 and 64, L1 = {len(given.network.hidden)}, L2 = {len(given.network.aligned)}"
    kernels = "linear; (x'y + 0)^2, (x'y + 0)^3; Gaussian, sigma 1 and 2"
    return [
        *(row for name in tables.SETS for row in _data(name)),
        ("features", "two disjoint parts, not printed which", _division(given.data.common)),
        ("co-occurring rows", "not printed", str(given.data.overlap)),
        ("units", "128 and 64, L1 = 1, L2 = 1", shown.replace("128", str(*given.network.hidden))),
        ("layers", "'several convolutional layers'", "linear: the rows are tables"),
        ("kernels", kernels, kernels if len(tables.KERNELS) == 5 else ", ".join(tables.KERNELS)),
        ("encryption", "additively homomorphic, not printed which", _encryption(given.backend.kind)),
        ("Gaussian", "second-order expansion", "second-order expansion where it is encrypted"),
        ("alpha, beta", "not printed", f"{given.method.alpha:g}, {given.beta:g}"),
        (
            "optimiser",
            "not printed",
            f"{given.optimizer.capitalize()}, {given.lr:g}, {given.steps} steps of {given.batch} rows",
        ),
        ("F-score, precision", "averaging and threshold not printed", "of the positives, by the source's share"),
        ("repetitions", "not printed", str(seeds)),
        ("FTL", "AUC only", "AUC, F-score and precision"),
    ]


def printed(scale: str, seeds: int) -> str:
    """Return the conditions of a scale, as text."""
    lines = [f"{'Tables 1 to 3, section 5':24} {'paper':60} here"]
    return "\n".join([*lines, *beside(rows(scale, seeds), 22, 60), *LEGEND])


def _division(common: Sequence[str] | None) -> str:
    return "two disjoint parts, by turns" if common is not None and not common else "parts with features in common"


def _encryption(kind: str) -> str:
    if kind == "fixed":
        return "fixed point: the integers of BFV, bit for bit, as `verify` shows"
    return f"{kind.upper()}, every product"


def _data(name: str) -> list[tuple[str, str, str]]:
    table = data.load(name)
    paper = {
        "credit": "UCI credit card: 30,000 rows, 23 features",
        "census": "UCI census income of 1994, size not printed",
    }[name]
    given = tables.disjoint(name)
    own, both = given["source"], given["common"]
    known = f"{table.x.shape[1]} inputs, {len(own)} of the source, {len(both)} of both"
    return [(name, paper, f"{len(table.y):,} rows, {known}")]
