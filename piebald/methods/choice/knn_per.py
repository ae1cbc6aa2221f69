"""kNN-Per: a model's classes, interpolated with those of the nearest of remembered rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from piebald.contracts import ClientContext, OwnChoice, Personalizes, RowOutputs, TrainInput, TrainOutput, Trains
from piebald.contracts.data import ModelSpec
from piebald.methods.choice.best_for_each import marked, marked_name, plain_choice, reason
from piebald.methods.choice.candidates import Verdict, judge
from piebald.methods.training.base import no_features

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
        memories = [_with_class(outputs) for outputs in context.row_outputs(model, "train")]
        outputs_by_client = context.row_outputs(model, "validation")
        choices = [self._chosen(*pair) for pair in zip(memories, outputs_by_client, strict=True)]
        metrics = {key: torch.tensor([choice[key] for choice in choices], dtype=torch.float64) for key in choices[0]}
        # metrics are numbers, so a name travels as a mark
        metrics |= marked("base", [name] * len(choices), [name])
        tries = [(int(choice["k"]), choice["lam"]) for choice in choices]
        metrics |= self._scores(
            "validation", (name, NEIGHBOURS), "validation", outputs_by_client, memories, tries, context
        )
        metrics["examples"] = torch.tensor([len(outputs.labels) for outputs in outputs_by_client])
        vectors = {"model": model}
        if self.split is not None:
            # the plain model is judged as an interpolation with the weight 0, to the bit
            used = [(k, lam if choice["chosen"] else 0.0) for (k, lam), choice in zip(tries, choices, strict=True)]
            rows = context.row_outputs(model, self.split)
            metrics |= self._scores("judged", ("shared", "chosen"), self.split, rows, memories, used, context)
            metrics["judged/rows"] = torch.tensor([len(outputs.labels) for outputs in rows])
            if self.classes:
                answers = self._mixed(rows, memories, used)
                counts = [
                    _counted(outputs.labels, out, self.classes) for outputs, out in zip(rows, answers, strict=True)
                ]
                vectors["confusion"] = torch.stack(counts)
        return inputs.answered(vectors=vectors, metrics=metrics)

    def record(self, metrics: Mapping[str, float], rows: int) -> dict[str, Any]:
        """See `OwnChoice`: as `choice.record`, with `neighbours`, the k, lam and scale of the chosen interpolation, for
        `models.NearestNeighbours`.
        """
        base = marked_name("base", metrics)
        verdict = Verdict(int(metrics["chosen"]), int(metrics["best"]), metrics["difference"], metrics["error"])
        why = reason(verdict, (base, NEIGHBOURS), 1, rows)
        choice = plain_choice(NEIGHBOURS if verdict.chosen else base, why, metrics, rows)
        if verdict.chosen:
            choice[NEIGHBOURS] = {"k": int(metrics["k"]), "lam": float(metrics["lam"]), "scale": self.scale}
        return choice

    def is_new(self, chosen: str) -> bool:
        return False  # the run has the model, and the client has the rows

    def _chosen(self, memory: RowOutputs, queries: RowOutputs) -> dict[str, float]:
        """The best k and lam of one client, and whether they are better than the plain model by more than luck."""
        queries = _with_class(queries)
        # a weight of 0 is the plain model, which is the first candidate already; without memory there is no other
        tries = [(k, lam) for k in self.k for lam in self.lam if lam] if len(memory.labels) else []
        losses = [functional.cross_entropy(queries.outputs, queries.labels, reduction="none")]
        # each k once, whatever the number of weights: distances are what costs time
        for k in dict.fromkeys(k for k, _ in tries):
            shares = neighbour_shares(queries.features, memory, k, self.scale)
            mixtures = (interpolated(queries.outputs, shares, lam) for tried_k, lam in tries if tried_k == k)
            losses += [functional.nll_loss(mixture, queries.labels, reduction="none") for mixture in mixtures]
        # the plain model comes first, as the only shared one, and so is the fallback
        verdict = judge(torch.stack(losses), 1, self.errors)
        # less one, for the plain model in front
        k, lam = tries[verdict.best - 1] if verdict.best else (self.k[0], 0.0)
        choice = {"chosen": float(verdict.chosen > 0), "best": float(verdict.best > 0), "k": float(k), "lam": lam}
        return {**choice, "difference": verdict.difference, "error": verdict.error}

    def _scores(
        self,
        group: str,
        names: tuple[str, str],
        split: Any,
        queries: list[RowOutputs],
        memories: list[RowOutputs],
        tries: list[tuple[int, float]],
        context: ClientContext,
    ) -> dict[str, Tensor]:
        """The scores of the plain model and of an interpolation for each client, by "GROUP/NAME/METRIC"."""
        plain, scores = [outputs.outputs for outputs in queries], dict[str, Tensor]()
        mixed = self._mixed(queries, memories, tries)
        for name, outputs in zip(names, (plain, mixed), strict=True):
            scores |= {
                f"{group}/{name}/{metric}": value for metric, value in context.measure(outputs, split)[0].items()
            }
        return scores

    def _mixed(
        self, queries: list[RowOutputs], memories: list[RowOutputs], tries: list[tuple[int, float]]
    ) -> list[Tensor]:
        """The outputs of an interpolation for each client."""
        mixed = [query.outputs for query in queries]
        for row, (query, memory, (k, lam)) in enumerate(zip(queries, memories, tries, strict=True)):
            if lam:
                mixed[row] = interpolated(query.outputs, neighbour_shares(query.features, memory, k, self.scale), lam)
        return mixed


def _counted(labels: Tensor, outputs: Tensor, classes: int) -> Tensor:
    """One client's rows by class and by the class with the largest output [classes * classes]."""
    has_class = labels >= 0
    cells = labels[has_class] * classes + outputs[has_class].argmax(1)
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


def _with_class(rows: RowOutputs) -> RowOutputs:
    """The rows that have a class."""
    # targets of -100 are unknown, and a row without a class has no vote
    has_class = rows.labels >= 0
    return RowOutputs(rows.features[has_class], rows.outputs[has_class], rows.labels[has_class])


_PAIRS = 1 << 22  # distances that are computed at a time


def neighbour_shares(features: Tensor, memory: RowOutputs, k: int, scale: float) -> Tensor:
    """The share of each class among the k nearest remembered rows, nearer ones counting more [n, classes].

    A row at distance d counts exp(-d / scale), see `KnnPer`.

    Args:
        features: [n, d], of the rows that are asked about.
        memory: at least one remembered row.
        k: how many of them; all where there are fewer.
        scale: of the distances, above 0.
    """
    count, classes = min(k, len(memory.features)), memory.outputs.shape[-1]
    parts = []
    # by blocks, as distances of all rows to all remembered ones may not fit
    for block in torch.split(features, max(1, _PAIRS // len(memory.features))):
        # the faster way by a matrix product loses small distances to rounding, and near rows are what counts
        apart = torch.cdist(block, memory.features, compute_mode="donot_use_mm_for_euclid_dist")
        near, rows = apart.topk(count, dim=1, largest=False)
        shares = functional.softmax(-near / scale, dim=1)  # exp(-d) over its sum, without underflow far away
        parts.append(shares.new_zeros(len(block), classes).scatter_add(1, memory.labels[rows], shares))
    return torch.cat(parts) if parts else features.new_zeros(0, classes)


def interpolated(outputs: Tensor, shares: Tensor, lam: float) -> Tensor:
    """Log probabilities lam * shares + (1 - lam) * softmax(outputs) [n, classes]; the outputs themselves for lam = 0,
    which have the same probabilities.
    """
    # outputs, not their log-softmax, so that the plain model stays what it is to the bit
    if lam == 0:
        return outputs
    return (lam * shares + (1 - lam) * functional.softmax(outputs, dim=1)).log()
