"""What every engine does with the module that it keeps: load models into it, and score them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from piebald import pytree
from piebald.client_work import ClientWork
from piebald.contracts import PLAIN_PASSES, PassSettings, Split
from piebald.errors import SettingError
from piebald.losses import IGNORED
from piebald.machine import moved
from piebald.parameters import Layout
from piebald.runtimes.engines.model_traits import Traits
from piebald.runtimes.engines.row_loader import RowLoader
from piebald.runtimes.engines.row_values import each_loss, value_of

SCORE_ROWS = 2048  # rows in a forward pass that only scores: enough to be efficient, few enough for any activation


class ScoringEngine:
    """Scores models with one module whose tensors are views of a flat vector; its attributes are those of `Engine`.

    Attributes:
        module: the module.
        vector: the numbers that its tensors are views of.
        bfloat16: whether all passes run under autocast to bfloat16.
    """

    work: ClientWork
    row_loader: RowLoader
    traits: Traits
    device: torch.device
    bfloat16: bool
    module: nn.Module
    vector: Tensor
    _integers: Mapping[str, Tensor]  # the module's buffers that are in no vector
    _conv2d: bool

    def _load(self, vector: Tensor) -> None:
        """Load a vector into the resident module, and reset its integer buffers."""
        with torch.no_grad():
            self.vector.copy_(vector)
            if self._integers:
                buffers = dict(self.module.named_buffers())
                for name, value in self._integers.items():
                    buffers[name].copy_(value)

    def shaped(self, x: Any) -> Any:
        """Images in channels-last format, on which torch's CPU pooling and convolution are much faster."""
        return pytree.mapped(_channels_last, x) if self._conv2d else x

    def precision(self, passes: PassSettings = PLAIN_PASSES) -> contextlib.AbstractContextManager[object]:
        """The context of forward passes: autocast, or nothing; of training with its settings, else of scoring."""
        wanted = "bfloat16" if self.bfloat16 and passes.precision == "float32" else passes.precision
        dtype = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[wanted]
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def score(
        self, clients: Sequence[int], model: Tensor, split: Split, metrics: bool = True
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Score models, as `contracts.ClientContext.score` describes."""
        outputs, targets = self._outputs(clients, model, split)
        measures = {"loss": self.work.objective.loss, **(self.work.objective.metrics if metrics else {})}
        with torch.no_grad():
            scores = {name: self._measure(measure, outputs, targets) for name, measure in measures.items()}
        return scores, moved(torch.tensor([pytree.count(target) for target in targets]), self.device)

    def row_losses(self, clients: Sequence[int], model: Tensor, split: Split) -> tuple[Tensor, Tensor]:
        """The loss of each row, as `contracts.ClientContext.row_losses` describes."""
        if self.work.objective.compares_rows:
            raise SettingError(
                f"the loss {self.work.objective.name!r} compares rows and has no value for a single one, which is "
                "needed here to choose among models: use another loss"
            )
        outputs, targets = self._outputs(clients, model, split)
        counts = [pytree.count(target) for target in targets]
        losses = torch.full((len(targets), max(counts)), torch.nan, device=self.device)
        with torch.no_grad():
            for row, (out, target) in enumerate(zip(outputs, targets, strict=False)):
                if counts[row]:
                    losses[row, : counts[row]] = each_loss(self.work.objective.loss, out, target)
        return losses, moved(torch.tensor(counts), self.device)

    def confusion(self, clients: Sequence[int], model: Tensor, split: Split) -> Tensor:
        """Count rows by true and predicted class, as `contracts.ClientContext.confusion` describes."""
        outputs, targets = self._outputs(clients, model, split)
        scores = [pytree.logits(out) for out in outputs]
        classes = max((out.shape[1] for out in scores if out.dim() > 1), default=0)
        matrices = torch.zeros(len(clients), classes, classes, device=self.device)
        for row, (out, target) in enumerate(zip(scores, targets, strict=False)):
            if pytree.count(target):
                cells = target.long().flatten() * classes + out.argmax(1).flatten()
                kept = target.flatten() != IGNORED
                own = matrices[row].view(-1)  # `bincount` would look for the largest cell, and make the host wait
                own.index_add_(0, torch.where(kept, cells, 0), kept.to(own.dtype))
        return matrices

    def public_outputs(self, model: Tensor) -> Tensor:
        """Models' outputs for the public rows, as `contracts.ClientContext.public_outputs` describes."""
        gathered = self.row_loader.public(len(model))
        self.module.eval()
        places, made = moved(torch.from_numpy(gathered.places[0]), self.device), []
        with torch.no_grad():
            for own in model:
                self._load(own)
                made.append(pytree.logits(self._forward(gathered.x, places)).float())
        return torch.stack(made)

    def _outputs(self, clients: Sequence[int], model: Tensor, split: Split) -> tuple[list[Any], list[Any]]:
        """Models' outputs for clients' rows, and the targets; one model for all clients runs over all their rows at
        once.
        """
        gathered = self.row_loader.gather(clients, split)
        self.module.eval()
        sizes = [len(places) for places in gathered.places]
        chosen = moved(torch.from_numpy(np.concatenate(gathered.places)), self.device)
        with torch.no_grad():
            outputs: list[Any]
            if (model.stride(0) == 0 and not self.traits.pooled) or len(clients) == 1:
                self._load(model[0])
                outputs_of_all = self._forward(gathered.x, chosen)
                outputs = pytree.split(outputs_of_all, sizes) if outputs_of_all is not None else []
            else:
                outputs = []
                for row, places in enumerate(torch.split(chosen, sizes)):
                    self._load(model[row])
                    out = self._forward(gathered.x, places)
                    outputs.append(out if out is not None else torch.empty(0, device=self.device))
        return outputs, pytree.split(pytree.take(gathered.y, chosen), sizes)

    def _forward(self, x: pytree.Tree, places: Tensor) -> Any:
        if len(places) == 0:
            return None
        with self.precision():
            parts = torch.split(places, SCORE_ROWS)
            outputs = [pytree.run(self.module, self.shaped(pytree.take(x, part))) for part in parts]
        return pytree.joined([pytree.by_row(out, len(part)) for out, part in zip(outputs, parts, strict=True)])

    def _measure(self, measure: object, outputs: list[Any], targets: list[Any]) -> Tensor:
        values = torch.full((len(targets),), torch.nan, device=self.device)
        for row, (out, target) in enumerate(zip(outputs, targets, strict=False)):
            if pytree.count(target):
                values[row] = value_of(measure, out, target)
        return values


def bind(module: nn.Module, layout: Layout, vector: Tensor) -> list[Tensor]:
    """Make a module's tensors views of `vector`, and return its parameters in the layout's order."""
    named = dict(module.named_parameters())
    parameters: list[Tensor] = []
    for slot in layout.slots:
        view = layout.views(vector)[slot.name]
        if slot.buffer:
            path, _, leaf = slot.name.rpartition(".")
            module.get_submodule(path)._buffers[leaf] = view
        else:
            named[slot.name].data = view
            parameters.append(named[slot.name])
    return parameters


def _channels_last(x: Tensor) -> Tensor:
    if x.dim() != 4:
        return x
    _, channels, height, width = x.shape
    if channels == 1:  # both formats are the same with one channel: the strides tell torch which one is meant
        return x.as_strided(x.shape, (height * width, 1, width, 1))
    return x.contiguous(memory_format=torch.channels_last)
