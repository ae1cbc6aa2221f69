"""The finished runs of the benchmark, read from their run folders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import federations
import settings
from blocks import BASE

from piebald.report.comparison import Comparison
from piebald.report.tables import History, load

OURS = "HDAFL"


@cache
def finished(*folders: Path) -> list[History]:
    """Return the finished runs below some folders, with what the tables need already read and the files closed."""
    found = [history for folder in folders if any(folder.rglob("run.db")) for history in load([folder])]
    for history in found:
        _ = history.final, history.curve, history.clients, history.row_scores
        _ = history.scores if history.recipe == "fine_tuned" else None
        history.close()
    return [history for history in found if history.meta.get("status") == "finished"]


def comparison(folder: Path, needed: Sequence[str] = (BASE, OURS)) -> Comparison | None:
    """Return the runs of one setting and cohort, with those of Local, which all cohorts share.

    None where the runs of a needed recipe are missing."""
    runs = finished(folder, folder.parent / "alone")
    if not set(needed) <= {run.label for run in runs}:
        return None
    seeds = {run.seed for run in runs if run.label == BASE}
    return Comparison([run for run in runs if run.seed in seeds])


def comparisons(out: Path, part: str) -> Iterator[tuple[str, str, int, Comparison]]:
    """Yield the network, the setting, the clients per round and the runs, in the order of `settings`."""
    for setting in (*settings.MANY, *settings.FEW):
        folders = [path for path in (out / part).glob(f"*/{setting}/C*") if path.is_dir()]
        for folder in sorted(folders, key=lambda path: int(path.name[1:])):
            if (runs := comparison(folder)) is not None:
                yield folder.parent.parent.name, setting, int(folder.name[1:]), runs


def traffic_runs(out: Path, model: str, case: str) -> list[History]:
    """Return the runs of one traffic case, only with seeds for which every recipe that was run has finished.

    Empty where those of FedAvg, HDAFL or the centralised model are missing."""
    runs = finished(out / "traffic" / model / case / "C2")
    labels = {run.label for run in runs}
    if not {BASE, OURS, federations.CENTRAL} <= labels:
        return []
    complete = set.intersection(*({run.seed for run in runs if run.label == label} for label in labels))
    return [run for run in runs if run.seed in complete]
