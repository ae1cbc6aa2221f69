"""Steps of a federation on bad networks: python benchmarks/networks/run.py [--quick] [--only TEXT] [--jobs N]

Each case is measured once, in a process of its own, and kept in results.json, so the same command goes on where it was
stopped; several commands may run at a time.  RESULTS.md is written from that file.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.extend([str(Path(__file__).parent), str(Path(__file__).parents[1])])

from links import QUICK, Case, cases, links
from shared.options import reader

FOLDER = Path(__file__).parent
LIMIT = 5400  # seconds that a case may take


def main() -> None:
    """Measure what is missing, and write RESULTS.md."""
    parser = reader(__doc__, ["one"], quick=False, jobs=1, out=FOLDER)
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose names contain each of these")
    parser.add_argument("--flower", type=Path, help="the interpreter of an environment with flwr 1.41.0 and torch")
    chosen = parser.parse_args()
    if chosen.one is not None:
        return print(json.dumps(measured(Case.of(chosen.one), chosen.flower)))
    kept = chosen.out / "results.json"
    wanted = [case for case in (QUICK if chosen.quick else cases()) if all(text in case.key for text in chosen.only)]
    if chosen.flower is None:
        wanted = [case for case in wanted if case.kind != "flower"]
    chosen.out.mkdir(parents=True, exist_ok=True)  # before an hour is spent on it
    there = known(kept)

    def one(case: Case) -> None:
        print(case.key, flush=True)
        found = apart(case, chosen.flower)
        print(case.key, found, flush=True)
        keep(kept, case, found)

    with ThreadPoolExecutor(chosen.jobs) as pool:
        list(pool.map(one, [case for case in wanted if case.key not in there]))
    write_page(chosen.out)


def known(path: Path) -> dict[str, Any]:
    """What was measured."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def keep(path: Path, case: Case, found: dict[str, Any]) -> None:
    """Add a case to what was measured; another command may do so at the same time."""
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = known(path) | {case.key: found}
        path.write_text(json.dumps({key: made[key] for key in sorted(made)}, indent=1) + "\n")


def apart(case: Case, flower: Path | None) -> dict[str, Any]:
    """Measure a case in a process of its own."""
    command = [sys.executable, __file__, "--one", case.key, *(["--flower", str(flower)] if flower else [])]
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"error": f"not over after {LIMIT} s"}
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        why = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"error": f"{why[:200]}, after {time.monotonic() - began:.0f} s"}


def measured(case: Case, flower: Path | None) -> dict[str, Any]:
    """Measure a case here."""
    logging.getLogger("piebald").setLevel(logging.ERROR)
    link, load = links()[case.link], os.getloadavg()[0]
    if case.kind == "flower":
        from peers.flower_link import measured as with_flower

        found = with_flower(case.link, case.size, flower)
    elif case.kind == "nvflare":
        from peers.nvflare_link import measured as with_nvflare

        found = with_nvflare(link, case.size)
    else:
        import measures

        found = getattr(measures, case.kind)(link, case.size)
    return found | {"load": round(load, 1)}


def write_page(out: Path) -> None:
    """RESULTS.md."""
    from page import page

    (out / "RESULTS.md").write_text(page(known(out / "results.json")))


if __name__ == "__main__":
    main()
