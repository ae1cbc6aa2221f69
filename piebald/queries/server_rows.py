"""What the centre does with rows of its own."""

from __future__ import annotations

import torch

from piebald.client_work import Work
from piebald.contracts import Learned, Local, Query, Start, Update
from piebald.training.base import Rule


class RootLoss(Query):
    """The loss of a model on the rows that the centre keeps for itself (`Clients.root`)."""

    def answer(self, start: Start, local: Local, rule: Rule) -> Learned:
        scores, count = local.score(start.model, "train")
        nothing = torch.zeros(len(start.versions))
        return Learned(start.model, nothing, metrics={"loss": scores["loss"], "examples": count.float()})

    def complaint(self, answer: Update, work: Work) -> str | None:
        return None if "loss" in answer.metrics else "no loss came"


class RootTraining(Query):
    """The change that the recipe's rule makes on the rows that the centre keeps for itself: part "model" [s]."""

    def answer(self, start: Start, local: Local, rule: Rule) -> Learned:
        end = rule.learn(start, local)
        change = (end.model - start.model)[:, : start.shared]
        return Learned(start.model, torch.zeros(len(start.versions)), parts={"model": change})

    def complaint(self, answer: Update, work: Work) -> str | None:
        change = answer.parts.get("model")
        fits = change is not None and tuple(change.shape) == (work.layout.shared,)
        return None if fits else f"must send {work.layout.shared} numbers"
