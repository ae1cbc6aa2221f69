"""Distributed validation weighting (Metis): models are weighted by their scores on the clients' validation rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field

from piebald.contracts import Cohort, ModelSpec, QueryRequest, ServerContext, Update
from piebald.core.randomness import select
from piebald.methods.aggregation.classification_scores import SCORES
from piebald.methods.aggregation.linear import Linear
from piebald.methods.queries.scores import Validate


class Dvw(Linear):
    """By the score of a client's model on the validation rows of all clients (Metis, section IV, eq. 3).

    A model goes to the evaluators of all other clients, each sends back its confusion matrix, the matrices are added up
    and scored; its own client sends its matrix along with the model (the paper's count of models exchanged, below
    figure 8).  An evaluator that does not answer for each model of a step, or answers with the wrong shape, counts for
    none of them, since evaluators differ in how hard their rows are; where nobody answers for all, each model has the
    sum of its own answers.
    Where transforms change updates, and in tasks without classes, a model also goes back to its own client.
    Regression tasks are weighted by 1 / (mean validation loss), which is ours: the paper leaves them open, and its
    scale does not matter, since weights are divided by their sum.

    Attributes:
        score: "micro_f1" (eq. 3), "accuracy", "macro_f1", "geometric_mean" or "matthews"; negative ones count 0.
        evaluators: ask only so many, a seeded choice at each step; None asks all that are there.
        above_chance: subtract 1 / C first, so that a model that guesses counts nothing.  Ours, not the paper's.
        power: raise the score to this power, so that differences count more.  Ours, not the paper's.
    """

    on_device: ClassVar[bool] = True

    score: Literal["micro_f1", "accuracy", "macro_f1", "geometric_mean", "matthews"] = "micro_f1"
    evaluators: int | None = Field(default=None, ge=1)
    above_chance: bool = False
    power: float = Field(default=1.0, gt=0)

    def needs_validation_rows(self) -> bool:
        return True

    def discloses(self) -> str | None:
        return "counts of right and wrong answers on their validation rows"

    def weight(self, update: Update, staleness: int = 0) -> float:
        return update.metrics["validation_weight"]

    def prepare(self, cohort: Cohort, context: ServerContext) -> Cohort:
        classes = _classes(context.spec)
        evaluators = context.members
        if self.evaluators is not None:
            evaluators = select(evaluators, self.evaluators, "evaluators", context.spec.seed, context.version)
        query = Validate(classes=classes)
        rows = range(len(cohort.updates))
        # answers that came with the updates save a model each on the way back
        answers_by_row = [self._self_evaluation(cohort, row, query, evaluators, context) for row in rows]
        asked = [(row, client) for row in rows for client in evaluators if client not in answers_by_row[row]]
        models = [{"model": cohort.model(row)} for row in rows]  # each is in memory once, whoever it goes to
        requests = [QueryRequest(client, query, models[row]) for row, client in asked]
        for (row, client), answer in zip(asked, context.query(requests), strict=True):
            if answer is not None:
                answers_by_row[row][client] = answer
        # on the same rows for all models: an easy evaluator's score would lift whichever model it answers for
        everywhere = set(evaluators).intersection(*answers_by_row)
        updates = []
        for update, answers in zip(cohort.updates, answers_by_row, strict=True):
            score = self._scored([answers[client] for client in answers if client in (everywhere or answers)], classes)
            metrics = {"validation": score, "validation_weight": self._sharpened(score, classes)}
            updates.append(dataclasses.replace(update, metrics={**update.metrics, **metrics}))
        return dataclasses.replace(cohort, updates=updates)

    def asks(self, spec: ModelSpec) -> Sequence[Validate]:
        return (Validate(classes=_classes(spec)),)

    def sender_query(self, spec: ModelSpec) -> Validate | None:
        classes = _classes(spec)
        return Validate(classes=classes) if classes else None

    def _self_evaluation(
        self, cohort: Cohort, row: int, query: Validate, evaluators: Sequence[int], context: ServerContext
    ) -> dict[int, Update]:
        """Return the answer that came with an update about its own model, by its client, if it is an evaluator's."""
        matrix = cohort.updates[row].vectors.get("confusion")
        if matrix is None or cohort.clients[row] not in evaluators or not bool(matrix.sum().isfinite()):
            return {}
        # the sender's matrix has to pass the checks of any other answer: it is a claim about its own model
        answer = Update({"confusion": matrix}, int(matrix.sum()), 0, {})
        return {} if query.reject_reason(answer, context.spec) else {cohort.clients[row]: answer}

    def _scored(self, answers: list[Update], classes: int) -> float:
        """One model's score, from all evaluators' rows as if they lay in one place."""
        if classes:
            # counts, not scores, are added: evaluators count by their rows
            total = torch.zeros(classes**2)
            for answer in answers:
                total += answer.vectors["confusion"]
            # Matthews' coefficient may be negative, and a weight may not
            return max(0.0, SCORES[self.score](total.view(classes, classes)))
        rows = sum(answer.counts for answer in answers)
        loss = sum(answer.metrics["loss"] * answer.counts for answer in answers)
        # a loss of 0 must not make a weight infinite
        return rows / max(loss, 1e-12 * rows) if rows else 0.0

    def _sharpened(self, score: float, classes: int) -> float:
        above = score - 1 / classes if self.above_chance and classes else score
        # a negative base would make a fractional power complex
        return float(max(0.0, above) ** self.power)


def _classes(spec: ModelSpec) -> int:
    """C, or 0 for an objective without classes."""
    if not spec.objective.classifies:
        return 0
    return spec.outputs[0] if len(spec.outputs) else 0
