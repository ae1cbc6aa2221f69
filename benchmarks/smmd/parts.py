"""What a direction under BFV consists of, and how long SEAL's operations take, in milliseconds of processor time."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import speed
from shared.markdown import table
from shared.measured import seconds
from shared.stored import Lines
from tables import KERNELS

from piebald.contracts.component import build
from piebald.vertical.encryption import bfv

ROWS, PRODUCTS = 128, ("polynomial (0, 2)", "Gaussian, sigma 1")


def least(act: Callable[[], Any], times: int = 40) -> float:
    """The fewest milliseconds of processor time of an operation."""
    return 1000 * min(seconds(act, time.process_time) for _ in range(times))


def directions(repeats: int) -> dict[str, list[float]]:
    """Milliseconds of whole directions by product, by turns."""
    found: dict[str, list[float]] = {what: [] for what in PRODUCTS}
    for _ in range(repeats):
        for what in PRODUCTS:
            timed = speed.time_direction(build("backend", {"kind": "bfv"}), speed.of_kernel(KERNELS[what], ROWS), 5)
            found[what].append(1000 * sum(timed["cpu"].values()))
    return found


def operations() -> list[tuple[str, int, float]]:
    """SEAL's operations in a direction with the polynomial of degree 2: name, how often, milliseconds of one."""
    backend = build("backend", {"kind": "bfv"})
    ((size, own, _),) = speed.of_kernel(KERNELS["polynomial (0, 2)"], ROWS)
    owner = backend.owner([size])
    evaluator = backend.evaluator(owner.announcement, [size])
    he, plan = owner.he, backend.layout(size)
    baby, giant = bfv.steps(plan.columns)
    do, new, empty = he.evaluator, he.seal.Ciphertext, he.seal.Plaintext
    plain = he.encode(np.arange(he.degree, dtype=np.uint64) * np.uint64(2**30) % np.uint64(he.t))
    (blob,) = bfv.split(owner.encrypt(own.matrix, size), plan.inputs, "statistics")
    fresh, ready, term, small, last = he.ciphertext(blob, "statistics", he.top), new(), new(), new(), new()
    transformed = he.ntt(plain)
    do.transform_to_ntt(fresh, ready)
    do.multiply_plain(ready, transformed, term)
    do.mod_switch_to_next(fresh, small)
    do.mod_switch_to(fresh, he.last, last)
    total = new()
    do.multiply_plain(ready, transformed, total)
    count = plan.columns * plan.outputs
    steps: list[tuple[str, int, Callable[[], Any]]] = [
        ("encrypt with the private key", plan.inputs, lambda: owner._encryptor.encrypt_symmetric(plain)),
        ("transform a plaintext", count, lambda: do.transform_to_ntt(plain, he.top, empty())),
        ("rotate, three primes", baby - 1, lambda: do.rotate_rows(fresh, plan.block, evaluator._galois, new())),
        ("transform a ciphertext", baby, lambda: do.transform_to_ntt(fresh, new())),
        ("multiply by a plaintext", count, lambda: do.multiply_plain(ready, transformed, new())),
        ("add", count - giant, lambda: do.add_inplace(total, term)),
        ("transform back", giant, lambda: do.transform_from_ntt(term, new())),
        ("leave out a prime", giant, lambda: do.mod_switch_to_next(fresh, new())),
        ("rotate, two primes", giant - 1, lambda: do.rotate_rows(small, baby * plan.block, evaluator._galois, new())),
        ("encrypt zero", plan.outputs, lambda: evaluator._encryptor.encrypt_zero(he.second, new())),
        ("decrypt", plan.outputs, lambda: owner._decryptor.decrypt(last, empty())),
    ]
    return [(name, times, least(act)) for name, times, act in steps]


def run(raw: Path, repeats: int = 5) -> None:
    """Measure, and keep it."""
    raw.parent.mkdir(parents=True, exist_ok=True)
    raw.write_text(json.dumps({"directions": directions(repeats), "operations": operations()}) + "\n")
    for block in tables(raw).values():
        print(block)


def tables(raw: Path) -> dict[str, str]:
    """Markdown by name."""
    (found,) = Lines(raw).read()
    whole = [[what, f"{statistics.median(times):.0f}"] for what, times in found["directions"].items()]
    single = [[name, times, f"{ms:.3f}", f"{times * ms:.1f}"] for name, times, ms in found["operations"]]
    last = f"| all of them | | | {sum(times * ms for _, times, ms in found['operations']):.1f} |"
    directions = table(["one direction, 128 rows, 64 units", "ms"], whole)
    operations = table(["operation of SEAL", "times", "ms each", "ms"], single)
    return {"parts": f"{directions}\n\n{operations}\n{last}"}
