"""Low-rank adapters whose rank differs between clients, at the client."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from piebald.contracts.data import ModelSpec
from piebald.core.client_models import ClientModels, adapter_pairs, nested_model, with_rank
from piebald.methods.training.sgd import Sgd

Rank = Annotated[int, Field(ge=1)]


class AdapterRanks(Sgd):
    """SGD on a model whose adapters have the first rows of A and columns of B of the global ones (Cho et al. 2024,
    "Heterogeneous LoRA for federated fine-tuning of on-device foundation models", section 3.2: truncation).

    A client of rank r trains, keeps and sends r / R of the numbers of adapters of rank R; its model is its own, and is
    what it is evaluated with.  The adapters' output is multiplied by the global model's alpha / R whatever r is, so
    that products B A of several ranks can be added.  In the program of FlexLoRA's authors it is alpha / r, by which its
    server multiplies each product.

    Attributes:
        ranks: r of each client by its number, at most that of the model's adapters; clients beyond the last begin with
            the first again.
    """

    ranks: tuple[Rank, ...] = Field(default=(4, 2), min_length=1)

    @model_validator(mode="after")
    def _check_state(self) -> Self:
        if self.optimizer_state == "averaged":
            raise ValueError(
                "optimizer_state = 'averaged' has no average where clients have unlike ranks: choose 'fresh' or 'kept'"
            )
        return self

    @property
    def holds_parts(self) -> bool:
        return True

    @property
    def changes_parts(self) -> bool:
        return False

    def own_models(self, spec: ModelSpec) -> ClientModels | None:
        with_rank(spec.model, max(self.ranks))  # refuses models without adapters of that rank
        inner = {pair.inner for pair in adapter_pairs(slot.name for slot in spec.layout.slots)}
        whole = max(slot.shape[0] for slot in spec.layout.slots if slot.name in inner)
        lower = sorted({rank for rank in self.ranks if rank < whole})
        if not lower:
            return None
        ranked = [with_rank(spec.model, rank) for rank in lower]
        models = tuple(nested_model(model, spec.layout, spec.initial, spec.outputs) for model in ranked)
        return ClientModels(models, tuple(lower.index(rank) if rank < whole else None for rank in self.ranks))
