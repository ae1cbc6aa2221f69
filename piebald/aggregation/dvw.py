"""Distributed validation weighting (Metis): models are weighted by their scores on the clients' validation rows."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from pydantic import Field

from piebald.aggregation.classification_scores import SCORES
from piebald.aggregation.linear import Linear
from piebald.contracts import Cohort, QueryRequest, ServerContext, Update
from piebald.queries.validate import Validate
from piebald.randomness import select


class Dvw(Linear):
    """By the score of a client's model on the validation rows of all clients (Metis, section IV, eq. 3).

    A model goes to every client's evaluator, each sends back its confusion matrix, the matrices are
    added up and scored.  An evaluator that does not answer, or answers with the wrong shape, is left out of the sum.
    Regression tasks are weighted by 1 / (mean validation loss), which is ours: the paper leaves them open, and this
    has no scale of its own, since shares are made of it.

    Attributes:
        score: "micro_f1" (eq. 3), "accuracy", "macro_f1", "geometric_mean" or "matthews"; negative ones count 0.
        evaluators: ask only so many, a seeded choice at each step; None asks all that are there.
        above_chance: subtract 1 / C first, so that a model that guesses counts nothing.  Ours, not the paper's.
        power: raise the score to this power, so that differences count more.  Ours, not the paper's.
    """

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
        classes = _classes(context)
        asked = context.members
        if self.evaluators is not None:
            asked = select(asked, self.evaluators, "evaluators", context.spec.seed, context.version)
        query = Validate(classes=classes)
        models = [cohort.model(row) for row in range(len(cohort.updates))]
        answers = context.query([QueryRequest(client, query, {"model": model}) for model in models for client in asked])
        updates = []
        for row, update in enumerate(cohort.updates):
            told = [one for one in answers[row * len(asked) : (row + 1) * len(asked)] if one is not None]
            score = self._scored(told, classes)
            metrics = {"validation": score, "validation_weight": self._sharpened(score, classes)}
            updates.append(dataclasses.replace(update, metrics={**update.metrics, **metrics}))
        return dataclasses.replace(cohort, updates=updates)

    def _scored(self, answers: list[Update], classes: int) -> float:
        """One model's score, from all evaluators' rows as if they lay in one place."""
        if classes:
            total = torch.zeros(classes**2)
            for answer in answers:
                total += answer.vectors["confusion"]
            return max(0.0, SCORES[self.score](total.view(classes, classes)))
        rows = sum(answer.examples for answer in answers)
        loss = sum(answer.metrics["loss"] * answer.examples for answer in answers)
        return rows / max(loss, 1e-12 * rows) if rows else 0.0

    def _sharpened(self, score: float, classes: int) -> float:
        above = score - 1 / classes if self.above_chance and classes else score
        return float(max(0.0, above) ** self.power)


def _classes(context: ServerContext) -> int:
    """C, or 0 for an objective without classes."""
    if context.spec.objective.name in ("regression", "multilabel"):
        return 0
    return context.spec.outputs[0] if len(context.spec.outputs) else 0
