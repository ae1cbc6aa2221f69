"""The query by which a client chooses its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import ClientContext, OwnChoice, Split, TrainInput, TrainOutput, Trains
from piebald.contracts.model_spec import ModelSpec
from piebald.methods.choice.candidates import SHARED, ClientCandidates
from piebald.methods.choice.guard import paired
from piebald.methods.choice.record import marked, record


class BestForEach(OwnChoice):
    """Let each client choose the one of its `ClientCandidates` that is best on its validation rows, by `guard.judge`.

    Attributes:
        split, tasks, passes: see `OwnChoice`; without tasks a client has no local model.
        errors: how many standard errors worse than the best one a shared model, or the local one, may be.
    """

    errors: float = Field(default=1.0, ge=0)

    def unsupported_model(self, spec: ModelSpec) -> str | None:
        if not spec.objective.compares_rows:
            return None
        return (
            f"keep = 'best_for_each' compares models row by row, but the loss {spec.objective.name!r} has no value for "
            "a single row: use keep = 'best'"
        )

    def record(self, metrics: Mapping[str, float], rows: int) -> dict[str, Any]:
        return record(metrics, rows)

    def is_new(self, chosen: str) -> bool:
        return chosen not in SHARED

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        offer = ClientCandidates(inputs, context, trainer, self.tasks, self.passes)
        names, count = list(offer.models), len(inputs.versions)
        losses = _losses(offer.models, context, "validation")
        verdicts = [offer.verdict(client_losses, offer.shared, self.errors) for client_losses in losses]
        chosen = torch.stack([offer.models[names[verdict.chosen]][row] for row, verdict in enumerate(verdicts)])
        numbers = {
            "shared": [offer.shared] * count,
            "difference": [verdict.difference for verdict in verdicts],
            "error": [verdict.error for verdict in verdicts],
            **{f"{name}/epochs": passes for name, passes in offer.epochs.items()},
        }
        metrics = marked("chosen", [names[verdict.chosen] for verdict in verdicts], names)
        metrics |= marked("best", [names[verdict.best] for verdict in verdicts], names)
        if offer.mixture:
            metrics |= marked("mixed/of", [name for name, _ in offer.mixture], names)
            numbers["mixed/share"] = [share for _, share in offer.mixture]
        metrics |= {name: torch.tensor(values, dtype=torch.float64) for name, values in numbers.items()}
        for name, model in offer.models.items():
            scores, metrics["examples"] = context.score(model, "validation")
            metrics |= {f"validation/{name}/{metric}": value for metric, value in scores.items()}
        if self.split is not None:
            compared = {"chosen": chosen, "shared": offer.models[offer.fallback]}
            compared |= {"local": offer.models["local"]} if "local" in offer.models else {}
            metrics |= _judged(self.split, compared, context)
        vectors = {"model": chosen}
        if self.split is not None and self.classes:
            vectors["confusion"] = context.confusion(chosen, self.split).flatten(1)
        return TrainOutput(inputs.model, torch.zeros(count), vectors=vectors, metrics=metrics)


def _losses(models: Mapping[str, Tensor], context: ClientContext, split: Split) -> list[Tensor]:
    """The losses [models, rows] of each client."""
    scored = [context.row_losses(model, split) for model in models.values()]
    counts = scored[0][1].tolist()
    return [torch.stack([losses[row, :count] for losses, _ in scored]) for row, count in enumerate(counts)]


def _judged(split: Split, models: Mapping[str, Tensor], context: ClientContext) -> dict[str, Tensor]:
    """Return how good the chosen model is on other rows, beside the shared one and the local one."""
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
