"""Lines of a site's log about its work: numbers of tasks, rows and bytes, and never a value of a row."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any

from piebald.contracts import Task
from piebald.federation.link.frames import Connection
from piebald.federation.site.client_session import Delivery, StartedTask
from piebald.federation.site.site_client import SiteClient
from piebald.federation.site.task_runner import TaskRunner

log = logging.getLogger("piebald.federation")


def connected(address: str, server: Connection | None, expires: datetime) -> None:
    """Log that the server answers."""
    fields = {"event": "connected", "address": address, "certificate": "server"}
    fields |= {"expires": "" if server is None else server.expires, "own_expires": f"{expires:%Y-%m-%d}"}
    log.info(
        "connected to %(address)s: the certificate of %(certificate)s is valid until %(expires)s, this site's until "
        "%(own_expires)s", fields,
    )  # fmt: skip


def joined(prepared: SiteClient, runner: TaskRunner) -> None:
    """Log that the site takes part."""
    rows = ", ".join(f"{count:,} {split} rows" for split, count in runner.rows.items())
    fields = {"event": "joined", "client": prepared.client + 1, "clients": len(prepared.clients), "rows": rows}
    log.info("joined as client %(client)d of %(clients)d, with %(rows)s", fields)


def training(started: StartedTask) -> str:
    """Log that a training task begins, and return the work in words."""
    epochs, rows = started.runner.work.trainer.table().get("epochs"), started.runner.rows["train"]
    work = f"training {'' if epochs is None else f'{epochs} epochs of '}{rows:,} rows"
    fields = {"event": "training", **_numbers(started.task), "epochs": epochs, "rows": rows, "work": work}
    log.info("task %(task)d of step %(step)d: %(work)s", fields)
    return f"task {started.task.id}: {work}"


def trained(started: StartedTask, failure: str | None, seconds: float) -> None:
    """Log that a training task ended."""
    fields: dict[str, Any] = {**_numbers(started.task), "seconds": round(seconds, 3)}
    if failure is None:
        log.info("task %(task)d of step %(step)d: trained in %(seconds).1f s", {"event": "trained", **fields})
    else:
        fields |= {"event": "failed", "why": failure}
        log.warning("task %(task)d of step %(step)d: no update: %(why)s", fields)


def answering(started: StartedTask) -> None:
    """Log that a query begins."""
    kind = "" if started.task.query is None else started.task.query.kind
    fields = {"event": "answering", **_numbers(started.task), "query": kind}
    log.debug("query %(task)d of step %(step)d: answering %(query)s", fields)


def declined(started: StartedTask, failure: str | None) -> None:
    """Log a question about the keys of a sum that got no answer: somebody may have lied."""
    if failure is not None:
        log.warning(
            "task %(task)d of step %(step)d: this site does not help to open the sum: %(why)s",
            {"event": "declined", **_numbers(started.task), "why": failure},
        )


def sent(delivery: Delivery, seconds: float) -> None:
    """Log that the server has a result."""
    size = len(delivery.body)
    fields = {
        "event": "sent",
        "task": delivery.id,
        "bytes": size,
        "megabytes": size / 1e6,
        "seconds": round(seconds, 3),
    }
    fields["kind"] = "task" if delivery.trains else "query"
    level = logging.INFO if delivery.trains else logging.DEBUG
    log.log(level, "%(kind)s %(task)d: sent %(megabytes).2f MB in %(seconds).1f s", fields)


def _numbers(task: Task) -> dict[str, Any]:
    """Return a task's number, and the server step that it is for."""
    return {"task": task.id, "step": task.version + 1}
