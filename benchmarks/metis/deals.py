"""Classes of the clients in the cells of Table I, recorded beside their rows: python benchmarks/metis/deals.py.

The settings may deal other images or classes after rows were run.  Then the page says in which cells.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

import settings
from shared.markdown import block, put, rows, table

PAGE = Path(__file__).with_name("RESULTS.md")
RECORD, SENTENCE = "dealt", "dealt otherwise"
Counts = Sequence[Sequence[int]]  # training rows of each class of each client


def described(counts_by_seed: Mapping[int, Counts]) -> tuple[str, str]:
    """Return the numbers of classes of a cell's clients in the paper's notation, and a checksum of all counts."""
    first = next(iter(counts_by_seed.values()))
    numbers = [sum(count > 0 for count in counts) for counts in first]
    pattern = ",".join(f"{number}x{len([*same])}" for number, same in groupby(numbers))
    plain = {seed: [[*map(int, row)] for row in counts] for seed, counts in sorted(counts_by_seed.items())}
    return pattern, f"{zlib.crc32(str(plain).encode()):08x}"


def now(scale: settings.Scale) -> dict[str, tuple[str, str]]:
    """Return what the settings deal in each cell of a scale, as `described`."""
    found: dict[str, dict[int, Counts]] = {}
    for seed in scale.seeds:
        data = settings.images(scale.rows, scale.side, seed)
        recipe = settings.synchronous(**scale.training)["FedAvg"]
        for cell in dict.fromkeys((*scale.settings, *scale.uneven)):
            clients = settings.partition(*cell, seed, recipe).split(data)
            counts = [clients.counts(client, "train") for client in range(len(clients))]
            found.setdefault(" ".join(cell), {})[seed] = counts
    return {cell: described(counts) for cell, counts in found.items()}


def record(dealt: Mapping[str, tuple[str, str]]) -> str:
    """Return the table of what was dealt when rows were run."""
    return table(["sizes, classes", "classes of clients", "checksum"], [[cell, *text] for cell, text in dealt.items()])


def of_runs(found: Mapping[tuple[str, str, str], Sequence[Mapping[str, Any]]]) -> dict[str, tuple[str, str]]:
    """Return what the runs of FedAvg were dealt in each cell, as `described`."""
    runs = {
        case: some for label in ("SyncFedAvg", "FedAvg") for (_, case, name), some in found.items() if name == label
    }
    counts = {case: {run["seed"]: run["counts"] for run in some if run.get("counts")} for case, some in runs.items()}
    return {case: described(by_seed) for case, by_seed in counts.items() if by_seed}


def otherwise(page: str, dealt: Mapping[str, tuple[str, str]]) -> str:
    """Return the sentence about cells of a page that the settings deal otherwise now, empty where there are none."""
    then = {row["sizes, classes"]: (row["classes of clients"], row["checksum"]) for row in rows(block(page, RECORD))}
    changed = [cell for cell in then if cell in dealt and then[cell] != dealt[cell]]
    if not changed:
        return ""
    which = "all cells" if len(changed) == len(then) else ", ".join(changed)
    whole = f"**Not run again.**  The settings deal other images now than this scale's rows were run with, in {which}"
    others = [cell for cell in changed if then[cell][0] != dealt[cell][0]]
    told = "; ".join([whole, *(f"{cell} dealt {then[cell][0]} classes, and deals {dealt[cell][0]}" for cell in others)])
    return f"{told}."


def main() -> None:
    """Write the sentence of the page."""
    text = PAGE.read_text("utf-8")
    scale = re.search(r"--scale (\w+)", text)
    assert scale is not None, "the page does not say which scale its rows are of"
    PAGE.write_text(put(text, SENTENCE, otherwise(text, now(settings.SCALES[scale[1]]))), "utf-8")


if __name__ == "__main__":
    main()
