"""The contract of a training engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from piebald.contracts import SgdOutcome, Split
from piebald.engines.device_copies import CohortCopies
from piebald.engines.factored.client_state import StatePacker
from piebald.engines.model_traits import Traits
from piebald.engines.row_loader import RowLoader
from piebald.engines.sgd_step import SgdRun
from piebald.methods.client_work import ClientWork


class Engine(Protocol):
    """An engine that trains and scores stacks of clients.

    Attributes:
        name: the engine's name in settings.
        takes_factored: whether the engine works with `FactoredVectors`; others get ordinary tensors.
        work: the model and the components that work at clients.
        row_loader: fetches clients' rows.
        device: where the engine computes.
        copies: copies on the device of what a cohort shares.
        traits: what the model is like.
        notes: which steps on a GPU are recorded, and why others are not.
    """

    name: str
    takes_factored: bool
    work: ClientWork
    row_loader: RowLoader
    device: torch.device
    copies: CohortCopies
    traits: Traits
    notes: dict[str, str]

    @property
    def packer(self) -> StatePacker: ...

    def of(self, number: int | None) -> Engine: ...

    def run_sgd(self, run: SgdRun) -> SgdOutcome: ...

    def score(
        self, clients: Sequence[int], model: Tensor, split: Split, metrics: bool = True
    ) -> tuple[dict[str, Tensor], Tensor]: ...

    def losses(self, clients: Sequence[int], models: Sequence[Tensor], split: Split) -> Tensor: ...

    def row_losses(self, clients: Sequence[int], model: Tensor, split: Split) -> tuple[Tensor, Tensor]: ...

    def public_outputs(self, model: Tensor) -> Tensor: ...

    def confusion(self, clients: Sequence[int], model: Tensor, split: Split) -> Tensor: ...
