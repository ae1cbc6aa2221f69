"""Server steps in the log of a federation's server."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from piebald.report.callbacks import Callback, RunStart

if TYPE_CHECKING:
    from piebald.report.tables import History

log = logging.getLogger("piebald.federation")


class StepLog(Callback):
    """Logs each server step and each evaluation."""

    def __init__(self) -> None:
        self._rounds: int | None = None

    def on_start(self, run: RunStart) -> None:
        """See `Callback`."""
        self._rounds = run.meta.get("rounds")
        if run.version:
            log.info("the run goes on after step %(step)s", {"event": "resumed", "step": self._place(run.version)})

    def on_server_step(self, step: Mapping[str, Any]) -> None:
        """See `Callback`."""
        loss = step.get("loss")
        about = {"event": "step", "step": step["version"], "rounds": self._rounds, "loss": loss}
        about |= {"arrived": step["arrived"], "failed": step["failed"], "place": self._place(step["version"])}
        shown = "step %(place)s" if loss is None else "step %(place)s: loss %(loss).4g"
        log.info(f"{shown}, %(arrived)d updates, %(failed)d without", about)

    def on_evaluation(self, version: int, scores: Sequence[Mapping[str, Any]]) -> None:
        """See `Callback`."""
        metric = next((row["metric"] for row in scores if row["metric"] != "loss"), None)
        for model in ("global", "personal"):
            values = [
                row["value"]
                for row in scores
                if (row["model"], row["metric"]) == (model, metric)
                and row["client"] is not None
                and row["value"] is not None
            ]
            if values:
                about = {"event": "evaluation", "step": version, "place": self._place(version), "metric": metric}
                about |= {"value": sum(values) / len(values), "clients": len(values), "model": model}
                log.info(
                    "step %(place)s: %(metric)s %(value).4g of the %(model)s model, mean of %(clients)d clients", about
                )

    def on_end(self, history: History, status: str) -> None:
        """See `Callback`."""
        log.info("the run has ended: %(status)s", {"event": "ended", "status": status})

    def _place(self, version: int) -> str:
        return f"{version}" if self._rounds is None else f"{version}/{self._rounds}"
