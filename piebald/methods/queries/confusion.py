"""Counts of right and wrong answers by class, for the report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import (
    ClientContext,
    Personalizes,
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


class Confusion(Query):
    """Count a client's rows by their class and by the class that the client's model takes them for.

    The model is the one that the client uses: its personal model where it has one, else the global model.  The counts
    tell how many of the client's rows each class has, and what they are mistaken for, which is more than a score tells:
    a site answers only where its policy names this query, and with `least_rows` only if no count is small.

    Attributes:
        split: which of the client's rows.
        classes: C; the answer is the confusion matrix [C * C], rows by true class and, within, by predicted class.
    """

    by_name = True

    split: Split = "test"
    classes: int = Field(ge=2)

    def rows_read(self, personal: bool) -> set[Split]:
        return {self.split, "train"} if personal else {self.split}

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        model = trainer.personalize(inputs, context) if isinstance(trainer, Personalizes) else inputs.model
        matrix = context.confusion(model, self.split).flatten(1)
        return TrainOutput(
            inputs.model, torch.zeros(len(matrix)), vectors={"confusion": matrix}, metrics={"examples": matrix.sum(1)}
        )

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        # no more counts than the model has outputs for, whatever number the query brings
        return ResultForm({"confusion": (math.prod(spec.outputs) ** 2,)}, (), rows[self.split], 0)

    def fewest_rows(self, answer: Update) -> int | None:
        held = answer.vectors["confusion"]
        held = held[held > 0]
        return int(held.min()) if len(held) else None

    def most_asked(self, hides: bool) -> int:
        return 10 if hides else 100

    def row_influence(self, rows: Rows) -> Mapping[str, float] | None:
        return {"confusion": 1.0}

    def reject_reason(self, answer: Update, spec: ModelSpec) -> str | None:
        return matrix_reason(answer, self.classes)


def matrix_reason(answer: Update, classes: int) -> str | None:
    """Return why an answer does not carry a confusion matrix of as many rows as it says, or None."""
    matrix = answer.vectors.get("confusion")
    if matrix is None or tuple(matrix.shape) != (classes**2,):
        sent = "nothing" if matrix is None else f"{list(matrix.shape)}"
        return f"must send {classes} x {classes} counts, sent {sent}"
    if bool((matrix < 0).any()) or bool((matrix != matrix.round()).any()):
        return "sent counts that are no whole numbers of at least 0"
    if int(matrix.sum()) != answer.examples:
        return f"sent counts of {int(matrix.sum())} rows and said there were {answer.examples}"
    return None


def counted(version: int, client: int, model: str, split: Split, matrix: Tensor) -> list[dict[str, Any]]:
    """An answer as rows of the table `confusion` of a run folder, one for each number that is not 0.

    Args:
        version: server steps made.
        client: its number.
        model: which of its models was asked: "global", "personal" or "chosen".
        split: of the rows.
        matrix: [C * C] rows by true class and, within, by predicted class.
    """
    classes, about = math.isqrt(len(matrix)), {"version": version, "client": client, "model": model, "split": split}
    return [
        about | {"actual": place // classes, "predicted": place % classes, "count": int(count)}
        for place, count in enumerate(matrix.tolist())
        if count
    ]
