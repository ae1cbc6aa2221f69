"""What a site writes into its log about its work: numbers of tasks, rows and bytes, and never a value of a row."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any

from piebald.contracts import Task
from piebald.federation.link.flare_link import Peer
from piebald.federation.site.client_session import Delivery, StartedTask
from piebald.federation.site.task_runner import SiteClient, TaskRunner

log = logging.getLogger("piebald.federation")


def connected(address: str, server: Peer | None, expires: datetime) -> None:
    """The server answers."""
    about = {"event": "connected", "address": address, "certificate": "server"}
    about |= {"expires": "" if server is None else server.expires, "own_expires": f"{expires:%Y-%m-%d}"}
    log.info(
        "connected to %(address)s: the certificate of %(certificate)s is valid until %(expires)s, this site's until "
        "%(own_expires)s", about,
    )  # fmt: skip


def joined(prepared: SiteClient, runner: TaskRunner) -> None:
    """The site takes part."""
    rows = ", ".join(f"{count:,} {split} rows" for split, count in runner.rows.items())
    about = {"event": "joined", "client": prepared.client + 1, "clients": len(prepared.clients), "rows": rows}
    log.info("joined as client %(client)d of %(clients)d, with %(rows)s", about)


def training(started: StartedTask) -> str:
    """A training task begins; returns what it does in words."""
    epochs, rows = started.runner.work.trainer.table().get("epochs"), started.runner.rows["train"]
    work = f"training {'' if epochs is None else f'{epochs} epochs of '}{rows:,} rows"
    about = {"event": "training", **_numbers(started.task), "epochs": epochs, "rows": rows, "work": work}
    log.info("task %(task)d of step %(step)d: %(work)s", about)
    return f"task {started.task.id}: {work}"


def trained(started: StartedTask, failure: str | None, seconds: float) -> None:
    """A training task ended."""
    about: dict[str, Any] = {**_numbers(started.task), "seconds": round(seconds, 3)}
    if failure is None:
        log.info("task %(task)d of step %(step)d: trained in %(seconds).1f s", {"event": "trained", **about})
    else:
        about |= {"event": "failed", "why": failure}
        log.warning("task %(task)d of step %(step)d: no update: %(why)s", about)


def answering(started: StartedTask) -> None:
    """A query begins."""
    kind = "" if started.task.query is None else started.task.query.kind
    about = {"event": "answering", **_numbers(started.task), "query": kind}
    log.debug("query %(task)d of step %(step)d: answering %(query)s", about)


def declined(started: StartedTask, failure: str | None) -> None:
    """A question about the keys of a sum ended, perhaps without an answer: somebody may have lied."""
    if failure is not None:
        log.warning(
            "task %(task)d of step %(step)d: this site does not help to open the sum: %(why)s",
            {"event": "declined", **_numbers(started.task), "why": failure},
        )


def sent(delivery: Delivery, seconds: float) -> None:
    """The server has a result."""
    size = len(delivery.body)
    about = {"event": "sent", "task": delivery.id, "bytes": size, "megabytes": size / 1e6, "seconds": round(seconds, 3)}
    about["kind"] = "task" if delivery.trains else "query"
    level = logging.INFO if delivery.trains else logging.DEBUG
    log.log(level, "%(kind)s %(task)d: sent %(megabytes).2f MB in %(seconds).1f s", about)


def _numbers(task: Task) -> dict[str, Any]:
    """A task's number, and the server step that it is for."""
    return {"task": task.id, "step": task.version + 1}
