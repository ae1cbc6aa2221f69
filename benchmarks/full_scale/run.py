"""The papers at full size on a GPU: python benchmarks/full_scale/run.py --device cuda --out build/full_scale

Each row is a run of its own with the paper's figure beside it, the most telling first, or with `--order seconds` the
shortest; `--seconds-a-row 600` leaves out what is expected to take longer (`rows.expected_seconds`).  Results are kept
in OUT/results.json and OUT/RESULTS.md, and the same command goes on: what is finished is not repeated, a run that was
stopped continues from its last checkpoint, and what did not fit into `--budget-seconds` is a row that says so.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.extend([str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "gpu")])  # for `shared`, `ledger`

from ledger import Ledger
from rows import STUDIES, Row, expected_seconds, folder_name, rows
from shared.options import reader

from piebald.core.machine import device_named, machine
from piebald.storage.store import RunStore

HERE = Path(__file__).parent
_STOP = 15.0  # seconds that a stopped run has to write its last checkpoint


def name_of(device: str) -> str:
    """The name of a device."""
    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else str(machine()["processor"])


def rounds_made(row: Row, runs: Path) -> str:
    """The number of rounds of a run that was stopped, in words; the same command goes on with it."""
    folder = next(runs.glob(f"{folder_name(row.study, row.about)}/*/seed-{row.seed}"), None)
    if folder is None:
        return "no round"
    with RunStore.open_read_only(folder) as store:
        return f"{store.version} rounds"


def carry_out(row: Row, out: Path, device: str, scale: str, seconds: float, tf32: bool) -> dict[str, object]:
    """Run one row for at most so many seconds; what it found, or why it found nothing."""
    command = [sys.executable, str(HERE / "one.py"), row.study, str(row.seed), *row.about]
    command += ["--out", str(out / "runs"), "--device", device, "--scale", scale, *["--tf32"] * tf32]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        found, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.communicate(timeout=_STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        came = rounds_made(row, out / "runs")
        return {"not measured": f"{came} in {seconds:.0f} s, when the time was up: the same command goes on"}
    if process.returncode:
        why = (said.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        return {"not measured": why[:300]}
    result: dict[str, object] = json.loads(found.strip().splitlines()[-1])
    return result


def main() -> int:
    """Run the rows that have not been run, until the time is up."""
    parser = reader(
        __doc__, device="cuda", only=STUDIES, seeds=None, names=[""], seconds_a_row=float("inf"), tf32=False,
        scale=("full", "tiny"), budget_seconds=540.0, out=Path("build/full_scale"), dry_run=False,
    )  # fmt: skip
    parser.add_argument("--order", choices=("telling", "seconds"), default="telling")
    options = parser.parse_args()
    wanted = [row for row in rows() if row.study in options.only]
    wanted = [row for row in wanted if options.seeds is None or row.seed in options.seeds]
    wanted = [row for row in wanted if any(part in row.name for part in options.names)]
    wanted = [row for row in wanted if expected_seconds(row) <= options.seconds_a_row]
    if options.order == "seconds":
        wanted.sort(key=expected_seconds)
    if options.dry_run:
        for row in wanted:
            print(f"{expected_seconds(row):6,d} s expected, {row.table}: {row.name} (the paper: {row.paper})")
        return 0
    began = time.monotonic()
    try:
        device = device_named(options.device)
    except ValueError as error:
        parser.error(str(error))
    ledger = Ledger(options.out, {"device": name_of(device), "scale": options.scale})
    for row in wanted:
        if ledger.has(row.table, row.name):
            continue
        left = options.budget_seconds - _STOP - (time.monotonic() - began)
        if left > 0:
            found = carry_out(row, options.out, device, options.scale, left, options.tf32)
        else:
            before = str(ledger.get(row.table, row.name).get("not measured", ""))
            found = {"not measured": before or "the time of this command was up"}
        ledger.put(row.table, row.name, {"paper": row.paper, "expected seconds": expected_seconds(row), **found})
        if "not measured" not in found:
            ledger.saw(row.table, str(ledger.about["device"]))
        print(f"[{time.monotonic() - began:.0f} s] {row.table}: {row.name}: {found}", flush=True)
    print(ledger.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
