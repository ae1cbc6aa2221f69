"""A federation in Prometheus' text form."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from piebald.core.plain_text import printable
from piebald.federation.operate.run_view import RunView
from piebald.federation.operate.status import STATES

_OF_SITES = {  # metric: field of a site's status, whether it only grows, help
    "piebald_site_received_bytes": ("received", True, "Bytes of messages from a site."),
    "piebald_site_sent_bytes": ("sent", True, "Bytes of messages to a site."),
    "piebald_site_results": ("finished", True, "Updates and answers that a site has delivered."),
    "piebald_site_late": ("late", True, "Results of a site that came twice, or too late to count."),
    "piebald_site_refusals": ("refusals", True, "Results of a site that were refused."),
    "piebald_site_absent_steps": ("absent", True, "Server steps of which a site was absent."),
    "piebald_site_staleness_steps": ("staleness", False, "Server steps since the model of a site's last task."),
    "piebald_site_task_seconds": ("seconds", False, "Time of a site's last training task."),
    "piebald_site_rows": ("rows", False, "Training rows that a site states."),
}


def exposition(view: RunView) -> tuple[bytes, str]:
    """Return the metrics of a federation now, and their media type.

    Args:
        view: the federation.
    """
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

    # of its own: the global one also tells of Python and of this process
    registry = CollectorRegistry()
    registry.register(_Collector(view))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Collector:
    """Collects the metrics of one view."""

    def __init__(self, view: RunView) -> None:
        self._view = view

    def collect(self) -> Iterable[Any]:
        """Yield the metrics, as prometheus-client asks for them."""
        from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

        status = self._view.status
        labels = {
            "version": printable(status.get("version", "")),
            "recipe": printable(self._view.meta.get("label", "")),
        }
        yield InfoMetricFamily("piebald", "The federation's server.", value=labels)
        state = GaugeMetricFamily("piebald_state", "1 for the state of the run, 0 for the others.", labels=["state"])
        for name in STATES:
            state.add_metric([name], float(str(status.get("state")).partition(" ")[0] == name))
        yield state
        yield GaugeMetricFamily("piebald_steps", "Server steps made.", value=float(status.get("steps", 0)))
        if self._view.meta.get("rounds") is not None:
            yield GaugeMetricFamily("piebald_rounds", "Server steps to make.", value=float(self._view.meta["rounds"]))
        if self._view.loss:
            yield GaugeMetricFamily("piebald_loss", "Loss of training, mean of a step.", value=self._view.loss[-1][1])
        score = GaugeMetricFamily("piebald_score", "Mean of the metric over clients.", labels=["model", "metric"])
        for model, curve in self._view.scores.items():
            score.add_metric([printable(model), printable(self._view.meta.get("metric", ""))], curve[-1][1])
        yield score
        spent = GaugeMetricFamily("piebald_epsilon", "Epsilon spent so far.", labels=["unit"])
        for budget in self._view.privacy:
            spent.add_metric(
                [printable(budget.get("unit", ""))], float("inf") if budget["epsilon"] is None else budget["epsilon"]
            )
        yield spent
        yield from self._of_sites(status.get("sites", ()))

    def _of_sites(self, sites: Iterable[Mapping[str, Any]]) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        rows = [(printable(row.get("site")), row) for row in sites]
        ready = GaugeMetricFamily("piebald_site_ready", "Whether a site can be sent tasks.", labels=["site"])
        word = GaugeMetricFamily("piebald_site_last_word_seconds", "Seconds since a site was heard.", labels=["site"])
        loss = GaugeMetricFamily("piebald_site_loss", "Loss of a site's last training task.", labels=["site"])
        for number, (name, row) in enumerate(rows):
            ready.add_metric([name], float(row.get("state") == "ready"))
            if row.get("heard") is not None:
                # the machine's clock may have been set back
                word.add_metric([name], max(0.0, time.time() - row["heard"]))
            if curve := self._view.losses.get(number):
                loss.add_metric([name], curve[-1][1])
        yield from (ready, word, loss)
        for metric, (field, grows, description) in _OF_SITES.items():
            family = (CounterMetricFamily if grows else GaugeMetricFamily)(metric, description, labels=["site"])
            for name, row in rows:
                if row.get(field) is not None:
                    family.add_metric([name], float(row[field]))
            yield family
