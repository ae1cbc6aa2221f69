"""Serve a stack of tasks: the rule, the stages on the way out, the check, and the sum where sums are enough.

This is all that happens on the client side of the seam, whatever engine trains and whichever process it runs in.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from piebald.client_work import ClientWork
from piebald.contracts import (
    Personalizes,
    Query,
    SgdConfig,
    SgdOutcome,
    Split,
    SumRequest,
    TrainInput,
    TrainOutput,
    Update,
)
from piebald.errors import RuntimeFault
from piebald.input_statistics import InputHooks, sums
from piebald.parameters import nbytes, pad
from piebald.randomness import key
from piebald.runtimes.engines.row_loader import RowLoader
from piebald.runtimes.engines.sgd_step import SgdRun
from piebald.runtimes.factored.client_state import StatePacker
from piebald.runtimes.factored.sum_terms import Known, Term
from piebald.runtimes.factored.vectors import FactoredVectors
from piebald.training.base import Trainer

PRIVATE = "private"  # the name under which a client's private slice lies in its memory


class Engine(Protocol):
    """What a training engine offers; one that is `lazy` takes vectors that are not formed."""

    name: str
    lazy: bool
    work: ClientWork
    feed: RowLoader
    device: torch.device

    @property
    def packer(self) -> StatePacker: ...

    def walk(self, walk: SgdRun) -> SgdOutcome: ...

    def score(self, clients: Sequence[int], model: Tensor, split: Split) -> tuple[dict[str, Tensor], Tensor]: ...

    def confusion(self, clients: Sequence[int], model: Tensor, split: Split) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class ClientStack:
    """Tasks served together: all train, or all answer one query.

    Attributes:
        moments: what tells these tasks' randomness from the clients' others.
        committed: see `Task`.
        models: [s] each; one tensor many times where clients start from the same model.
        vectors, memory: by name, one [...] for each client.
        ids: the tasks', under which an actor hands in what the clients are to remember (`engines.state_actors`).
    """

    clients: Sequence[int]
    versions: Sequence[int]
    moments: Sequence[int | str]
    committed: Sequence[int]
    models: Sequence[Tensor]
    vectors: Mapping[str, Sequence[Tensor]]
    state: Mapping[str, Sequence[Tensor]]
    query: Query | None = None
    ids: Sequence[int] = ()

    def row(self, row: int) -> ClientStack:
        """One of its clients alone."""
        one = slice(row, row + 1)
        return ClientStack(
            self.clients[one],
            self.versions[one],
            self.moments[one],
            self.committed[one],
            self.models[one],
            {name: rows[one] for name, rows in self.vectors.items()},
            {name: rows[one] for name, rows in self.state.items()},
            self.query,
            self.ids[one],
        )


@dataclass(slots=True, eq=False)
class StackResult:
    """What came of a stack.

    Attributes:
        steps, examples, norms, nbytes: numbers of each client.
        metrics: by name, a number of each client.
        failures: why a client's update may not count, or None.
        vectors: by name, [c, ...]; empty where they were pooled or there is nothing to send.
        memory: by name, what the clients remember from now on, [c, ...] or a list of rows.
    """

    steps: list[int]
    examples: list[int]
    norms: list[float]
    nbytes: int
    metrics: dict[str, list[float]]
    failures: list[str | None]
    vectors: dict[str, Tensor] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)

    def update(self, row: int) -> Update:
        """One client's update."""
        return Update(
            vectors={name: part[row] for name, part in self.vectors.items()},
            examples=self.examples[row],
            steps=self.steps[row],
            metrics={name: values[row] for name, values in self.metrics.items()},
            norm=self.norms[row],
            nbytes=self.nbytes,
        )


class RunningSum:
    """The running sum of a pool."""

    def __init__(self) -> None:
        self.weight = 0.0
        self.vectors: dict[str, Tensor] = {}

    def add(self, weight: float, vectors: Mapping[str, Tensor]) -> None:
        """Add summed vectors that count `weight` together."""
        self.weight += weight
        for name, part in vectors.items():
            if name in self.vectors:
                self.vectors[name] += part
            else:
                self.vectors[name] = part.clone()


@dataclass(slots=True)
class EngineContext:
    """`contracts.ClientContext` for one stack."""

    engine: Engine
    stack: ClientStack
    phase: int = 0

    def run_sgd(
        self,
        model: Tensor,
        descent: SgdConfig,
        *,
        prox: float = 0.0,
        prox_center: Tensor | None = None,
        correction: Tensor | None = None,
        velocity: Tensor | None = None,
    ) -> SgdOutcome:
        stack = self.stack
        walk = SgdRun(stack.clients, stack.moments, self.phase, model, descent, prox, prox_center, correction, velocity)
        self.phase += 1
        with torch.enable_grad():  # also where the caller only wants a model to use, inside torch.no_grad
            return self.engine.walk(walk)

    def score(self, model: Tensor, split: Split) -> tuple[dict[str, Tensor], Tensor]:
        return self.engine.score(self.stack.clients, model, split)

    def moments(self, model: Tensor, layers: Sequence[str]) -> Tensor:
        return moments(self.engine, self.stack.clients, model, layers)

    def confusion(self, model: Tensor, split: Split) -> Tensor:
        return self.engine.confusion(self.stack.clients, model, split)


def serve(
    engine: Engine, stack: ClientStack, pool: SumRequest | None = None, total: RunningSum | None = None
) -> StackResult:
    """Serve a stack; with a pool, updates that may count are summed into `total` and not handed back."""
    work = engine.work
    start = _start(engine, stack)
    if stack.query is not None:
        return _answered(stack.query.answer(start, EngineContext(engine, stack), work.trainer))
    learned = work.trainer.train(start, EngineContext(engine, stack))
    summed = pool is not None and not work.transforms
    served = _outgoing(engine, stack, start, learned, summed)
    if pool is not None and total is not None:
        _pool(served, pool, total)
    served.vectors = {name: formed(part).cpu() for name, part in served.vectors.items()}
    return served


def personal_model(engine: Engine, client: int, version: int, community: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """The model [p] that a client would use for itself, given the global model [s] and what it remembers."""
    remembered = {name: [tensor] for name, tensor in state.items()}
    stack = ClientStack([client], [version], [version], [0], [community], {}, remembered, query=None)
    trainer, start = engine.work.trainer, _start(engine, stack)
    made = (
        trainer.personalize(start, EngineContext(engine, stack)) if isinstance(trainer, Personalizes) else start.model
    )
    return made[0].cpu()


def moments(engine: Engine, clients: Sequence[int], models: Tensor, layers: Sequence[str]) -> Tensor:
    """See `contracts.ClientContext.moments`.  One client after another on any engine: it is one pass without gradient."""
    module, layout = copy.deepcopy(engine.work.model).to(engine.device).eval(), engine.work.layout
    gathered, found = engine.feed.gather(clients, "train"), []
    with torch.no_grad(), InputHooks(module, layers) as inputs:
        for model, places in zip(models, gathered.places, strict=True):
            layout.load(module, model)
            total: dict[str, tuple[Tensor, Tensor, int]] = {}
            for part in torch.split(torch.from_numpy(places).to(engine.device), 256):
                module(gathered.x.index_select(0, part))
                for name in layers:
                    before, new = total.get(name), sums(inputs.seen[name])
                    total[name] = new if before is None else _added(before, new)
            found.append(torch.cat([_moments(total[name]) for name in layers]) if total else None)
    longest = max((len(one) for one in found if one is not None), default=0)
    return torch.stack([one if one is not None else torch.zeros(longest, device=engine.device) for one in found])


def _added(one: tuple[Tensor, Tensor, int], two: tuple[Tensor, Tensor, int]) -> tuple[Tensor, Tensor, int]:
    return one[0] + two[0], one[1] + two[1], one[2] + two[2]


def _moments(total: tuple[Tensor, Tensor, int]) -> Tensor:
    """Means, then variances, from sums, sums of squares and a count."""
    whole, squares, count = total
    mean = whole / count
    return torch.cat([mean, (squares / count - mean.square()).clamp(min=0)]).float()


def _start(engine: Engine, stack: ClientStack) -> TrainInput:
    """The stack's starting point on the engine's device."""
    device, layout = engine.device, engine.work.layout
    model = _together(stack.models, device)
    state = {
        name: _recalled(engine, stack.clients, name, rows) for name, rows in stack.state.items() if name != PRIVATE
    }
    if layout.size > layout.shared:
        model = _with_private(model, _together(stack.state[PRIVATE], device))
    vectors = {name: _together(rows, device) for name, rows in stack.vectors.items()}
    sizes = [engine.feed.size(client) for client in stack.clients] if stack.query is None else [0] * len(stack.clients)
    examples = torch.tensor(sizes, dtype=torch.float32, device=device).unsqueeze(1)
    committed = torch.tensor(stack.committed, dtype=torch.float64, device=device).unsqueeze(1)
    return TrainInput(model, layout.shared, state, vectors, stack.versions, committed, examples)


def _recalled(engine: Engine, clients: Sequence[int], name: str, rows: Sequence[Tensor]) -> Tensor:
    """What clients remember under a name, [c, ...]; for a lazy engine, what a rule adds to vectors and takes from them
    is added up once, if at all.
    """
    packed = [engine.packer.is_packed(row, name) for row in rows]
    made = engine.packer.unpack(rows, clients, engine.device) if any(packed) else _together(rows, engine.device)
    if made is None:  # some are packed and some are not, as when another engine trained before
        alone = [_recalled(engine, [client], name, [row]) for client, row in zip(clients, rows, strict=True)]
        made = torch.cat([formed(one) for one in alone])
    if not engine.lazy:
        return formed(made)
    nothing = made.dim() == 2 and made.stride(0) == 0 and not bool(made[0].any())  # nobody has been asked before
    return FactoredVectors.zeros(made) if nothing else FactoredVectors.of(made) if made.dim() == 2 else made


def _remembered(engine: Engine, clients: Sequence[int], rows: Tensor) -> Tensor | list[Tensor]:
    """What clients are to remember, [c, ...] or one after another."""
    packed = engine.packer.pack(rows, clients) if isinstance(rows, FactoredVectors) else None
    return formed(rows).cpu() if packed is None else [row.cpu() for row in packed]


def _together(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    """Clients' tensors as one [c, ...]; what all of them share is expanded, not copied."""
    first = rows[0]
    if all(row is first for row in rows):
        return first.to(device).expand(len(rows), *first.shape)
    return torch.stack(list(rows)).to(device)


def _with_private(model: Tensor, private: Tensor) -> Tensor:
    """Whole models [c, p] from their shared numbers and their private ones; what all share is not copied."""
    shared, size = model.shape[1], model.shape[1] + private.shape[1]
    if model.stride(0):
        return torch.cat([model, private], dim=1)
    base = Term.of(pad(model[0], size))
    return FactoredVectors(
        model, len(model), size, [base], (), private, [(slice(shared, size), slice(0, size - shared))]
    )


def _outgoing(engine: Engine, stack: ClientStack, start: TrainInput, learned: TrainOutput, summed: bool) -> StackResult:
    """Split what was learnt at the shared slice: the front leaves, the rest stays.

    What will only be `summed` is not formed where the engine has not formed it.
    """
    work, shared, size = engine.work, start.shared, engine.work.layout.size
    change = learned.model[:, :shared] - start.model[:, :shared]
    vectors: Mapping[str, Tensor] = {"model": change, **learned.vectors}
    _check_declared(work.trainer, learned.vectors)
    for name, part in vectors.items():
        if shared < size and part.shape[1:].numel() > shared:
            raise RuntimeFault(
                f"trainer {work.trainer.kind!r} would send {name!r}, which is longer than what is shared"
            )
    norms = None if work.transforms else _lengths(learned.model, start, shared)
    if not summed:
        vectors = {name: formed(part) for name, part in vectors.items()}
    for place, stage in enumerate(work.transforms):
        words = [engine.feed.words(work.seed, c, v, place) for c, v in zip(stack.clients, stack.moments, strict=True)]
        vectors = stage.on_client(vectors, [key("stage", *word) for word in words], stack.clients)
    norms = torch.linalg.vector_norm(vectors["model"], dim=1) if norms is None else norms
    state = {name: _remembered(engine, stack.clients, rows) for name, rows in learned.state.items()}
    if shared < size:
        state[PRIVATE] = _columns(learned.model, shared, size).cpu()
    one = {name: part[0] for name, part in vectors.items()} if work.transforms else {}
    sent = sum([part.shape[1:].numel() * part.element_size() for part in vectors.values()])
    return StackResult(
        steps=[int(count) for count in learned.steps.tolist()],
        examples=[int(count) for count in start.examples.flatten().tolist()],
        norms=norms.tolist(),
        nbytes=work.transforms[-1].nbytes(one) if work.transforms else sent,
        metrics={name: values.tolist() for name, values in learned.metrics.items()},
        failures=[None] * len(learned.steps),
        vectors=dict(vectors),
        state=state,
    )


def _check_declared(trainer: Trainer, vectors: Mapping[str, Tensor]) -> None:
    """Refuse an update whose vectors are not those that its trainer declares."""
    declared = set(trainer.uploads())
    if undeclared := sorted(vectors.keys() - declared):
        raise RuntimeFault(
            f"trainer {trainer.kind!r} would send {undeclared[0]!r}, which its uploads() do not declare: add it there"
        )
    if missing := sorted(declared - vectors.keys()):
        raise RuntimeFault(
            f"trainer {trainer.kind!r} declares {missing[0]!r} in uploads() but sent nothing of that name"
        )


def formed(vectors: Tensor) -> Tensor:
    """Vectors as an ordinary tensor."""
    return vectors.dense() if isinstance(vectors, FactoredVectors) else vectors


def _columns(models: Tensor, start: int, stop: int) -> Tensor:
    """Some columns of models [c, p], without forming the others."""
    return models.columns(start, stop) if isinstance(models, FactoredVectors) else models[:, start:stop]


def _lengths(models: Tensor, start: TrainInput, shared: int) -> Tensor | None:
    """How far models have moved in their shared numbers, [c], where training knows."""
    if not isinstance(models, FactoredVectors) or models.start is None:
        return None
    began = FactoredVectors.of(start.model).alone
    return models.first(shared).lengths() if began is not None and began.name == models.start.name else None


def _answered(learned: TrainOutput) -> StackResult:
    metrics = {name: values.tolist() for name, values in learned.metrics.items()}
    count = len(learned.steps)
    examples = [int(rows) for rows in metrics.pop("examples", [0.0] * count)]
    vectors = {name: part.cpu() for name, part in learned.vectors.items()}
    return StackResult(
        [0] * count, examples, [0.0] * count, nbytes(vectors) // max(count, 1), metrics, [None] * count, vectors
    )


def _pool(served: StackResult, pool: SumRequest, total: RunningSum) -> None:
    """Sum the updates that may count; the others are marked, and no number of theirs is touched."""
    weights, rows = [], []
    vectors, served.vectors = served.vectors, {}
    # a sum is finite where its terms are; `isfinite` writes three tensors as large as the part
    sound = {n: _sums(part).isfinite().tolist() for n, part in vectors.items() if n != "model"}
    for row in range(len(served.norms)):
        served.failures[row] = reject_reason(served.norms[row], pool.limit) or next(
            (f"{name} is not finite" for name, finite in sound.items() if not finite[row]), None
        )
        if served.failures[row] is None:
            weights.append(pool.weight.weight(served.update(row)))
            rows.append(row)
    if not rows:
        return
    if len(rows) < len(served.norms):  # a sum of products cannot leave out one that is not finite
        vectors = {name: part[rows] for name, part in vectors.items()}
    ones, known = [1.0] * len(rows), Known()
    summed = {name: _weighted(part, weights if name == "model" else ones, known) for name, part in vectors.items()}
    total.add(sum(weights), summed)


def _sums(part: Tensor) -> Tensor:
    """Numbers [c] that are finite where a client's part is."""
    return part.sums() if isinstance(part, FactoredVectors) else part.flatten(1).sum(1)


def _weighted(part: Tensor, weights: Sequence[float], known: Known) -> Tensor:
    """The weighted sum of clients' vectors [c, ...]."""
    if isinstance(part, FactoredVectors):
        return part.total(part.own.new_tensor(weights), known)
    if set(weights) == {1.0}:
        return part.sum(0)
    made: Tensor = torch.tensordot(part.new_tensor(weights), part, 1)
    return made


def reject_reason(norm: float, limit: float) -> str | None:
    """Why an update with this norm may not count."""
    if norm != norm or norm == float("inf"):
        return "not finite"
    return f"step of length {norm:.3g} is above the limit of {limit:.3g}" if norm > limit else None
