"""Mean and variance of the inputs of a model's layers over clients' rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from piebald.core import pytree
from piebald.core.input_statistics import InputHooks, sums
from piebald.core.machine import moved
from piebald.core.parameters import copied
from piebald.engines.engine import Engine

_ROWS = 256  # rows in one forward pass


def input_moments(engine: Engine, clients: Sequence[int], models: Tensor, layers: Sequence[str]) -> Tensor:
    """Compute `contracts.ClientContext.moments`, one client after another: a single pass without gradient is enough."""
    device, layout = engine.device, engine.work.layout
    module = copied(engine.work.model, device).eval()
    gathered, found = engine.row_loader.gather(clients, "train"), []
    with torch.no_grad(), InputHooks(module, layers) as inputs:
        chosen = moved(torch.from_numpy(np.concatenate(gathered.places)), device)
        for model, own in zip(models, torch.split(chosen, [len(places) for places in gathered.places]), strict=True):
            layout.load(module, model)
            total: dict[str, tuple[Tensor, Tensor, int]] = {}
            for part in torch.split(own, _ROWS):
                pytree.run(module, pytree.take(gathered.x, part))
                for name in layers:
                    before, new = total.get(name), sums(inputs.seen[name])
                    total[name] = new if before is None else _added(before, new)
            found.append(torch.cat([_moments(total[name]) for name in layers]) if total else None)
    longest = max((len(one) for one in found if one is not None), default=0)
    return torch.stack([one if one is not None else torch.zeros(longest, device=device) for one in found])


def _added(one: tuple[Tensor, Tensor, int], two: tuple[Tensor, Tensor, int]) -> tuple[Tensor, Tensor, int]:
    return one[0] + two[0], one[1] + two[1], one[2] + two[2]


def _moments(total: tuple[Tensor, Tensor, int]) -> Tensor:
    """Means, then variances, from sums, sums of squares and a count."""
    whole, squares, count = total
    mean = whole / count
    return torch.cat([mean, (squares / count - mean.square()).clamp(min=0)]).float()
