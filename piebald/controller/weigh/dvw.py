"""Distributed validation weighting (Metis): how much a model counts is said by learners, not by its rows."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from pydantic import Field

from piebald.contracts import Centre, Learned, Local, Question, Split, Start, Update, Work
from piebald.controller.roster import select
from piebald.controller.weigh.linear import Linear
from piebald.controller.weigh.scores import SCORES
from piebald.parts import Cohort, Query, Rule


class Validate(Query):
    """Run a model over the client's validation rows and send counts, nothing else (Metis, section IV, the evaluator).

    Where layers are private the shared ones are judged together with the client's own.

    Attributes:
        split: which of the client's rows.
        classes: C; the answer is the confusion matrix [C * C], rows by true class and, within, by predicted class.
            0 asks for the mean loss instead, for tasks without classes.
    """

    split: Split = "validation"
    classes: int = Field(default=0, ge=0)

    def answer(self, start: Start, local: Local, rule: Rule) -> Learned:
        if not self.classes:
            scores, rows = local.score(start.model, self.split)
            told = {"loss": scores["loss"].nan_to_num(), "examples": rows}
            return Learned(start.model, torch.zeros(len(rows)), metrics=told)
        matrix = local.confusion(start.model, self.split).flatten(1)
        return Learned(
            start.model, torch.zeros(len(matrix)), parts={"confusion": matrix}, metrics={"examples": matrix.sum(1)}
        )

    def complaint(self, answer: Update, work: Work) -> str | None:
        if not self.classes:
            return None if "loss" in answer.metrics else "sent no loss"
        matrix = answer.parts.get("confusion")
        if matrix is None or tuple(matrix.shape) != (self.classes**2,):
            came = "nothing" if matrix is None else f"{list(matrix.shape)}"
            return f"must send {self.classes} x {self.classes} counts, sent {came}"
        if bool((matrix < 0).any()) or bool((matrix != matrix.round()).any()):
            return "sent counts that are no whole numbers of at least 0"
        if int(matrix.sum()) != answer.examples:
            return f"sent counts of {int(matrix.sum())} rows and said there were {answer.examples}"
        return None


class Dvw(Linear):
    """By the score of a learner's model on the validation rows of all learners (Metis, section IV, eq. 3).

    A model to be weighed goes to every learner's evaluator, each sends back its confusion matrix, the matrices are
    added up and scored.  An evaluator that does not answer, or answers with the wrong shape, is left out of the sum.
    Tasks without classes are weighed by 1 / (mean validation loss), which is ours: the paper leaves them open, and this
    has no scale of its own, since shares are made of it.

    Attributes:
        score: "micro_f1" (eq. 3), "accuracy", "macro_f1", "geometric_mean" or "matthews"; negative ones count 0.
        evaluators: ask only so many, a seeded choice at each commit; None asks all that are there.
        above_chance: subtract 1 / C first, so that a model that guesses counts nothing.  Ours, not the paper's.
        power: raise the score to this power, so that differences count more.  Ours, not the paper's.
    """

    needs_each = True

    score: Literal["micro_f1", "accuracy", "macro_f1", "geometric_mean", "matthews"] = "micro_f1"
    evaluators: int | None = Field(default=None, ge=1)
    above_chance: bool = False
    power: float = Field(default=1.0, gt=0)

    def validates(self) -> bool:
        return True

    def weight(self, update: Update, staleness: int = 0) -> float:
        return update.metrics["validation_weight"]

    def prepare(self, cohort: Cohort, centre: Centre) -> Cohort:
        classes = _classes(centre)
        asked = centre.members
        if self.evaluators is not None:
            asked = select(asked, self.evaluators, "evaluators", centre.work.seed, centre.version)
        query = Validate(classes=classes)
        models = [cohort.model(row) for row in range(len(cohort.updates))]
        answers = centre.ask([Question(client, query, {"model": model}) for model in models for client in asked])
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
                total += answer.parts["confusion"]
            return max(0.0, SCORES[self.score](total.view(classes, classes)))
        rows = sum(answer.examples for answer in answers)
        loss = sum(answer.metrics["loss"] * answer.examples for answer in answers)
        return rows / max(loss, 1e-12 * rows) if rows else 0.0

    def _sharpened(self, score: float, classes: int) -> float:
        above = score - 1 / classes if self.above_chance and classes else score
        return float(max(0.0, above) ** self.power)


def _classes(centre: Centre) -> int:
    """C, or 0 for a task without classes."""
    if centre.work.task.name in ("regression", "multilabel"):
        return 0
    return centre.work.outputs[0] if len(centre.work.outputs) else 0
