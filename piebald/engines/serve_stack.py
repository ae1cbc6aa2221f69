"""The serving of a stack of clients: the inputs of the trainer, its run, and its results.

This is all that happens on the client side, whatever engine trains and whichever process it runs in:

    serve -> train_input -> trainer.train (through `client_context.EngineContext`) -> updates -> add_to_sum
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from piebald.contracts import Personalizes, SumRequest, TrainInput
from piebald.core.machine import float64_device, moved
from piebald.core.parameters import pad
from piebald.engines.client_context import EngineContext
from piebald.engines.device_copies import LaterNumbers
from piebald.engines.factored.factors import MatrixTerm
from piebald.engines.factored.vectors import FactoredVectors, to_dense
from piebald.engines.outgoing import add_to_sum, answers, updates
from piebald.engines.sequential import SequentialEngine as Engine
from piebald.engines.stack import PRIVATE, ClientStack, RunningSum, StackResult
from piebald.methods.transforms.compression import COMPRESSION


def serve(
    engine: Engine,
    stack: ClientStack,
    sum_request: SumRequest | None = None,
    total: RunningSum | None = None,
    later: LaterNumbers | None = None,
) -> StackResult:
    """Train a stack of clients, or let them answer a query.

    Args:
        engine: that trains and scores.
        stack: the tasks, of clients with one model and one trainer.
        sum_request: if given, updates that may count are added to `total` and not returned.
        total: the sum so far.
        later: if given, what the result has of numbers and tensors is there only once this was read.
    """
    numbers = later or LaterNumbers()
    result = _served(engine, stack, sum_request, total, numbers)
    if later is None:
        numbers.read()
    return result


def _served(
    engine: Engine,
    stack: ClientStack,
    sum_request: SumRequest | None,
    total: RunningSum | None,
    numbers: LaterNumbers,
) -> StackResult:
    number = engine.work.number_of(stack.clients[0], stack.versions[0], stack.query)
    if stack.query is not None and any(engine.work.number(client) != number for client in stack.clients):
        private = {name: rows for name, rows in stack.state.items() if name == PRIVATE}
        stack = dataclasses.replace(stack, state=private)  # the rest has the lengths of other models than this one
    engine = engine.of(number)
    work, context = engine.work, EngineContext(engine, stack)
    trainer = work.trainer_of(stack.clients[0])
    inputs = train_input(engine, stack)
    if stack.query is not None:
        return answers(stack.query.answer(inputs, context, trainer), numbers)
    output = trainer.train(inputs, context)
    if work.own_query is not None:
        answer = work.own_query.answer(dataclasses.replace(inputs, model=output.model), context, trainer)
        output = dataclasses.replace(output, vectors={**output.vectors, **answer.vectors})
    summed = sum_request is not None and not work.transforms
    result, lengths = updates(engine, stack, inputs, output, summed, numbers)
    del output  # the trained models, which the sum need not lie beside
    if sum_request is not None and total is not None:
        add_to_sum(result, stack.clients, lengths, sum_request, total, numbers)
    # what the server is sent stays where its model is; answers are read on the host
    stays = {"model", *trainer.uploads()} if stack.models[0].device.type == engine.device.type else set()
    dense = {name: to_dense(part) for name, part in result.vectors.items()}
    result.vectors = {name: part if name in stays else numbers.fetched(part) for name, part in dense.items()}
    return result


def personal_model(
    engine: Engine, client: int, version: int, global_model: Tensor, state: Mapping[str, Tensor]
) -> Tensor:
    """The model [p] that a client uses for itself, from the global model [s] and the client's state.

    Where the client has a model of its own, s and p are those of that model.
    """
    engine, states = engine.of(engine.work.number(client)), {name: [tensor] for name, tensor in state.items()}
    stack = ClientStack([client], [version], [version], [0], [global_model], {}, states, query=None)
    trainer, inputs = engine.work.trainer_of(client), train_input(engine, stack)
    if not isinstance(trainer, Personalizes):
        return inputs.model[0].cpu()
    return trainer.personalize(inputs, EngineContext(engine, stack))[0].cpu()


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
    # float32 counts steps exactly up to 2^24 only, which a long run may pass
    wide = torch.float64 if float64_device(device) == device else torch.float32
    committed = moved(torch.tensor(stack.committed, dtype=wide), device).unsqueeze(1)
    statistics = layout.shared - layout.shared_trained
    clients = engine.work.shown_numbers(stack.clients, stack.query)
    return TrainInput(model, layout.shared, state, vectors, stack.versions, committed, examples, clients, statistics)


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
