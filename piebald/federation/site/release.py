"""The gate out of a site: whatever leaves is a release with a declared mechanism, and its owner can list them all.

Fields of messages say as what they leave (`wire_messages.Leaving`); what results carry follows from the task.  `Outlet`
is the only way to the network, and takes releases only.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NewType, Protocol

from piebald.contracts import SUM, Query, Split, Task, Update
from piebald.contracts.component import Component, build
from piebald.core.errors import SettingError
from piebald.federation.link.frames import Connection
from piebald.federation.link.messaging import SERVER, Link
from piebald.federation.link.transfer import WAIT, fetch_terms, send_body
from piebald.federation.link.wire_format import contents, digest, pack_update
from piebald.federation.link.wire_messages import (
    CheckRequest,
    Hello,
    Leaving,
    Piece,
    Reply,
    SiteMessage,
    Welcome,
    encode,
)
from piebald.federation.site.policy import Policy
from piebald.methods.client_work import ClientWork
from piebald.methods.transforms.gaussian import Gaussian
from piebald.privacy.secure_aggregation.key_queries import KeyQuery, MasksOverGraph
from piebald.version import __version__

# the reasons of all failures that rows may have to do with, at a site that hides rows: none tells of them
FAILED = "failure at the site, whose log says more"
SPENT = "refused by the site's policy, whose log says more"

_UNKNOWN = {"noise": math.inf, "question": {}, "ask": ""}  # arguments of a question that nobody has asked yet

log = logging.getLogger("piebald.federation")

ResultBody = NewType("ResultBody", bytes)  # of a result that has passed the gate


class Mechanism(StrEnum):
    """What protects rows in a release."""

    NOISED = "noised"  # Gaussian noise, which a budget counts
    MASKED = "masked"  # only a sum over several sites can be opened
    THRESHOLDED = "thresholded"  # rules of disclosure control
    OPEN = "open"  # nothing; the owner reads its name


@dataclass(frozen=True, slots=True)
class Declared:
    """One line of the list of what leaves.

    Attributes:
        leaves: what it is.
        mechanism: what protects rows in it.
        how: the mechanism's numbers, or where it is in force.
        name: of a question or a vector, "" for what has none.
    """

    leaves: Leaving
    mechanism: Mechanism
    how: str = ""
    name: str = ""

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Its name, what it is about, its mechanism, and when it leaves."""
        title = f"{self.leaves.title} {self.name}".strip()
        mechanism = f"{self.mechanism}: {self.how}" if self.how else str(self.mechanism)
        return title, self.leaves.about, mechanism, self.leaves.when


def declared(policy: Policy, work: ClientWork | None = None, rows: Mapping[Split, int] | None = None) -> list[Declared]:
    """Return all that leaves a site.

    Args:
        policy: the site's.
        work: the run that it takes part in, None for any.
        rows: how many rows of each split it states.
    """
    masks = None if work is None else work.masking
    hides = work is not None and policy.protection(work) is not None
    counts = "" if rows is None else ", ".join(f"{count:,} {split}" for split, count in rows.items())
    reasons = "one reason for all that rows may have to do with" if hides else ""
    how = {Leaving.ROW_NUMBERS: counts, Leaving.FAILURE: reasons, Leaving.REFUSAL: reasons}
    lines = []
    for leaves in Leaving:
        if leaves in (Leaving.UPDATE, Leaving.LOSS, Leaving.COUNTS):
            lines += _training(leaves, policy, work)
        elif leaves is Leaving.ANSWER:
            lines += _answers(policy, work)
        elif leaves is not Leaving.KEYS or work is None or masks is not None:
            lines.append(Declared(leaves, Mechanism.OPEN, how.get(leaves, "")))
    return lines


def _training(leaves: Leaving, policy: Policy, work: ClientWork | None) -> list[Declared]:
    """Return how what a trained update holds leaves."""
    masking = None if work is None else work.masking
    least = masking.least if isinstance(masking, MasksOverGraph) else policy.sum_demands.least
    sums = f"only a sum over at least {least} sites can be opened"
    if work is None:
        masked = Declared(leaves, Mechanism.MASKED, f"{sums}, in runs with secure_aggregation")
        noised = Declared(leaves, Mechanism.NOISED, "in runs with dp_sgd, or gaussian at the client")
        is_open = Declared(leaves, Mechanism.OPEN, "in other runs")
        if policy.secure_aggregation is not None:
            return [masked]
        needs_noise = policy.noise is not None or policy.training is not None
        lines = [masked, *([noised] if leaves is Leaving.UPDATE else [])]
        return lines if needs_noise and leaves is not Leaving.COUNTS else [*lines, is_open]
    noises = _noises(policy, work)
    if not work.trains or (leaves is Leaving.LOSS and noises and work.masking is None):
        return []
    if work.masking is not None:
        return [Declared(leaves, Mechanism.MASKED, "; ".join([sums, *noises]))]
    if leaves is not Leaving.UPDATE:
        return [Declared(leaves, Mechanism.OPEN)]
    mechanism = Mechanism.NOISED if noises else Mechanism.OPEN
    return [Declared(leaves, mechanism, "; ".join(noises), name) for name in ("model", *work.uploads())]


def _noises(policy: Policy, work: ClientWork) -> list[str]:
    """Return the noise that hides rows or updates at this site, in words; nothing where there is none."""
    rows, noises = work.row_privacy, []
    if rows is not None and rows.noise:
        noises.append(f"each row's gradient is clipped to {rows.clip:g}, noise of {rows.noise:g} clips in each step")
    for transform in work.transforms:
        if isinstance(transform, Gaussian) and transform.where == "client" and transform.multiplier:
            noises.append(f"each update is clipped to {transform.clip:g}, noise of {transform.multiplier:g} clips")
    if noises and policy.training is not None:
        noises.append(f"epsilon {policy.training.epsilon:g} at delta {policy.training.delta:g} in all")
    return noises


def _answers(policy: Policy, work: ClientWork | None) -> list[Declared]:
    """Return how answers leave, for each kind of question that a run's terms name, or that the policy allows."""
    if work is not None:
        tables = [dict(table) for table in work.questions]
    else:
        kinds = policy.queries or (() if policy.demanded else Component.registry["query"])
        tables = [{"kind": kind, **_UNKNOWN} for kind in kinds]
    unless = "; not in runs that protect rows or updates" if work is None and policy.queries is None else ""
    lines = []
    for query in filter(None, map(_query, tables)):
        if work is not None:
            is_answered = policy.query_reject_reason(query, work) is None
        else:
            is_answered = query.asked_of == "clients" and (policy.queries is not None or not query.by_name)
        if is_answered and not isinstance(query, KeyQuery):
            mechanism, how = answer_mechanism(policy, query)
            lines.append(Declared(Leaving.ANSWER, mechanism, how + unless, query.kind))
    return sorted(set(lines), key=lambda line: line.name)


def answer_mechanism(policy: Policy, query: Query) -> tuple[Mechanism, str]:
    """Return what protects rows in an answer to a query, with its numbers."""
    hidden, deviation = query.hiding(), policy.score_noise(query)
    most = policy.most_asked(query)
    asked = "any number of them" if most is None else f"at most {most:,} of them about the same rows"
    if hidden is not None and hidden.noise:
        budget = policy.budget
        total = "" if budget is None else f", epsilon {budget.epsilon:g} at delta {budget.delta:g} in all"
        stated = "that it states" if hidden.noise == math.inf else f"of {hidden.noise:g}"
        return Mechanism.NOISED, f"Gaussian, with a deviation {stated} times what one row changes{total}"
    if hidden is not None and hidden.masked:
        return Mechanism.MASKED, f"only sums over at least {policy.sum_demands.least} sites; {asked}"
    rules = policy.disclosure
    if query.names_only:
        named = "" if rules is None else f", of those that at least {rules.least_rows} rows have"
        return Mechanism.OPEN, f"kinds and names of columns, names of classes and categories{named}; {asked}"
    if deviation and query.overrides(Query.row_influence):
        bounded = f"Gaussian, with a deviation of {deviation:.3g} times what one row changes, else it stays"
        return Mechanism.NOISED, f"{bounded}; {asked}"
    if rules is not None:
        share = f"no row with more than {rules.largest_share:g} of a sum"
        return Mechanism.THRESHOLDED, f"nothing about fewer than {rules.least_rows} rows, {share}; {asked}"
    return Mechanism.OPEN, asked


def _query(table: Mapping[str, Any]) -> Query | None:
    """Return a question from what terms say of it, or a policy's name; None for one that is not known here."""
    kind = Component.registry["query"].get(table.get("kind", ""))
    try:
        query = None if kind is None else build("query", table)
    except SettingError:  # only some of its arguments are known before
        query = None if kind is None else kind.model_construct(None, **table)
    return query if isinstance(query, Query) else None


def stated_rows(work: ClientWork, rows: Mapping[Split, int]) -> dict[Split, int]:
    """Return the numbers of rows that a site tells the server, which holds its results to them.

    Under masks updates tell nothing of the training rows, so their number stays at the site.
    """
    return {split: count for split, count in rows.items() if split != "train" or not work.masking}


class Gate:
    """Turns the outcomes of tasks into results that may leave.

    Args:
        policy: the site's.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def result(
        self, task: Task, work: ClientWork, rows: Mapping[Split, int], update: Update | None, failure: str | None
    ) -> ResultBody:
        """Return the body of a result.

        Args:
            task: what was asked.
            work: the run, with the models of all clients.
            rows: how many rows of each split the site has.
            update: the outcome, as it is after noise and masks; None where there is none.
            failure: why there is none.
        """
        if update is not None and (undeclared := self._undeclared(task, work, rows, update)) is not None:
            log.error("task %d: %s is not declared, so nothing leaves", task.id, undeclared)
            update, failure = None, FAILED
        if update is None and failure is not None and not self._may_tell(task, work, failure):
            if task.query is not None:  # of training, `client_log` has said so
                log.warning("task %d has no result: %s", task.id, failure)
            failure = SPENT if failure.startswith("refused by") and self._is_counted(task) else FAILED
        elif update is not None and task.query is None and _noises(self._policy, work):
            update = replace(update, metrics={})  # the noise does not cover them
        return ResultBody(pack_update(update, failure))

    def _undeclared(self, task: Task, work: ClientWork, rows: Mapping[Split, int], update: Update) -> str | None:
        """Return the name of something that a result carries and nobody has declared, or None."""
        query, form = (
            task.query,
            work.of_task(task).result_form(task, dict.fromkeys(("train", "validation", "test"), 0)),
        )
        hidden = None if query is None else query.hiding()
        if isinstance(query, KeyQuery):
            vectors, numbers = set(query.answers), set[str]()
        elif work.masking is not None and (query is None or (hidden is not None and hidden.masked)):
            vectors, numbers = {SUM}, set[str]()
            if update.examples or update.steps:
                return "a count beside a masked sum"
        else:
            vectors = set(form.vectors or ())
            numbers = set(update.metrics if form.metrics is None else form.metrics)
        return next(iter(sorted((update.vectors.keys() - vectors) | (update.metrics.keys() - numbers))), None)

    def _may_tell(self, task: Task, work: ClientWork, reason: str) -> bool:
        """Return whether a reason may be told as it is: at a site that hides rows, if it follows from no row."""
        query, policy = task.query, self._policy
        counted = query is not None and (hidden := query.hiding()) is not None and hidden.noise > 0
        if isinstance(query, KeyQuery) or (policy.protection(work) is None and not counted):
            return True
        if query is None:
            return not work.trains
        return reason in (policy.query_reject_reason(query, work), policy.work.steps_reject_reason(query.most_steps()))

    def _is_counted(self, task: Task) -> bool:
        """Return whether a task is refused by a policy before any row is looked at, by what was spent."""
        hidden = None if task.query is None else task.query.hiding()
        return task.query is None or (hidden is not None and hidden.noise > 0)


@dataclass(frozen=True, slots=True)
class Release:
    """Something that leaves a site; only this module makes any.

    Attributes:
        topic: of the message, "" for a reply.
        head: its fields, each declared.
        body: a result, which has passed the gate.
    """

    topic: str
    head: SiteMessage
    body: ResultBody = field(default=ResultBody(b""), repr=False)


def hello(message: Hello) -> Release:
    """Return a heartbeat."""
    return Release("hello", message)


def check() -> Release:
    """Return the question of a site that only looks."""
    return Release("check", CheckRequest(version=__version__))


def reply(status: Reply) -> Release:
    """Return the reply to a piece of a task."""
    return Release("", status)


def result(welcome: Welcome, id: int, trains: bool, body: bytes) -> Release:
    """Return a finished result, as it was kept.

    Args:
        welcome: of the server process that waits for it.
        id, trains: of its task.
        body: what `Gate.result` made.

    Raises:
        ValidationError: the body has a field that is not declared.
    """
    contents(body)
    name = digest(body)
    head = Piece(run=welcome.run, epoch=welcome.epoch, id=id, trains=trains, start=0, size=len(body), digest=name)
    return Release("result", head, ResultBody(body))


class Connected(Protocol):
    """What a site knows of its connection, through which it sends nothing itself."""

    trouble: str
    sent: Counter[str]
    received: Counter[str]
    peers: dict[str, Connection]

    def start(self) -> None:
        """See `Link`."""

    def stop(self) -> None:
        """See `Link`."""

    def report(self, sentence: str) -> None:
        """See `Link`."""


class Outlet:
    """The only way from a site to the network.

    Args:
        link: the site's connection, which nothing else sends through.
    """

    def __init__(self, link: Link) -> None:
        self._link = link

    def send(self, release: Release) -> Future[memoryview]:
        """Send a request, see `Link.send`."""
        return self._link.send(SERVER, release.topic, release.head, release.body)

    def request(self, release: Release, timeout: float) -> memoryview | None:
        """Send a request and wait for the reply, see `Link.request`."""
        return self._link.request(SERVER, release.topic, release.head, release.body, timeout=timeout)

    def deliver(self, release: Release) -> str | None:
        """Send a result in pieces, see `send_body`."""
        assert isinstance(release.head, Piece)
        return send_body(self._link, SERVER, release.topic, release.head, release.body, timeout=WAIT)

    def fetch_terms(
        self, known_by: str, *, timeout: float = WAIT, wanted: Callable[[], bool] = lambda: True
    ) -> bytearray | None:
        """Fetch the terms of a run, see `transfer.fetch_terms`."""
        return fetch_terms(self._link, SERVER, known_by, timeout=timeout, wanted=wanted)

    def on_task(self, handler: Callable[[str, Piece, memoryview], Release]) -> None:
        """Set what takes a piece of a task, and replies."""
        self._link.on("task", Piece, lambda *message: encode(handler(*message).head))
