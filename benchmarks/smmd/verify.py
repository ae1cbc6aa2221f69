"""Real BFV runs on credit, and the same runs in fixed point: weights must be the same, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tables as shown
import torch
from shared.markdown import table
from shared.stored import Lines

from piebald import vertical as transfer
from piebald.storage.store import RunStore
from piebald.vertical.party_store import read_steps

STEPS = {"bfv": 5}
SMALL = ("polynomial (0, 2)", "Gaussian, sigma 1")  # also with batches of 128, as the prototype was timed
METHODS: dict[str, dict[str, Any]] = {label: shown.smmd(kernel) for label, kernel in shown.KERNELS.items()} | {
    "FTL": {"kind": "ftl", "kappa": 0.01}
}


def plan() -> Iterator[tuple[str, str, int, int]]:
    """Backend, method, rows of a batch, steps."""
    for backend, steps in STEPS.items():
        for label in METHODS:
            yield backend, label, 256, 3 if label == "polynomial (0, 3)" else steps
            if label in SMALL:
                yield backend, label, 128, steps


def run(raw: Path) -> None:
    """Train with each backend and method from the same start, and compare the last checkpoints."""
    kept = Lines(raw, "backend", "kernel", "rows")
    done = kept.done()
    for backend, label, rows, steps in plan():
        if (backend, label, rows) in done:
            continue
        folders = {
            kind: raw.parent / "verify" / f"{backend}-{label}-{rows}-{kind}".replace(" ", "")
            for kind in (backend, "fixed")
        }
        made = {}
        for kind, folder in folders.items():
            given = shown.settings(
                "credit", 0, steps=steps, method=METHODS[label], backend=kind,
                checkpoint_every=steps, batch=rows, overlap_batch=rows,
            )  # fmt: skip
            made[kind] = transfer.run(given, out=folder)
        row: dict[str, Any] = {
            "backend": backend,
            "kernel": label,
            "rows": rows,
            "steps": steps,
            "same": all(_same(folders[backend] / role, folders["fixed"] / role) for role in ("source", "target")),
            "seconds": _plain(folders[backend]),
            "watched": made[backend].seconds,
            "to_target": made[backend].bytes_to_target,
            "to_source": made[backend].bytes_to_source,
        }
        kept.add(row)


def _plain(folder: Path) -> float | None:
    """Seconds of a step that does not watch the losses: the least, of the party that took longer; None if all do."""
    lines = [[line for line in read_steps(folder / role) if line["losses"] is None] for role in ("source", "target")]
    return max(min(line["seconds"] for line in party) for party in lines) if all(lines) else None


def _same(one: Path, other: Path) -> bool:
    left, right = (
        store.server_checkpoint(store.version).tensors for store in map(RunStore.open_read_only, (one, other))
    )
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def tables(raw: Path) -> dict[str, str]:
    """Markdown by name."""
    heads = ["backend", "", "rows", "steps", "weights of both parties", "s a step", "s a step, mean with watching",
             "kB to the target", "kB to the source"]  # fmt: skip
    cells = [
        [
            *(row[name] for name in ("backend", "kernel", "rows", "steps")),
            "the same, bit for bit" if row["same"] else "**differ**",
            "-" if row["seconds"] is None else f"{row['seconds']:.2f}", f"{row['watched']:.2f}",
            *(f"{row[to] / 1000:,.0f}" for to in ("to_target", "to_source")),
        ]
        for row in Lines(raw).read()
    ]  # fmt: skip
    return {"verify": table(heads, cells)}
