"""The score of each single row, and those of answers that need no model, for the report of a simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from piebald.contracts import (
    MOST_REMEMBERED,
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
from piebald.methods.queries.scores import ScoringQuery, used_model

NO_VALUE = float(torch.finfo(torch.float32).min)  # behind the last row, since answers must be finite
NAIVE, NAIVE_OF_ALL = "naive", "naive_of_all"
STANDARD_ERROR = "standard_error"
Naive = Literal["classes", "labels", "median", "mean", "equal"]


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
            median, the mean, or, of survival, equal hazards; None for none.
        of_all: the training rows of each class of all clients together, for an answer from those; empty for none.
    """

    asked_of: ClassVar[Literal["clients", "server", "itself"]] = "itself"

    rows: bool = True
    naive: Naive | None = None
    of_all: tuple[int, ...] = ()

    def rows_read(self, personal: bool) -> set[Split]:
        return {self.split, "train"}

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        vectors, metrics = dict[str, Tensor](), dict[str, Tensor]()
        for name, constants in self._constants(context).items():
            scores, metrics["examples"], rows = context.constant_scores(constants, self.split)
            metrics |= {f"{name}/{metric}": values for metric, values in scores.items()}
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
            counts = context.label_counts().float()
            if self.of_all:  # a client without training rows has no answer of its own
                of_all = torch.tensor(self.of_all, dtype=torch.float32, device=counts.device)
                counts = torch.where(counts.sum(1, keepdim=True) > 0, counts, of_all)
            # one row more of each class, so that the log loss of a class that training lacks is finite
            constants = {NAIVE: (counts + 1).log()}
            if self.of_all:
                constants[NAIVE_OF_ALL] = (of_all + 1).log().expand(len(counts), -1)
            return constants
        targets = [pytree.leaves(rows.y)[0] for rows in context.rows("train")]
        if self.naive == "equal":
            return {NAIVE: torch.zeros(len(targets), 1)}
        return {NAIVE: torch.stack([self._constant(values.reshape(len(values), -1).float()) for values in targets])}

    def _constant(self, targets: Tensor) -> Tensor:
        """The constant [k] for targets [n, k], of which NaN is unknown; 0 without any."""
        known = torch.where(targets == -100, torch.nan, targets)
        if self.naive == "median":
            return torch.nan_to_num(known.nanmedian(0).values) if len(known) else known.new_zeros(known.shape[1])
        if self.naive == "labels":
            return torch.nan_to_num(((known.nansum(0) + 0.5) / ((~known.isnan()).sum(0) + 1)).logit())
        return torch.nan_to_num(known.nanmean(0))

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
        split, rows, naive, of_all: see `RowScores`; `of_all` is empty.
    """

    asked_of: ClassVar[Literal["clients", "server", "itself"]] = "clients"

    def site_answer(
        self, answer: Update, remember: Callable[[Mapping[str, Tensor]], tuple[Mapping[str, int], Mapping[int, Tensor]]]
    ) -> Update:
        numbers, remembered = remember(answer.vectors)
        metrics = dict(answer.metrics)
        for model, values in answer.vectors.items():
            if (variance := _covariance(values, values)) is not None:
                metrics[f"{model}/{STANDARD_ERROR}"] = variance**0.5
                metrics[f"{model}/values"] = int((values != NO_VALUE).sum())
                metrics |= {f"{model}/number": numbers[model]} if model in numbers else {}
        earlier = ((n, values) for n, values in remembered.items() if n != numbers.get("rows"))
        for place, (number, values) in enumerate(earlier):
            if (covariance := _covariance(answer.vectors["rows"], values)) is not None:
                metrics |= {f"rows/earlier/{place}": number, f"rows/covariance/{place}": covariance}
        return replace(answer, vectors={}, metrics=metrics)

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        names = {f"{NAIVE}/{metric}" for metric in ("loss", *spec.objective.metrics)}
        names |= {f"{model}/{name}" for model in ("rows", NAIVE) for name in (STANDARD_ERROR, "values", "number")}
        names |= {f"rows/{name}/{place}" for name in ("earlier", "covariance") for place in range(MOST_REMEMBERED)}
        return ResultForm({}, names, rows[self.split], 0)

    def row_influence(self, rows: Rows) -> Mapping[str, float] | None:
        return self.influence_on_shares(rows, NAIVE)


def _covariance(a: Tensor, b: Tensor) -> float | None:
    """Return the covariance of two means of values of the same rows [n], None of fewer than two or of unlike rows."""
    scored = a != NO_VALUE
    if len(a) != len(b) or not torch.equal(scored, b != NO_VALUE) or (count := int(scored.sum())) < 2:
        return None
    ours, theirs = (values[scored].double() - values[scored].double().mean() for values in (a, b))
    return float(ours @ theirs) / (count - 1) / count
