"""Counts of a model's right and wrong answers on a client's validation rows."""

from __future__ import annotations

import torch
from pydantic import Field

from piebald.contracts import Learned, Local, Query, Split, Start, Update
from piebald.model_spec import ModelSpec as Work
from piebald.training.base import Rule


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
