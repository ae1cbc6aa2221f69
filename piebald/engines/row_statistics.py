"""Outputs of rows, features of classes and statistics of layers under clients' models, without gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from piebald.contracts import RowOutputs, Rows, SgdConfig, Split
from piebald.core import pytree
from piebald.core.errors import RuntimeFault
from piebald.core.machine import float64_device, moved
from piebald.core.moments import InputHooks, sums
from piebald.core.parameters import copied, head
from piebald.core.targets import parted
from piebald.engines.factored.vectors import to_dense
from piebald.engines.row_loader import Gathered, Positions, batches
from piebald.engines.scoring import value_of
from piebald.engines.sequential import SequentialEngine as Engine

_ROWS = 256  # rows in one forward pass


@torch.no_grad()
def input_moments(engine: Engine, clients: Sequence[int], models: Tensor, layers: Sequence[str]) -> Tensor:
    """Compute `contracts.ClientContext.moments`."""
    module = copied(engine.work.model, engine.device).eval()
    moments: list[Tensor | None] = []
    with InputHooks(module, layers) as inputs:
        for gathered, positions in _loaded(engine, module, clients, models, "train"):
            totals: dict[str, tuple[Tensor, Tensor, int]] = {}
            for rows in _chunks(engine, gathered, positions):
                pytree.run(module, rows.x)
                for name in layers:
                    new = sums(inputs.seen[name])
                    old = totals.get(name)
                    totals[name] = new if old is None else (old[0] + new[0], old[1] + new[1], old[2] + new[2])
            moments.append(torch.cat([_moments(*totals[name]) for name in layers]) if totals else None)
    longest = max((len(vector) for vector in moments if vector is not None), default=0)
    nothing = torch.zeros(longest, device=engine.device)
    return torch.stack([nothing if vector is None else vector for vector in moments])


def _moments(total: Tensor, squares: Tensor, count: int) -> Tensor:
    """Return means, then variances, from sums, sums of squares and a count."""
    mean = total / count
    # E x^2 - (E x)^2 may round to just below 0, which is no variance
    return torch.cat([mean, (squares / count - mean.square()).clamp(min=0)]).float()


@torch.no_grad()
def class_features(engine: Engine, clients: Sequence[int], models: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `contracts.ClientContext.class_features`, summed in float64."""
    device, (classes,) = engine.device, engine.work.outputs
    wide: Any = {"dtype": torch.float64, "device": float64_device(device)}
    module, (last, width) = copied(engine.work.model, device).eval(), _last_layer(engine)
    means, counts = [], []
    with InputHooks(module, [last]) as inputs:
        for gathered, positions in _loaded(engine, module, clients, models, "train"):
            total, count = torch.zeros(classes, width, **wide), torch.zeros(classes, **wide)
            for rows in _chunks(engine, gathered, positions):
                pytree.run(module, rows.x)
                labels = pytree.single(parted(rows.y)[0], "features of classes").long()
                labelled = labels >= 0  # as zeros: a mask would make the host wait for the number of rows
                features = torch.where(labelled.unsqueeze(1), inputs.seen[last].flatten(1), 0)
                places_of = labels.clamp_min(0).to(total.device)
                total.index_add_(0, places_of, features.to(total.device).double())
                count.index_add_(0, places_of, labelled.to(total.device).double())
            # 0 and not 0 / 0 for a class without rows, whose count is 0
            means.append((total / count.clamp(min=1).unsqueeze(1)).float())
            counts.append(count.float())
    return torch.stack(means).to(device), torch.stack(counts).to(device)


@torch.no_grad()
def batch_statistics(
    engine: Engine, clients: Sequence[int], rng_versions: Sequence[int | str], models: Tensor, batch: int
) -> tuple[Tensor, Tensor]:
    """Compute `contracts.ClientContext.batch_statistics`, one client after another."""
    device, layout, rng_key = engine.device, engine.work.layout, engine.row_loader.rng_key
    module, config = copied(engine.work.model, device).eval(), SgdConfig(lr=1.0, batch=batch)
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.train()
            layer.momentum = 1.0  # running statistics are then those of the last batch, whatever they were
    means, counts = [], []
    walked = _loaded(engine, module, clients, models, "train")
    for (gathered, positions), client, version in zip(walked, clients, rng_versions, strict=True):
        total = torch.zeros(layout.shared - layout.shared_trained, dtype=torch.float64, device=device)
        # batch norm refuses a single row
        count = len(positions) if len(positions) > 1 else 0
        for part in batches(positions[:count], config, True, *rng_key(engine.work.seed, client, version, 0)):
            pytree.run(module, pytree.take(gathered.x, moved(torch.from_numpy(part), device)))
            buffers = dict(module.named_buffers())
            shared = [slot for slot in layout.slots if slot.buffer and slot.stop <= layout.shared]
            # by rows, since the last batch may be shorter
            total += len(part) * torch.cat([buffers[slot.name].flatten() for slot in shared]).double()
        means.append((total / max(count, 1)).float())
        counts.append(count)
    return torch.stack(means), moved(torch.tensor(counts), device)


@torch.no_grad()
def row_outputs(engine: Engine, clients: Sequence[int], models: Tensor, split: Split) -> list[RowOutputs]:
    """Compute `contracts.ClientContext.row_outputs`."""
    device, (classes,) = engine.device, engine.work.outputs
    module, (last, width) = copied(engine.work.model, device).eval(), _last_layer(engine)
    by_client = []
    with InputHooks(module, [last]) as inputs:
        for gathered, positions in _loaded(engine, module, clients, models, split):
            features, outputs = [torch.empty(0, width, device=device)], [torch.empty(0, classes, device=device)]
            for rows in _chunks(engine, gathered, positions):
                outputs.append(pytree.logits(pytree.run(module, rows.x)))
                features.append(inputs.seen[last].flatten(1))
            rows = gathered.take(moved(torch.from_numpy(positions), device))
            labels = pytree.single(parted(rows.y)[0], "outputs of single rows").long()
            by_client.append(RowOutputs(torch.cat(features), torch.cat(outputs), labels))
    return by_client


@torch.no_grad()
def measure(
    engine: Engine, clients: Sequence[int], outputs: Sequence[Tensor], split: Split
) -> tuple[dict[str, Tensor], Tensor]:
    """Compute `contracts.ClientContext.measure`."""
    gathered, device = engine.row_loader.gather(clients, split), engine.device
    measures = {"loss": engine.work.objective.loss, **engine.work.objective.metrics}
    scores, counts = {name: torch.full((len(clients),), torch.nan, device=device) for name in measures}, []
    for row, positions in enumerate(gathered.positions):
        targets = gathered.take(moved(torch.from_numpy(positions), device)).y
        counted = engine.row_loader.counted(targets)
        counted = torch.ones(len(positions), dtype=torch.bool, device=device) if counted is None else counted > 0
        counts.append(int(counted.sum()))
        for name, function in measures.items() if counts[-1] else ():
            scores[name][row] = value_of(function, outputs[row][counted], pytree.take(targets, counted))
    return scores, moved(torch.tensor(counts), device)


def _loaded(
    engine: Engine, module: nn.Module, clients: Sequence[int], models: Tensor, split: Split
) -> Iterator[tuple[Gathered, Positions]]:
    """Load one client's model after another into a module; yield all rows, and the positions of the client's own."""
    gathered = engine.row_loader.gather(clients, split)
    for model, positions in zip(to_dense(models), gathered.positions, strict=True):
        engine.work.layout.load(module, model)
        yield gathered, positions


def _chunks(engine: Engine, gathered: Gathered, positions: Positions) -> Iterator[Rows]:
    """Yield a client's rows in pieces for one forward pass each."""
    return (gathered.take(part) for part in torch.split(moved(torch.from_numpy(positions), engine.device), _ROWS))


def _last_layer(engine: Engine) -> tuple[str, int]:
    """Return the name of the last linear layer and the number of features that go into it."""
    last = head(engine.work.model)
    if last is None:
        raise RuntimeFault("features are what goes into a last linear layer, which this model has not")
    return last, engine.work.model.get_submodule(last).get_parameter("weight").shape[1]
