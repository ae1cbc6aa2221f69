"""The list of all that leaves a site, each with the mechanism that protects rows in it, which its owner can print.

Fields of messages are annotated with what leaves in them (`wire_messages.Leaving`); what results carry follows from
the run and the policy.  `site.gate` lets nothing else through.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from piebald.contracts import Query, Split
from piebald.contracts.component import Component, build
from piebald.core.errors import SettingError
from piebald.federation.link.wire_messages import Leaving
from piebald.federation.site.policy import Policy
from piebald.methods.client_work import ClientWork
from piebald.methods.transforms.gaussian import Gaussian
from piebald.privacy.secure_aggregation.key_queries import KeyQuery
from piebald.privacy.secure_aggregation.masks import MasksOverGraph

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
        if isinstance(transform, Gaussian) and transform.where == "client" and transform.multiplier:
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
