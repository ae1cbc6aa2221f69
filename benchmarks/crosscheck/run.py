"""Piebald beside other programs, on the same arrays: python benchmarks/crosscheck/run.py --peers build/crosscheck

Each program has an environment of its own, since they require different versions of common packages; nothing is fetched
here.  To put them beside, once (on a machine without a GPU also `--extra-index-url
https://download.pytorch.org/whl/cpu`):

    for peer in torch statistics opacus byzfl flower fedjax pfl pfllib fedlab flbench authors cgau; do
      python -m venv build/crosscheck/$peer
      build/crosscheck/$peer/bin/pip install -r benchmarks/crosscheck/requirements/$peer.txt
    done

Some programs are no packages: put their sources into an environment, at the commits that RESULTS.md names:

    cd build/crosscheck
    git clone https://github.com/TsingZ0/PFLlib pfllib/PFLlib
    git clone https://github.com/KarhouTam/FL-bench flbench/FL-bench
    git clone https://github.com/felisat/clustered-federated-learning authors/clustered-federated-learning
    git clone https://github.com/jichan3751/ifca authors/ifca
    git clone https://github.com/diaoenmao/HeteroFL-Computation-and-Communication-Efficient-Federated-Learning-for-\
Heterogeneous-Clients authors/HeteroFL
    git clone --branch FlexLoRA https://github.com/alibaba/FederatedScope authors/FlexLoRA
    git clone https://github.com/rasmusmhl/cgau-client-adaptation cgau/cgau-client-adaptation

`--only "FL-bench"` runs one program and keeps the rows of the others, so a program is added without them.

A peer's script in peers/ reads the inputs and writes what the peer makes of them; RESULTS.md is the table of the
largest differences.  The exit code is 1 if a difference is larger than rounding and not explained in `EXPLAINED`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

import authors
import equations
import frameworks
import inputs
import numpy as np
import ours
import personal
from shared.options import reader

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
    Peer("FedLab", "with_fedlab.py", "fedlab", ("fedlab", "torch")),
    Peer("FL-bench", "with_flbench.py", "flbench", ("torch",), "06e658bca5af6ce732e25bb7c0f8be321e14a85e"),
    Peer("CFL's authors", "with_cfl.py", "authors", ("torch",), "23a1c3887ed151a9c6340370337804766d11c69c"),
    Peer("IFCA's authors", "with_ifca.py", "authors", ("torch",), "61e44b8977a53c25368e8120aac6a505496ebbdf"),
    Peer("HeteroFL's authors", "with_heterofl.py", "authors", ("torch",), "cc40f3e46b0fab5364d62a1bb623d3764daf179d"),
    Peer("FlexLoRA's authors", "with_flexlora.py", "authors", ("torch",), "1cb1ab76bf4c9394d617c4c5a800cb0df145796d"),
    Peer(
        "CGAU's authors", "with_cgau.py", "cgau", ("tensorflow-cpu",), "ea2882bc38209b5bbf18c61f279af5bc3bb249ca",
    ),
)  # fmt: skip
# differences larger than rounding: what is defined otherwise, and the largest that this explains
EXPLAINED = {
    ("Flower", "FedAdam"): ("Flower corrects the bias of both moments, which the paper's algorithm 2 does not", 1.0),
    ("Flower", "FedYogi"): ("Flower starts the second moment at 0, the paper at tau squared", 0.01),
    ("opacus", "epsilon, RDP"): ("ours has whole orders of the Renyi divergence only, so its bound is larger", 0.002),
    ("opacus", "epsilon, PLD"): ("opacus' PRV accountant gives an upper bound that is up to 0.01 too high", 0.002),
    ("CFL's authors", "CFL, cut of noise"): (
        "their clusters use complete linkage, the paper's algorithm 1 single linkage",
        1.0,
    ),
    ("statistics' libraries", "logistic regression"): ("400 rounds of gradient descent beside a Newton solver", 1e-4),
}
Line = tuple[str, ...]
WITHOUT = """No program of others stands beside these recipes.  `async_fedavg`, `async_dvw`, `adaptive_dvw` and
`sync_dvw`: their authors' MetisFL has no weights by validation (at commit a33b749ed59dfbb3e6cf456d4a5a127d54d7cb6d by
examples, later also by batches or equal ones); the cache of `async_fedavg`, in its later history, is part of a
controller of C++ that is built with Bazel and protocol buffers.  `distfl`: its authors' program (YikFungTsai/DistFL,
commit aef5592bf32d6c19c88e573404d377e6a2d732dc) needs CUDA, and makes its probes without a gradient of the term about
distributions, which it computes from detached numbers.  They are compared with their papers' equations in our tests."""


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


def known(page: str) -> tuple[list[Line], dict[str, str]]:
    """The rows of a page that `text` has written, and its programs with their versions."""
    table = [tuple(row.strip("| ").split(" | ")) for row in page.splitlines() if row.startswith("| ")]
    listed = page.rpartition("Programs:")[2].splitlines()
    programs = [row.removeprefix("- ").partition(": ") for row in listed if row.startswith("- ")]
    return table[1:], {name: numbers for name, _, numbers in programs}


def in_order(lines: list[Line]) -> list[Line]:
    """Rows by program, in the order of `PEERS`."""
    titles = [peer.title for peer in PEERS]
    return sorted(lines, key=lambda row: titles.index(row[0]))


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
What FL-bench, FedLab and the programs of papers' authors do otherwise than the papers is in the scripts of `peers`.

{WITHOUT}

{absent}Programs:

{listed}
"""


def main() -> int:
    """Compare with every peer that has an environment."""
    parser = reader(__doc__, peers=Path("build/crosscheck"), results=HERE)
    parser.add_argument("--only", nargs="+", default=[], metavar="PROGRAM", choices=[peer.title for peer in PEERS],
                        help="run these, and keep the rows of the others")  # fmt: skip
    options = parser.parse_args()
    page = options.results / "RESULTS.md"
    lines, installed = known(page.read_text("utf-8")) if options.only else ([], {})
    lines = [row for row in lines if row[0] not in options.only]
    made, absent = compare(options.peers.resolve(), options.only or [peer.title for peer in PEERS])
    installed |= {name: numbers for name, (_, numbers) in made.items()}
    lines = in_order(lines + [row for rows, _ in made.values() for row in rows])
    page.write_text(
        text(lines, {peer.title: installed[peer.title] for peer in PEERS if peer.title in installed}, absent)
    )
    for row in lines:
        print(" | ".join(row))
    return 1 if any(row[4].startswith("DIFFERS") for row in lines) or not lines else 0


def compare(root: Path, titles: list[str]) -> tuple[dict[str, tuple[list[Line], str]], list[str]]:
    """The rows and the versions of each of these programs that has an environment, and the titles of the others."""
    given = inputs.make()
    modules = (ours, personal, equations, frameworks, authors)
    mine = {name: value for module in modules for name, value in module.results(given).items()}
    found: dict[str, tuple[list[Line], str]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        events = {key: value for key, value in mine.items() if key.startswith("events")}
        np.savez(folder / "inputs.npz", **given, **events)
        for peer in PEERS:
            theirs = results_of(peer, root, folder / "inputs.npz", folder) if peer.title in titles else None
            if theirs is not None:
                rows = [
                    line(peer.title, key, np.asarray(mine[key.partition(" by ")[0]]), np.asarray(value))
                    for key, value in theirs.items()
                ]
                found[peer.title] = rows, versions(peer, root)
    return found, [title for title in titles if title not in found]


if __name__ == "__main__":
    sys.exit(main())
