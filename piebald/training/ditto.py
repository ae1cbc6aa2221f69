"""Ditto: a personal model beside the shared one, tied to it by a spring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from piebald.contracts import Learned, Local, Start
from piebald.training.sgd import Sgd

if TYPE_CHECKING:
    from torch import Tensor


class Ditto(Sgd):
    """Train the shared model as ever, and a personal one on loss + pull/2 |v - w_t|^2 (Li et al. 2021, algorithm 1).

    Attributes:
        pull: lambda of the paper, at least 0; 0 is local training.
        personal_epochs: passes of the personal model an assignment.
    """

    pull: float = Field(default=0.1, ge=0)
    personal_epochs: int = Field(default=1, ge=1)

    def remember(self, model: Tensor, shared: int) -> dict[str, Tensor]:
        return super().remember(model, shared) | {"personal": model}

    def learn(self, start: Start, local: Local) -> Learned:
        sent = self.descend(start, local)
        own = local.descend(
            start.memory["personal"], self.descent(start, self.personal_epochs), pull=self.pull, anchor=start.model
        )
        return self.learned(sent, memory={"personal": own.model})

    def personal(self, start: Start, local: Local) -> Tensor:
        return start.memory["personal"]
