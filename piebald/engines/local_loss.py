"""Losses of a client's own in place of the objective's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from piebald.contracts import LocalLoss, LossBatch, Rows
from piebald.contracts.model_spec import ModelSpec
from piebald.core import pytree
from piebald.core.input_statistics import InputHooks
from piebald.core.losses import Loss, mean_over_rows
from piebald.core.parameters import copied, head
from piebald.engines.device_copies import fit_to_device


class LossEvaluator:
    """Evaluates a `contracts.LocalLoss` on one client's batch, also inside `torch.func.vmap`.

    Args:
        local: the loss.
        spec: the model.
        losses: the objective's loss, for training.
        module: the module in training mode that `forward` runs.
        device: where the engine computes.
    """

    def __init__(
        self, local: LocalLoss, spec: ModelSpec, losses: Loss, module: nn.Module, device: torch.device
    ) -> None:
        self.local, self.spec, self.losses, self.module, self.device = local, spec, losses, module, device
        self._heads = [name] if local.reads_features and (name := head(module)) is not None else []
        # a module of its own, since anchors run in evaluation mode while the other stays in training mode
        self._frozen = copied(spec.model, device).eval() if local.anchors else None
        if self._frozen is not None:
            fit_to_device(self._frozen, device)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that it reads besides its arguments."""
        return [] if self._frozen is None else [*self._frozen.parameters(), *self._frozen.buffers()]

    def __call__(self, forward: Callable[[Any], Any], rows: Rows, own: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        """The loss of each row [b], or one value for all of them; the arguments are as in `contracts.LossBatch`."""
        features: dict[str, Tensor] = {}
        with InputHooks(self.module, self._heads) as hooks:
            outputs = forward(rows.x)
        for name in self._heads:
            features["model"] = hooks.seen[name].flatten(1)
        for name in self.local.anchors:
            features[name] = self._features(own[name], rows.x)
        return self.local.batch_loss(LossBatch(self.losses, outputs, rows.y, mask, own, features))

    def mean_of_client(
        self, rows: Rows, own: Mapping[str, Tensor], client: int, counted: Tensor | None = None
    ) -> Tensor:
        """The mean loss over the `counted` rows of a client's batch; `own` are the tensors [c, ...] of a stack."""
        client_tensors = {name: stacked[client] for name, stacked in own.items()}
        forward = functools.partial(pytree.run, self.module)
        mask = torch.ones(len(rows), device=self.device) if counted is None else counted.float()
        losses = self(forward, rows, client_tensors, mask)
        return mean_over_rows(losses, counted) if losses.dim() == 1 else losses.mean()

    def _features(self, vector: Tensor, x: Any) -> Tensor:
        """The features of a model [p] in evaluation mode, without a gradient."""
        assert self._frozen is not None
        with torch.no_grad(), InputHooks(self._frozen, self._heads) as hooks:
            functional_call(self._frozen, self.spec.layout.views(vector), *pytree.arguments(x))
        return hooks.seen[self._heads[0]].flatten(1)
