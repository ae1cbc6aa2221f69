"""The runs of the leaderboard, kept as data.

Under the first seed every method is trained with each of its settings, and with the one that is best by validation rows
under the others.  `results/<federation>.jsonl` has a line for each run, written when it has ended, so an interrupted
competition goes on, and a method that is added is trained without the others.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from methods import ALONE, FEW, POOLED, RUN, TOGETHER, Method
from runs import about, run_one
from tiers import FEDERATIONS, REAL, SMALL, SURVIVAL, Entrants

sys.path.append(str(Path(__file__).parents[1] / "advise"))
import truth

from piebald.core.errors import SettingError

RESULTS = Path(__file__).with_name("results")
SEEDS = (0, 1, 2, 3, 4)
CLIENTS, REFUSED = "clients.json", "refused.json"
Lines = dict[tuple[str, str, int], dict[str, Any]]


def read(federation: str, folder: Path = RESULTS) -> Lines:
    """The lines of a federation by method, setting and seed; those of a setting that is no longer drawn stay unread."""
    return {(line["method"], label(line["settings"]), line["seed"]): line for line in truth.read(folder, federation)}


def label(settings: dict[str, Any]) -> str:
    """A setting as text."""
    return json.dumps(settings, sort_keys=True)


def table(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """A table of all federations: their clients, or the methods that cannot be trained on them and why."""
    file = folder / name
    return dict(json.loads(file.read_text("utf-8"))) if file.exists() else {}


def keep(name: str, federation: str, values: dict[str, Any], folder: Path) -> None:
    """Keep what is known of a federation in one of the tables."""
    known = table(name, folder) | {federation: table(name, folder).get(federation, {}) | values}
    (folder / name).write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", "utf-8")


def chosen(method: Method, lines: Lines) -> int | None:
    """The setting with the most right validation rows under the first seed; None while some are missing."""
    found = [lines.get((method.name, label(settings), SEEDS[0])) for settings in method.settings()]
    if any(line is None for line in found):
        return None
    # the mean over clients, each of which counts the same
    scores = [_share(line) for line in found if line is not None]
    return scores.index(max(scores))


def _share(line: dict[str, Any]) -> float:
    shares = [right / rows for right, rows in zip(line["validation"], line["rows"], strict=True) if rows]
    return sum(shares) / len(shares)


def fits(federation: Entrants, method: Method) -> bool:
    """Whether a method is compared on a federation: those without rounds, and what they must beat, by the clock."""
    if federation.tier in (REAL, SURVIVAL) and method.name not in FEW:
        return False
    if federation.tier != SMALL and method.network is not None:
        return False
    return method.clock == federation.slow or (federation.slow and method.name in (POOLED, ALONE, TOGETHER))


def missing(federation: Entrants, method: Method, seeds: Sequence[int], folder: Path) -> Iterator[tuple[int, int]]:
    """The settings and seeds that are not there: those of the first seed, then the chosen one with the others."""
    if not fits(federation, method):
        return
    refused = table(REFUSED, folder).get(federation.name, {})
    labels = [label(settings) for settings in method.settings()]
    for number, own in enumerate(labels):
        if method.name not in refused and (method.name, own, SEEDS[0]) not in read(federation.name, folder):
            yield number, SEEDS[0]
            refused = table(REFUSED, folder).get(federation.name, {})
    lines = read(federation.name, folder)
    best = chosen(method, lines)
    for seed in seeds[1:]:
        if best is not None and (method.name, labels[best], seed) not in lines:
            yield best, seed


def compete(
    names: Sequence[str] = (),
    only: Sequence[str] = (),
    seeds: Sequence[int] = SEEDS,
    minutes: float = float("inf"),
    folder: Path = RESULTS,
    tier: str = SMALL,
) -> int:
    """Make the runs that are missing, all of a federation before the next.

    Args:
        names: of federations, all by default.
        only: of methods, all by default.
        seeds: the first one tunes.
        minutes: no run is started after so many.
        folder: where lines are kept.
        tier: of the networks.

    Returns:
        The number of runs that were made.
    """
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    methods = tuple(method for method in RUN if not only or method.name in only)
    began, made = time.monotonic(), 0
    for federation in FEDERATIONS:
        if federation.tier != tier or (names and federation.name not in names):
            continue
        clients: Any = None
        for method in methods:
            for number, seed in missing(federation, method, seeds, folder):
                if time.monotonic() - began > 60 * minutes:
                    return made
                if clients is None:
                    clients = federation.clients()
                    keep(CLIENTS, federation.name, about(clients), folder)
                    gc.freeze()  # else each run ends with a collection of all that torch has, a third of its time
                try:
                    line = run_one(federation, clients, method, number, seed)
                except SettingError as why:  # the method does not fit such rows: a finding, and no end of the others
                    keep(REFUSED, federation.name, {method.name: str(why)}, folder)
                    print(f"{federation.name} {method.name}: {why}", flush=True)
                    continue
                truth.append(folder, federation.name, line)
                made += 1
                print(f"[{time.monotonic() - began:.0f} s] {federation.name} {method.name} {number} {seed}: "
                      f"{100 * _share(line):.1f} of validation rows, {line['seconds']:.1f} s", flush=True)  # fmt: skip
    return made
