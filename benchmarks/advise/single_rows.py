"""Single rows that methods of the race are right on, so that a pair of them is compared on the same rows.

The truth has scores of clients, by which two methods are compared as two shares.  That finds less than the test of
`piebald advise`, which knows on which rows both are right.  So what the race finishes is trained once more and asked
for these rows.  Most runs repeat to the bit; of the others, where training is unstable and rounding in another order
matters, the rows say only how often two methods disagree, and those far from the truth are left out.

`python benchmarks/advise/run.py rows` writes `truth/single_rows/<federation>.jsonl`, which has a line for each run: the
rows that are right of each client's validation and test part, as bits in hexadecimal digits.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from federations import BY_NAME
from grid import Entry, entries
from numpy.typing import NDArray
from truth import SCALE, kept, known_rows, trained

PARTS = ("validation", "test")
FOLDER = "single_rows"  # in that of the truth
TOLERANCE = 3.0  # points of the mean over clients
Right = dict[tuple[str, int], dict[str, list[NDArray[np.float64]]]]  # by entry and seed: 0 or 1 for each row, by client


def run_all(folder: Path, wanted: Mapping[str, Sequence[tuple[str, int]]], minutes: float) -> tuple[int, int]:
    """Train what is not there yet; return how many of the wanted runs there are and how many there should be.

    Args:
        folder: of the truth.
        wanted: entries and seeds, by federation.
        minutes: after which no run is started.
    """
    torch.set_num_threads(1)
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    began, done, count = time.monotonic(), 0, sum(map(len, wanted.values()))
    for name, runs in wanted.items():
        federation = BY_NAME[name]
        known = {(line["entry"], line["seed"]) for line in kept(folder / FOLDER, name).read()}
        missing = [run for run in runs if run not in known]
        done += len(runs) - len(missing)
        clients = federation.clients() if missing else None
        sizes = {part: [clients.size(c, part) for c in range(len(clients))] for part in PARTS} if missing else {}
        if any(own != known_rows(folder)[name][part] for part, own in sizes.items()):
            print(f"{name} is left out: its rows are divided otherwise than when the truth was trained", flush=True)
            count -= len(missing)
            continue
        truth = {(line["entry"], line["seed"]): line for line in kept(folder, name).read()}
        grid = [*entries(federation.slow), *entries(federation.slow, leaders=True)]
        by_label = {entry.label: entry for entry in grid}
        for label, seed in missing:
            if time.monotonic() - began > 60 * minutes:
                break
            line, change = run_one(federation, clients, by_label[label], seed, truth[label, seed])
            if change <= TOLERANCE:
                kept(folder / FOLDER, name).add(line)
                done += 1
            else:
                count -= 1
            print(f"[{done}/{count}, {time.monotonic() - began:.0f} s] {name} {label} seed {seed}: "
                  f"{change:.1f} points from the truth", flush=True)  # fmt: skip
    return done, count


def run_one(
    federation: Any, clients: Any, entry: Entry, seed: int, truth: Mapping[str, Any]
) -> tuple[dict[str, Any], float]:
    """One run, as the line that is kept, and how many points its mean on a part is from that of the truth, at most."""
    with tempfile.TemporaryDirectory() as out:
        run = trained(federation, clients, entry, seed, keep="last", out=Path(out) / "run")[0]
        right = {part: [_right(run.model(c), clients.rows(c, part)) for c in range(len(clients))] for part in PARTS}
        run.close()
    known = {"validation": truth["validation"][-1], "test": truth["test"]}
    changes = [
        100 * abs(np.mean([rows.mean() for rows in right[part]]) - np.mean(known[part]) / SCALE) for part in PARTS
    ]
    bits = {part: [np.packbits(rows).tobytes().hex() for rows in right[part]] for part in PARTS}
    return {"entry": entry.label, "seed": seed, **bits}, float(max(changes))


@torch.no_grad()
def _right(model: torch.nn.Module, rows: Any) -> NDArray[np.bool_]:
    return np.asarray((model.eval()(rows.x).argmax(1) == rows.y).numpy())


def single_rows(folder: Path, name: str, sizes: Mapping[str, Sequence[int]]) -> Right:
    """Return the rows that are kept of a federation, whose clients have so many by split."""
    return {
        (line["entry"], line["seed"]): {
            part: [
                np.unpackbits(np.frombuffer(bytes.fromhex(bits), np.uint8), count=size).astype(np.float64)
                for bits, size in zip(line[part], sizes[part], strict=True)
            ]
            for part in PARTS
        }
        for line in kept(folder / FOLDER, name).read()
    }
