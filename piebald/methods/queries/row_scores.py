"""The score of each single row, and those of answers that need no model, for the report of a simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import (
    MOST_REMEMBERED,
    ClientContext,
    ModelSpec,
    Query,
    ResultForm,
    Rows,
    Split,
    TrainInput,
    TrainOutput,
    Trains,
    Update,
)
from piebald.core import pytree
from piebald.methods.queries.scores import ScoringQuery, used_model

NO_VALUE = float(torch.finfo(torch.float32).min)  # behind the last row, since answers must be finite
NAIVE, NAIVE_OF_ALL = "naive", "naive_of_all"
STANDARD_ERROR = "standard_error"
_MOST_EDGES = 168  # of a question about a median: powers of two, of both signs
_CELLS, _CLOSE = 64, 1e-4  # of a question about a median, and the width of the last ones, beside its size
Naive = Literal["classes", "labels", "median", "mean", "rate", "equal"]


class RowScores(ScoringQuery):
    """Score each row by the client's model, and all rows by an answer that is the same for every row.

    Two methods that score the same rows can be compared row by row, which tells more than two means do; and a method is
    worth something if it beats the best constant answer.  What is said of single rows leaves no site, so only
    simulations ask.  Vectors are "rows", and "naive" and "naive_of_all" where there is such an answer: the main metric
    of each row [n], or `NO_VALUE`, see `contracts.ClientContext.row_scores`.  Metrics are those of constant answers, as
    "naive/accuracy".

    Attributes:
        split: which of the client's rows.
        rows: whether there is a main metric, for which rows have values.
        naive: the constant answer from the client's own training rows: the share of each class, of each label, the
            median, the mean, of counts the rate for one unit of exposure, or, of survival, equal hazards, since one
            Kaplan-Meier curve for all rows ranks nobody; None for none.
        of_all: the outputs of the answer from the training rows of all clients together; empty for none.
    """

    asked_of: ClassVar[Literal["clients", "server", "itself"]] = "itself"

    rows: bool = True
    naive: Naive | None = None
    of_all: tuple[float, ...] = ()

    def rows_read(self, personal: bool) -> set[Split]:
        return {self.split, "train"}

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        vectors, metrics = dict[str, Tensor](), dict[str, Tensor]()
        for name, constants in self._constants(context).items():
            scores, metrics["examples"], rows = context.constant_scores(constants, self.split)
            metrics |= {f"{name}/{metric}": values for metric, values in scores.items()}
            # answers with NaN are refused, and rows without a value must keep their place
            vectors |= {name: rows.nan_to_num(NO_VALUE)} if self.rows else {}
        if self.rows:
            model = used_model(inputs, context, trainer)
            rows, metrics["examples"] = context.row_scores(model, self.split)
            vectors["rows"] = rows.nan_to_num(NO_VALUE)
        return inputs.answered(vectors=vectors, metrics=metrics)

    def _constants(self, context: ClientContext) -> dict[str, Tensor]:
        """The outputs [c, k] that are the same for all rows of a client, by name."""
        if self.naive is None:
            return {}
        if self.naive == "classes":
            counts = context.label_counts(weighted=True)
            outputs, rows_known = constant(self.naive, counts.double()).float(), counts.sum(1, keepdim=True)
        elif self.naive == "equal":
            # equal hazards: any constant would do, as survival losses compare rows
            return {NAIVE: torch.zeros(len(context.rows("train")), 1)}
        else:
            held = context.rows("train")
            targets = [known_targets(rows, self.naive) for rows in held]
            each = [None if rows.weight is None else row_weights(rows) for rows in held]
            outputs = torch.stack([constant_of(self.naive, *pair) for pair in zip(targets, each, strict=True)])
            rows_known = torch.stack([(~values.isnan()).any() for values in targets])[:, None]
        if not self.of_all:
            return {NAIVE: outputs}
        of_all = torch.tensor(self.of_all, dtype=outputs.dtype, device=outputs.device).expand_as(outputs)
        # a client without training rows has no answer of its own
        return {NAIVE: torch.where(rows_known > 0, outputs, of_all), NAIVE_OF_ALL: of_all}

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        vectors = (*(["rows"] if self.rows else []), NAIVE, NAIVE_OF_ALL)
        return ResultForm({name: (rows[self.split],) for name in vectors}, None, rows[self.split], 0)


class NaiveScores(RowScores):
    """Score all rows by the answer that is the same for every row, and tell how far other rows would move the scores.

    A site answers with the means that it would give of a model and, instead of single rows, with the standard error of
    the main metric by its own model and by that answer, as "rows/standard_error": one number, which holds also for
    metrics of all rows together (`engines.scoring.pseudo_values`).  It remembers the values of rows, and tells how far
    those of two runs coincide: their covariance, which of accuracies follows from the number of rows that both are
    right on.  What it remembers has a number ("rows/number"), and "rows/covariance/3" is that with "rows/earlier/3".
    The scores tell the share of its most frequent class, so the same policy and limits hold as for other scores of a
    model, and noise where the site hides rows.

    Attributes:
        split, rows, naive, of_all: see `RowScores`.
    """

    asked_of: ClassVar[Literal["clients", "server", "itself"]] = "clients"
    later: ClassVar = {"of_all": "the outputs of one answer for all rows of all sites, which the server computes"}

    def site_answer(
        self, answer: Update, remember: Callable[[Mapping[str, Tensor]], tuple[Mapping[str, int], Mapping[int, Tensor]]]
    ) -> Update:
        numbers, remembered = remember(answer.vectors)
        metrics = dict(answer.metrics)
        for model, values in answer.vectors.items():
            # None for fewer than two rows, of which no error can be stated
            if (variance := _covariance(values, values)) is not None:
                metrics[f"{model}/{STANDARD_ERROR}"] = variance**0.5
                metrics[f"{model}/values"] = int((values != NO_VALUE).sum())
                metrics |= {f"{model}/number": numbers[model]} if model in numbers else {}
        earlier = ((n, values) for n, values in remembered.items() if n != numbers.get("rows"))
        for index, (number, values) in enumerate(earlier):
            if (covariance := _covariance(answer.vectors["rows"], values)) is not None:
                metrics |= {f"rows/earlier/{index}": number, f"rows/covariance/{index}": covariance}
        return replace(answer, vectors={}, metrics=metrics)

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        answers, metrics = (NAIVE, NAIVE_OF_ALL), ("loss", *spec.objective.metrics)
        names = {f"{model}/{metric}" for model in answers for metric in metrics}
        names |= {f"{model}/{name}" for model in ("rows", *answers) for name in (STANDARD_ERROR, "values", "number")}
        names |= {f"rows/{name}/{index}" for name in ("earlier", "covariance") for index in range(MOST_REMEMBERED)}
        return ResultForm({}, names, rows[self.split], 0)

    def row_influence(self, rows: Rows) -> Mapping[str, float] | None:
        return self.influence_on_shares(rows, NAIVE, NAIVE_OF_ALL)


class TrainingTotals(Query):
    """Tell the totals of a site's training targets, from which the constant answer of all clients follows.

    Of classes they are the rows of each, of a mean and of labels the sum and the number of rows, of a rate the sums of
    counts and of exposures and the number of rows, and for a median the rows between any two of some edges, which are
    asked for again, closer, where the median lies.  Scores of constant models (`Evaluate`) tell as much.  A site that
    hides rows tells counts with noise, only if none is small, and no sum.

    Attributes:
        naive: what the answer is made of, see `RowScores`.
        edges: for a median, in ascending order.
    """

    reads_model = False
    later: ClassVar = {"edges": f"up to {_MOST_EDGES} rising numbers, between which targets are counted"}

    naive: Naive
    edges: tuple[float, ...] = Field(default=(), max_length=_MOST_EDGES)

    @classmethod
    def of(cls, naive: Naive) -> TrainingTotals:
        """The first question."""
        # powers of two reach from a millionth to 10^18 on both sides, so nobody need tell a range first
        powers = tuple(2.0**exponent for exponent in range(-20, 64)) if naive == "median" else ()
        return cls(naive=naive, edges=(*(-edge for edge in reversed(powers)), *powers))

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        # numbers of rows and no weights, since the rules of a site go by them
        if self.naive == "classes":
            totals = context.label_counts()
        else:
            targets = [known_targets(rows, self.naive) for rows in context.rows("train")]
            if context.disclosure is not None and not self._counts_only:
                context.disclosure.check(known.nan_to_num(0.0).cpu().numpy() for known in targets)
            totals = torch.stack([self._totals(known) for known in targets])
        # the most rows that any output has a target of
        examples = totals.sum(1) if self._counts_only else self._rows(totals).amax(1)
        return inputs.answered(vectors={"totals": totals.float()}, metrics={"examples": examples})

    def _totals(self, targets: Tensor) -> Tensor:
        if not self.edges:
            return totals_of(self.naive, targets)
        known = targets[~targets.isnan()]
        edges = torch.tensor(self.edges, dtype=known.dtype, device=known.device)
        return torch.bincount(torch.searchsorted(edges, known), minlength=len(edges) + 1)

    def outputs(self, answers: Sequence[Update]) -> tuple[float, ...]:
        """The outputs of the answer from the rows of all who answered; of a median, as near as the edges are."""
        sums = torch.stack([answer.vectors["totals"].double() for answer in answers]).sum(0)
        return (sum(self._ends(sums)) / 2,) if self.edges else tuple(constant(self.naive, sums).tolist())

    def closer(self, answers: Sequence[Update]) -> TrainingTotals | None:
        """The question with edges around the median, None where they are close."""
        sums = torch.stack([answer.vectors["totals"].double() for answer in answers]).sum(0)
        low, high = self._ends(sums) if self.edges else (0.0, 0.0)
        # relative to the size, but absolute below 1, or a median of 0 would never be near enough
        if high - low <= _CLOSE * max(abs(low), abs(high), 1.0):
            return None
        return self.model_copy(update={"edges": tuple(np.linspace(low, high, _CELLS + 1).tolist())})

    def _ends(self, counts: Tensor) -> tuple[float, float]:
        """The edges between which the median lies."""
        index = int(torch.searchsorted(counts.cumsum(0), (counts.sum() / 2).clamp_min(0.5)))
        last = len(self.edges) - 1  # where noise or gaps leave less than half a row, the place is beyond all edges
        return self.edges[min(max(index - 1, 0), last)], self.edges[min(index, last)]

    @property
    def _counts_only(self) -> bool:
        return self.naive == "classes" or bool(self.edges)

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        outputs = math.prod(spec.outputs)
        length = len(self.edges) + 1 if self.edges else outputs if self._counts_only else 2 * outputs
        length += self.naive == "rate"
        return ResultForm({"totals": (length,)}, (), rows["train"], 0)

    def most_asked(self, hides: bool) -> int:
        return 10 if hides else 100

    def fewest_rows(self, answer: Update) -> int | None:
        counts = self._counts(answer)
        return int(counts[counts > 0].min()) if counts.any() else None

    def row_influence(self, rows: Rows) -> Mapping[str, float] | None:
        # a row leaves one cell for another, but moves a sum by as much as its target
        return {"totals": math.sqrt(2)} if self._counts_only else {}

    def reject_reason(self, answer: Update, spec: ModelSpec) -> str | None:
        return "sent a number of rows below 0" if bool((self._counts(answer) < 0).any()) else None

    def _counts(self, answer: Update) -> Tensor:
        totals = answer.vectors["totals"]
        return totals if self._counts_only else self._rows(totals)

    def _rows(self, totals: Tensor) -> Tensor:
        """The numbers of rows among totals [..., k] that are sums as well."""
        return totals[..., totals.shape[-1] - totals.shape[-1] // 2 :]


def known_targets(rows: Rows, naive: Naive | None = None) -> Tensor:
    """The targets of rows [n, k], NaN where one is unknown, and, of a rate, also the other one of its pair."""
    values = pytree.leaves(rows.y)[0]
    values = values.reshape(len(values), -1).double()
    # NaN, so that unknown labels of all kinds fall out of sums by one rule
    unknown = (values == -100) | values.isnan()
    return torch.where(unknown.any(1, keepdim=True) if naive == "rate" else unknown, torch.nan, values)


def row_weights(rows: Rows) -> Tensor:
    """How much each row counts [n], 1 where all count alike."""
    return torch.ones(len(rows), dtype=torch.float64) if rows.weight is None else rows.weight.double()


def class_totals(rows: Rows, classes: int) -> Tensor:
    """The sums of the weights of each class's rows [classes]."""
    labels, weights = known_targets(rows), row_weights(rows)
    known, each = ~labels.isnan(), weights.to(labels.device)[:, None].expand_as(labels)
    return torch.bincount(labels[known].long(), each[known], classes)


def totals_of(naive: Naive, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """The sums of targets [n, k] and the numbers of rows that have them [2 * k], or the sums of their weights [n].

    For a rate they are the sums of counts and of exposures, 1 where targets have none, and the number of rows [3].
    """
    each = torch.ones(len(targets), dtype=targets.dtype) if weights is None else weights
    each = each.to(targets)[:, None]
    if naive == "rate":
        exposures = torch.ones_like(targets).where(~targets.isnan(), torch.nan)
        pairs = targets if targets.shape[1] == 2 else torch.cat([targets, exposures], 1)
        return torch.cat([(pairs * each).nansum(0), (~targets[:, :1].isnan() * each).sum(0)])
    return torch.cat([(targets * each).nansum(0), (~targets.isnan() * each).sum(0)])


def constant_of(naive: Naive, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """The outputs [k] that are the same for all rows, from targets [n, k] and weights [n]; 0 without any."""
    if naive != "median":
        return constant(naive, totals_of(naive, targets, weights)).float()
    if weights is not None:
        return torch.stack([_weighted_median(column, weights) for column in targets.T]).float()
    return (targets.nanmedian(0).values if len(targets) else targets.new_zeros(targets.shape[1])).nan_to_num().float()


def _weighted_median(targets: Tensor, weights: Tensor) -> Tensor:
    """The least target [n] at which half of the weight is reached, 0 without any."""
    known = ~targets.isnan()
    values, order = targets[known].sort()
    reached = weights.to(targets)[known][order].cumsum(0)
    if not len(values):
        return targets.new_zeros(())
    return values[torch.searchsorted(reached, reached[-1] / 2).clamp_max(len(values) - 1)]


def constant(naive: Naive, totals: Tensor) -> Tensor:
    """The outputs [..., k] that are the same for all rows, from totals [..., k] of classes, of others see `totals_of`.

    One row more of each class, of labels half a row with and half a row without it, and half a count where nothing was
    counted keep the loss of what training rows lack finite.
    """
    if naive == "classes":
        # a class without rows would have an output of minus infinity
        return (totals + 1).log()
    if naive == "rate":
        counts, exposures = totals[..., :1], totals[..., 1:2]
        return torch.where(exposures > 0, (torch.where(counts > 0, counts, 0.5) / exposures).log(), 0.0)
    sums, counts = totals.chunk(2, -1)
    # half a row of each kind, as a share of exactly 0 or 1 has an infinite logit
    return ((sums + 0.5) / (counts + 1)).logit() if naive == "labels" else sums / counts.clamp_min(1)


def _covariance(a: Tensor, b: Tensor) -> float | None:
    """Return the covariance of two means of values of the same rows [n], None of fewer than two or of unlike rows."""
    scored = a != NO_VALUE
    if len(a) != len(b) or not torch.equal(scored, b != NO_VALUE) or (count := int(scored.sum())) < 2:
        return None
    ours, theirs = (values[scored].double() - values[scored].double().mean() for values in (a, b))
    # of the means, so once more by the number of rows
    return float(ours @ theirs) / (count - 1) / count
