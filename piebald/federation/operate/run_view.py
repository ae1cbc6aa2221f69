"""A running federation as the status page and the metrics show it, read from the files that its server writes.

Nothing here talks to the server's threads: the page can be slow, wrong or attacked and the run does not notice.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from piebald.core.errors import PiebaldError
from piebald.federation.operate.status import status_values
from piebald.storage.store import RunStore

POINTS = 200  # points of a curve, at most
_STEPS = 60  # server steps over which a site's loss is followed
_FRESH = 2.0  # seconds for which a view is shown again

Curve = list[tuple[int, float]]  # server step, value


@dataclass(frozen=True, slots=True)
class RunView:
    """A federation at one moment.

    Attributes:
        status: see `status.status_values`; empty where nothing has been written yet.
        meta: what the run folder keeps about the run; empty before there is one.
        loss: the loss of training over server steps.
        scores: the mean of the metric over clients, by model.
        losses: the last losses of each client's training, by client number.
        clusters: the cluster of each client, by client number.
        failures: tasks without an update, by client number and status.
        privacy: the budgets that are spent so far.
    """

    status: Mapping[str, Any] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    loss: Curve = field(default_factory=list)
    scores: Mapping[str, Curve] = field(default_factory=dict)
    losses: Mapping[int, Curve] = field(default_factory=dict)
    clusters: Mapping[int, int] = field(default_factory=dict)
    failures: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    privacy: tuple[Mapping[str, Any], ...] = ()


class Viewer:
    """Reads the view of a federation, at most every two seconds however often it is asked for.

    Args:
        credentials: the server's credentials.
        run: the run folder; by default the one that the credentials name at the time.
    """

    def __init__(self, credentials: Path, run: Path | None = None) -> None:
        self._credentials, self._given = credentials, run
        self._lock = threading.Lock()
        self._read, self._view = float("-inf"), RunView()

    def view(self) -> RunView:
        """Return the federation now."""
        with self._lock:
            # under the lock, so that many readers at once cost one reading
            if time.monotonic() - self._read > _FRESH:
                self._view = self._fresh()
                self._read = time.monotonic()
            return self._view

    def _fresh(self) -> RunView:
        try:
            status = status_values(self._credentials)
        except PiebaldError:  # nothing has been written yet
            status = {}
        named = status.get("folder")
        run = self._given or (None if named is None else Path(named))
        if run is None or not (run / "run.db").exists():
            return RunView(status)
        with RunStore.open_read_only(run) as store:
            return self._of(status, store)

    def _of(self, status: Mapping[str, Any], store: RunStore) -> RunView:
        meta, version = store.meta, store.version
        stride = max(1, version // POINTS)
        # the last step in any case, since the page shows its loss as the present one
        steps = store.query(
            "SELECT version, loss FROM step WHERE loss IS NOT NULL AND (version % ? = 0 OR version = ?) "
            "ORDER BY version", stride, version,
        )  # fmt: skip
        means = store.query(
            "SELECT version, model, avg(value) AS value FROM score WHERE client IS NOT NULL AND metric = ? "
            "AND value IS NOT NULL GROUP BY version, model ORDER BY version", meta.get("metric"),
        )  # fmt: skip
        scores: dict[str, Curve] = {}
        for row in means:
            scores.setdefault(str(row["model"]), []).append((row["version"], row["value"]))
        # ids grow, so that the last ones are found without reading the whole table
        clients = max(1, int(meta.get("clients") or len(status.get("sites", ())) or 1))
        recent = store.query(
            "SELECT client, version, loss, cluster, status FROM result WHERE kind = 'train' AND id > "
            "(SELECT coalesce(max(id), 0) FROM result) - ? AND version > ? ORDER BY id",
            4 * _STEPS * clients, version - _STEPS,
        )  # fmt: skip
        losses: dict[int, Curve] = {}
        clusters: dict[int, int] = {}
        failures: dict[int, dict[str, int]] = {}
        for row in recent:
            if row["loss"] is not None:
                losses.setdefault(row["client"], []).append((row["version"], row["loss"]))
            if row["cluster"] is not None:
                clusters[row["client"]] = row["cluster"]
            if row["status"] != "ok":
                of = failures.setdefault(row["client"], {})
                of[row["status"]] = of.get(row["status"], 0) + 1
        loss = [(row["version"], row["loss"]) for row in steps]
        thinned = {name: curve[:: max(1, len(curve) // POINTS)] for name, curve in scores.items()}
        return RunView(status, meta, loss, thinned, losses, clusters, failures, _spent(store))


def _spent(store: RunStore) -> tuple[Mapping[str, Any], ...]:
    """Return the budgets that were spent when the server last said so, with the server steps until then."""
    last = store.query(
        "SELECT version, value FROM note WHERE axis = 'privacy' AND name = 'spent' ORDER BY version DESC LIMIT 1"
    )
    return tuple({"steps": row["version"], **budget} for row in last for budget in json.loads(row["value"]))
