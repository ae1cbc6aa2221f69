"""Counts of a model's right and wrong answers on a client's validation rows."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from pydantic import Field

from piebald.contracts import (
    ClientContext,
    Query,
    ResultForm,
    Rows,
    Split,
    TrainInput,
    TrainOutput,
    Trains,
    Update,
)
from piebald.contracts.model_spec import ModelSpec
from piebald.methods.queries.confusion import matrix_reason


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

    def rows_read(self, personal: bool) -> set[Split]:
        return {self.split, "train"} if personal else {self.split}

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        if not self.classes:
            scores, rows = context.score(inputs.model, self.split)
            metrics = {"loss": scores["loss"].nan_to_num(), "examples": rows}
            return TrainOutput(inputs.model, torch.zeros(len(rows)), metrics=metrics)
        matrix = context.confusion(inputs.model, self.split).flatten(1)
        return TrainOutput(
            inputs.model, torch.zeros(len(matrix)), vectors={"confusion": matrix}, metrics={"examples": matrix.sum(1)}
        )

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        # as many counts as the model has outputs allow: the query cannot choose how many a site sends
        vectors = {"confusion": (math.prod(spec.outputs) ** 2,)} if self.classes else {}
        return ResultForm(vectors, () if self.classes else ("loss",), rows[self.split], 0)

    def most_asked(self, hides: bool) -> int:
        return 200 if hides else 5000  # voters judge the model of each cluster, or of each client, in a round

    def row_influence(self, rows: Rows) -> Mapping[str, float] | None:
        return {"confusion": 1.0} if self.classes else {}

    def fewest_rows(self, answer: Update) -> int | None:
        return answer.examples or None

    def reject_reason(self, answer: Update, spec: ModelSpec) -> str | None:
        if not self.classes:
            return None if "loss" in answer.metrics else "sent no loss"
        return matrix_reason(answer, self.classes)
