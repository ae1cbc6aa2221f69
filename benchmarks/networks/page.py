"""RESULTS.md of the networks, from results.json."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from links import Case, cases, links
from shared.markdown import table
from shared.measured import machine
from shared.stored import texts

TEXTS = texts(Path(__file__).with_name("page.md"))
BUSY = 10.0  # load of the machine above which the proxy itself may be too slow for its rate
Found = dict[str, dict[str, Any]]


def page(found: Found) -> str:
    """The page."""
    missing = [case.key for case in cases() if case.key not in found]
    parts = [TEXTS["head"].format(machine=machine(), netem=_netem())]
    for name, (heads, rows) in {
        "steps": (STEP, _steps(found)), "masked": (MASKED, _masked(found)), "parties": (PARTIES, _parties(found)),
        "peers": (PEERS, _peers(found)), "namespaces": (NAMESPACES, _namespaces()),
    }.items():  # fmt: skip
        parts += [f"{TEXTS[name]}\n{table(heads, rows, '---')}\n"] if rows or name == "steps" else []
    if missing:
        parts.append(f"Not measured yet: {len(missing)} of {len(cases())} cases: {', '.join(missing)}.\n")
    return "\n".join(parts)


AGAIN = ["resets", "recovered", "lost"]
STEP = ["network", "model", "s a step", "s bare TLS", "share", "throughput", "MB crossed", *AGAIN]
MASKED = ["network", "s a step", "MB up", "MB down", "of the rate", *AGAIN]
PARTIES = ["network", "s a step", "MB up", "MB down", "resets", "ended with"]
NAMESPACES = ["delay each way", "loss", "made by", "s a step", "packets", "lost", "sent again", "updates", "same model"]
PEERS = ["network", "model", "Piebald s", "NVFlare s", "Flower s"]


def _steps(found: Found) -> list[list[str]]:
    rows = []
    for case in cases():
        one = found.get(case.key)
        if case.kind != "step" or one is None:
            continue
        if "error" in one:
            rows.append([case.link, case.size, one["error"], *[""] * 7])
            continue
        crossed, bare = one["up"] + one["down"], found.get(Case("bare", links()[case.link].bare, case.size).key)
        beside = ["", "", ""]
        if bare is not None:
            rate = crossed / one["seconds"] / (2 * one["nbytes"] / bare["seconds"])
            busy = f" (load {bare['load']:.0f})" if bare["load"] > BUSY else ""
            beside = [_seconds(bare["seconds"]) + busy, f"{bare['seconds'] / one['seconds']:.0%}", f"{rate:.0%}"]
        cells = [case.link, case.size, _seconds(one["seconds"]), *beside, f"{crossed / 1e6:.1f}"]
        rows.append([*cells, *(str(one[name]) for name in ("resets", "again", "lost"))])
    return rows


def _masked(found: Found) -> list[list[str]]:
    return [[case.link, *_cells(case, one)] for case, one in _of(found, "masked")]


def _parties(found: Found) -> list[list[str]]:
    return [
        [case.link, _seconds(one["seconds"]), f"{one['up'] / 1e6:.2f}", f"{one['down'] / 1e6:.2f}", one["resets"],
         one["error"] or "all steps"] for case, one in _of(found, "parties")
    ]  # fmt: skip


def _peers(found: Found) -> list[list[str]]:
    rows = []
    for case in cases():
        others = [found.get(Case(kind, case.link, case.size).key) for kind in ("nvflare", "flower")]
        if case.kind == "step" and any(others):
            rows.append([case.link, case.size, *map(_told, (found.get(case.key), *others))])
    return rows


def _of(found: Found, kind: str) -> list[tuple[Case, dict[str, Any]]]:
    return [(case, found[case.key]) for case in cases() if case.kind == kind and "seconds" in found.get(case.key, ())]


def _cells(case: Case, one: dict[str, Any]) -> list[str]:
    rate = links()[case.link].conditions.rate
    share = "" if rate is None else f"{max(one['up'], one['down']) / one['seconds'] / rate:.0%}"
    cells = [_seconds(one["seconds"]), f"{one['up'] / 1e6:.1f}", f"{one['down'] / 1e6:.1f}", share]
    return [*cells, *(str(one[name]) for name in ("resets", "again", "lost"))]


def _told(one: dict[str, Any] | None) -> str:
    if one is None:
        return "not measured"
    return _seconds(one["seconds"]) if "seconds" in one else str(one["error"])


def _seconds(spent: float) -> str:
    return f"{spent:.2f}" if spent < 10 else f"{spent:,.0f}"


def _namespaces() -> list[list[str]]:
    path = Path(__file__).with_name("namespaces.json")
    return [
        [f"{one['delay_ms']} ms", f"{one['loss']:.0%}", one["by"], _seconds(one["seconds a step"]),
         *(f"{one[name]:,}" for name in ("packets", "lost", "sent again", "updates")),
         "yes" if one["same model"] else "no"]
        for one in (json.loads(path.read_text()) if path.exists() else [])
    ]  # fmt: skip


def _netem() -> str:
    if shutil.which("tc") is None or os.geteuid() != 0:
        return "not tried, this machine has no `tc`, or it is not allowed"
    tried = "ip link add v0 type veth peer name v1 && tc qdisc add dev v0 root netem delay 1ms"
    done = subprocess.run(["unshare", "-n", "sh", "-c", tried], capture_output=True)
    return "not tried yet, `netem` is there" if done.returncode == 0 else "not tried, this kernel has no `netem`"
