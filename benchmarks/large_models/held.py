"""Copies of a model in each process: python benchmarks/large_models/held.py --parameters 3e7

Trains a network of two hidden layers by plain SGD: by simulation of four clients, in one process and with two workers,
and in a federation of a server and two sites.  Says how much more anonymous memory each process has at its peak than
the same with a network of a thousand parameters, in models of 4 bytes a parameter; the pages of files are told apart,
as the system takes them back where memory is short.  The user's own model counts, as the commands build it.  Linux
only.  Keeps the lines of other sizes.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from billion import PAGE, trained
from shared.markdown import block, put, rows, table
from shared.measured import processor
from shared.options import reader

COLUMNS, CLASSES, ROWS = 1000, 10, 32
SETTINGS = """rounds = 3
evaluate = {{ every = 0 }}
measure = "none"
data = {{ source = "{rows}", client = "client", target = "label" }}
model = {{ name = "mlp", hidden = [{width}, {width}] }}
recipe = {{ name = "fedavg", lr = 0.01, batch = 8, epochs = 1 }}
runtime = {{ kind = "simulator", engine = "sequential", workers = {workers} }}
"""
# clients, workers of the simulator, the command, and what its processes are in the order of their start
CASES: dict[str, tuple[int, int, tuple[str, ...], tuple[str, ...]]] = {
    "simulation": (4, 0, ("run",), ("one process",)),
    "two workers": (4, 2, ("run",), ("first process", "worker 1", "worker 2")),
    "federation": (2, 0, ("up", "--local", "2"), ("server", "site 1", "site 2")),
}


def written(path: Path, clients: int) -> None:
    """Write a table of rows of random numbers."""
    import numpy as np
    import pandas as pd

    draw = np.random.default_rng(0)
    numbers = draw.normal(size=(clients * ROWS, COLUMNS)).astype("float32").round(2)
    frame = pd.DataFrame(numbers, columns=[f"x{column}" for column in range(COLUMNS)])
    names = [f"c{number % clients}" for number in range(len(frame))]
    frame.assign(label=draw.integers(0, CLASSES, len(frame)), client=names).to_csv(path, index=False)


def peaks(case: str, parameters: float) -> list[tuple[float, float]]:
    """MB of each process, anonymous and of files."""
    clients, workers, words, _ = CASES[case]
    # of w**2 + (COLUMNS + CLASSES) w parameters
    width = max(1, round((math.sqrt((COLUMNS + CLASSES) ** 2 + 4 * parameters) - COLUMNS - CLASSES) / 2))
    with tempfile.TemporaryDirectory() as place:
        written(Path(place) / "rows.csv", clients)
        file = Path(place) / "experiment.toml"
        file.write_text(SETTINGS.format(rows=Path(place) / "rows.csv", width=width, workers=workers))
        return trained(Path(place), file, *words)[1]


def main() -> None:
    given = reader(__doc__, parameters=3e7, cases=None).parse_args()
    text = PAGE.read_text("utf-8")
    heads = ["parameters", "", "process", "small, MB", "rises by, models", "files, models"]
    lines = [list(row.values()) for row in rows(block(text, "held"))]
    for case, (_, _, _, roles) in CASES.items():
        if given.cases and not any(text in case for text in given.cases):
            continue
        small, large = peaks(case, 1000), peaks(case, given.parameters)
        for role, base, most in zip(roles, small, large, strict=False):
            risen = [1e6 * (much - little) / (4 * given.parameters) for much, little in zip(most, base, strict=True)]
            line = [f"{given.parameters:,.0f}", case, role, f"{base[0]:.0f}", *(f"{number:.1f}" for number in risen)]
            lines = [other for other in lines if other[:3] != line[:3]] + [line]
            print(*line, sep=" | ", flush=True)
    about = (
        "`python benchmarks/large_models/held.py --parameters 3e7` (1.25e8): anonymous memory at the peak, beyond the "
        "same process with a small model, read five times a second, so that shorter peaks are not seen.  "
        f"{processor()}; other programs used it as well."
    )
    PAGE.write_text(put(text, "held", f"{about}\n\n{table(heads, lines)}", append=True), "utf-8")


if __name__ == "__main__":
    main()
