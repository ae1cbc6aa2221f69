"""Questions about how well a client's model does on the client's own rows: scores, and counts by class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import Field
from torch import Tensor

from piebald import contracts
from piebald.contracts.data import ModelSpec
from piebald.core.metrics import SHARES
from piebald.core.targets import TargetDomain


class ScoringQuery(contracts.Query):
    """Base class of questions about a model on the rows of one split.

    Attributes:
        split: which of the client's rows.
    """

    axis = "query"  # a base class, not a question

    split: contracts.Split = "test"

    def rows_read(self, personal: bool) -> set[contracts.Split]:
        return {self.split, "train"} if personal else {self.split}

    def most_asked(self, hides: bool) -> int:
        return 10 if hides else 100

    def fewest_rows(self, answer: contracts.Update) -> int | None:
        return answer.examples or None

    @staticmethod
    def influence_on_shares(rows: contracts.Rows, *models: str) -> Mapping[str, float]:
        """By how much one row changes the means that models are scored by, see `Query.row_influence`."""
        if rows.weight is not None:  # of which nobody knows how large it could be in another row
            return {}
        counted = max(int(TargetDomain().known_rows(rows.y).sum()), 1)  # others are in no mean
        return {f"{model}/{name}": 1 / counted for model in models for name in SHARES}


def used_model(inputs: contracts.TrainInput, context: contracts.ClientContext, trainer: contracts.Trains) -> Tensor:
    """Return the models [c, p] that clients use: their personal ones where they have some, else the global one."""
    return trainer.personalize(inputs, context) if isinstance(trainer, contracts.Personalizes) else inputs.model


def row_losses(model: Tensor, context: contracts.ClientContext, split: contracts.Split) -> Any:
    """Return the losses of all rows of a stack's clients, an array [n, 1]."""
    losses, _ = context.row_losses(model, split)
    return losses[~losses.isnan()].abs().double().cpu().numpy()[:, None]  # NaN is padding


def weight_metric(context: contracts.ClientContext, split: contracts.Split) -> dict[str, Tensor]:
    """Return by `WEIGHT` how much each client's rows count in averages, nothing where by their number.

    Raises:
        Withheld: a site's rules do not allow to tell the sum of its rows' weights.
    """
    weights = context.weights(split)
    if weights is not None and context.disclosure is not None:
        held = [rows.weight for rows in context.rows(split) if rows.weight is not None]
        context.disclosure.check([part.double().cpu().numpy()[:, None] for part in held], dominance_only=True)
    return {} if weights is None else {contracts.WEIGHT: weights}


def even_losses(model: Tensor, context: contracts.ClientContext, split: contracts.Split) -> bool:
    """Return whether the site's rules of disclosure allow to tell the sum of the rows' losses."""
    if context.disclosure is None:
        return True
    return context.disclosure.allow(row_losses(model, context, split), dominance_only=True)


class Evaluate(ScoringQuery):
    """Score the global model and the client's personal model.

    Metrics come back as "global/NAME" and "personal/NAME".  Where nothing is private and the trainer personalizes
    nothing the two are one model and only "global" is scored; where layers are private there is no global model to use
    alone.

    Attributes:
        split: which of the client's rows.
        personal: also score personal models; False for the common test set, which belongs to no client.
    """

    personal: bool = True

    def rows_read(self, personal: bool) -> set[contracts.Split]:
        return super().rows_read(personal and self.personal)

    def answer(
        self, inputs: contracts.TrainInput, context: contracts.ClientContext, trainer: contracts.Trains
    ) -> contracts.TrainOutput:
        # beside private layers the shared ones are no model by themselves
        whole = inputs.shared == inputs.model.shape[-1]
        models = {"global": inputs.model} if whole else {}
        if self.personal and (isinstance(trainer, contracts.Personalizes) or not whole):
            models["personal"] = used_model(inputs, context, trainer)
        metrics = {}
        for name, model in models.items():
            scores, metrics["examples"] = context.score(model, self.split)
            if not even_losses(model, context, self.split):
                # shares count rows, and all else would tell of one row
                scores = {metric: value for metric, value in scores.items() if metric in SHARES}
            metrics |= {f"{name}/{metric}": value for metric, value in scores.items()}
        return inputs.answered(metrics=metrics | weight_metric(context, self.split))

    def answer_form(self, spec: ModelSpec, rows: Mapping[contracts.Split, int]) -> contracts.ResultForm:
        metrics = ("loss", *spec.objective.metrics)
        names = {f"{model}/{metric}" for model in ("global", "personal") for metric in metrics}
        return contracts.ResultForm({}, {*names, contracts.WEIGHT}, rows[self.split], 0)

    def most_asked(self, hides: bool) -> int:
        return 200 if hides else 1000

    def row_influence(self, rows: contracts.Rows) -> Mapping[str, float] | None:
        return self.influence_on_shares(rows, "global", "personal")


class Validate(ScoringQuery):
    """Run a model over the client's validation rows and send counts, nothing else (Metis, section IV, the evaluator).

    Where layers are private the shared ones are judged together with the client's own.

    Attributes:
        split: which of the client's rows.
        classes: C; the answer is the confusion matrix [C * C], rows by true class and, within, by predicted class.
            0 asks for the mean loss instead, for tasks without classes.
    """

    split: contracts.Split = "validation"
    classes: int = Field(default=0, ge=0)

    def answer(
        self, inputs: contracts.TrainInput, context: contracts.ClientContext, trainer: contracts.Trains
    ) -> contracts.TrainOutput:
        if not self.classes:
            scores, rows = context.score(inputs.model, self.split)
            if context.disclosure is not None:
                context.disclosure.check([row_losses(inputs.model, context, self.split)], dominance_only=True)
            # without rows the loss is NaN, and answers must be finite; `examples` says that it counts nothing
            metrics = {"loss": scores["loss"].nan_to_num(), "examples": rows}
            return inputs.answered(metrics=metrics | weight_metric(context, self.split))
        matrix = context.confusion(inputs.model, self.split).flatten(1)
        return inputs.answered(vectors={"confusion": matrix}, metrics={"examples": matrix.sum(1)})

    def answer_form(self, spec: ModelSpec, rows: Mapping[contracts.Split, int]) -> contracts.ResultForm:
        # as many counts as the model has outputs allow: the query cannot choose how many a site sends
        vectors = {"confusion": (math.prod(spec.outputs) ** 2,)} if self.classes else {}
        return contracts.ResultForm(vectors, () if self.classes else ("loss", contracts.WEIGHT), rows[self.split], 0)

    def most_asked(self, hides: bool) -> int:
        return 200 if hides else 5000  # voters judge the model of each cluster, or of each client, in a round

    def row_influence(self, rows: contracts.Rows) -> Mapping[str, float] | None:
        return {"confusion": math.sqrt(2)} if self.classes else {}  # it leaves one cell for another

    def reject_reason(self, answer: contracts.Update, spec: ModelSpec) -> str | None:
        if not self.classes:
            return None if "loss" in answer.metrics else "sent no loss"
        return matrix_reason(answer, self.classes)


class Confusion(ScoringQuery):
    """Count a client's rows by their class and by the class that the client's model takes them for.

    The model is the one that the client uses: its personal model where it has one, else the global model.  The counts
    tell how many of the client's rows each class has, and what they are mistaken for, which is more than a score tells:
    a site answers only where its policy names this query, and with `least_rows` only if no count is small.

    Attributes:
        split: which of the client's rows.
        classes: C; the answer is the confusion matrix [C * C], rows by true class and, within, by predicted class.
    """

    by_name = True

    classes: int = Field(ge=2)

    def answer(
        self, inputs: contracts.TrainInput, context: contracts.ClientContext, trainer: contracts.Trains
    ) -> contracts.TrainOutput:
        model = used_model(inputs, context, trainer)
        matrix = context.confusion(model, self.split).flatten(1)
        return inputs.answered(vectors={"confusion": matrix}, metrics={"examples": matrix.sum(1)})

    def answer_form(self, spec: ModelSpec, rows: Mapping[contracts.Split, int]) -> contracts.ResultForm:
        # no more counts than the model has outputs for, whatever number the query brings
        return contracts.ResultForm({"confusion": (math.prod(spec.outputs) ** 2,)}, (), rows[self.split], 0)

    def fewest_rows(self, answer: contracts.Update) -> int | None:
        held = answer.vectors["confusion"]
        # an empty cell tells of nobody: policies limit the smallest count that is there
        held = held[held > 0]
        return int(held.min()) if len(held) else None

    def row_influence(self, rows: contracts.Rows) -> Mapping[str, float] | None:
        return {"confusion": math.sqrt(2)}  # it leaves one cell for another

    def reject_reason(self, answer: contracts.Update, spec: ModelSpec) -> str | None:
        return matrix_reason(answer, self.classes)


def matrix_reason(answer: contracts.Update, classes: int) -> str | None:
    """Return why an answer does not carry a confusion matrix of as many rows as it says, or None."""
    matrix = answer.vectors.get("confusion")
    if matrix is None or tuple(matrix.shape) != (classes**2,):
        sent = "nothing" if matrix is None else f"{list(matrix.shape)}"
        return f"must send {classes} x {classes} counts, sent {sent}"
    # a weight follows from these counts, so a client that invents some must not pass
    if bool((matrix < 0).any()) or bool((matrix != matrix.round()).any()):
        return "sent counts that are no whole numbers of at least 0"
    if int(matrix.sum()) != answer.examples:
        return f"sent counts of {int(matrix.sum())} rows and said there were {answer.examples}"
    return None


def counted(version: int, client: int, model: str, split: contracts.Split, matrix: Tensor) -> list[dict[str, Any]]:
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
        about | {"actual": index // classes, "predicted": index % classes, "count": int(count)}
        for index, count in enumerate(matrix.tolist())
        # most cells are empty, and a table of C^2 rows for each client would be large
        if count
    ]
