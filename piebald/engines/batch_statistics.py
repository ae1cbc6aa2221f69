"""What the batch norms of a model compute over clients' rows in training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from piebald.contracts import SgdConfig
from piebald.core import pytree
from piebald.core.machine import moved
from piebald.core.parameters import copied
from piebald.engines.engine import Engine
from piebald.engines.row_loader import batches


def batch_statistics(
    engine: Engine, clients: Sequence[int], rng_versions: Sequence[int | str], models: Tensor, batch: int
) -> tuple[Tensor, Tensor]:
    """Compute `contracts.ClientContext.batch_statistics`, one client after another, in one pass without gradients."""
    device, layout, rng_key = engine.device, engine.work.layout, engine.row_loader.rng_key
    module = copied(engine.work.model, device).eval()
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.train()
            layer.momentum = 1.0  # running statistics are then those of the last batch, whatever they were
    gathered, config = engine.row_loader.gather(clients, "train"), SgdConfig(lr=1.0, batch=batch)
    found, counts = [], []
    for model, places, client, version in zip(models, gathered.places, clients, rng_versions, strict=True):
        layout.load(module, model)
        total = torch.zeros(layout.shared - layout.shared_trained, dtype=torch.float64, device=device)
        rows = len(places) if len(places) > 1 else 0
        for part in batches(places[:rows], config, True, *rng_key(engine.work.seed, client, version, 0)):
            with torch.no_grad():
                pytree.run(module, pytree.take(gathered.x, moved(torch.from_numpy(part), device)))
            named = dict(module.named_buffers())
            held = [named[slot.name].flatten() for slot in layout.slots if slot.buffer and slot.stop <= layout.shared]
            total += len(part) * torch.cat(held).double()
        found.append((total / max(rows, 1)).float())
        counts.append(rows)
    return torch.stack(found), moved(torch.tensor(counts), device)
