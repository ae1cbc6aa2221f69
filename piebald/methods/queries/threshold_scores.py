"""Scores of a client's model at the threshold that is best on the client's validation rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import numpy as np
import torch
from pydantic import AfterValidator
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
from piebald.core import pytree
from piebald.core.targets import TargetDomain
from piebald.core.thresholds import METRICS, best_threshold, checked_criterion, rates

AT_THRESHOLD, AT_HALF = "at_threshold", "at_half"


class ThresholdScores(Query):
    """Choose the threshold of two classes on a client's validation rows, and score its other rows there and at a half.

    The model is the one that the client uses: its personal model where it has one, else the global model.  Metrics are
    those of `core.thresholds`, as "at_threshold/f1" and "at_half/f1"; a client without validation rows of both classes
    has none.  The threshold lies between the outputs of two rows, so it stays at the client.

    Attributes:
        split: which of the client's rows are scored.
        criterion: what is best, see `core.thresholds.best_threshold`.
    """

    split: Split = "test"
    criterion: Annotated[str, AfterValidator(checked_criterion)]

    def thresholds(self, model: Tensor, context: ClientContext) -> list[float | None]:
        """The threshold of each client for its model [c, p]; None without validation rows of both classes."""
        return [best_threshold(*chosen_by, self.criterion) for chosen_by in _leads(model, context, "validation")[0]]

    def rows_read(self, personal: bool) -> set[Split]:
        return {self.split, "validation", "train"} if personal else {self.split, "validation"}

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        model = trainer.personalize(inputs, context) if isinstance(trainer, Personalizes) else inputs.model
        metrics = {f"{at}/{name}": torch.full((len(model),), torch.nan) for at in (AT_THRESHOLD, AT_HALF)
                   for name in METRICS}  # fmt: skip
        judged, counts = _leads(model, context, self.split)
        for row, (threshold, rows) in enumerate(zip(self.thresholds(model, context), judged, strict=True)):
            if threshold is None or not len(rows[0]) or not np.isfinite(rows[0]).all():
                continue
            for at, cut in ((AT_THRESHOLD, float(np.log(threshold / (1 - threshold)))), (AT_HALF, 0.0)):
                for name, values in rates(np.array([cut]), *rows).items():
                    metrics[f"{at}/{name}"][row] = float(values[0])
        return TrainOutput(inputs.model, torch.zeros(len(model)), metrics=metrics | {"examples": counts})

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        names = {f"{at}/{name}" for at in (AT_THRESHOLD, AT_HALF) for name in METRICS}
        return ResultForm({}, names, rows[self.split], 0)

    def most_asked(self, hides: bool) -> int:
        return 10 if hides else 100

    def row_influence(self, rows: Rows) -> Mapping[str, float] | None:
        return {}  # a validation row moves the threshold, and with it what any number of rows are taken for

    def fewest_rows(self, answer: Update) -> int | None:
        return answer.examples or None


Leads = tuple[np.ndarray, np.ndarray]


def _leads(model: Tensor, context: ClientContext, split: Split) -> tuple[list[Leads], Tensor]:
    """The second class's lead in each client's rows with a target [n], whether they are of it [n], and their number."""
    leads, counts = context.row_values(model, split, _lead)
    labels = [pytree.single(rows.y, "a threshold") for rows in context.rows(split)]
    positive = [(y[TargetDomain().known_rows(y)] == 1).cpu().numpy() for y in labels]
    values = [row[: len(ill)].double().cpu().numpy() for row, ill in zip(leads, positive, strict=True)]
    return list(zip(values, positive, strict=True)), counts


def _lead(outputs: Tensor, targets: Tensor) -> Tensor:
    scores = pytree.logits(outputs)
    return scores[:, 1] - scores[:, 0]
