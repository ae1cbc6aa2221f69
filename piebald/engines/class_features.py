"""Mean features of each class over clients' training rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from piebald.core import pytree
from piebald.core.errors import RuntimeFault
from piebald.core.input_statistics import InputHooks
from piebald.core.machine import float64_device, moved
from piebald.core.parameters import copied, head
from piebald.engines.engine import Engine

_ROWS = 256  # rows in one forward pass


def class_features(engine: Engine, clients: Sequence[int], models: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `contracts.ClientContext.class_features`, one client after another, summed in float64."""
    device, layout, (classes,) = engine.device, engine.work.layout, engine.work.outputs
    wide: Any = {"dtype": torch.float64, "device": float64_device(device)}
    module, last = copied(engine.work.model, device).eval(), head(engine.work.model)
    if last is None:
        raise RuntimeFault("features are what goes into a last linear layer, which this model has not")
    width = module.get_submodule(last).get_parameter("weight").shape[1]
    gathered = engine.row_loader.gather(clients, "train")
    means, counts = [], []
    with torch.no_grad(), InputHooks(module, [last]) as inputs:
        for model, places in zip(models, gathered.places, strict=True):
            layout.load(module, model)
            summed = torch.zeros(classes, width, **wide)
            count = torch.zeros(classes, **wide)
            for part in torch.split(moved(torch.from_numpy(places), device), _ROWS):
                rows = gathered.take(part)
                pytree.run(module, rows.x)
                labels = pytree.single(rows.y, "features of classes").long()
                held = labels >= 0  # as zeros: a mask would make the host wait for the number of rows
                seen = torch.where(held.unsqueeze(1), inputs.seen[last].flatten(1), 0)
                classes_of = labels.clamp_min(0).to(summed.device)
                summed.index_add_(0, classes_of, seen.to(summed.device).double())
                count.index_add_(0, classes_of, held.to(summed.device).double())
            means.append((summed / count.clamp(min=1).unsqueeze(1)).float())
            counts.append(count.float())
    return torch.stack(means).to(device), torch.stack(counts).to(device)
