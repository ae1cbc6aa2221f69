"""Piebald beside other programs, on the same arrays: python benchmarks/crosscheck/run.py --peers build/crosscheck

Each program has an environment of its own, since they require different versions of common packages; nothing is fetched
here.  To put them beside, once (on a machine without a GPU also `--extra-index-url
https://download.pytorch.org/whl/cpu`):

    for peer in torch statistics opacus byzfl flower fedjax pfl pfllib; do
      python -m venv build/crosscheck/$peer
      build/crosscheck/$peer/bin/pip install -r benchmarks/crosscheck/requirements/$peer.txt
    done

PFLlib is no package: put its sources into its environment, at the commit that RESULTS.md names:

    git clone https://github.com/TsingZ0/PFLlib build/crosscheck/pfllib/PFLlib
    git -C build/crosscheck/pfllib/PFLlib checkout d832e76f6a23b833038949ec1e4fdefe63a4d350

A peer's script in peers/ reads the inputs and writes what the peer makes of them; RESULTS.md is the table of the
largest differences.  The exit code is 1 if a difference is larger than rounding and not explained in `EXPLAINED`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equations
import inputs
import numpy as np
import ours
import personal

HERE = Path(__file__).parent
ROUNDING = 1e-5  # relative to the largest number: float32 in another order of sums
ERRORS = 4.0  # standard errors between means of random draws
DRAWN = {"Dirichlet": "entropy, sizes, classes", "QSGD": "part kept, squared error, zeros"}  # and what is measured


@dataclass(frozen=True)
class Peer:
    """Another program.

    Attributes:
        title: its name.
        script: in peers/.
        environment: the folder of its environment, and the name of its file in requirements/.
        packages: whose versions are shown.
        commit: of its sources, where it is no package.
    """

    title: str
    script: str
    environment: str
    packages: tuple[str, ...]
    commit: str = ""


PEERS = (
    Peer("plain PyTorch and NumPy", "with_torch.py", "torch", ("torch",)),
    Peer("the papers' equations", "with_equations.py", "torch", ("torch",)),
    Peer("Flower", "with_flower.py", "flower", ("flwr",)),
    Peer("FedJAX", "with_fedjax.py", "fedjax", ("fedjax", "jax")),
    Peer("pfl-research", "with_pfl.py", "pfl", ("pfl",)),
    Peer("PFLlib", "with_pfllib.py", "pfllib", ("torch",), "d832e76f6a23b833038949ec1e4fdefe63a4d350"),
    Peer("ByzFL", "with_byzfl.py", "byzfl", ("byzfl",)),
    Peer("opacus", "with_opacus.py", "opacus", ("opacus",)),
    Peer(
        "PFLlib, personal models", "with_pfllib_personal.py", "pfllib", ("torch",),
        "d832e76f6a23b833038949ec1e4fdefe63a4d350",
    ),
    Peer("flwr-datasets", "with_flwr_datasets.py", "flower", ("flwr-datasets",)),
    Peer(
        "statistics' libraries", "with_statistics.py", "statistics",
        ("scipy", "scikit-learn", "statsmodels", "POT", "torchmetrics"),
    ),
)  # fmt: skip
# differences larger than rounding: what is defined otherwise, and the largest that this explains
EXPLAINED = {
    ("Flower", "FedAdam"): ("Flower corrects the bias of both moments, which the paper's algorithm 2 does not", 1.0),
    ("Flower", "FedYogi"): ("Flower starts the second moment at 0, the paper at tau squared", 0.01),
    ("opacus", "epsilon, RDP"): ("ours has whole orders of the Renyi divergence only, so its bound is larger", 0.002),
    ("opacus", "epsilon, PLD"): ("opacus' PRV accountant gives an upper bound that is up to 0.01 too high", 0.002),
    ("statistics' libraries", "logistic regression"): ("400 rounds of gradient descent beside a Newton solver", 1e-4),
}
Line = tuple[str, ...]


def results_of(peer: Peer, root: Path, given: Path, folder: Path) -> inputs.Arrays | None:
    """Run a peer's script in its environment; None if there is no environment."""
    python = root / peer.environment / "bin" / "python"
    if not python.exists():
        return None
    made = folder / f"{peer.script}.npz"
    environment = os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    subprocess.run([python, HERE / "peers" / peer.script, given, made], check=True, env=environment, cwd=folder)
    with np.load(made) as found:
        return dict(found)


def versions(peer: Peer, root: Path) -> str:
    """Return a peer's packages with their versions, as installed."""
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    python = root / peer.environment / "bin" / "python"
    shown = subprocess.run([python, "-c", code, *peer.packages], check=True, capture_output=True, text=True).stdout
    named = [f"{name} {number}" for name, number in zip(peer.packages, shown.split(), strict=True)]
    return ", ".join([f"commit {peer.commit}", *named] if peer.commit else named)


def line(peer: str, name: str, mine: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> Line:
    """Return a row: peer, quantity, largest difference, largest number, verdict."""
    measured = next((words for begin, words in DRAWN.items() if name.startswith(begin)), None)
    if measured is not None:
        error = np.sqrt(mine.var(0) / len(mine) + theirs.var(0) / len(theirs))
        apart = float((np.abs(mine.mean(0) - theirs.mean(0)) / error).max())
        means = "; ".join(f"{one:.3g} and {other:.3g}" for one, other in zip(mine.mean(0), theirs.mean(0), strict=True))
        word = "equal" if apart <= ERRORS else "DIFFERS"
        return peer, name, f"{apart:.1f} standard errors", f"{measured}: {means}", word
    if mine.shape != theirs.shape:
        return peer, name, "-", "-", f"DIFFERS: shapes {mine.shape} and {theirs.shape}"
    apart, scale = float(np.abs(mine - theirs).max(initial=0)), float(np.abs(mine).max(initial=0))
    why, bound = EXPLAINED.get((peer, name), ("", ROUNDING))
    word = "equal" if apart <= ROUNDING * scale else f"differs: {why}" if apart <= bound * scale else "DIFFERS"
    return peer, name, f"{apart:.1e}", f"{scale:.3g}", word


def text(lines: list[Line], installed: dict[str, str], missing: list[str]) -> str:
    """Return RESULTS.md."""
    differs = [row for row in lines if not row[4].startswith("equal")]
    open_ones = [row for row in differs if row[4].startswith("DIFFERS")]
    rows = "\n".join(f"| {' | '.join(row)} |" for row in lines)
    listed = "\n".join(f"- {name}: {numbers}" for name, numbers in installed.items())
    absent = f"Not installed, so without rows: {', '.join(missing)}.\n\n" if missing else ""
    named = len(differs) - len(open_ones)
    return f"""# Piebald beside other programs

`python benchmarks/crosscheck/run.py --peers build/crosscheck`, which says how to put the other programs beside; each
has its own requirements.  The same updates, rows, starting models and batches go through both; in training, a batch is
all rows of a client, so that the order in which a program draws rows does not matter.

Of {len(lines)} quantities {len(lines) - len(differs)} are equal within rounding ({ROUNDING:g} of the largest number;
for random draws {ERRORS:g} standard errors), {named} differ by a definition that the last column names, and
{len(open_ones)} differ without explanation.

| program | quantity | largest difference | largest number | verdict |
|---|---|---|---|---|
{rows}

"PLD" is compared with opacus' PRV accountant; "IRLS line" is the repeated-median line through sorted values, with both
intercepts; "MMD" is its square, over all pairs.  FedAsync and FedBuff run on six clients of different speeds, and plain
PyTorch replays which client sent what, from which version, at which step.  Of PFLlib its clients are run, whose models
are averaged with equal weights, and FedAMP's mixing; its FedLC calibrates by the rows of all clients together, where
the paper counts those of the client, so its client is given its own counts.  "The papers' equations" are written out
in plain PyTorch (`peers/with_equations.py`), for methods that no maintained program has as their papers say; it is told
the numbers that were drawn for random-k and for the first basis of low rank.  QSGD draws for itself at both ends.

{absent}Programs:

{listed}
"""


def main() -> int:
    """Compare with every peer that has an environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path("build/crosscheck"), help="folder of the environments")
    parser.add_argument("--results", type=Path, default=HERE, help="folder of RESULTS.md")
    options = parser.parse_args()
    root = options.peers.resolve()
    given = inputs.make()
    mine = ours.results(given) | personal.results(given) | equations.results(given)
    lines: list[Line] = []
    installed: dict[str, str] = {}
    missing: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        events = {key: value for key, value in mine.items() if key.startswith("events")}
        np.savez(folder / "inputs.npz", **given, **events)
        for peer in PEERS:
            theirs = results_of(peer, root, folder / "inputs.npz", folder)
            if theirs is None:
                missing.append(peer.title)
                continue
            installed[peer.title] = versions(peer, root)
            lines += [
                line(peer.title, key, np.asarray(mine[key.partition(" by ")[0]]), np.asarray(value))
                for key, value in theirs.items()
            ]
    (options.results / "RESULTS.md").write_text(text(lines, installed, missing))
    for row in lines:
        print(" | ".join(row))
    return 1 if any(row[4].startswith("DIFFERS") for row in lines) or not lines else 0


if __name__ == "__main__":
    sys.exit(main())
