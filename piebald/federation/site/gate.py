"""The gate out of a site: it decides what of an outcome leaves, and only through it anything reaches the network.

    checked    an update or an answer, before it is masked: it has the form that the server was told, with noise where
               the site's policy says so, and with few digits
    result     the bytes of a result, in which nothing is that the list of releases does not name, and no reason that
               tells of rows which are hidden
    Outlet     the way to the network, which takes messages with declared fields (`Release`) and results of the gate

The list of all that leaves, each with the mechanism that protects rows in it, is what the site's owner can print.
Fields of messages are annotated with what leaves in them (`wire_format.Leaving`); what results carry follows from
the run and the policy.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from piebald.contracts import SUM, WEIGHT, Clients, Query, ResultForm, Split, Task, Update, count_reason
from piebald.contracts.component import Component, build
from piebald.core.errors import SettingError
from piebald.core.randomness import NoiseSource
from piebald.federation.link.messaging import SERVER, Connection, Link
from piebald.federation.link.transfer import WAIT, fetch_terms, send_body
from piebald.federation.link.wire_format import (
    CheckRequest,
    Hello,
    Leaving,
    Piece,
    Release,
    Reply,
    ResultBody,
    Welcome,
    contents,
    digest,
    encode,
    pack_update,
)
from piebald.federation.site.policy import Policy, rows_read
from piebald.federation.site.site_rows import SPLITS
from piebald.methods.client_work import ClientWork
from piebald.methods.transforms.gaussian import Gaussian
from piebald.privacy.ledger import DisclosureRules
from piebald.privacy.secure_aggregation.key_queries import KeyQuery
from piebald.privacy.secure_aggregation.masks import MasksOverGraph
from piebald.privacy.secure_aggregation.server_side import Outcome
from piebald.version import __version__

# the reasons of all failures that rows may have to do with, at a site that hides rows: none tells of them
FAILED = "failure at the site, whose log says more"
SPENT = "refused by the site's policy, whose log says more"
REFUSED = "refused by the site's policy: "
DIGITS = 4  # significant ones of a number that leaves a site which protects rows or updates
_NUMBERS = 64  # named numbers in an answer

log = logging.getLogger("piebald.federation")


class Gate:
    """Decides what leaves of the outcomes of one run's tasks.

    Args:
        policy: the site's.
        work: the run, with the models of all clients.
        clients: all clients' names, and this site's rows.
        client: this site's client number.
        rules: what answers without noise obey, None for nothing.

    Attributes:
        rows: how many rows the site has of each split.
    """

    def __init__(
        self, policy: Policy, work: ClientWork, clients: Clients, client: int, rules: DisclosureRules | None
    ) -> None:
        self._policy, self._work, self._clients, self._client, self._rules = policy, work, clients, client, rules
        self.rows = {split: len(clients.rows(client, split)) for split in SPLITS}
        # as the policy saw them: what a trainer declares later does not count
        self._declared = {"model", *work.of(client).uploads()}

    def checked(self, task: Task, update: Update) -> Outcome:
        """Return what may leave of an update or an answer, or why nothing does.

        Under masks this is what is masked; in the open, nothing else is done to it but that a compressor packs it.

        Args:
            task: what was asked.
            update: the outcome, as the engine made it.
        """
        query = task.query
        # noise on gradients or updates covers no numbers beside them
        numbers = {} if query is None and noises(self._policy, self._work) else update.metrics
        # JSON has none that are not finite
        update = replace(update, metrics={name: value for name, value in numbers.items() if math.isfinite(value)})
        reason = self._form_reason(task, update)
        if reason is None and query is not None:
            reason = self._disclosure_reason(query, update)
        if reason is not None:
            return None, reason
        told, reason = (update, None) if query is None else self._with_noise(query, update)
        return (None, reason) if told is None else (self._rounded(task, told), None)

    def _form_reason(self, task: Task, update: Update) -> str | None:
        """Return why an outcome has not the form that the server and the policy were told before, or None."""
        work = self._work.of_task(task)
        if task.query is None and work.masking is not None:  # before its masks
            work = replace(work, transforms=work.transforms[:-1])
        if task.query is None and (undeclared := sorted(update.vectors.keys() - self._declared)):
            return f"{REFUSED}the update carries {undeclared[0]!r}, which was not declared"
        form = work.result_form(task, self.rows)
        reason = form.reject_reason(update.vectors, update.examples, update.steps, update.metrics)
        return reason or (None if math.isfinite(update.norm) else "not finite")

    def _disclosure_reason(self, query: Query, answer: Update) -> str | None:
        """Return which rule of the policy an answer breaks, or None."""
        hiding, hidden = self._policy.protection(self._work), query.hiding()
        # so many numbers could be a model, or a gradient of one
        long = sum(vector.numel() for vector in answer.vectors.values()) >= self._work.layout.shared
        if hiding and long and hidden is None and not query.names_only:
            return f"{REFUSED}the answer is as long as the model, beside {hiding}"
        if len(answer.metrics) > _NUMBERS:
            return f"{REFUSED}the answer carries {len(answer.metrics)} numbers, at most {_NUMBERS} are allowed"
        rules = None if hidden is not None and hidden.noise else self._rules
        fewest = None if rules is None else query.fewest_rows(answer)
        if rules is not None and fewest is not None and fewest < rules.least_rows:
            return f"{REFUSED}the answer is about fewer than the {rules.least_rows} rows that this site demands"
        return None

    def influence(self, query: Query) -> Mapping[str, float] | None:
        """Return how much one row changes the scores in an answer, None where they have no noise."""
        if not self._policy.score_noise(query):
            return None
        splits = sorted(rows_read(query, self._work.of(self._client)) - {"train"}) or ["train"]
        return query.row_influence(self._clients.rows(self._client, getattr(query, "split", splits[0])))

    def _with_noise(self, query: Query, answer: Update) -> Outcome:
        """Return an answer whose scores have noise where the policy says so, or why there is none."""
        deviation, influence = self._policy.score_noise(query), self.influence(query)
        if influence is None:
            return answer, None
        scores = {name: answer.metrics[name] for name in sorted(influence) if name in answer.metrics}
        vectors = {name: vector for name, vector in answer.vectors.items() if name in influence}
        if not scores and not vectors:
            return None, f"{REFUSED}scores leave this site with noise, and {query.kind!r} has none that noise can hide"
        # one row changes all numbers of an answer: so much more noise in each makes them one release together
        deviation *= math.sqrt(len(scores) + len(vectors))
        noise = NoiseSource.fresh()
        scores = {
            # bounds are processing of what the noise has hidden already, so that they tell nothing more
            name: min(max(value + deviation * influence[name] * float(noise.gaussian(1)[0]), 0.0), 1.0)
            for name, value in scores.items()
        }
        vectors = {
            name: noise.add_to(vector.double(), deviation * influence[name]).round().clamp_min(0).to(vector.dtype)
            for name, vector in vectors.items()
        }
        examples = answer.examples
        for vector in vectors.values():
            # the server refuses more rows than there are, whose number it is told: the largest counts are cut
            order = vector.argsort()
            vector[order] = vector[order].cumsum(0).clamp_max(examples).diff(prepend=vector.new_zeros(1))
            examples = int(vector.sum())
        return replace(answer, vectors=vectors, metrics=scores, examples=examples), None

    def _rounded(self, task: Task, update: Update) -> Update:
        """Return an outcome whose numbers have few digits: the last bits of an exact one tell of single rows."""
        if not self._policy.rounds(self._work):
            return update
        metrics = {
            name: float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
            for name, value in update.metrics.items()
        }
        if WEIGHT in metrics and self._work.is_masked(task.query):  # only in a sum, and no less than was announced
            metrics[WEIGHT] = update.metrics[WEIGHT]
        return replace(update, metrics=metrics)

    def result(self, task: Task, update: Update | None, failure: str | None) -> ResultBody:
        """Return the body of a result.

        Args:
            task: what was asked.
            update: the outcome, as it is after noise and masks; None where there is none.
            failure: why there is none.
        """
        if update is not None and (undeclared := self._undeclared(task, update)) is not None:
            log.error("task %d: %s is not declared, so nothing leaves", task.id, undeclared)
            update, failure = None, FAILED
        if update is None and failure is not None and not self._may_tell(task, failure):
            if task.query is not None:  # of training, `client_session` has said so
                log.warning("task %d has no result: %s", task.id, failure)
            failure = SPENT if failure.startswith("refused by") and self._is_counted(task) else FAILED
        return ResultBody(pack_update(update, failure))

    def _undeclared(self, task: Task, update: Update) -> str | None:
        """Return what a result carries besides what its task may tell, or None."""
        query = task.query
        if isinstance(query, KeyQuery):
            form = ResultForm(dict.fromkeys(query.answers), (), 0, 0)
        elif self._work.is_masked(query):
            form = ResultForm({SUM: None}, (), 0, 0)
        else:
            form = self._work.result_form(task, self.rows)
        numbers = update.metrics.keys() if form.metrics is None else set(form.metrics)
        names = (update.vectors.keys() - (form.vectors or {}).keys()) | (update.metrics.keys() - numbers)
        count = count_reason("examples", update.examples, form.examples)
        return min(names, default=count or count_reason("steps", update.steps, form.max_steps))

    def _may_tell(self, task: Task, reason: str) -> bool:
        """Return whether a reason may be told as it is: at a site that hides rows, if it follows from no row."""
        query, policy = task.query, self._policy
        if isinstance(query, KeyQuery) or (policy.protection(self._work) is None and not self._has_noise(query)):
            return True
        if query is None:
            return not self._work.trains
        work = self._work
        return reason in (policy.query_reject_reason(query, work), policy.work.steps_reject_reason(query.most_steps()))

    def _is_counted(self, task: Task) -> bool:
        """Return whether a task is refused by a policy before any row is looked at, by what was spent."""
        return task.query is None or self._has_noise(task.query)

    @staticmethod
    def _has_noise(query: Query | None) -> bool:
        """Return whether a question is answered with noise, of which a budget counts."""
        hidden = None if query is None else query.hiding()
        return hidden is not None and hidden.noise > 0


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

    def hello(self, message: Hello, timeout: float) -> memoryview | None:
        """Send a heartbeat, and return the answer, None where none came in so many seconds."""
        return self._request("hello", message, timeout)

    def check(self, timeout: float) -> memoryview | None:
        """Send the question of a site that only looks, and return the answer, None where none came."""
        return self._request("check", CheckRequest(version=__version__), timeout)

    def deliver(self, welcome: Welcome, id: int, trains: bool, body: ResultBody) -> str | None:
        """Send a result in pieces, and return the server's last word, see `send_body`.

        Args:
            welcome: of the server process that waits for it.
            id, trains: of its task.
            body: as it was stored.

        Raises:
            ValidationError: the body has a field that is not declared.
        """
        contents(body)
        name = digest(body)
        head = Piece(run=welcome.run, epoch=welcome.epoch, id=id, trains=trains, start=0, size=len(body), digest=name)
        return send_body(self._link, SERVER, "result", head, body, timeout=WAIT)

    def fetch_terms(
        self, known_by: str, *, timeout: float = WAIT, wanted: Callable[[], bool] = lambda: True
    ) -> bytearray | None:
        """Fetch the terms of a run, see `transfer.fetch_terms`."""
        return fetch_terms(self._link, SERVER, known_by, timeout=timeout, wanted=wanted)

    def on_task(self, handler: Callable[[str, Piece, memoryview], Reply]) -> None:
        """Set what takes a piece of a task, and replies."""
        self._link.on("task", Piece, lambda *message: encode(handler(*message)))

    def _request(self, topic: str, message: Release, timeout: float) -> memoryview | None:
        return self._link.request(SERVER, topic, message, timeout=timeout)


_UNKNOWN = {"noise": math.inf, "question": {}, "ask": ""}  # arguments of a question that nobody has asked yet


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
    noise = noises(policy, work)
    if not work.trains or (leaves is Leaving.LOSS and noise and work.masking is None):
        return []
    if work.masking is not None:
        return [Declared(leaves, Mechanism.MASKED, "; ".join([sums, *noise]))]
    if leaves is not Leaving.UPDATE:
        return [Declared(leaves, Mechanism.OPEN)]
    mechanism = Mechanism.NOISED if noise else Mechanism.OPEN
    return [Declared(leaves, mechanism, "; ".join(noise), name) for name in ("model", *work.uploads())]


def noises(policy: Policy, work: ClientWork) -> list[str]:
    """Return the noise that hides rows or updates at this site, in words; nothing where there is none."""
    rows, sentences = work.row_privacy, []
    if rows is not None and rows.noise:
        sentences.append(f"each row's gradient is clipped to {rows.clip:g}, noise of {rows.noise:g} clips in each step")
    for transform in work.transforms:
        if isinstance(transform, Gaussian) and transform.noises_update():
            sentences.append(f"each update is clipped to {transform.clip:g}, noise of {transform.multiplier:g} clips")
    if sentences and policy.training is not None:
        sentences.append(f"epsilon {policy.training.epsilon:g} at delta {policy.training.delta:g} in all")
    return sentences


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
    rules = policy.disclosure()
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
    table = {name: value for name, value in table.items() if kind and name in ("kind", *kind.model_fields)}
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
