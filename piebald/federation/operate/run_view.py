"""A running federation as the status page and the metrics show it, read from the files that its server writes.

Nothing here talks to the server's threads: the page can be slow, wrong or attacked and the run does not notice.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from piebald.core.errors import PiebaldError
from piebald.core.plain_text import printable
from piebald.federation.credentials.revocation import certificate_expires
from piebald.federation.operate.experiment_queue import ExperimentQueue
from piebald.federation.operate.status import STATES, status_values
from piebald.report.page import markup, wording
from piebald.report.page.markup import Cell
from piebald.report.page.wording import NONE, MetricFormat
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
        waiting: the number of experiments in the queue that have not begun.
        disk: free bytes where the run folder is, or will be.
        expires: when the server's certificate expires, in seconds since 1970; None without one.
    """

    status: Mapping[str, Any] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    loss: Curve = field(default_factory=list)
    scores: Mapping[str, Curve] = field(default_factory=dict)
    losses: Mapping[int, Curve] = field(default_factory=dict)
    clusters: Mapping[int, int] = field(default_factory=dict)
    failures: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    privacy: tuple[Mapping[str, Any], ...] = ()
    waiting: int = 0
    disk: int | None = None
    expires: float | None = None


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
        view = RunView(status)
        if run is not None and (run / "run.db").exists():
            with RunStore.open_read_only(run) as store:
                view = self._of(status, store)
        expires = certificate_expires(self._credentials)
        return replace(
            view,
            waiting=sum(entry.state == "waiting" for entry in ExperimentQueue(self._credentials).entries()),
            disk=shutil.disk_usage(run if run is not None and run.exists() else self._credentials).free,
            expires=None if expires is None else expires.timestamp(),
        )

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


REFRESH = 10  # seconds after which a browser asks again
_FOOTER = Markup(
    f"Nothing can be changed here.  The page is read again every {REFRESH} seconds; "
    '<a href="/metrics">/metrics</a> and <a href="/status.json">/status.json</a> are for programs.'
)


def page(view: RunView) -> str:
    """Return the page as HTML; all text of others is escaped in it."""
    sections = [
        ("sites", "Sites", _sites(view)),
        ("curve", "Learning curve", _curves(view)),
        ("clusters", "Clusters", _clusters(view)),
        ("privacy", "Privacy", _privacy(view)),
    ]
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return markup.document(
        "status", f"Piebald: {_name(view)}", _top(view), sections, _FOOTER, refresh=REFRESH, beside=now
    )


def content_policy() -> str:
    """Return a content security policy under which the page has its own style, no script, and fetches nothing."""
    return f"{markup.content_policy()}; frame-ancestors 'none'"


def _name(view: RunView) -> str:
    names = (view.status.get("federation"), view.meta.get("label") or "no run yet")
    return printable(": ".join(str(name) for name in names if name), 80)


def _state(view: RunView) -> Markup:
    """Return the state, since when it is so, and what would end it."""
    state, since, ends = view.status.get("state", "starting"), view.status.get("since"), view.status.get("ends")
    shown = [] if since is None else [f"for {wording.duration(max(0, int(time.time() - since)))}"]
    shown += [] if ends is None else [f"until {printable(ends, 200)}"]
    return markup.small(markup.span("state", state), ", ".join(shown))


def _top(view: RunView) -> str:
    shown, sites = MetricFormat(str(view.meta.get("metric") or "accuracy")), view.status.get("sites", ())
    listed = view.status.get("sites_listed", len(sites))  # as the server tells a site
    ready = view.status.get("sites_ready", sum(row.get("state") == "ready" for row in sites))
    rounds, steps = view.meta.get("rounds"), view.status.get("steps", 0)
    end = "no fixed end" if rounds is None else f"of {rounds:,}"
    tiles: list[tuple[str, Cell]] = [
        ("State", _state(view)),
        ("Server steps", markup.small(f"{steps:,}", end)),
        ("Sites ready", markup.small(f"{ready:,}", f"of {listed:,}")),
    ]
    if state := view.status.get("run_state"):
        ends = view.status.get("run_until")
        tiles.append(
            ("At the server", markup.small(printable(state, 80), f"until {printable(ends, 200)}" if ends else ""))
        )
        tiles.append(("Seen there as", markup.small(printable(view.status.get("seen_as") or "", 200), "")))
    if view.loss:
        tiles.append(("Loss of training", markup.small(f"{view.loss[-1][1]:.3g}", f"at step {view.loss[-1][0]:,}")))
    for model, curve in view.scores.items():
        tiles.append(
            (f"Mean {shown.name}", markup.small(shown.value(curve[-1][1]), f"{model} model, step {curve[-1][0]:,}"))
        )
    for budget in view.privacy:
        about = f"of a {printable(budget['unit'])}, delta {budget['delta']:.0e}, {budget['steps']:,} steps"
        tiles.append(("Epsilon spent", markup.small(_epsilon(budget["epsilon"]), about)))
    model = f"{view.meta.get('model', '')}, {view.meta['parameters']:,} parameters" if "parameters" in view.meta else ""
    return markup.top(_name(view), printable(model), tiles)


# ------------------------------------------------------------------------------------------------------------- sites


def _sites(view: RunView) -> str:
    head = (
        "Site", "State", "Last word", "Loss, last steps", "Time of a task", "Staleness", "Done", "Absent", "Failed",
        "Late, refused", "MB from, to it", "Rows", "Piebald",
    )  # fmt: skip
    rows = [_site(view, number, row) for number, row in enumerate(view.status.get("sites", ()))]
    if not rows:
        return ""
    caption = (
        "Sites by name.  A loss is that of the site's own training: its line, its last value, and how far the mean of "
        "its last third lies from that of its first."
    )
    return markup.section("sites", "Sites", "", markup.table(caption, head, rows))


def _site(view: RunView, number: int, row: Mapping[str, Any]) -> list[Cell]:
    def count(name: str) -> str:
        return NONE if row.get(name) is None else f"{row[name]:,}"

    heard, state = row.get("heard"), row.get("state") or NONE  # between two runs sites have none
    refusal = f": {row['refused']}" if row.get("refused") else ""
    good = {"ready": True, "joining": None, NONE: None}.get(state, False)
    failed = view.failures.get(number, {})
    return [
        markup.name(printable(row.get("site"))),
        markup.judged(printable(f"{state}{refusal}", 120), good),
        NONE if heard is None else f"{wording.duration(max(0.0, round(time.time() - heard)))} ago",
        _drift(view.losses.get(number, [])),
        wording.duration(row.get("seconds")),
        count("staleness"),
        count("finished"),
        count("absent"),
        ", ".join(f"{times} {printable(kind)}" for kind, times in failed.items()) or "0",
        f"{count('late')}, {count('refusals')}",
        ", ".join(wording.megabytes((row.get(name) or 0) / 1e6) for name in ("received", "sent")),
        count("rows"),
        printable(row.get("version") or NONE, 40),
    ]


def _drift(curve: Curve) -> Cell:
    """A site's losses as a small line, the last one, and how much it changed."""
    if not curve:
        return NONE
    values = [value for _, value in curve]
    # thirds, since single losses of few batches jump
    third = max(1, len(values) // 3)
    drift = sum(values[-third:]) / third - sum(values[:third]) / third
    change = f"{drift:+.2g}".replace("-", wording.MINUS)
    return markup.small(markup.spark(values, f"{values[-1]:.3g}"), f"{change} in {len(values)} tasks")


# ------------------------------------------------------------------------------------------------------------ curves


def _curves(view: RunView) -> str:
    metric = MetricFormat(str(view.meta.get("metric") or "accuracy"))
    scores = {model: curve for model, curve in view.scores.items() if len(curve) > 1}
    figures = []
    if len(view.loss) > 1:
        figures.append(
            _figure("Loss of training", "Mean over the clients of a step.", {"loss": view.loss}, "{:.3g}".format)
        )
    if scores:
        figures.append(
            _figure(f"Mean {metric.name}", "Mean over clients, on rows that were held out.", scores, metric.value)
        )
    return markup.section("curve", "Learning curve", "", markup.charts(figures)) if figures else ""


def _figure(title: str, caption: str, curves: Mapping[str, Curve], written: Callable[[float], str]) -> str:
    steps = [step for curve in curves.values() for step, _ in curve]
    ticks: dict[float, str] = {min(steps): f"step {min(steps):,}", max(steps): f"{max(steps):,}"}
    return markup.line_chart(title, caption, curves, ticks, written)


# --------------------------------------------------------------------------------------------- clusters and privacy


def _clusters(view: RunView) -> str:
    if len(set(view.clusters.values())) < 2:
        return ""
    names = {number: printable(row.get("site")) for number, row in enumerate(view.status.get("sites", ()))}
    of: dict[int, list[str]] = {}
    for client, cluster in sorted(view.clusters.items()):
        of.setdefault(cluster, []).append(names.get(client, f"client {client}"))
    rows: list[list[Cell]] = [
        [f"{cluster}", f"{len(members):,}", wording.names(members, 12)] for cluster, members in sorted(of.items())
    ]
    caption = "Clusters of the last steps, as far as sites have trained in them."
    return markup.section(
        "clusters", "Clusters", "", markup.table(caption, ("Cluster", "Sites", "Names"), rows, "list")
    )


def _epsilon(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.3g}"


def _privacy(view: RunView) -> str:
    budgets = view.meta.get("privacy") or ()
    if not budgets:
        return ""
    spent = {budget.get("unit"): budget for budget in view.privacy}
    rows: list[list[Cell]] = [
        [
            printable(budget.get("unit", "client")),
            _epsilon(spent[budget.get("unit")]["epsilon"]) if budget.get("unit") in spent else NONE,
            _epsilon(budget["epsilon_pld"]),
            f"{budget['delta']:.1g}",
            printable(budget["meaning"]),
        ]
        for budget in budgets
    ]
    head = ("Protected", "Epsilon so far", "Epsilon of the whole run", "Delta", "Meaning")
    caption = "Differential privacy of the updates that sites send, and of nothing else."
    return markup.section("privacy", "Privacy budget", "", markup.table(caption, head, rows, "text"))


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


_OF_ONE_SITE = {  # metric at a site: field of its status, help
    "piebald_sites_ready": ("sites_ready", "Sites that can be sent tasks, as the server says."),
    "piebald_sites_listed": ("sites_listed", "Sites of the run, as the server says."),
    "piebald_updates_sent": ("updates", "Updates that have left about these rows, in all runs."),
    "piebald_outbox": ("outbox", "Results that the server has not received yet."),
    "piebald_working": ("working", "Tasks that are under way."),
}


def exposition(view: RunView) -> tuple[bytes, str]:
    """Return the metrics of a federation now, and their media type.

    Args:
        view: the federation.
    """
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest

    # of its own: the global one also tells of Python
    registry = CollectorRegistry()
    registry.register(_Collector(view))
    ProcessCollector(registry=registry)  # memory, files and processor seconds of this process, the server's
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
        yield InfoMetricFamily("piebald", "This process of a federation.", value=labels)
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
        waiting = "Experiments of the queue that have not begun."
        yield GaugeMetricFamily("piebald_queue_waiting", waiting, value=self._view.waiting)
        if self._view.disk is not None:
            free = "Free bytes of the disk that the run is written to."
            yield GaugeMetricFamily("piebald_disk_free_bytes", free, value=self._view.disk)
        if self._view.expires is not None:
            expires = "When the server's certificate expires, in seconds since 1970."
            yield GaugeMetricFamily("piebald_certificate_expires_seconds", expires, value=self._view.expires)
        yield from self._of_sites(status.get("sites", ()))
        if "sites_listed" in status:
            yield from self._of_this_site(status)

    def _of_this_site(self, status: Mapping[str, Any]) -> Iterable[Any]:
        """Yield the metrics of a site's own process."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, (column, description) in _OF_ONE_SITE.items():
            if status.get(column) is not None:
                value = status[column]
                yield GaugeMetricFamily(
                    name, description, value=float(len(value) if isinstance(value, list) else value)
                )
        if status.get("heard") is not None:
            word = "Seconds since the server was heard."
            yield GaugeMetricFamily(
                "piebald_server_last_word_seconds", word, value=max(0, time.time() - status["heard"])
            )
        for way in ("received", "sent"):
            yield CounterMetricFamily(
                f"piebald_{way}_bytes", f"Bytes of messages {way}.", value=float(status.get(way) or 0)
            )

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
        for metric, (column, grows, description) in _OF_SITES.items():
            family = (CounterMetricFamily if grows else GaugeMetricFamily)(metric, description, labels=["site"])
            for name, row in rows:
                if row.get(column) is not None:
                    family.add_metric([name], float(row[column]))
            yield family
