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
from shared.stored import table as stored
from shared.stored import texts

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


STORED = stored(HERE / "peers.toml")
PEERS = tuple(Peer(**one | {"packages": tuple(one["packages"])}) for one in STORED["peers"])
EXPLAINED = {(one["peer"], one["quantity"]): (one["why"], one["bound"]) for one in STORED["explained"]}
TEXTS = texts(HERE / "page.md")
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
    return TEXTS["page"].format(
        quantities=len(lines), equal=len(lines) - len(differs), rounding=ROUNDING, errors=ERRORS, named=named,
        unexplained=len(open_ones), rows=rows, absent=absent, listed=listed,
    )  # fmt: skip


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
