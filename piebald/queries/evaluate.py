"""How good the models are on a client's own rows."""

from __future__ import annotations

import torch

from piebald.contracts import Learned, Local, Query, Split, Start
from piebald.training.base import Rule


class Evaluate(Query):
    """Score the community model and the client's personal model.

    Metrics come back as "community/NAME" and "personal/NAME".  Where nothing is private and the rule tailors nothing
    the two are one model and only "community" is scored; where layers are private there is no community model to use
    alone.

    Attributes:
        split: which of the client's rows.
        personal: also score personal models; False where nobody in particular is asked (the common test set).
    """

    split: Split = "test"
    personal: bool = True

    def answer(self, start: Start, local: Local, rule: Rule) -> Learned:
        whole = start.shared == start.model.shape[-1]
        models = {"community": start.model} if whole else {}
        if self.personal and (rule.tailors() or not whole):
            models["personal"] = rule.personal(start, local)
        metrics = {}
        for name, model in models.items():
            scores, metrics["examples"] = local.score(model, self.split)
            metrics |= {f"{name}/{metric}": value for metric, value in scores.items()}
        return Learned(start.model, torch.zeros(len(start.versions)), metrics=metrics)
