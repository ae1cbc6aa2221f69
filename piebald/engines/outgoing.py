"""The serving of a stack of clients: the inputs of the trainer, its run, and the results.

Results are the update behind its transforms, the new client state, and the sum where that is enough.  This is all that
happens on the client side, whatever engine trains and whichever process it runs in:

    serve -> train_input -> trainer.train (through `client_context.EngineContext`) -> updates -> add_to_sum
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite

import torch
from torch import Tensor

from piebald.contracts import WEIGHT, Personalizes, SumRequest, TrainInput, TrainOutput, Update
from piebald.core.errors import TOO_LONG, RuntimeFault
from piebald.core.machine import float64_device, moved
from piebald.core.parameters import nbytes, pad
from piebald.core.randomness import key, long_key
from piebald.engines.client_context import EngineContext
from piebald.engines.device_copies import LaterNumbers
from piebald.engines.factored.factors import KnownProducts, MatrixTerm
from piebald.engines.factored.vectors import FactoredVectors, to_dense
from piebald.engines.sequential import SequentialEngine as Engine
from piebald.engines.stack import PRIVATE, ClientStack, RunningSum, StackResult
from piebald.methods.aggregation.linear import weighs_by_examples
from piebald.methods.client_work import ClientWork
from piebald.methods.transforms.compression import COMPRESSION, Compressed, Compressor


def updates(
    engine: Engine,
    stack: ClientStack,
    inputs: TrainInput,
    output: TrainOutput,
    summed: bool,
    numbers: LaterNumbers,
) -> tuple[StackResult, Tensor]:
    """Split trained models at the end of the shared slice: what is before it is sent, the rest stays at the client.

    Args:
        engine: that trained.
        stack: the clients.
        inputs: what they started from.
        output: what the trainer returned.
        summed: whether the updates will only be summed; then factored vectors stay factored.
        numbers: what the host reads later, of which the result has nothing before.

    Returns:
        The result, and the lengths [c] of the changes on the device.
    """
    work, shared, size = engine.work, inputs.shared, engine.work.layout.size
    change = output.model[:, :shared] - inputs.model[:, :shared]
    vectors: Mapping[str, Tensor] = {"model": change, **output.vectors}
    _check_uploads(engine, output, vectors, shared)
    trained, hides_rows = work.layout.shared_trained, work.row_privacy is not None
    if hides_rows and trained < shared:
        change[:, trained:] = 0.0  # noise hides gradients, and a buffer moves without one
    # transforms change what is sent, and with it the length that bounds are for
    known_lengths = {n: None if work.transforms else _known_norms(output.model, inputs, n) for n in {trained, shared}}
    if not summed:
        vectors = {name: to_dense(part) for name, part in vectors.items()}
    vectors = _transformed(engine, stack, vectors)
    packed, memory = list[Tensor](), dict[str, Tensor | list[Tensor]]()
    if work.compressor is not None:
        vectors, packed, memory = _compressed(work, work.compressor, stack, vectors)
    lengths = _norms(vectors["model"], known_lengths[shared], shared)
    state = memory | {name: _packed(engine, stack.clients, rows, numbers) for name, rows in output.state.items()}
    # a mean over rows is a number without noise, and its release is in no budget
    metrics: Mapping[str, Tensor] = {} if hides_rows else output.metrics
    if shared < size:
        state[PRIVATE] = numbers.fetched(_columns(output.model, shared, size))
    result = StackResult(
        steps=[],
        examples=[_examples(engine, client) for client in stack.clients],
        norms=[],
        nbytes=_sizes(engine, vectors, packed, len(output.steps)),
        metrics={name: [] for name in metrics} | (_weights(engine, stack.clients) if work.tells_weight else {}),
        failures=[None] * len(output.steps),
        vectors=dict(vectors),
        state=state,
        packed=packed,
    )
    numbers.add(output.steps, lambda steps: result.steps.extend(map(int, steps)))
    numbers.add(lengths, result.norms.extend)
    if trained < shared:
        numbers.add(_norms(vectors["model"], known_lengths[trained], trained), result.trained_norms.extend)
    for name, values in metrics.items():
        numbers.add(values, result.metrics[name].extend)
    return result, lengths


def _examples(engine: Engine, client: int) -> int:
    """Return the rows that a client trained on: where single rows are hidden, all alike, whatever is in them."""
    loader, hides_rows = engine.row_loader, engine.work.row_privacy is not None
    return loader.size(client) if hides_rows else loader.examples(client)


def _weights(engine: Engine, clients: Sequence[int]) -> dict[str, list[float]]:
    """Return how much each client's training counts, by `WEIGHT`, where that is not the number of its rows."""
    weights = [engine.row_loader.weight(client, "train") for client in clients]
    if all(weight is None for weight in weights):
        return {}
    pairs = zip(clients, weights, strict=True)
    return {WEIGHT: [_examples(engine, client) if weight is None else weight for client, weight in pairs]}


def answers(output: TrainOutput, numbers: LaterNumbers) -> StackResult:
    """The result of a stack that answered a query."""
    count, counted = len(output.steps), output.metrics.get("examples")
    vectors = {name: numbers.fetched(part) for name, part in output.vectors.items()}
    each = nbytes(vectors) // max(count, 1)
    examples: list[int] = [] if counted is not None else [0] * count
    metrics: dict[str, list[float]] = {name: [] for name in output.metrics if name != "examples"}
    if counted is not None:
        numbers.add(counted, lambda rows: examples.extend(map(int, rows)))
    for name, values in metrics.items():
        numbers.add(output.metrics[name], values.extend)
    return StackResult([0] * count, examples, [0.0] * count, [each] * count, metrics, [None] * count, vectors)


def add_to_sum(
    result: StackResult,
    clients: Sequence[int],
    lengths: Tensor,
    request: SumRequest,
    total: RunningSum,
    numbers: LaterNumbers,
) -> None:
    """Move the updates that may count from `result` to `total`; the others are marked and left out of the sum.

    Which ones those are is decided on a GPU without the host, where it can weigh them without knowing their numbers.
    """
    vectors, result.vectors = result.vectors, {}
    sums = {name: _finiteness(part) for name, part in vectors.items() if name != "model"}
    read: dict[str, list[float]] = {}
    for name, each in sums.items():
        numbers.add(each, partial(read.__setitem__, name))
    dense = not any(isinstance(part, FactoredVectors) for part in vectors.values())
    here = lengths.device.type == "cpu" or float64_device(lengths.device) != lengths.device
    if dense and not here and weighs_by_examples(request.weight):
        known = result.metrics.get(WEIGHT, result.examples)
        weights = [request.weight.weight(Update({}, 0, 0, {WEIGHT: counts})) for counts in known]
        # in float64, as the host compares in `_reject_reason`: both must come to the same rows
        counts = lengths.isfinite() & (lengths.double() <= request.limit)
        for each in sums.values():
            counts &= each.isfinite()
        for name, part in vectors.items():
            total.add_rows(
                name, _only(part, counts, name == "model"), weights if name == "model" else [1.0] * len(weights)
            )

        def settle(_: object) -> None:
            rows = _sound_rows(result, request, read)
            total.weight += sum(weights[row] for row in rows)

        numbers.add(lengths, settle)
        return
    numbers.read()
    rows = _sound_rows(result, request, read)
    if not rows:
        return
    weights = [request.weight.weight(replace(result.update(row), client=clients[row])) for row in rows]
    if len(rows) < len(result.norms):  # a sum of products cannot leave out one that is not finite
        vectors = {name: part[rows] for name, part in vectors.items()}
    ones, products, summed = [1.0] * len(rows), KnownProducts(), dict[str, Tensor]()
    for name, part in vectors.items():
        scales = weights if name == "model" else ones
        if isinstance(part, FactoredVectors):
            summed[name] = part.total(moved(torch.tensor(scales, dtype=part.own.dtype), part.own.device), products)
        else:
            total.add_rows(name, part, scales)
    total.add(sum(weights), summed)


def _sound_rows(result: StackResult, request: SumRequest, sums: Mapping[str, Sequence[float]]) -> list[int]:
    """The rows of the updates that count; of the others it is noted why they do not.

    `sums` are those of `_finiteness`, by name.
    """
    for row, norm in enumerate(result.norms):
        result.failures[row] = _reject_reason(norm, request.limit) or next(
            (f"{name} is not finite" for name, values in sums.items() if not isfinite(values[row])), None
        )
    return [row for row, failure in enumerate(result.failures) if failure is None]


def _only(part: Tensor, counts: Tensor, in_place: bool) -> Tensor:
    """Clients' tensors [c, ...] with nothing where a client does not count."""
    # filled and not weighted by 0: 0 times NaN or infinity is NaN, and would spoil the whole sum
    mask = ~counts.view(-1, *[1] * (part.dim() - 1))
    # in place only on the change, which `updates` made afresh: other vectors may be a trainer's own state
    return part.masked_fill_(mask, 0.0) if in_place else part.masked_fill(mask, 0.0)


def _check_uploads(engine: Engine, output: TrainOutput, vectors: Mapping[str, Tensor], shared: int) -> None:
    """Refuse vectors other than those that the trainer declares, and vectors that are longer than what is shared."""
    trainer = engine.work.trainer
    declared = set(engine.work.uploads())
    if undeclared := sorted(output.vectors.keys() - declared):
        raise RuntimeFault(
            f"trainer {trainer.kind!r} would send {undeclared[0]!r}, which its uploads() do not declare: add it there"
        )
    if missing := sorted(declared - output.vectors.keys()):
        raise RuntimeFault(
            f"trainer {trainer.kind!r} declares {missing[0]!r} in uploads() but sent nothing of that name"
        )
    shapes = trainer.upload_shapes(engine.work)
    for name, part in vectors.items():
        if name in shapes:  # declared with its shape, so that private numbers do not fit by chance
            if tuple(part.shape[1:]) != shapes[name]:
                raise RuntimeFault(f"trainer {trainer.kind!r} would send {name!r} of another shape than it declares")
        elif shared < engine.work.layout.size and part.shape[1:].numel() > shared:
            raise RuntimeFault(f"trainer {trainer.kind!r} would send {name!r}, which is longer than what is shared")


def _transformed(engine: Engine, stack: ClientStack, vectors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The vectors after every transform, at the clients."""
    rng_key, seed = engine.row_loader.rng_key, stack.secret or engine.work.noise_seed
    draw = long_key if isinstance(seed, str) else key
    clients = engine.work.shown_numbers(stack.clients)
    for index, transform in enumerate(engine.work.transforms):
        rng_keys = [rng_key(seed, c, v, index) for c, v in zip(stack.clients, stack.rng_versions, strict=True)]
        change, count = vectors["model"], None if transform.takes_statistics else engine.work.layout.shared_trained
        vectors = transform.on_client(
            {**vectors, "model": change[:, :count]}, [draw("stage", *key_of) for key_of in rng_keys], clients
        )
        if vectors["model"].shape[1] < change.shape[1]:
            statistics = torch.zeros_like(change[:, count:]) if transform.hides() else change[:, count:]
            vectors = {**vectors, "model": torch.cat([vectors["model"], statistics], dim=1)}
    return vectors


def _sizes(engine: Engine, vectors: Mapping[str, Tensor], packed: Sequence[Tensor], count: int) -> list[int]:
    """Bytes of each client's update: of its vectors, some of which may be packed."""
    if packed and engine.work.masking is not None:  # the numbers that are packed are masked instead
        client_vectors = {name: part[0] for name, part in vectors.items()} | {"model": packed[0].view(torch.float32)}
        return [engine.work.masking.nbytes(client_vectors)] * count
    if packed:
        rest = sum([part[0].numel() * part.element_size() for name, part in vectors.items() if name != "model"])
        return [rest + len(row) for row in packed]
    if engine.work.transforms:
        return [engine.work.transforms[-1].nbytes({name: part[0] for name, part in vectors.items()})] * count
    return [sum([part.shape[1:].numel() * part.element_size() for part in vectors.values()])] * count


def _packed(engine: Engine, clients: Sequence[int], rows: Tensor, numbers: LaterNumbers) -> Tensor | list[Tensor]:
    """A named tensor of the new client state, [c, ...], or packed with a tensor for each client."""
    packed = engine.packer.pack(rows, clients) if isinstance(rows, FactoredVectors) else None
    return numbers.fetched(to_dense(rows)) if packed is None else [row.cpu() for row in packed]


def _columns(models: Tensor, start: int, stop: int) -> Tensor:
    """Some columns of models [c, p], without forming the others."""
    return models.columns(start, stop) if isinstance(models, FactoredVectors) else models[:, start:stop]


def _norms(changes: Tensor, known_lengths: Tensor | None, count: int) -> Tensor:
    """Lengths [c] of the first `count` numbers of the changes [c, s], unless they are known."""
    if known_lengths is not None:
        return known_lengths
    cut = changes.first(count) if isinstance(changes, FactoredVectors) else changes[:, :count]
    lengths: Tensor = torch.linalg.vector_norm(changes if count == changes.shape[1] else cut, dim=1)
    return lengths


def _known_norms(models: Tensor, inputs: TrainInput, shared: int) -> Tensor | None:
    """Lengths [c] of the changes of the first `shared` numbers, where training has computed them already."""
    if not isinstance(models, FactoredVectors) or models.start is None:
        return None
    start = FactoredVectors.of(inputs.model).alone
    return models.first(shared).lengths() if start is not None and start.name == models.start.name else None


def _finiteness(part: Tensor) -> Tensor:
    """Numbers [c] that are finite where a client's tensor is: `isfinite` writes three tensors as large as that."""
    return part.sums() if isinstance(part, FactoredVectors) else part.flatten(1).sum(1)


def _reject_reason(norm: float, limit: float) -> str | None:
    """Return why an update of this length may not count, or None."""
    # NaN is above no limit, so it has to be asked for first
    if norm != norm or norm == float("inf"):
        return "not finite"
    return f"the step{TOO_LONG}" if norm > limit else None


def _compressed(
    work: ClientWork, compressor: Compressor, stack: ClientStack, vectors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[Tensor], dict[str, Tensor | list[Tensor]]]:
    """Pack the changes of a stack.

    Returns:
        The vectors as the server unpacks them; the bytes of each client's change; and the clients' new state.
    """
    changes, packed = vectors["model"].cpu(), list[Compressed]()
    for row, (client, version) in enumerate(zip(stack.clients, stack.rng_versions, strict=True)):
        state = {name: rows[row].cpu() for name, rows in stack.state.items()}
        change = changes[row].contiguous()
        if bool(change.isfinite().all()):
            packed.append(compressor.compress(change, state, work.wire_context(client, version)))
        else:  # it cannot count, and the client's state stays as it was
            packed.append(Compressed(change.new_zeros(0, dtype=torch.uint8), change, state))
    new_state = {name: [compressed.state[name] for compressed in packed] for name in compressor.initial_state(work)}
    model = torch.stack([compressed.change for compressed in packed]).to(vectors["model"].device)
    return {**vectors, "model": model}, [compressed.packed for compressed in packed], dict(new_state)


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
