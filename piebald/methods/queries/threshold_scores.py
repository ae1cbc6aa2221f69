"""Scores of a client's model at the threshold that is best on the client's validation rows, or on those of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from piebald.contracts import ClientContext, ModelSpec, ResultForm, Rows, Split, TrainInput, TrainOutput, Trains, Update
from piebald.core import pytree
from piebald.core.metrics import GRID, METRICS, best_threshold, checked_criterion, rates
from piebald.core.targets import TargetDomain
from piebald.methods.queries.scores import ScoringQuery, used_model

AT_THRESHOLD, AT_HALF = "at_threshold", "at_half"


class ThresholdScores(ScoringQuery):
    """Choose the threshold of two classes on a client's validation rows, and score its other rows there and at a half.

    The model is the one that the client uses: its personal model where it has one, else the global model.  Metrics are
    those of `core.metrics`, as "at_threshold/f1" and "at_half/f1"; a client without validation rows of both classes
    has none.  The threshold lies between the outputs of two rows, so it stays at the client.

    Attributes:
        split: which of the client's rows are scored.
        criterion: what is best, see `core.metrics.best_threshold`.
    """

    criterion: Annotated[str, AfterValidator(checked_criterion)]

    def thresholds(self, model: Tensor, context: ClientContext) -> list[float | None]:
        """The threshold of each client for its model [c, p]; None without validation rows of both classes."""
        return [best_threshold(*chosen_by, self.criterion) for chosen_by in _leads(model, context, "validation")[0]]

    def rows_read(self, personal: bool) -> set[Split]:
        return super().rows_read(personal) | {"validation"}

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        model = used_model(inputs, context, trainer)
        metrics = {f"{at}/{name}": torch.full((len(model),), torch.nan) for at in (AT_THRESHOLD, AT_HALF)
                   for name in METRICS}  # fmt: skip
        judged, counts = _leads(model, context, self.split)
        for row, (threshold, rows) in enumerate(zip(self.thresholds(model, context), judged, strict=True)):
            # NaN stays, which means that there is no score: a 0 would enter the mean over clients
            if threshold is None or not len(rows[0]) or not np.isfinite(rows[0]).all():
                continue
            # softmax of two outputs is a sigmoid of their difference, so probabilities are compared as logits
            for at, cut in ((AT_THRESHOLD, float(np.log(threshold / (1 - threshold)))), (AT_HALF, 0.0)):
                for name, values in rates(np.array([cut]), *rows).items():
                    metrics[f"{at}/{name}"][row] = float(values[0])
        return inputs.answered(metrics=metrics | {"examples": counts})

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        names = {f"{at}/{name}" for at in (AT_THRESHOLD, AT_HALF) for name in METRICS}
        return ResultForm({}, names, rows[self.split], 0)

    def row_influence(self, rows: Rows) -> Mapping[str, float] | None:
        return {}  # a validation row moves the threshold, and with it what any number of rows are taken for


class ThresholdCounts(ThresholdScores):
    """Choose one threshold for all clients: first by counts of their validation rows, then each scores its rows there.

    The first question counts validation rows by class and by the cell of the grid of probabilities that the client's
    model takes them to; the counts of all clients give the threshold.  They tell of each row its class and nearly its
    score, so a site answers only where its policy names this query, and never where it hides rows.  The second one
    brings the threshold, by which a site also names classes when the run has ended.

    Attributes:
        split, criterion: see `ThresholdScores`.
        chosen: the threshold of all clients, None as long as it is to be chosen.
    """

    by_name = True
    later: ClassVar = {
        "chosen": "no threshold, for counts of validation rows in cells of a fixed grid; then one, for scores"
    }

    chosen: float | None = Field(default=None, gt=0, lt=1)

    def with_threshold(self, answers: Sequence[Update]) -> ThresholdCounts | None:
        """The second question, after the answers to the first; None without validation rows of both classes."""
        counts = [answer.vectors["validation"].double() for answer in answers]
        chosen = best_threshold(*_rows_of(torch.stack(counts).sum(0)), self.criterion) if counts else None
        return None if chosen is None else self.model_copy(update={"chosen": chosen})

    def thresholds(self, model: Tensor, context: ClientContext) -> list[float | None]:
        return [self.chosen] * len(model)

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        if self.chosen is not None:
            return super().answer(inputs, context, trainer)
        rows, counts = _leads(used_model(inputs, context, trainer), context, "validation")
        return inputs.answered(
            vectors={"validation": torch.stack([_cells(*of_client) for of_client in rows])},
            metrics={"examples": counts},
        )

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        if self.chosen is not None:
            return super().answer_form(spec, rows)
        return ResultForm({"validation": (2 * (len(GRID) + 1),)}, (), rows["validation"], 0)

    def fewest_rows(self, answer: Update) -> int | None:
        if self.chosen is not None:
            return super().fewest_rows(answer)
        held = answer.vectors["validation"]
        return int(held[held > 0].min()) if held.any() else None

    def reject_reason(self, answer: Update, spec: ModelSpec) -> str | None:
        if any(bool(((vector < 0) | (vector != vector.round())).any()) for vector in answer.vectors.values()):
            return "sent counts that are no whole numbers of at least 0"
        return None


def _cells(leads: np.ndarray, positive: np.ndarray) -> Tensor:
    """The numbers of rows of the first and of the second class in each cell between thresholds of the grid [2 * n]."""
    # left: a row exactly at a threshold is below it, as in `rates`
    places = np.searchsorted(GRID, leads, side="left")
    return torch.from_numpy(np.concatenate([
        np.bincount(places[positive == ill], minlength=len(GRID) + 1) for ill in (False, True)
    ])).float()  # fmt: skip


def _rows_of(counts: Tensor) -> Leads:
    """Rows in the middle of their cells, from which any metric at a threshold of the grid follows."""
    numbers = counts.numpy().astype(int).reshape(2, -1)
    # any place inside a cell would do, since thresholds lie on its edges only
    middles = np.concatenate([[GRID[0] - 1], (GRID[1:] + GRID[:-1]) / 2, [GRID[-1] + 1]])
    leads = np.concatenate([np.repeat(middles, numbers[0]), np.repeat(middles, numbers[1])])
    return leads, np.arange(len(leads)) >= numbers[0].sum()


Leads = tuple[np.ndarray, np.ndarray]


def _leads(model: Tensor, context: ClientContext, split: Split) -> tuple[list[Leads], Tensor]:
    """The second class's lead in each client's rows with a target [n], whether they are of it [n], and their number."""
    leads, counts = context.row_values(model, split, _lead)
    labels = [pytree.single(rows.y, "a threshold") for rows in context.rows(split)]
    positive = [(y[TargetDomain().known_rows(y)] == 1).cpu().numpy() for y in labels]
    # behind a client's last row of a stack is padding
    values = [row[: len(ill)].double().cpu().numpy() for row, ill in zip(leads, positive, strict=True)]
    return list(zip(values, positive, strict=True)), counts


def _lead(outputs: Tensor, targets: Tensor) -> Tensor:
    scores = pytree.logits(outputs)
    return scores[:, 1] - scores[:, 0]
