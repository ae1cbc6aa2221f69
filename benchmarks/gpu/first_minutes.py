"""What four minutes on a GPU tell: speed with each part switched on and off, equality of recipes, and tests.

Every section is a process of its own, so that a lost device costs one section, and every row is written to
OUT/first_minutes.jsonl when it is known: whatever ends this program, nothing that was measured is lost.  In the end, or
when the time is up, OUT/first_minutes.md has the table.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

from shared import markdown

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# The most telling first, with the seconds that each may take.
SECTIONS = {"W2": 45.0, "ResNet-18, group norm": 50.0, "W1": 25.0, "tests": 80.0, "equality": 60.0}
ROUNDS = {"W1": 5, "W2": 5, "ResNet-18, group norm": 1}
FIRST = ("test_faults.py", "test_workers.py", "test_launches.py", "test_devices.py")  # then what else there is


class Rows:
    """Rows of a table, one a line of a file."""

    def __init__(self, file: Path, began: float) -> None:
        self.file, self.began = file, began

    def add(self, section: str, name: str, **numbers: Any) -> None:
        """Add a row at once."""
        row = {"section": section, "name": name, "at": round(time.time() - self.began, 1), **numbers}
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)

    def markdown(self) -> str:
        """All rows as tables."""
        rows = [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []
        lines = []
        for section in dict.fromkeys(row["section"] for row in rows):
            own = [row for row in rows if row["section"] == section]
            columns = list(dict.fromkeys(key for row in own for key in row if key != "section"))
            cells = [map(markdown.of_any, map(row.get, columns)) for row in own]
            lines += ["", f"## {section}", "", markdown.table(columns, cells, "---")]
        return "\n".join(lines)


# -- what is switched


def host_server() -> Any:
    """The server on the host."""
    from piebald.core.machine import HOST
    from piebald.runtimes.simulation.simulator import Simulator

    return mock.patch.object(Simulator, "server_device", return_value=HOST)


def small_blocks() -> Any:
    """Sums in blocks of a processor's cache."""
    from piebald.core import cohort_matrix

    return mock.patch.object(cohort_matrix, "_AT_ONCE", cohort_matrix._CACHED)


def numbers_at_once() -> Any:
    """Numbers read for each stack, not for each cohort."""
    from piebald.engines.device_copies import LaterNumbers

    add = LaterNumbers.add

    def read(self: Any, numbers: Any, take: Any) -> None:
        add(self, numbers, take)
        self.read()

    return mock.patch.object(LaterNumbers, "add", read)


def channels_last() -> Any:
    """Images in channels-last order, as on the CPU."""
    from piebald.core import pytree
    from piebald.engines import scoring

    turned = lambda self, x: pytree.mapped(scoring._channels_last, x) if self._conv2d else x  # noqa: E731
    return mock.patch.object(scoring.ScoringEngine, "shaped", turned)


VARIANTS: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "recorded": ({"recorded": True}, contextlib.nullcontext),
    "not recorded": ({"recorded": False}, contextlib.nullcontext),
    "server on the host": ({}, host_server),
    "sums in a CPU's blocks": ({}, small_blocks),
    "numbers for each stack": ({}, numbers_at_once),
    "channels-last": ({}, channels_last),
}


def speed(name: str, options: Any, rows: Rows) -> None:
    """One workload: the bare loop, the engines, and the faster of them with each part switched."""
    import measures
    import torch
    from works import SCALES

    import piebald

    work = replace(SCALES[options.scale][name], rounds=ROUNDS[name] if options.scale == "full" else 1)
    device, clients = options.device, work.data()
    base = measures.bare(work, device)
    rows.add(name, "bare loop", **base)
    known = piebald.Simulator.model_fields
    cohort = 100 if name == "W1" else 10

    def measured(label: str, how: dict[str, Any], switch: Callable[[], Any]) -> float | None:
        if lacking := [setting for setting in how if setting not in known]:
            rows.add(name, label, skipped=f"no setting {lacking[0]!r} in this version")
            return None
        if how.get("recorded") and not device.startswith("cuda"):
            rows.add(name, label, skipped=f"steps are recorded on NVIDIA's GPUs, not on {device}")
            return None
        try:
            with switch():
                row = measures.seconds_a_round(work, device, clients, **how)
        except Exception as error:
            rows.add(name, label, failed=f"{type(error).__name__}: {error}"[:300])
            measures.stop_if_lost(error, device)
            return None
        finally:
            if device.startswith("cuda"):
                with contextlib.suppress(RuntimeError):
                    torch.cuda.empty_cache()
        rows.add(name, label, **measures.beside(row, base, name))
        return float(row["seconds a round"])

    engines = {"sequential": {"engine": "sequential", "stack": 1}, "vmapped": {"engine": "vmapped", "stack": cohort}}
    if "norm" not in name:
        engines["batched"] = {"engine": "batched", "stack": cohort}
    if name == "W1":  # one client after another takes too long
        del engines["sequential"]
    times: dict[str, float] = {}
    for label, how in engines.items():
        seconds = measured(label, how, contextlib.nullcontext)
        if seconds is not None:
            times[label] = seconds
    best = engines[min(times, key=lambda label: times[label])] if times else next(iter(engines.values()))
    tried = [("sequential", engines["sequential"])] if "sequential" in engines else []
    tried += [(best["engine"], best)] if best not in [how for _, how in tried] else []
    for label, engine in tried:
        for what, (how, switch) in VARIANTS.items():
            if what != "channels-last" or "W1" not in name:
                measured(f"{label}, {what}", engine | how, switch)
    measured("auto", {}, contextlib.nullcontext)


def equality(options: Any, rows: Rows) -> None:
    """Fifteen recipes and engines beside the reference engine on the CPU."""
    import measures

    names = [("fedavg", engine) for engine in measures.ENGINES]
    names += [(r, measures.ENGINES[at % 3]) for at, r in enumerate(list(measures.RECIPES)[1:])]
    for recipe, engine in names if options.scale == "full" else names[:2]:
        try:
            found = measures.equal_to_the_cpu(recipe, engine, options.device, 2 if options.scale == "full" else 1)
        except Exception as error:
            rows.add("equality", f"{recipe}, {engine}", failed=f"{type(error).__name__}: {error}"[:300])
            measures.stop_if_lost(error, options.device)
            continue
        rows.add("equality", f"{recipe}, {engine}", **found)


def tests(options: Any, rows: Rows) -> None:
    """The telling half of `make test-gpu`, file by file; without what is not here."""
    where = "pretended" if options.device == "cpu" else options.device
    others = sorted(path.name for path in (ROOT / "tests" / "devices").glob("test_*.py"))
    files = [*FIRST, *(name for name in others if name not in (*FIRST, "test_pretended.py"))]
    for file in files if options.scale == "full" else files[:1]:
        quick = ["-m", "not full and not long"] if file != "test_workers.py" else []
        command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(ROOT), "--import-mode=importlib"]
        command += ["-p", "no:cacheprovider", "-q", "--tb=line", "-W", "error:RNN module weights:UserWarning"]
        command += [*quick, f"tests/devices/{file}"]
        began, said = time.time(), list[str]()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
            env=os.environ | {"PIEBALD_TEST_DEVICE": where},
        )  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line.rstrip())
            if line.startswith(("FAILED", "ERROR")):
                rows.add("tests", file, failed=line.strip()[:300])
        code = process.wait()
        rows.add("tests", file, result=said[-1] if said else "", exit=code, seconds=round(time.time() - began, 1))
        (options.out / f"{file}.log").write_text("\n".join(said))


# -- the sections


def carry_out(options: Any, section: str, seconds: float) -> None:
    """Run a section in a process of its own for at most so many seconds."""
    command = [sys.executable, str(HERE / "first_minutes.py"), "--section", section, "--out", str(options.out)]
    command += ["--device", options.device, "--scale", options.scale, "--began", str(options.began)]
    process = subprocess.Popen(command, start_new_session=True, cwd=ROOT)
    rows = Rows(options.out / "first_minutes.jsonl", options.began)
    try:
        code = process.wait(timeout=seconds)
        if code:
            rows.add(section, "this section", failed=f"exit code {code}")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # also the tests that it has started
        process.wait()
        rows.add(section, "this section", stopped=f"after {seconds:.0f} s, its share of the time")


def about(options: Any) -> Iterator[str]:
    """The device, the versions, the commit and the date."""
    import measures
    import torch
    from ledger import commit

    yield f"{measures.device_name(options.device)}, torch {torch.__version__}, commit {commit()}"
    yield f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, scale {options.scale}"


def main() -> int:
    """Run the sections, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full", help="tiny tries the program on the CPU")
    parser.add_argument("--seconds", type=float, default=235.0, help="for all sections together")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, default=time.time(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.out = options.out.resolve()
    rows = Rows(options.out / "first_minutes.jsonl", options.began)
    if options.section:
        sys.path.insert(0, str(HERE))
        if options.section == "tests":
            tests(options, rows)
        elif options.section == "equality":
            equality(options, rows)
        else:
            speed(options.section, options, rows)
        return 0
    page = options.out / "first_minutes.md"
    for section in options.only:
        left = options.seconds - (time.time() - options.began)
        if left < 5:
            rows.add(section, "this section", stopped="the time was up before it began")
            continue
        carry_out(options, section, min(left, SECTIONS[section]))
        page.write_text(rows.markdown())
    sys.path.insert(0, str(HERE))
    with contextlib.suppress(Exception):  # the table counts, whatever the device says of itself
        page.write_text("\n".join([*about(options), rows.markdown()]))
    print(page.read_text())
    failed = re.search(r'"failed"', rows.file.read_text()) is not None
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
