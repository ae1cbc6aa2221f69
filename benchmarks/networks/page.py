"""RESULTS.md of the networks, from results.json."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from typing import Any

from links import Case, cases, links

BUSY = 10.0  # load of the machine above which the proxy itself may be too slow for its rate
Found = dict[str, dict[str, Any]]


def page(found: Found) -> str:
    """The page."""
    missing = [case.key for case in cases() if case.key not in found]
    lines = [
        "# Bad networks",
        "",
        "`python benchmarks/networks/run.py --jobs 4 --flower PYTHON` (`--quick` for a part) on "
        f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}.  "
        "The machine was shared with other work, and several cases were measured at a time, each on a link of its own "
        "(results.json has the machine's load before each).",
        "",
        "All links are proxies on loopback (`bad_link.py`), which delay and limit; they do not make TCP's own slow "
        f"start and its reaction to loss.  Packet loss: {_netem()}.",
        *_steps(found),
        *_masked(found),
        *_parties(found),
        *_peers(found),
    ]
    if missing:
        lines += ["", f"Not measured yet: {len(missing)} of {len(cases())} cases: {', '.join(missing)}."]
    return "\n".join([*lines, ""])


def _steps(found: Found) -> list[str]:
    lines = [
        "",
        "## A step of a federation",
        "",
        "The model goes to the one site, which trains one step on ten rows, writes the update to its disk, and sends "
        "it.  *Bare TLS*: as many bytes down and up again over the same link, without resets, stalls and events.  "
        "*Share*: its seconds over those of the step, which may be above 100 % since pieces are compressed where that "
        "pays.  *Throughput*: bytes a second that crossed the link, compressed or not, over those of bare TLS; the "
        "step's training and its write to the disk count against it.  Where bare TLS was measured under a load that is "
        "given with it, the proxy got too little of the processor for its rate, and share and throughput are too "
        "high.  *Recovered*: connections that were made anew "
        "meanwhile, after which the transfer went on.  *Lost*: updates that did not arrive.",
        "",
        "| network | model | s a step | s bare TLS | share | throughput | MB crossed | resets | recovered | lost |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases():
        one = found.get(case.key)
        if case.kind != "step" or one is None:
            continue
        if "error" in one:
            lines.append(f"| {case.link} | {case.size} | {one['error']} | | | | | | | |")
            continue
        crossed, bare = one["up"] + one["down"], found.get(Case("bare", links()[case.link].bare, case.size).key)
        beside = ["", "", ""]
        if bare is not None:
            rate = crossed / one["seconds"] / (2 * one["nbytes"] / bare["seconds"])
            busy = f" (load {bare['load']:.0f})" if bare["load"] > BUSY else ""
            beside = [_seconds(bare["seconds"]) + busy, f"{bare['seconds'] / one['seconds']:.0%}", f"{rate:.0%}"]
        cells = [case.link, case.size, _seconds(one["seconds"]), *beside, f"{crossed / 1e6:.1f}"]
        lines.append("| " + " | ".join([*cells, *(str(one[name]) for name in ("resets", "again", "lost"))]) + " |")
    return lines


def _masked(found: Found) -> list[str]:
    lines = [
        "",
        "## Secure sums",
        "",
        "A step of three sites with a model of 1 MB over one link.  Masked updates have 8 bytes for a parameter, and "
        "the rounds of the protocol cross the link one after another.  *Of the rate*: bytes a second that crossed, of "
        "what the link carries in the direction of the larger part.",
        "",
        "| network | s a step | MB up | MB down | of the rate | resets | recovered | lost |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, one in _of(found, "masked"):
        lines.append(f"| {case.link} | {_cells(case, one)} |")
    return lines if len(lines) > 7 else []


def _parties(found: Found) -> list[str]:
    lines = [
        "",
        "## Transfers of two parties",
        "",
        "Steps of 100 rows with real numbers in fixed point, five of them; seconds are of one step, bytes of all.  A "
        "connection that is reset ends both processes in one sentence, and they go on from their last checkpoint "
        "(`tests/vertical/test_bad_links.py`, `test_processes.py`), so those links are no rows here.",
        "",
        "| network | s a step | MB up | MB down | resets | ended with |",
        "|---|---|---|---|---|---|",
    ]
    for case, one in _of(found, "parties"):
        sums = f"{_seconds(one['seconds'])} | {one['up'] / 1e6:.2f} | {one['down'] / 1e6:.2f}"
        lines.append(f"| {case.link} | {sums} | {one['resets']} | {one['error'] or 'all steps'} |")
    return lines if len(lines) > 7 else []


def _peers(found: Found) -> list[str]:
    lines = [
        "",
        "## Beside others",
        "",
        "The same bytes over the same links.  *NVFlare*: its own messages without its jobs and without TLS "
        "(`peers/nvflare_link.py`): the model is fetched and an update sent, and nothing is trained.  *Flower*: a "
        "SuperLink and a SuperNode without TLS, which starts a process for each message that imports torch "
        "(`peers/flower_link.py`).  So these compare frameworks with their defaults, not protocols.  A case that did "
        "not end says so.",
        "",
        "| network | model | Piebald s | NVFlare s | Flower s |",
        "|---|---|---|---|---|",
    ]
    for case in cases():
        others = [found.get(Case(kind, case.link, case.size).key) for kind in ("nvflare", "flower")]
        if case.kind != "step" or not any(others):
            continue
        cells = [_told(one) for one in (found.get(case.key), *others)]
        lines.append(f"| {case.link} | {case.size} | {' | '.join(cells)} |")
    return lines if len(lines) > 7 else []


def _of(found: Found, kind: str) -> list[tuple[Case, dict[str, Any]]]:
    return [(case, found[case.key]) for case in cases() if case.kind == kind and "seconds" in found.get(case.key, ())]


def _cells(case: Case, one: dict[str, Any]) -> str:
    rate = links()[case.link].conditions.rate
    share = "" if rate is None else f"{max(one['up'], one['down']) / one['seconds'] / rate:.0%}"
    cells = [_seconds(one["seconds"]), f"{one['up'] / 1e6:.1f}", f"{one['down'] / 1e6:.1f}", share]
    return " | ".join([*cells, *(str(one[name]) for name in ("resets", "again", "lost"))])


def _told(one: dict[str, Any] | None) -> str:
    if one is None:
        return "not measured"
    return _seconds(one["seconds"]) if "seconds" in one else str(one["error"])


def _seconds(spent: float) -> str:
    return f"{spent:.2f}" if spent < 10 else f"{spent:,.0f}"


def _netem() -> str:
    if shutil.which("tc") is None or os.geteuid() != 0:
        return "not tried, this machine has no `tc`, or it is not allowed"
    tried = "ip link add v0 type veth peer name v1 && tc qdisc add dev v0 root netem delay 1ms"
    done = subprocess.run(["unshare", "-n", "sh", "-c", tried], capture_output=True)
    return "not tried yet, `netem` is there" if done.returncode == 0 else "not tried, this kernel has no `netem`"
