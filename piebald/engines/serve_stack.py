"""Serve a stack of tasks: the inputs, the trainer, what leaves the clients, and the sum where a sum is enough.

This is all that happens on the client side, whatever engine trains and whichever process it runs in:

    serve -> train_input -> trainer.train (through `client_context.EngineContext`) -> updates -> add_to_sum
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from piebald.contracts import Personalizes, SumRequest
from piebald.engines.client_context import EngineContext
from piebald.engines.deferred_reads import LaterNumbers
from piebald.engines.factored.vectors import to_dense
from piebald.engines.incoming import train_input
from piebald.engines.outgoing import add_to_sum, answers, updates
from piebald.engines.sequential import SequentialEngine as Engine
from piebald.engines.stack import PRIVATE, ClientStack, RunningSum, StackResult


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
    result.vectors = {name: numbers.fetched(to_dense(part)) for name, part in result.vectors.items()}
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
