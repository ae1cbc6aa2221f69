"""kNN-Per: the query by which a client finds how far to trust its own nearest rows beside its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from piebald.contracts import (
    ClientContext,
    OwnChoice,
    Personalizes,
    RowOutputs,
    TrainInput,
    TrainOutput,
    Trains,
)
from piebald.contracts.model_spec import ModelSpec
from piebald.methods.choice.guard import Verdict, judge
from piebald.methods.choice.neighbours import interpolated, neighbour_shares
from piebald.methods.choice.record import finite, grouped, reason
from piebald.methods.training.base import no_features

BASES = ("global", "cluster", "personal", "local")
NEIGHBOURS = "neighbours"
TENTHS = tuple(number / 10 for number in range(10))


class KnnPer(OwnChoice):
    """Interpolate a client's model with the nearest of its own training rows (Marfoq et al. 2022, "Personalized
    federated learning through local memorization", eq. 7 and algorithm 1).

    A client remembers the features of its training rows, which are what goes into the last linear layer of its model,
    and their classes.  For a new row, each of its k nearest neighbours votes for its class with exp(-d / scale), where
    d is the Euclidean distance of the features; the shares of the votes, times lam, are added to the model's own
    probabilities, times 1 - lam.  Nothing is trained for this and nothing is sent: the memory is made of the client's
    rows wherever it is needed.

    The authors' program divides squared distances by the number of features and chooses on test rows; here k and lam
    are those with the lowest loss on the client's validation rows, and the plain model is kept unless they are better
    by more than luck (`choice.judge`).  The model is what the recipe gives the client: the global one, that of its
    cluster, or its personal one.

    Attributes:
        k: numbers of neighbours to try, each at least 1.
        lam: weights of the neighbours to try, each in [0, 1]; with 0 alone, the model stays what it is.  By default
            tenths below 1: with 1, a class without a neighbour has the probability 0, and its rows an infinite loss.
        scale: of distances, above 0.
        errors: how many standard errors worse than the best interpolation the plain model may be and still be kept.
    """

    k: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(10,), min_length=1)
    lam: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(default=TENTHS, min_length=1)
    scale: float = Field(default=1.0, gt=0)
    errors: float = Field(default=1.0, ge=0)

    def unsupported_model(self, spec: ModelSpec) -> str | None:
        if spec.objective.name != "classification" or len(spec.outputs) != 1:
            return f"keep = '{self.kind}' needs classification with one label for each row: use 'best_for_each'"
        return no_features(f"keep = '{self.kind}'", spec)

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        name, model = _own_model(inputs, context, trainer)
        memories = [_known(one) for one in context.row_outputs(model, "train")]
        asked = context.row_outputs(model, "validation")
        found = [self._chosen(*pair) for pair in zip(memories, asked, strict=True)]
        metrics = {key: torch.tensor([one[key] for one in found], dtype=torch.float64) for key in found[0]}
        metrics["base"] = torch.full((len(found),), float(BASES.index(name)), dtype=torch.float64)
        tries = [(int(one["k"]), one["lam"]) for one in found]
        metrics |= self._scores("validation", (name, NEIGHBOURS), "validation", asked, memories, tries, context)
        metrics["examples"] = torch.tensor([len(one.labels) for one in asked])
        vectors = {"model": model}
        if self.split is not None:
            taken = [(k, lam if one["chosen"] else 0.0) for (k, lam), one in zip(tries, found, strict=True)]
            rows = context.row_outputs(model, self.split)
            metrics |= self._scores("judged", ("shared", "chosen"), self.split, rows, memories, taken, context)
            metrics["judged/rows"] = torch.tensor([len(one.labels) for one in rows])
            if self.classes:
                answers = self._mixed(rows, memories, taken)
                counts = [_counted(one.labels, out, self.classes) for one, out in zip(rows, answers, strict=True)]
                vectors["confusion"] = torch.stack(counts)
        return TrainOutput(inputs.model, torch.zeros(len(found)), vectors=vectors, metrics=metrics)

    def record(self, metrics: Mapping[str, float], rows: int) -> dict[str, Any]:
        """See `OwnChoice`: as `choice.record`, with `neighbours`, the k, lam and scale of the chosen interpolation, for
        `models.NearestNeighbours`.
        """
        told, base = finite(metrics), BASES[int(metrics["base"])]
        verdict = Verdict(int(metrics["chosen"]), int(metrics["best"]), metrics["difference"], metrics["error"])
        made: dict[str, Any] = {
            "chosen": NEIGHBOURS if verdict.chosen else base,
            "why": reason(verdict, (base, NEIGHBOURS), 1, rows),
            "rows": rows,
            "candidates": grouped(told, "validation"),
            "difference": told["difference"],
            "error": told["error"],
        }
        if verdict.chosen:
            made[NEIGHBOURS] = {"k": int(metrics["k"]), "lam": float(metrics["lam"]), "scale": self.scale}
        if (judged := int(metrics.get("judged/rows", 0))) > 0:
            made["judged"] = {"rows": judged, **grouped(told, "judged")}
        return made

    def is_new(self, chosen: str) -> bool:
        return False  # the run has the model, and the client has the rows

    def _chosen(self, memory: RowOutputs, asked: RowOutputs) -> dict[str, float]:
        """The best k and lam of one client, and whether they are better than the plain model by more than luck."""
        asked = _known(asked)
        tries = [(k, lam) for k in self.k for lam in self.lam if lam] if len(memory.labels) else []
        losses = [functional.cross_entropy(asked.outputs, asked.labels, reduction="none")]
        for k in dict.fromkeys(k for k, _ in tries):
            shares = neighbour_shares(asked.features, memory, k, self.scale)
            made = (interpolated(asked.outputs, shares, lam) for one, lam in tries if one == k)
            losses += [functional.nll_loss(one, asked.labels, reduction="none") for one in made]
        verdict = judge(torch.stack(losses), 1, self.errors)
        k, lam = tries[verdict.best - 1] if verdict.best else (self.k[0], 0.0)
        told = {"chosen": float(verdict.chosen > 0), "best": float(verdict.best > 0), "k": float(k), "lam": lam}
        return {**told, "difference": verdict.difference, "error": verdict.error}

    def _scores(
        self,
        group: str,
        names: tuple[str, str],
        split: Any,
        asked: list[RowOutputs],
        memories: list[RowOutputs],
        tries: list[tuple[int, float]],
        context: ClientContext,
    ) -> dict[str, Tensor]:
        """The scores of the plain model and of an interpolation for each client, by "GROUP/NAME/METRIC"."""
        plain, scores = [one.outputs for one in asked], dict[str, Tensor]()
        mixed = self._mixed(asked, memories, tries)
        for name, outputs in zip(names, (plain, mixed), strict=True):
            scores |= {f"{group}/{name}/{metric}": one for metric, one in context.measure(outputs, split)[0].items()}
        return scores

    def _mixed(
        self, asked: list[RowOutputs], memories: list[RowOutputs], tries: list[tuple[int, float]]
    ) -> list[Tensor]:
        """The outputs of an interpolation for each client."""
        mixed = [one.outputs for one in asked]
        for row, (one, memory, (k, lam)) in enumerate(zip(asked, memories, tries, strict=True)):
            if lam:
                mixed[row] = interpolated(one.outputs, neighbour_shares(one.features, memory, k, self.scale), lam)
        return mixed


def _counted(labels: Tensor, outputs: Tensor, classes: int) -> Tensor:
    """One client's rows by class and by the class with the largest output [classes * classes]."""
    known = labels >= 0
    cells = labels[known] * classes + outputs[known].argmax(1)
    return torch.bincount(cells, minlength=classes**2).float()


def _own_model(inputs: TrainInput, context: ClientContext, trainer: Trains) -> tuple[str, Tensor]:
    """The model that the recipe gives each client [c, p], and what it is."""
    if isinstance(trainer, Personalizes):
        return "personal", trainer.personalize(inputs, context)
    if inputs.shared == 0:
        return "local", inputs.model
    if inputs.shared < inputs.model.shape[-1]:
        return "personal", inputs.model
    return "cluster" if "global" in inputs.vectors else "global", inputs.model


def _known(rows: RowOutputs) -> RowOutputs:
    """The rows that have a class."""
    known = rows.labels >= 0
    return RowOutputs(rows.features[known], rows.outputs[known], rows.labels[known])
