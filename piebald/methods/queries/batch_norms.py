"""Statistics of batch norms, asked for once a model is trained."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from piebald.contracts import ClientContext, Query, ResultForm, Rows, Split, TrainInput, TrainOutput, Trains, Update
from piebald.contracts.data import ModelSpec


class BatchStatistics(Query):
    """Run a model over the training rows as in training, and tell what its batch norms see (Diao, Ding, Tarokh 2021,
    "HeteroFL", static batch norm).

    The answer is the mean over the rows of the mean and the variance of each one's batch, with how many rows there
    are: as much as running statistics tell with every update of another method.

    Attributes:
        batch: rows in each batch.
        network: the number of the model that it is about where clients have unlike ones, None for the run's.
    """

    batch: int = Field(ge=1)
    network: int | None = Field(default=None, ge=0)

    def model_number(self, own: int | None) -> int | None:
        return self.network

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        # in batches, as norms saw them in training
        statistics, rows = context.batch_statistics(inputs.model, self.batch)
        return inputs.answered(vectors={"buffers": statistics}, metrics={"examples": rows})

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        return ResultForm({"buffers": (spec.layout.shared - spec.layout.shared_trained,)}, (), rows["train"], 0)

    def most_asked(self, hides: bool) -> int:
        return 100

    def row_influence(self, rows: Rows) -> Mapping[str, float] | None:
        return {}  # whoever chooses the model chooses how much

    def fewest_rows(self, answer: Update) -> int | None:
        return answer.examples or None

    def reject_reason(self, answer: Update, spec: ModelSpec) -> str | None:
        return None if "buffers" in answer.vectors else "sent no statistics"
