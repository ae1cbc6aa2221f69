"""The query by which a client chooses its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from piebald.choice.candidates import CANDIDATES, Candidates
from piebald.choice.guard import judge, paired
from piebald.contracts import ClientContext, Query, ResultForm, Split, TrainInput, TrainOutput, Trains
from piebald.model_spec import ModelSpec


class BestForEach(Query):
    """Let a client choose among its `Candidates` the model that is best on its validation rows, as `guard.judge` says.

    The answer is the chosen model [p], as vector "model", and as metrics what `record.record` makes a record of.  It is
    meant for the client itself: a site answers it to nobody.

    Attributes:
        split: the rows on which the chosen model is judged afterwards, None for no judgement.
        tasks: the training tasks that the client made, as `Task.rng_version`; with none it has no local model.
        passes: passes over its rows in each of them.
        errors: how many standard errors worse than the best one a shared model may be.
    """

    asked_of = "itself"
    trains: ClassVar[bool] = True

    split: Split | None = "test"
    tasks: tuple[str, ...] = ()
    passes: tuple[int, ...] = ()
    errors: float = Field(default=1.0, ge=0)

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        return ResultForm({"model": (spec.layout.size,)}, None, rows["validation"], 0)

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        offer = Candidates(inputs, context, trainer, self.tasks, self.passes)
        names, count = list(offer.models), len(inputs.versions)
        verdicts = [judge(one, offer.shared, self.errors) for one in _losses(offer.models, context, "validation")]
        chosen = torch.stack([offer.models[names[one.chosen]][row] for row, one in enumerate(verdicts)])
        told = {
            "chosen": [float(CANDIDATES.index(names[one.chosen])) for one in verdicts],
            "best": [float(CANDIDATES.index(names[one.best])) for one in verdicts],
            "shared": [float(offer.shared)] * count,
            "fallback": [float(CANDIDATES.index(offer.fallback))] * count,
            "difference": [one.difference for one in verdicts],
            "error": [one.error for one in verdicts],
        }
        metrics = {name: torch.tensor(values, dtype=torch.float64) for name, values in told.items()} | offer.about
        for name, model in offer.models.items():
            scores, metrics["examples"] = context.score(model, "validation")
            metrics |= {f"validation/{name}/{metric}": value for metric, value in scores.items()}
        if self.split is not None:
            compared = {"chosen": chosen, "shared": offer.models[offer.fallback]}
            compared |= {"local": offer.models["local"]} if "local" in offer.models else {}
            metrics |= _judged(self.split, compared, context)
        return TrainOutput(inputs.model, torch.zeros(count), vectors={"model": chosen}, metrics=metrics)


def _losses(models: Mapping[str, Tensor], context: ClientContext, split: Split) -> list[Tensor]:
    """The losses [models, rows] of each client."""
    found = [context.row_losses(model, split) for model in models.values()]
    counts = found[0][1].tolist()
    return [torch.stack([losses[row, :count] for losses, _ in found]) for row, count in enumerate(counts)]


def _judged(split: Split, models: Mapping[str, Tensor], context: ClientContext) -> dict[str, Tensor]:
    """How good the chosen model is on other rows, beside the shared one and the local one."""
    metrics: dict[str, Tensor] = {}
    for name, model in models.items():
        scores, metrics["judged/rows"] = context.score(model, split)
        metrics |= {f"judged/{name}/{metric}": value for metric, value in scores.items()}
    if "local" in models:
        both = _losses({name: models[name] for name in ("chosen", "local")}, context, split)
        gaps = [paired(*losses) for losses in both]
        metrics["alone/difference"] = torch.tensor([gap[0] for gap in gaps], dtype=torch.float64)
        metrics["alone/error"] = torch.tensor([gap[1] for gap in gaps], dtype=torch.float64)
    return metrics
