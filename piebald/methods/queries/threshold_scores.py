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
from piebald.core.thresholds import GRID, METRICS, best_threshold, checked_criterion, rates
from piebald.methods.queries.scores import ScoringQuery, used_model

AT_THRESHOLD, AT_HALF = "at_threshold", "at_half"


class ThresholdScores(ScoringQuery):
    """Choose the threshold of two classes on a client's validation rows, and score its other rows there and at a half.

    The model is the one that the client uses: its personal model where it has one, else the global model.  Metrics are
    those of `core.thresholds`, as "at_threshold/f1" and "at_half/f1"; a client without validation rows of both classes
    has none.  The threshold lies between the outputs of two rows, so it stays at the client.

    Attributes:
        split: which of the client's rows are scored.
        criterion: what is best, see `core.thresholds.best_threshold`.
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
            if threshold is None or not len(rows[0]) or not np.isfinite(rows[0]).all():
                continue
            for at, cut in ((AT_THRESHOLD, float(np.log(threshold / (1 - threshold)))), (AT_HALF, 0.0)):
                for name, values in rates(np.array([cut]), *rows).items():
                    metrics[f"{at}/{name}"][row] = float(values[0])
        return inputs.answered(metrics=metrics | {"examples": counts})

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        names = {f"{at}/{name}" for at in (AT_THRESHOLD, AT_HALF) for name in METRICS}
        return ResultForm({}, names, rows[self.split], 0)

    def row_influence(self, rows: Rows) -> Mapping[str, float] | None:
        return {}  # a validation row moves the threshold, and with it what any number of rows are taken for


class ThresholdCounts(ScoringQuery):
    """Count a client's rows by class and by the cell of the grid of probabilities that its model takes them to.

    The counts of all clients' validation rows give one threshold for all, and those of the judged rows each client's
    scores there (`pooled_scores`).  They tell of each row its class and nearly its score, so a site answers only where
    its policy names this query, and never where it hides rows.

    Attributes:
        split: which of the client's rows are scored.
        criterion: what is best on the validation rows of all, see `core.thresholds.best_threshold`.
    """

    by_name = True

    criterion: Annotated[str, AfterValidator(checked_criterion)]

    def rows_read(self, personal: bool) -> set[Split]:
        return super().rows_read(personal) | {"validation"}

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        model = used_model(inputs, context, trainer)
        vectors, counts = {}, torch.zeros(len(model))
        for name, split in (("validation", "validation"), ("judged", self.split)):
            leads, counts = _leads(model, context, split)  # type: ignore[arg-type]  # one of the splits
            vectors[name] = torch.stack([_cells(*rows) for rows in leads])
        return inputs.answered(vectors=vectors, metrics={"examples": counts})

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        shape = (2 * (len(GRID) + 1),)
        return ResultForm({"validation": shape, "judged": shape}, (), rows[self.split], 0)

    def fewest_rows(self, answer: Update) -> int | None:
        held = torch.cat([vector[vector > 0] for vector in answer.vectors.values()])
        return int(held.min()) if len(held) else None

    def row_influence(self, rows: Rows) -> Mapping[str, float] | None:
        return {}  # noise in single cells would leave nothing of a threshold

    def reject_reason(self, answer: Update, spec: ModelSpec) -> str | None:
        if any(bool(((vector < 0) | (vector != vector.round())).any()) for vector in answer.vectors.values()):
            return "sent counts that are no whole numbers of at least 0"
        return None


def pooled_scores(answers: Mapping[int, Update], criterion: str) -> dict[int, dict[str, float]]:
    """Return each client's scores at the threshold of all and at a half, as `ThresholdScores` names them.

    Args:
        answers: those to `ThresholdCounts`, by client.
        criterion: of the threshold.

    Returns:
        Scores by client, of those that have rows; empty without validation rows of both classes.
    """
    rows = {client: _rows_of(answer.vectors["judged"]) for client, answer in answers.items()}
    sums = torch.stack([answer.vectors["validation"].double() for answer in answers.values()]).sum(0)
    threshold = best_threshold(*_rows_of(sums), criterion)
    if threshold is None:
        return {}
    cuts = np.array([np.log(threshold / (1 - threshold)), 0.0])
    return {
        client: {f"{at}/{metric}": float(values[place]) for metric, values in rates(cuts, *judged).items()
                 for place, at in enumerate((AT_THRESHOLD, AT_HALF))}
        for client, judged in rows.items() if len(judged[0])
    }  # fmt: skip


def _cells(leads: np.ndarray, positive: np.ndarray) -> Tensor:
    """The numbers of rows of the first and of the second class in each cell between thresholds of the grid [2 * n]."""
    places = np.searchsorted(GRID, leads, side="left")
    return torch.from_numpy(np.concatenate([
        np.bincount(places[positive == ill], minlength=len(GRID) + 1) for ill in (False, True)
    ])).float()  # fmt: skip


def _rows_of(counts: Tensor) -> Leads:
    """Rows in the middle of their cells, from which any metric at a threshold of the grid follows."""
    numbers = counts.numpy().astype(int).reshape(2, -1)
    middles = np.concatenate([[GRID[0] - 1], (GRID[1:] + GRID[:-1]) / 2, [GRID[-1] + 1]])
    leads = np.concatenate([np.repeat(middles, numbers[0]), np.repeat(middles, numbers[1])])
    return leads, np.arange(len(leads)) >= numbers[0].sum()


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
