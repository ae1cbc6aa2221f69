"""Queries about rows of the server's own."""

from __future__ import annotations

from collections.abc import Mapping

from piebald.contracts import ClientContext, Query, ResultForm, Split, TrainInput, TrainOutput, Trains, Update
from piebald.contracts.data import ModelSpec


class RootLoss(Query):
    """The loss of a model on the rows that the server keeps for itself (`Clients.server_rows`)."""

    asked_of = "server"

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        scores, count = context.score(inputs.model, "train")
        return inputs.answered(metrics={"loss": scores["loss"], "examples": count.float()})

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        return ResultForm({}, ("loss",), rows["train"], 0)

    def reject_reason(self, answer: Update, spec: ModelSpec) -> str | None:
        return None if "loss" in answer.metrics else "no loss came"


class RootTraining(Query):
    """The change [s] of the model that training on the server's own rows makes, as vector "model"."""

    asked_of = "server"

    def answer(self, inputs: TrainInput, context: ClientContext, trainer: Trains) -> TrainOutput:
        end = trainer.train(inputs, context)
        # shared numbers only, as in clients' updates that it is compared with
        change = (end.model - inputs.model)[:, : inputs.shared]
        return inputs.answered(vectors={"model": change})

    def answer_form(self, spec: ModelSpec, rows: Mapping[Split, int]) -> ResultForm:
        return ResultForm({"model": (spec.layout.shared,)}, (), 0, 0)

    def reject_reason(self, answer: Update, spec: ModelSpec) -> str | None:
        change = answer.vectors.get("model")
        fits = change is not None and tuple(change.shape) == (spec.layout.shared,)
        return None if fits else f"must send {spec.layout.shared} numbers"
