"""Evaluations for the report: when and of whom, the best version, counts by class, and buffers that models lack."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piebald.contracts import SERVER_ID, Clients, InMemory, Personalizes, Query, Result, Split
from piebald.core.cohort_matrix import weighted_mean
from piebald.core.errors import SettingError
from piebald.core.metrics import checked_criterion, is_pooled
from piebald.core.randomness import select
from piebald.methods.client_work import ClientWork
from piebald.methods.queries import row_scores
from piebald.methods.queries.scores import Confusion, counted
from piebald.methods.queries.threshold_scores import AT_THRESHOLD, ThresholdCounts, ThresholdScores
from piebald.server.cluster_models import ClusterModels
from piebald.server.cluster_state import ClusterModel, ModelSnapshot
from piebald.server.records import TableRow

MOST_CLASSES = 100
MOST_CLIENTS = 1_000
MOST_ROWS = 200_000  # of all clients, whose single scores are kept

Ask = Callable[[Sequence[tuple[int, Query]]], Sequence[Result]]  # clients about the model of their cluster


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """The plan of evaluations for the report: when, and on which clients.

    Attributes:
        query: what clients are asked.
        every: server steps between evaluations; the last version is always evaluated.  0: never.
        clients: how many clients (a seeded choice), None for all.
        common: what the server asks of its own test set, None where it has none or no model can be used alone.
        higher: whether more is better of the score that matters, the first one that clients give.
        count: what clients are asked about right and wrong answers by class, None for nothing.
        rows: what they are asked about single rows and constant answers, None for nothing.
        totals: what sites are asked about their training rows for the constant answer of all, None for nothing.
        thresholds: what is asked about scores at thresholds, None for nothing.
        validate: the query that decides which version is the best, None where the last one is kept.
        stopping: the query whose scores may end the run, None where none do.
    """

    query: Query
    every: int = 1
    clients: int | None = None
    common: Query | None = None
    higher: bool = True
    validate: Query | None = None
    count: Confusion | None = None
    rows: row_scores.RowScores | None = None
    totals: row_scores.TrainingTotals | None = None
    thresholds: ThresholdScores | None = None
    stopping: Query | None = None

    @property
    def asked(self) -> list[Query]:
        """All that clients may be asked."""
        queries = (*self._scoring, self.count, self.rows, self.totals, self.thresholds) if self.every else ()
        return [query for query in queries if query is not None and query.asked_of != "itself"]

    @property
    def _scoring(self) -> list[Query]:
        """The queries at every evaluation, each once."""
        queries = list[Query]()
        for query in (self.query, self.validate, self.stopping):
            if query is not None and query not in queries:
                queries.append(query)
        return queries

    def is_due(self, version: int, rounds: int | None, last: bool) -> bool:
        """Return whether a version is evaluated; `last` says that the run ends with it."""
        return bool(self.every) and (last or version % self.every == 0 or version == rounds)

    def queries(self, known: int, seed: int) -> list[tuple[int, Query]]:
        """The clients that are asked at every evaluation out of `known`, each with its query."""
        clients = self._evaluated_clients(known, seed)
        pairs = [(client, query) for query in self._scoring for client in clients]
        return pairs if self.common is None else [*pairs, (SERVER_ID, self.common)]

    def counting(self, known: int, seed: int) -> list[tuple[int, Query]]:
        """The same clients, each with the queries about classes and thresholds; none where nothing is asked."""
        queries = [query for query in (self.count, self.thresholds) if query is not None]
        return [(client, query) for query in queries for client in self._evaluated_clients(known, seed)]

    def scoring_at(self, answers: Sequence[Result], known: int, seed: int) -> list[tuple[int, Query]]:
        """The same clients, each with the query about scores at the threshold of all, which follows from `answers`."""
        first = self.thresholds
        if not isinstance(first, ThresholdCounts):
            return []
        second = first.with_threshold([x.update for x in answers if x.update is not None and x.task.query == first])
        return [] if second is None else [(client, second) for client in self._evaluated_clients(known, seed)]

    def row_scoring(self, of_all: Sequence[float], known: int, seed: int) -> list[tuple[int, Query]]:
        """The same clients, each with the query about single rows; none where nothing is asked.

        Args:
            of_all: the outputs of the constant answer of all sites, empty where it is not known.
        """
        query = self.rows.model_copy(update={"of_all": tuple(of_all)}) if self.rows and of_all else self.rows
        return [] if query is None else [(client, query) for client in self._evaluated_clients(known, seed)]

    def _evaluated_clients(self, total: int, seed: int) -> Sequence[int]:
        return range(total) if self.clients is None else select(range(total), self.clients, "measure", seed)


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """Progress after a server step: its version, and the newest mean scores by "model/metric"."""

    version: int
    scores: Mapping[str, float]


@dataclass(slots=True, eq=False)
class BestVersion:
    """The version with the lowest validation loss over all evaluated rows of all clients (CGAU keeps that one).

    Its global models are kept here during the run; a run folder has them, with the state of clients at that time, in
    that version's checkpoint.  A client is judged by its personal model where it has one.  The initial model is not a
    candidate.

    Attributes:
        version: server steps made by then, None before the first evaluation.
        loss: mean over rows.
        models: the global models at that version, None after a resume.
    """

    version: int | None = None
    loss: float = float("inf")
    models: ModelSnapshot | None = None

    def consider(self, version: int, scores: Sequence[Mapping[str, Any]], models: ModelSnapshot) -> bool:
        """Keep this version if it is better than all earlier ones, and say so; the earliest of equals is kept."""
        loss = validation_loss(scores)
        better = bool(version) and loss is not None and loss < self.loss
        if better and loss is not None:
            self.version, self.loss, self.models = version, loss, models
        return better

    def state(self) -> list[float] | None:
        """Version and loss as JSON."""
        return None if self.version is None else [self.version, self.loss]

    def restore(self, state: Sequence[float] | None) -> None:
        """Restore what `state` returned."""
        if state is not None:
            self.version, self.loss = int(state[0]), float(state[1])


def validation_loss(scores: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean loss over validation rows, from rows of the table `score`; None where there are none."""
    by_client: dict[int, Mapping[str, Any]] = {}
    for row in scores:
        if (
            row["split"] == "validation"
            and row["metric"] == "loss"
            and (row["model"] == "personal" or row["client"] not in by_client)
        ):
            by_client[row["client"]] = row
    rows = sum(row["examples"] for row in by_client.values())
    return sum(row["examples"] * row["value"] for row in by_client.values()) / rows if rows else None


def class_query(
    wanted: bool | None, work: ClientWork, clients: Clients, split: Split, asked: int, simulates: bool
) -> Confusion | None:
    """The query, None where nothing is to be counted.

    Args:
        wanted: True or False as the user says; None counts in simulations, as far as it costs little.
        work, clients: what is trained, by whom.
        split: the rows that models are judged by.
        asked: how many clients are evaluated, 0 for none.
        simulates: whether all rows are on this machine; else each site's policy must name the query.

    Raises:
        SettingError: counts are wanted and there can be none.
    """
    if wanted is False or (wanted is None and not simulates):
        return None
    classes, reason = len(clients.classes or ()), None
    if not asked:
        reason = "needs evaluations: set evaluate_every to 1 or more"
    elif not work.objective.classifies or not classes or tuple(work.outputs) != (classes,):
        reason = "needs classes, and a model with an output for each"
    elif not simulates and work.choice is not None:
        reason = f"does not fit keep = {work.choice.kind!r} in a federation, whose sites tell nobody what they chose"
    elif not 2 <= classes <= MOST_CLASSES:
        reason = f"is for 2 to {MOST_CLASSES} classes, there are {classes}"
    elif asked > MOST_CLIENTS:
        reason = f"is for at most {MOST_CLIENTS:,} clients, {asked:,} are evaluated: set evaluate_clients"
    if reason is None:
        return Confusion(split=split, classes=classes)
    if wanted:
        raise SettingError(f"per_class {reason}, or leave it out")
    return None


def threshold_query(
    criterion: str | None, work: ClientWork, clients: Clients, split: Split, asked: int
) -> ThresholdScores | ThresholdCounts | None:
    """The query about scores at clients' own thresholds or at one for all, None where no criterion is given.

    Args:
        criterion: what is best on validation rows, see `core.metrics.best_threshold`.
        work, clients, split, asked: as for `class_query`.

    Raises:
        SettingError: there is no such criterion, or nothing can be chosen by it.
    """
    if criterion is None:
        return None
    criterion, reason = checked_criterion(criterion), None  # before the query, whose refusal names itself
    if not asked:
        reason = "needs evaluations: set evaluate_every to 1 or more"
    elif not work.objective.classifies or len(clients.classes or ()) != 2 or tuple(work.outputs) != (2,):
        reason = "needs two classes, and a model with an output for each"
    elif split == "validation":
        reason = "is chosen on validation rows, so that other rows must be scored: set evaluate_split to 'test'"
    elif work.choice is not None:
        reason = f"does not fit keep = {work.choice.kind!r}, with which each client is judged by another kind of model"
    elif all(clients.size(client, "validation") == 0 for client in range(len(clients))):
        reason = "needs validation rows but no client has any: give [split] validation = 0.1"
    if reason is not None:
        raise SettingError(f"threshold {reason}, or leave it out")
    return (ThresholdCounts if is_pooled(criterion) else ThresholdScores)(split=split, criterion=criterion)


def row_query(
    work: ClientWork, clients: Clients, split: Split, asked: int, simulates: bool
) -> row_scores.RowScores | None:
    """The query about single rows and constant answers, None where there is nothing to ask.

    Args:
        work, clients, split, asked, simulates: as for `class_query`; real sites say nothing of single rows.
    """
    sizes = [clients.size(client, split) for client in range(min(len(clients), MOST_CLIENTS + 1))]
    # of clients that choose among models, the chosen one is judged elsewhere
    if not 0 < asked <= MOST_CLIENTS or sum(size or 0 for size in sizes) > MOST_ROWS or work.choice is not None:
        return None
    objective, main = work.objective, next(iter(work.objective.metrics.values()), None)
    classes = len(clients.classes or ())
    naive: row_scores.Naive | None = None
    if objective.classifies:
        naive = "classes" if classes and tuple(work.outputs) == (classes,) else None
    elif objective.name in ("regression", "l1", "huber"):
        naive = "median" if "absolute_error" in objective.metrics else "mean"
    else:
        others: dict[str, row_scores.Naive] = {"multilabel": "labels", "counts": "rate", "survival": "equal"}
        naive = others.get(objective.name)
    if naive is None and main is None:
        return None
    kind, of_all = (row_scores.RowScores, _of_all(clients, naive)) if simulates else (row_scores.NaiveScores, ())
    return kind(split=split, rows=main is not None, naive=naive, of_all=of_all)


def _of_all(clients: Clients, naive: row_scores.Naive | None) -> tuple[float, ...]:
    """The outputs of the constant answer from all clients' training rows, which are on this machine; empty for none."""
    if naive == "classes" and _are_weighted(clients):
        classes = len(clients.classes or ())
        each = (clients.rows(client, "train") for client in range(len(clients)))
        sums_of = [row_scores.class_totals(rows, classes) for rows in each if len(rows)]
        return tuple(row_scores.constant(naive, torch.stack(sums_of).sum(0)).tolist())
    if naive == "classes":
        counts = [clients.counts(client, "train") for client in range(len(clients))]
        sums = [*map(sum, zip(*[row for row in counts if row], strict=True))] if None not in counts else []
        return tuple(row_scores.constant(naive, torch.tensor(sums).double()).tolist())
    if naive in (None, "equal") or len(clients) > MOST_CLIENTS:
        return ()
    held = [rows for client in range(len(clients)) if len(rows := clients.rows(client, "train"))]
    targets = torch.cat([row_scores.known_targets(rows, naive) for rows in held])
    weights = torch.cat([*map(row_scores.row_weights, held)])
    some = any(rows.weight is not None for rows in held)
    return tuple(row_scores.constant_of(naive, targets, weights if some else None).tolist())


def _are_weighted(clients: Clients) -> bool:
    """Return whether rows count by weights: of clients in memory any, of others those of the first that has rows."""
    if isinstance(clients, InMemory) and clients.in_memory():
        return clients.pool().weight is not None
    held = (clients.rows(client, "train") for client in range(len(clients)))
    return next((rows.weight is not None for rows in held if len(rows)), False)


def totals_query(rows: row_scores.RowScores | None, work: ClientWork) -> row_scores.TrainingTotals | None:
    """The query about the training rows of sites, None where no constant answer of all follows from their totals."""
    asked = rows.naive if isinstance(rows, row_scores.NaiveScores) else None
    # there is no order of several numbers
    several = asked == "median" and math.prod(work.outputs) > 1
    return None if asked in (None, "equal") or several else row_scores.TrainingTotals.of(asked)


def rows_of_scores(answers: Sequence[Result], version: int, work: ClientWork) -> list[TableRow]:
    """Answers to the query as rows of the table `row_score`."""
    rows = list[TableRow]()
    for answer in answers:
        update, query = answer.update, answer.task.query
        if update is None or not isinstance(query, row_scores.RowScores | ThresholdScores):
            continue
        about = {"version": version, "client": answer.task.client, "split": query.split}
        scores = dict(update.metrics)
        if isinstance(query, ThresholdCounts) and query.chosen is not None:
            scores[f"{AT_THRESHOLD}/threshold"] = query.chosen
        for name, value in scores.items():
            model, _, metric = name.partition("/")
            rows.append(about | {"model": model, "metric": metric, "value": value})
        for model, vector in update.vectors.items() if isinstance(query, row_scores.RowScores) else ():
            values = vector[vector != row_scores.NO_VALUE]
            if len(values):
                row = about | {"model": model, "metric": work.objective.metric, "row_values": values.tolist()}
                rows.append(row | {"value": float(values.double().mean())})
    return rows


def confusion_rows(answers: Sequence[Result], version: int, work: ClientWork) -> list[TableRow]:
    """Answers to the query as rows of the table `confusion`."""
    model = "personal" if isinstance(work.trainer, Personalizes) or work.layout.private else "global"
    return [
        row
        for answer in answers
        if answer.update is not None and isinstance(answer.task.query, Confusion)
        for row in counted(
            version, answer.task.client, model, answer.task.query.split, answer.update.vectors["confusion"]
        )
    ]


class CompletedModels:
    """Has clients complete the models of clusters, and gives each client the one that it uses.

    Args:
        work: the run's.
        most: a client's rows count as at most so many, None for no limit.
    """

    def __init__(self, work: ClientWork, most: int | None = None) -> None:
        self._work, self._most = work, most
        self._used: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by number: the model, its buffers, and both

    @property
    def needed(self) -> bool:
        """True if models lack anything."""
        return self._work.trainer.completing_query(None) is not None

    def complete(self, models: ClusterModels, clients: Sequence[int], ask: Ask) -> None:
        """Ask for the buffers of each cluster's model, and of those parts of it that clients have.

        Like an evaluation, this is no part of training, and costs neither bytes nor virtual time.  What nobody tells
        stays as it is.

        Args:
            models: of the clusters.
            clients: who is asked, each about the model of its cluster.
            ask: asks them, and returns the answers that can be used.
        """
        owns = () if self._work.own_models is None else range(len(self._work.own_models.models))
        for cluster in models.clusters.values():
            members = [client for client in clients if models.of(client) is cluster]
            answers = {number: self._buffers(number, members, ask) for number in (None, *owns)}
            complete = {number: buffers for number, buffers in answers.items() if buffers is not None}
            cluster.own_buffers |= {str(number): buffers for number, buffers in complete.items() if number is not None}
            if None in complete:
                # a model is never written to, since whoever it was sent to still holds it
                model = cluster.model.clone()
                model[self._work.layout.shared_trained : self._work.layout.shared] = complete[None]
                cluster.settle(model)

    def _buffers(self, number: int | None, clients: Sequence[int], ask: Ask) -> Tensor | None:
        """The mean of the buffers that clients tell of a model, None where nobody does."""
        query = self._work.trainer.completing_query(number)
        layout = self._work.numbered(number).layout
        updates = [] if query is None else [result.update for result in ask([(client, query) for client in clients])]
        size = (layout.shared - layout.shared_trained,)
        answers = [
            update
            for update in updates
            if update is not None and update.examples and update.vectors["buffers"].shape == size
        ]
        if not answers:
            return None
        weights = [min(answer.counts, self._most or answer.counts) for answer in answers]
        mean = weighted_mean([answer.vectors for answer in answers], "buffers", weights, sum(weights)).float()
        for span in layout.variances:
            # a client may send any number, and batch norm takes the root of a variance
            mean[span.start - layout.shared_trained : span.stop - layout.shared_trained].clamp_(min=0.0)
        return mean

    def model(self, cluster: ClusterModel, client: int) -> Tensor:
        """The model [s] of a cluster as a client gets it to use: with the buffers of its own part.

        Clients of one part get the same tensor.
        """
        number = self._work.number(client)
        buffers = None if number is None else cluster.own_buffers.get(str(number))
        if number is None or buffers is None:
            return cluster.model
        model, earlier, completed = self._used.get(number, (None, None, None))
        if completed is None or model is not cluster.model or earlier is not buffers:
            completed = self._work.with_buffers(number, cluster.model, buffers)
            self._used[number] = cluster.model, buffers, completed
        return completed
