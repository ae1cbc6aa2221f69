"""Kills: python benchmarks/robustness/kills.py --count 30

A simulation is killed (SIGKILL) or asked to stop (SIGTERM) at a random moment, again and again, and resumed until it
has ended.  Its final model must have the bits of the run that nothing disturbed.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

import torch
from rows import Row, command, tallied

from piebald.storage.store import RunStore

FILE = """\
rounds = 30
checkpoint_every = 1
measure = "none"
partition = {{ kind = "iid", clients = 4, limit = 200 }}
model = {{ name = "mlp", hidden = [8] }}
recipe = {{ name = "scaffold", lr = 0.05, cohort = 2 }}
runtime = {{ engine = "sequential", stack = 1, workers = {workers} }}
evaluate = {{ every = 5 }}
"""


def started(*words: object) -> subprocess.Popen[str]:
    """A command in a process of its own."""
    command = [sys.executable, "-m", "piebald.cli", *map(str, words), "--quiet"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def final(folder: Path) -> torch.Tensor:
    """The model that a run ended with."""
    with RunStore.open_read_only(folder) as store:
        found = store.last_checkpoint()
    assert found is not None
    return next(tensor for name, tensor in sorted(found[1].tensors.items()) if "model" in name)


def begun(folder: Path, process: subprocess.Popen[str], versions: int) -> None:
    """Wait until a run has recorded some steps more, or has ended."""
    least = None
    while process.poll() is None:
        if (folder / "run.db").exists():
            with RunStore.open_read_only(folder) as store:
                least = store.version + versions if least is None else least
                if store.version >= least:
                    return
        time.sleep(0.005)


def disturbed(file: Path, folder: Path, wanted: torch.Tensor, kills: int, draw: random.Random) -> list[tuple[str, str]]:
    """Kill one run so many times; the last verdict is on its result."""
    verdicts: list[tuple[str, str]] = []
    words: tuple[object, ...] = ("run", file, "--out", folder)
    for _ in range(kills):
        process = started(*words)
        begun(folder, process, draw.randrange(1, 4))
        time.sleep(draw.random() * 0.05)
        sent = draw.choice((signal.SIGKILL, signal.SIGTERM))
        process.send_signal(sent)
        errors = process.communicate()[1]
        code = process.returncode
        clean = code in (-signal.SIGKILL, 0) if sent == signal.SIGKILL else code in (130, 0)
        good = clean and "Traceback" not in errors
        verdicts.append(("accepted" if good else "raw", f"{sent.name}: exit code {code}: {errors.strip()[-200:]}"))
        if (folder / "run.db").exists():
            words = ("resume", folder)
    process = started(*words)
    errors = process.communicate()[1]
    if process.returncode or not torch.equal(final(folder), wanted):
        verdicts[-1] = (
            "raw",
            f"after {kills} kills the result differs (exit code {process.returncode}): {errors[-200:]}",
        )
    return verdicts


def run(count: int = 30, seed: int = 0, each: int = 5) -> list[Row]:
    """Kill simulations so many times in all, in this process and with workers; `each` run is killed so many times."""
    draw, rows = random.Random(seed), []
    with tempfile.TemporaryDirectory() as place:
        for workers in (0, 2):
            file = Path(place) / f"{workers}.toml"
            file.write_text(FILE.format(workers=workers))
            started("run", file, "--out", Path(place) / f"whole-{workers}").communicate()
            wanted = final(Path(place) / f"whole-{workers}")
            verdicts: list[tuple[str, str]] = []
            for number in range(max(1, count // (2 * each))):
                verdicts += disturbed(file, Path(place) / f"{workers}-{number}", wanted, each, draw)
            rows.append(tallied(f"kills of a simulation, {workers} workers", verdicts))
    return rows


if __name__ == "__main__":
    sys.exit(command(__doc__, run, count=30, seed=0))
