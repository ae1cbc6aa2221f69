"""The scores of models on a client's own rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from piebald.contracts import (
    ClientContext,
    Personalizes,
    Query,
    ResultForm,
    Rows,
    Split,
    TrainInput,
    TrainOutput,
    Trains,
    Update,
)
from piebald.contracts.model_spec import ModelSpec
from piebald.core.metrics import SHARES
from piebald.core.targets import TargetDomain


class Evaluate(Query):
    """Score the global model and the client's personal model.

    Metrics come back as "global/NAME" and "personal/NAME".  Where nothing is private and the trainer personalizes
    nothing the two are one model and only "global" is scored; where layers are private there is no global model to use
    alone.

    Attributes:
        split: which of the client's rows.
        personal: also score personal models; False for the common test set, which belongs to no client.
    """

    split: Split = "test"
    personal: bool = True

    def rows_read(self, personal: bool) -> set[Split]:
        return {self.split, "train"} if personal and self.personal else {self.split}

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        whole = inputs.shared == inputs.model.shape[-1]
        models = {"global": inputs.model} if whole else {}
        if self.personal and (isinstance(trainer, Personalizes) or not whole):
            models["personal"] = (
                trainer.personalize(inputs, context) if isinstance(trainer, Personalizes) else inputs.model
            )
        metrics = {}
        for name, model in models.items():
            scores, metrics["examples"] = context.score(model, self.split)
            metrics |= {f"{name}/{metric}": value for metric, value in scores.items()}
        return TrainOutput(inputs.model, torch.zeros(len(inputs.versions)), metrics=metrics)

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        metrics = ("loss", *spec.objective.metrics)
        names = {f"{model}/{metric}" for model in ("global", "personal") for metric in metrics}
        return ResultForm({}, names, rows[self.split], 0)

    def most_asked(self, hides: bool) -> int:
        return 200 if hides else 1000

    def row_influence(self, rows: Rows) -> Mapping[str, float] | None:
        counted = max(int(TargetDomain().known_rows(rows.y).sum()), 1)  # others are in no mean
        return {f"{model}/{name}": 1 / counted for model in ("global", "personal") for name in SHARES}

    def fewest_rows(self, answer: Update) -> int | None:
        return answer.examples or None
