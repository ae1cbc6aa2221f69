"""Steps of a federation on bad networks: python benchmarks/networks/run.py [--quick] [--only TEXT]

Each condition and size is measured once and kept in results.json, so the same command goes on where it was stopped.
RESULTS.md is written from that file.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import bare_tls
from bad_link import BadLink, Conditions
from threads import Tasks, provisioned

from piebald.experiment_file import ExperimentSettings
from piebald.runtimes.federation import provisioning

FOLDER = Path(__file__).parent
MBIT = 125_000  # bytes a second
WIDTHS = {"1 MB": [470, 470], "25 MB": [2450, 2450], "200 MB": [7000, 7000]}  # of a model's hidden layers


class Case(NamedTuple):
    """A condition.

    Attributes:
        conditions: how the link behaves.
        event: what happens to it while a model is under way, and for how many seconds.
    """

    conditions: Conditions
    event: tuple[str, float] | None = None


def links() -> dict[str, Case]:
    """All conditions, by name."""
    found = {"loopback": Case(Conditions())}
    for rate in (10, 1):
        for trip in (50, 200, 600):
            found[f"{rate} Mbit/s, {trip} ms"] = Case(Conditions(trip / 1000, trip / 10_000, rate * MBIT))
    base = Conditions(0.05, 0.005, 10 * MBIT)
    found["10 Mbit/s, 50 ms, a reset every 5 MB"] = Case(base._replace(reset_every=5_000_000))
    found["10 Mbit/s, 50 ms, 3 s standing still every 2 MB"] = Case(base._replace(stall_every=2_000_000, stall=3.0))
    for seconds in (10, 60, 600):
        found[f"10 Mbit/s, 50 ms, a partition of {seconds} s"] = Case(base, ("partition", seconds))
    found["10 Mbit/s, 50 ms, the connection is forgotten"] = Case(base, ("half_open", 0))
    return found


QUICK = [
    ("loopback", "1 MB"), ("loopback", "25 MB"), ("10 Mbit/s, 50 ms", "1 MB"), ("10 Mbit/s, 200 ms", "25 MB"),
    ("10 Mbit/s, 600 ms", "25 MB"), ("1 Mbit/s, 200 ms", "1 MB"), ("10 Mbit/s, 50 ms, a reset every 5 MB", "25 MB"),
    ("10 Mbit/s, 50 ms, a partition of 10 s", "25 MB"), ("10 Mbit/s, 50 ms, the connection is forgotten", "25 MB"),
    ("10 Mbit/s, 50 ms, 3 s standing still every 2 MB", "25 MB"),
]  # fmt: skip


def settings(size: str) -> ExperimentSettings:
    """One step of SGD on ten rows, which takes little but the network."""
    table = {
        "data": {"name": "digits"},
        "model": {"name": "mlp", "hidden": WIDTHS[size]},
        "partition": {"kind": "iid", "clients": 1, "limit": 100},
        "recipe": {"name": "fedavg", "lr": 0.01, "batch": 10, "steps": 1},
        "runtime": {"kind": "federation", "task_timeout": 3600.0, "patience": 1200.0},
    }
    return ExperimentSettings.of_table(table, "the benchmark's settings")


def measured(name: str, size: str) -> dict[str, Any]:
    """One step of one site: the model goes down, ten rows are trained on, the update comes up."""
    case = links()[name]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        provisioned(folder, 1)
        bad = BadLink(("127.0.0.1", provisioning.read(folder / "server").port))
        parties = Tasks(settings(size), folder, [bad.port])
        try:
            parties.step()  # the site has joined, and libraries are loaded
            computed = time.monotonic()
            parties.step()
            computed = time.monotonic() - computed
            before, resets = dict(bad.passed), bad.resets
            bad.conditions = case.conditions
            began = time.monotonic()
            if case.event is not None:
                threading.Thread(target=_happen, args=(bad, *case.event), daemon=True).start()
            results = parties.step()
            spent = time.monotonic() - began
        finally:
            bad.conditions = Conditions()
            parties.close()
            bad.close()
        nbytes = 4 * parties.ready.work.layout.size
        made = case.conditions._replace(reset_every=None, stall_every=None)
        bare = _bare(folder, made, nbytes)
        lost = sum(one.update is None for one in results)
        passed = {way: bad.passed[way] - before[way] for way in before}
        found = {"condition": name, "size": size, "nbytes": nbytes, "seconds": spent, "bare": bare, "lost": lost}
        return found | {"loopback": computed, **passed, "resets": bad.resets - resets, "opened": bad.opened}


def _bare(folder: Path, conditions: Conditions, nbytes: int) -> float:
    """Seconds of bare TLS over a link without what breaks it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        bad = BadLink(("127.0.0.1", listening.getsockname()[1]), conditions)
        try:
            return bare_tls.seconds(folder, listening, bad.port, nbytes)
        finally:
            bad.close()


def _happen(bad: BadLink, what: str, seconds: float) -> None:
    time.sleep(3.0)  # a piece of the model is under way
    getattr(bad, what)()
    time.sleep(seconds)
    bad.heal()


def main() -> None:
    """Measure what is missing, and write RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few conditions, in about five minutes")
    parser.add_argument("--only", default="", help="conditions and sizes whose names contain this")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of results.json and RESULTS.md")
    chosen = parser.parse_args()
    logging.getLogger("piebald").setLevel(logging.ERROR)
    cases = QUICK if chosen.quick else [(name, size) for name in links() for size in WIDTHS]
    kept = chosen.out / "results.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    for name, size in cases:
        key = f"{name}; {size}"
        if chosen.only in key and key not in found:
            print(key, flush=True)
            found[key] = measured(name, size)
            kept.write_text(json.dumps(found, indent=1) + "\n")
        (chosen.out / "RESULTS.md").write_text(page(found))


def page(found: dict[str, Any]) -> str:
    """RESULTS.md."""
    lines = [
        "# Bad networks",
        "",
        "`python benchmarks/networks/run.py` (`--quick` for a part) on "
        f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}.  "
        "The machine was shared with other work.",
        "",
        "One site and its server, over a proxy on loopback that is the bad network (`bad_link.py`).  A *step*: the "
        "model goes to the site, which trains one step on ten rows, writes the update to its disk, and sends it.  "
        "*Bare TLS*: as many bytes down and up again over the same link, without resets, stalls and events.  "
        "*Share*: its seconds over those of the step, which may be above 100 % since pieces are compressed where that "
        "pays.  *Throughput*: bytes a second that crossed the link, compressed or not, over those of bare TLS; the "
        "step's training and its write to the disk count against it.  *Lost*: updates that did not arrive.",
        "",
        "| network | model | s a step | s bare TLS | share | throughput | MB crossed | resets | lost |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in links():
        for size in WIDTHS:
            if (one := found.get(f"{name}; {size}")) is None:
                continue
            crossed = one["up"] + one["down"]
            throughput = crossed / one["seconds"] / (2 * one["nbytes"] / one["bare"])
            lines.append(
                f"| {name} | {size} | {one['seconds']:.1f} | {one['bare']:.1f} | {one['bare'] / one['seconds']:.0%} | "
                f"{throughput:.0%} | "
                f"{crossed / 1e6:.1f} | {one['resets']} | "
                f"{one['lost']} |"
            )
    missing = [f"{name}; {size}" for name in links() for size in WIDTHS if f"{name}; {size}" not in found]
    if missing:
        lines += ["", f"Not measured yet: {len(missing)} of {len(found) + len(missing)} cases."]
    return "\n".join([*lines, "", *_notes(), ""])


def _notes() -> list[str]:
    """What was there, and what was not."""
    return [
        "The proxy delays and limits; it does not make TCP's own slow start and its reaction to loss.  "
        f"Packet loss: {_netem()}.",
        "",
        f"Beside others: {_peers()}.",
    ]


def _netem() -> str:
    if shutil.which("tc") is None or os.geteuid() != 0:
        return "not tried, this machine has no `tc`, or it is not allowed"
    tried = "ip link add v0 type veth peer name v1 && tc qdisc add dev v0 root netem delay 1ms"
    done = subprocess.run(["unshare", "-n", "sh", "-c", tried], capture_output=True)
    return "not tried yet, `netem` is there" if done.returncode == 0 else "not tried, this kernel has no `netem`"


def _peers() -> str:
    try:
        return f"flwr {version('flwr')} is installed, and its part is not written"
    except PackageNotFoundError:
        return "Flower is not installed here, and NVFlare's job layer was not measured on these links"


if __name__ == "__main__":
    main()
