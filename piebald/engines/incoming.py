"""The start of a stack of clients: the models and vectors that were sent, and client state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from piebald.contracts import TrainInput
from piebald.core.machine import float64_device, moved
from piebald.core.parameters import pad
from piebald.engines.factored.sum_terms import MatrixTerm
from piebald.engines.factored.vectors import FactoredVectors, to_dense
from piebald.engines.sequential import SequentialEngine as Engine
from piebald.engines.stack import PRIVATE, ClientStack
from piebald.methods.transforms.compression import COMPRESSION


def train_input(engine: Engine, stack: ClientStack) -> TrainInput:
    """The input of a trainer or query for a stack, on the engine's device."""
    device, layout = engine.device, engine.work.layout
    model = _stacked(stack.models, engine)
    state = {
        name: unpack_state(engine, stack.clients, name, rows)
        for name, rows in stack.state.items()
        if name != PRIVATE and not name.startswith(COMPRESSION)
    }
    if layout.size > layout.shared:
        model = _with_private(model, _stacked(stack.state[PRIVATE], engine))
    vectors = {name: _stacked(rows, engine) for name, rows in stack.vectors.items()}
    trains = stack.query is None
    sizes = [engine.row_loader.size(client) if trains else 0 for client in stack.clients]
    examples = moved(torch.tensor(sizes, dtype=torch.float32), device).unsqueeze(1)
    wide = torch.float64 if float64_device(device) == device else torch.float32
    committed = moved(torch.tensor(stack.committed, dtype=wide), device).unsqueeze(1)
    statistics = layout.shared - layout.shared_trained
    return TrainInput(
        model, layout.shared, state, vectors, stack.versions, committed, examples, stack.clients, statistics
    )


def unpack_state(engine: Engine, clients: Sequence[int], name: str, rows: Sequence[Tensor]) -> Tensor:
    """One named tensor of the clients' state, [c, ...], from a stored tensor for each client.

    Stored tensors may be packed (`factored.client_state`).  An engine that takes factored vectors gets such ones, so
    that sums and differences that a trainer computes with them are formed once, if at all.
    """
    packed = [engine.packer.is_packed(row, name) for row in rows]
    vectors = engine.packer.unpack(rows, clients, engine.device) if any(packed) else _stacked(rows, engine)
    if vectors is None:  # some are packed and some are not, as when another engine trained before
        alone = [unpack_state(engine, [client], name, [row]) for client, row in zip(clients, rows, strict=True)]
        vectors = torch.cat([to_dense(vector) for vector in alone])
    if not engine.takes_factored:
        return to_dense(vectors)
    shared = vectors.dim() == 2 and vectors.stride(0) == 0 and all(row is rows[0] for row in rows)
    nothing = shared and not bool(rows[0].any())  # nobody has been asked before; looked up where it is kept
    return FactoredVectors.zeros(vectors) if nothing else FactoredVectors.of(vectors) if vectors.dim() == 2 else vectors


def _stacked(rows: Sequence[Tensor], engine: Engine) -> Tensor:
    """Clients' tensors as one [c, ...]; a tensor that all of them share is expanded, not copied."""
    first = rows[0]
    if all(row is first for row in rows):
        return engine.copies.of(first).expand(len(rows), *first.shape)
    return moved(torch.stack(list(rows)), engine.device)


def _with_private(model: Tensor, private: Tensor) -> Tensor:
    """Whole models [c, p] from shared and private parameters; what all clients share is not copied."""
    shared, size = model.shape[1], model.shape[1] + private.shape[1]
    if model.stride(0):
        return torch.cat([model, private], dim=1)
    base = MatrixTerm.of(pad(model[0], size))
    spans = [(slice(shared, size), slice(0, size - shared))]
    return FactoredVectors(model, len(model), size, [base], (), private, spans)
