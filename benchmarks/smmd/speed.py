"""Seconds and bytes of one direction of a step, phase by phase, beside literal encryption of every element with `phe`.

Processor time is what is compared: it does not depend on what else the machine does.  Encryption, preparation,
multiplication, decryption and unmasking are timed apart; the owner does the first and fourth, the evaluator the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from shared.markdown import table
from shared.measured import seconds
from shared.stored import Lines
from tables import KERNELS

from piebald.contracts.component import build
from piebald.vertical.encryption.backend import Backend
from piebald.vertical.kernels import Floats, Kernel, ProductSize, ProductStatistics
from piebald.vertical.loss_terms import LabelTerm, PartyView

UNITS = 64
PHASES = ("encrypt", "prepare", "multiply", "decrypt", "unmask")
BACKENDS: dict[str, dict[str, Any]] = {
    "BFV, N = 8192": {"kind": "bfv"},
    "BFV, N = 16384": {"kind": "bfv", "degree": 16384},
}
BEFORE = {  # the prototype that this follows: seconds, one thread, of the same products at 128 rows
    ("BFV, N = 8192", "linear"): 0.010, ("BFV, N = 8192", "polynomial (0, 2)"): 0.118,
    ("BFV, N = 8192", "Gaussian, sigma 1"): 0.215, ("BFV, N = 8192", "polynomial (0, 3)"): 3.0,
}  # fmt: skip
Products = list[tuple[ProductSize, ProductStatistics, Floats]]


def unit(seed: int, n: int) -> Floats:
    rows = np.random.default_rng(seed).random((n, UNITS))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def of_kernel(kernel: Kernel, rows: int) -> Products:
    x, y = unit(0, rows), unit(1, rows)
    return list(zip(kernel.sizes(rows, UNITS, 1.0), kernel.statistics(y), kernel.coefficients(x), strict=True))


def of_labels(rows: int) -> Products:
    """Both ways."""
    import torch

    u, labels = torch.from_numpy(unit(0, rows)), torch.sign(torch.from_numpy(unit(1, rows)[:, 0]) - 0.12)
    views = {"source": PartyView([], u, labels, u[0]), "target": PartyView([], u)}
    terms = {role: LabelTerm(role, rows, UNITS) for role in ("source", "target")}  # type: ignore[arg-type]
    return [
        (terms[owner].owned[0], terms[owner].statistics(views[owner])[0], terms[asker].coefficients(views[asker])[0])
        for owner, asker in (("source", "target"), ("target", "source"))
    ]


def time_direction(backend: Backend, products: Products, repeats: int) -> dict[str, Any]:
    """The least processor and wall seconds of each phase, and bytes."""
    owner = backend.owner([size for size, _, _ in products])
    evaluator = backend.evaluator(owner.announcement, [size for size, _, _ in products])
    best: dict[str, list[float]] = {phase: [np.inf, np.inf] for phase in PHASES}
    sent = [0, 0, 0]
    for _ in range(repeats + 1):  # the first one fills tables and caches
        spent = {phase: [0.0, 0.0] for phase in PHASES}
        sent = [0, 0, 0]

        def clocked(phase: str, act: Callable[..., Any], *given: Any, spent: dict[str, list[float]] = spent) -> Any:
            cpu, wall = time.process_time(), time.perf_counter()
            made = act(*given)
            spent[phase][0] += time.process_time() - cpu
            spent[phase][1] += time.perf_counter() - wall
            return made

        for size, own, c in products:
            encrypted = clocked("encrypt", owner.encrypt, own.matrix, size)
            ready = clocked("prepare", evaluator.prepare, c, size)
            masked, mask = clocked("multiply", evaluator.multiply, encrypted, ready, size)
            decrypted = clocked("decrypt", owner.decrypt, masked, size, own.constant)
            found = clocked("unmask", evaluator.unmask, decrypted, mask, size)
            assert np.abs(found - (c @ own.matrix + own.constant)).max() < 1e-3
            sent = [total + len(blob) for total, blob in zip(sent, (encrypted, masked, decrypted), strict=True)]
        for phase in PHASES:
            best[phase] = [min(old, new) for old, new in zip(best[phase], spent[phase], strict=True)]
    return {
        "cpu": {phase: best[phase][0] for phase in PHASES},
        "wall": {phase: best[phase][1] for phase in PHASES},
        "bytes": sent,
        "key": len(owner.announcement),
    }


# ------------------------------------------------------------------------------------------------------- every element


def of_phe() -> dict[str, Any] | None:
    """Costs of phe's operations, and a small literal run beside what they predict; None without phe."""
    try:
        from phe import paillier
    except ImportError:
        return None
    public, private = paillier.generate_paillier_keypair(n_length=2048)
    rng = np.random.default_rng(0)

    def least(act: Callable[[], Any]) -> float:
        return min(seconds(act, time.process_time) for _ in range(20))

    one = public.encrypt(0.3)
    product = one * 0.7
    costs = {
        "encrypt": least(lambda: public.encrypt(0.3)),
        "multiply": least(lambda: one * float(rng.random())),
        "add": least(lambda: product + one * 0.7) - least(lambda: one * 0.7),
        "decrypt": least(lambda: private.decrypt(product)),
    }
    n, d = 6, 5
    x, y = rng.random((n, d)), rng.random((n, d))
    began = time.process_time()
    encrypted = [[[public.encrypt(float(row[a] * row[b])) for b in range(a + 1)] for a in range(d)] for row in y]
    for row in x:
        for a in range(d):
            total = None
            for other in encrypted:
                for b in range(d):
                    term = other[max(a, b)][min(a, b)] * float(2 * row[b] / n)
                    total = term if total is None else total + term
            private.decrypt(total)
    real = time.process_time() - began
    return {"costs": costs, "small": [n, d, real, literal(costs, n, d)]}


def literal(costs: dict[str, float], rows: int, units: int) -> float:
    """Seconds of poly-2 by the cost law: every row's outer product encrypted, every pair of rows multiplied out."""
    terms = rows * rows * units * units
    encryptions = rows * units * (units + 1) / 2
    return encryptions * costs["encrypt"] + terms * (costs["multiply"] + costs["add"]) + rows * units * costs["decrypt"]


def on_moments(costs: dict[str, float], rows: int, units: int) -> float:
    """Seconds of poly-2 with moments encrypted element by element."""
    terms, encryptions = rows * units * units, units * (units + 1) / 2
    return encryptions * costs["encrypt"] + terms * (costs["multiply"] + costs["add"]) + rows * units * costs["decrypt"]


# ---------------------------------------------------------------------------------------------------------- the record


def plan(small: bool) -> Iterator[tuple[str, str, int]]:
    for rows in (128,) if small else (128, 256):
        for name in BACKENDS:
            if small and name != "BFV, N = 8192":
                continue
            for what in (*KERNELS, "labels, both ways"):
                if what != "Gaussian, sigma 2":  # the same products as with sigma 1
                    yield name, what, rows


def run(raw: Path, small: bool = False) -> None:
    """Time what is not in the file yet."""
    kept = Lines(raw, "backend", "what", "rows")
    done = kept.done()
    for name, what, rows in plan(small):
        if (name, what, rows) in done:
            continue
        products = of_labels(rows) if what.startswith("labels") else of_kernel(KERNELS[what], rows)
        repeats = 1 if "3)" in what else 5
        timed = time_direction(build("backend", BACKENDS[name]), products, repeats)
        kept.add({"backend": name, "what": what, "rows": rows} | timed)
    if ("phe", "literal", 0) not in done and (found := of_phe()) is not None:
        kept.add({"backend": "phe", "what": "literal", "rows": 0} | found)


def tables(raw: Path) -> dict[str, str]:
    """Markdown by name."""
    rows = Lines(raw).read()
    phe = next((row for row in rows if row["backend"] == "phe"), None)
    return {"speed": _speed([row for row in rows if row["backend"] != "phe"]), "phe": _phe(rows, phe)}


def _speed(rows: list[dict[str, Any]]) -> str:
    found = []
    for row in rows:
        before = BEFORE.get((row["backend"], row["what"])) if row["rows"] == 128 else None
        sums = [f"{sum(row[clock].values()):.3f}" for clock in ("cpu", "wall")]
        sent = " / ".join(f"{blob / 1000:,.0f}" for blob in row["bytes"])
        phases = [f"{row['cpu'][phase]:.3f}" for phase in PHASES]
        found.append([row["backend"], row["what"], row["rows"], *phases, *sums, before or "-", sent])
    more = ["sum, processor s", "wall s", "prototype, s", "kB to evaluator / masked / decrypted"]
    return table(["backend", "product", "rows", *PHASES, *more], found)


def _phe(rows: list[dict[str, Any]], phe: dict[str, Any] | None) -> str:
    if phe is None:
        return "phe was not installed."
    costs, (n, d, real, predicted) = phe["costs"], phe["small"]
    mine = {
        row["backend"]: sum(row["cpu"].values())
        for row in rows
        if row["what"] == "polynomial (0, 2)" and row["rows"] == 128
    }
    ways = {
        "phe, literal: rows' outer products, all pairs (predicted)": literal(costs, 128, UNITS),
        "phe, element by element on moments (predicted)": on_moments(costs, 128, UNITS),
    } | mine
    fastest = mine["BFV, N = 8192"]
    cells = [[way, f"{seconds:,.2f} s", f"{seconds / fastest:,.1f}"] for way, seconds in ways.items()]
    spent = ", ".join(f"{name} {1000 * value:.3f} ms" for name, value in costs.items())
    return (
        f"{table(['way', 'poly-2, one direction, 128 rows, 64 units', 'times BFV'], cells)}\n\n"
        f"phe's operations: {spent}. A real literal run with {n} rows and {d} units took {real:.2f} s; "
        f"the law says {predicted:.2f} s."
    )
