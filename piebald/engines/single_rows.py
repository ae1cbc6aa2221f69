"""Outputs and features of clients' single rows, and what outputs that were made of them are worth."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from piebald.contracts import RowOutputs, Split
from piebald.core import pytree
from piebald.core.errors import RuntimeFault
from piebald.core.input_statistics import InputHooks
from piebald.core.machine import moved
from piebald.core.parameters import copied, head
from piebald.engines.engine import Engine
from piebald.engines.factored.vectors import to_dense
from piebald.engines.row_values import value_of

_ROWS = 256  # rows in one forward pass


def row_outputs(engine: Engine, clients: Sequence[int], models: Tensor, split: Split) -> list[RowOutputs]:
    """Compute `contracts.ClientContext.row_outputs`, one client after another."""
    device, layout, (classes,) = engine.device, engine.work.layout, engine.work.outputs
    module, last = copied(engine.work.model, device).eval(), head(engine.work.model)
    if last is None:
        raise RuntimeFault("features are what goes into a last linear layer, which this model has not")
    width = module.get_submodule(last).get_parameter("weight").shape[1]
    gathered, found = engine.row_loader.gather(clients, split), []
    with torch.no_grad(), InputHooks(module, [last]) as inputs:
        for model, places in zip(to_dense(models), gathered.places, strict=True):
            layout.load(module, model)
            features, outputs = [torch.empty(0, width, device=device)], [torch.empty(0, classes, device=device)]
            for part in torch.split(moved(torch.from_numpy(places), device), _ROWS):
                outputs.append(pytree.logits(pytree.run(module, gathered.take(part).x)))
                features.append(inputs.seen[last].flatten(1))
            rows = gathered.take(moved(torch.from_numpy(places), device))
            labels = pytree.single(rows.y, "outputs of single rows").long()
            found.append(RowOutputs(torch.cat(features), torch.cat(outputs), labels))
    return found


def measure(
    engine: Engine, clients: Sequence[int], outputs: Sequence[Tensor], split: Split
) -> tuple[dict[str, Tensor], Tensor]:
    """Compute `contracts.ClientContext.measure`."""
    gathered, device = engine.row_loader.gather(clients, split), engine.device
    measures = {"loss": engine.work.objective.loss, **engine.work.objective.metrics}
    scores = {name: torch.full((len(clients),), torch.nan, device=device) for name in measures}
    for row, places in enumerate(gathered.places):
        if len(places):
            targets = gathered.take(moved(torch.from_numpy(places), device)).y
            with torch.no_grad():
                for name, one in measures.items():
                    scores[name][row] = value_of(one, outputs[row], targets)
    return scores, moved(torch.tensor([len(places) for places in gathered.places]), device)
