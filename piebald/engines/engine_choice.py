"""Build an engine by name, or measure which engine is fastest here."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from piebald.contracts import PLAIN_STEP, Clients, SgdConfig
from piebald.contracts.data import lacked_inputs
from piebald.core.machine import count_cores, free_cached, free_memory, raise_if_lost
from piebald.engines.batched import BatchedEngine
from piebald.engines.factored.vectors import FactoredVectors
from piebald.engines.model_traits import passes_of, probe
from piebald.engines.recorded_step import WORTH
from piebald.engines.reference import ReferenceEngine
from piebald.engines.row_loader import RowLoader
from piebald.engines.sequential import MOST_LANES, SequentialEngine
from piebald.engines.sgd_step import SgdRun
from piebald.engines.vmapped import VmappedEngine
from piebald.methods.client_work import ClientWork
from piebald.methods.training.sgd import Sgd

ENGINES: dict[str, type[SequentialEngine]] = {
    engine.name: engine for engine in (SequentialEngine, VmappedEngine, BatchedEngine, ReferenceEngine)
}
_STACKS = (1, 5, 25, 50)
_LARGE_STACK = 250  # of tiny models, where the clients of a round are so many that each core gets several
_TINY = 20_000  # parameters: the stack of them takes 20 MB
_SHARE = 4  # stacks for each core, so that those with few rows do not wait for those with many
_STACKS_ON_GPU = (1, 8, 32, 128, 512)  # larger ones: a GPU has no use for one small client after another
_LANES = (2, 4, 8, MOST_LANES)  # clients that the sequential engine trains side by side where steps are recorded
DEFAULT_LANES = 4
_VECTORS = 12  # numbers on a GPU for each parameter of a stack: models, starts, gradients, state, copies, activations
_STACK_NUMBERS = 64_000_000  # a measured stack has at most this many parameters, so that measuring takes little memory
_STEPS = 4
_FEW_STEPS = 2  # the loss of the second one shows the first one's gradient
_FEW_ROWS = 4  # of a batch: enough to compare two engines, where times are not measured
_REPEATS, _SECONDS = 4, 0.2  # a measurement is the best of this many repeats, or of fewer that have taken this long
_MARGIN = 0.85  # another engine must be this much faster than the sequential one: measuring is noisy
_COUNTED_STACK = 25  # of the batched engine, where the choice is made by counting alone
_LOOKED_AT = 1000  # clients among which two with rows are looked for
_CANNOT_RUN = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, UserWarning)
_CLOSE = 1e-3  # allowed relative difference of another engine's first losses from the sequential one's
_log = logging.getLogger(__name__)


class EngineChoice(NamedTuple):
    """The engine that was measured to be the fastest.

    Attributes:
        engine: the name of the engine.
        stack: clients in a stack.
        seconds_per_step: of one client.
    """

    engine: str
    stack: int
    seconds_per_step: float


MEASURED: dict[Hashable, EngineChoice] = {}  # in this process: the runs of a comparison measure once


def make_engine(
    name: str,
    work: ClientWork,
    clients: Clients,
    device: torch.device,
    bfloat16: bool,
    compiles: bool = False,
    recorded: bool = True,
) -> SequentialEngine:
    """An engine by name ("sequential", "vmapped", "batched" or "reference"), ready for these clients.

    Args:
        name: the engine's name.
        work: what clients do.
        clients: who holds what.
        device: that computes.
        bfloat16: whether passes are under autocast.
        compiles: whether passes are compiled.
        recorded: whether steps are recorded, where the device can.
    """
    row_loader = RowLoader(clients, device, work)
    traits = row_loader.tried(lambda rows: probe(work, rows))
    engine = ENGINES[name](work, row_loader, traits, device, bfloat16, recorded)
    if compiles:
        engine.compile()
    if (refusal := _refusal(engine)) is not None:
        _log.warning("engine %r trains one client after another, as 'sequential' does: %s", name, refusal)
    return engine


def _refusal(engine: SequentialEngine) -> str | None:
    """Return why an engine that trains many clients at once cannot do so with this model, or None."""
    if isinstance(engine, BatchedEngine) and engine.can_batch:
        return None
    return engine.refusal if isinstance(engine, VmappedEngine) and not engine.traits.random else None


def stack_limit(work: ClientWork, device: torch.device | None = None, share: float = 1.0) -> int:
    """The largest stack whose vectors take a modest amount of memory, or what is free on a GPU.

    Args:
        work: what clients do.
        device: that computes.
        share: of the GPU that one process may fill, where several use it.
    """
    free = None if device is None else free_memory(device)
    # 4 bytes for each float32
    numbers = _STACK_NUMBERS if free is None else int(free * share) // (4 * _VECTORS)
    return max(1, numbers // max(work.layout.size, 1))


def stack_sizes(work: ClientWork, device: torch.device, expected: int) -> tuple[int, ...]:
    """The sizes of stacks that are measured where so many clients train at a time."""
    if device.type != "cpu":
        return _even(_STACKS_ON_GPU, expected)
    many = expected >= _SHARE * count_cores() * _LARGE_STACK and work.layout.size <= _TINY
    return (*_STACKS, _LARGE_STACK) if many else _STACKS


def lane_counts(stacks: Sequence[int]) -> tuple[int, ...]:
    """The numbers of lanes that are measured beside these sizes of stacks."""
    return _even(_LANES, max(stacks))


def _even(sizes: Sequence[int], expected: int) -> tuple[int, ...]:
    """Sizes near these, so that the last of a cohort's stacks has as many clients as the others, or hardly fewer."""
    stacks = [-(-expected // size) for size in sizes]
    return tuple(dict.fromkeys(-(-expected // count) for count in stacks))


def fastest(
    work: ClientWork,
    clients: Clients,
    device: torch.device,
    bfloat16: bool,
    sample: Sequence[int],
    stacks: Sequence[int],
    share: float = 1.0,
    recorded: bool = True,
) -> EngineChoice:
    """Try the engines on some clients' own rows.

    An engine whose losses differ from those of the sequential one is left out, so that a model that it does not run
    correctly runs slowly rather than wrongly.  The sizes `stacks` are in increasing order, and one for which memory
    runs out ends them; `share` is as in `stack_limit`, `recorded` as in `make_engine`.  All are measured once the steps
    are recorded that will be.

    Returns:
        The name and the stack size of the fastest, and its seconds for one client and step.
    """
    sample = [client for client in sample if clients.size(client, "train") != 0] or list(sample)
    sequential = make_engine("sequential", work, clients, device, bfloat16, recorded=recorded)
    expected, seconds = _measure(sequential, sample[:2], 1)
    best = EngineChoice("sequential", 1, seconds)
    if sequential.traits.random:
        return best
    kinds: list[type[SequentialEngine]] = [] if passes_of(work).alone else [BatchedEngine, VmappedEngine]
    if sequential.records:
        plain = make_engine("sequential", work, clients, device, bfloat16, recorded=False)
        expected = _losses(plain, sample[:2])
        kinds.insert(0, SequentialEngine)
    for kind in kinds:
        engine = kind(work, sequential.row_loader, sequential.traits, device, bfloat16, recorded)
        if isinstance(engine, BatchedEngine) and (not engine.can_batch or work.row_privacy is not None):
            continue
        if kind is not SequentialEngine and _refusal(engine) is not None:
            continue
        for stack in lane_counts(stacks) if kind is SequentialEngine else stacks:
            if stack > min(len(sample), stack_limit(work, device, share)):
                break
            try:
                with warnings.catch_warnings():
                    # vmap falls back to a loop
                    warnings.filterwarnings("error", message="There is a performance drop")
                    # two clients at least, whose losses are compared with the sequential engine's
                    losses, seconds = _measure(engine, sample[: max(stack, 2)], stack)
            except _CANNOT_RUN as error:  # of this engine with this model, or with the memory that there is
                raise_if_lost(error, device)
                free_cached(device)
                break
            # a client without rows has the loss NaN with every engine
            if not torch.allclose(losses[:2], expected, rtol=_close(work, bfloat16), equal_nan=True):
                break
            other = best[0] == "sequential" and kind is not SequentialEngine
            if seconds < (_MARGIN * best[2] if other else best[2]):
                best = EngineChoice(kind.name, stack, seconds)
        if best[0] == BatchedEngine.name and device.type == "cpu":
            break  # many clients through vmap would not be faster
        # before the next one is made, since each keeps models and recordings on the device
        del engine
    free_cached(device)  # a stack that was tried may have taken ten times as much as what is chosen
    return best


def key_of(
    work: ClientWork, rows: Sequence[int | None], device: torch.device, bfloat16: bool, recorded: bool
) -> Hashable:
    """Return all that decides which engine is fast here: the model, the form and number of rows, the kind of training.

    Args:
        work: what clients do.
        rows: training rows of each client that would be measured; None where that is not known.
        device: that computes.
        bfloat16: whether passes are under autocast.
        recorded: whether steps are recorded, where the device can.
    """
    counts, config = [count for count in rows if count is not None], trial(work)
    # to a power of two, so that runs of about the same size share a measurement
    mean = round(math.log2(1 + sum(counts) / len(counts))) if counts else None
    model = tuple(map(type, work.model.modules())), repr(work.model), repr(work.shape), tuple(work.outputs)
    training = config.batch, config.momentum > 0, type(config.rule), len(config.groups), type(config.step)
    return str(device), bfloat16, recorded, model, work.layout, work.objective.name, len(rows), mean, training


def agrees(
    name: str, work: ClientWork, clients: Clients, device: torch.device, bfloat16: bool, sample: Sequence[int]
) -> bool:
    """Return whether an engine can run the model here with the sequential one's first losses on a few rows."""
    sequential = make_engine("sequential", work, clients, device, bfloat16)
    if name == "sequential":
        return True
    engine = ENGINES[name](work, sequential.row_loader, sequential.traits, device, bfloat16)
    if sequential.traits.random or (isinstance(engine, BatchedEngine) and not engine.can_batch):
        return False
    if _refusal(engine) is not None:
        return False
    try:
        expected, losses = (_losses(candidate, sample[:2], _FEW_STEPS, _FEW_ROWS) for candidate in (sequential, engine))
    except _CANNOT_RUN as error:
        raise_if_lost(error, device)
        return False
    return torch.allclose(losses, expected, rtol=_close(work, bfloat16), equal_nan=True)


def counted(work: ClientWork, clients: Clients, device: torch.device, bfloat16: bool, expected: int) -> tuple[str, int]:
    """Choose engine and stack without measuring times, so that the choice is the same whenever and wherever it is made.

    "batched" where several clients train at a time, every layer of the model has a batched form, single rows are not
    hidden, and the losses of the first clients are those of the sequential engine; else "sequential".  A batched stack
    has 25 clients, or fewer where so many models are large or so many do not train at a time.
    """
    held = ((client, clients.size(client, "train")) for client in range(min(len(clients), _LOOKED_AT)))
    # batch norm cannot train on one row, and a stack has one model
    holding = [c for c, size in held if size not in (0, 1) and not lacked_inputs(clients, c)] or [0]
    sequential = make_engine("sequential", work, clients, device, bfloat16)
    stack = min(_COUNTED_STACK, stack_limit(work), expected)
    if stack < 2 or sequential.traits.random or work.row_privacy is not None or passes_of(work).alone:
        return "sequential", 1
    batched = BatchedEngine(work, sequential.row_loader, sequential.traits, device, bfloat16)
    if not batched.can_batch:
        return "sequential", 1
    expected_losses, losses = (_losses(engine, holding[:2]) for engine in (sequential, batched))
    close = torch.allclose(losses, expected_losses, rtol=_close(work, bfloat16), equal_nan=True)
    return ("batched", stack) if close else ("sequential", 1)


def _close(work: ClientWork, bfloat16: bool) -> float:
    """The allowed relative difference of two engines' losses."""
    return 0.02 if bfloat16 or passes_of(work).precision != "float32" else _CLOSE


def _losses(
    engine: SequentialEngine, clients: Sequence[int], steps: int = _STEPS, most_rows: int | None = None
) -> torch.Tensor:
    """The mean losses of a few steps of these clients, trained in one stack, in batches of so many rows at most."""
    start, config = engine.work.initial.to(engine.device).expand(len(clients), -1), trial(engine.work)
    config = dataclasses.replace(config, steps=steps, batch=min(config.batch, most_rows or config.batch))
    return engine.run_sgd(SgdRun(clients, [0] * len(clients), 0, start, config)).loss


def trial(work: ClientWork) -> SgdConfig:
    """A few steps with the run's batch and optimizer."""
    if not isinstance(work.trainer, Sgd):
        return SgdConfig(lr=0.01, batch=20, steps=_STEPS, step=work.row_privacy or PLAIN_STEP)
    trainer = work.trainer
    momentum = 0.0 if trainer.rule is None else trainer.momentum  # that of plain SGD costs next to nothing
    return SgdConfig(
        0.01, momentum, batch=trainer.batch, batches=trainer.batches, steps=_STEPS, step=trainer.local_step,
        rule=trainer.rule, groups=trainer.parameter_groups, base_lr=trainer.lr, passes=trainer.passes,
    )  # fmt: skip


def clock(device: torch.device) -> Callable[[], float]:
    """A clock of what this process computes, where it computes by itself: what other programs take does not count."""
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def _measure(engine: SequentialEngine, clients: Sequence[int], stack: int) -> tuple[torch.Tensor, float]:
    """The clients' mean losses, and seconds for one client and step."""
    config = trial(engine.work)
    start = engine.work.initial.to(engine.device)
    times: list[float] = []
    losses: list[torch.Tensor] = []

    def train() -> list[torch.Tensor]:
        stack_losses = []
        for lo in range(0, len(clients), stack):
            chosen = clients[lo : lo + stack]
            end = engine.run_sgd(SgdRun(chosen, [0] * len(chosen), 0, start.expand(len(chosen), -1), config))
            if isinstance(end.model, FactoredVectors):  # what is not formed in training must be summed afterwards
                change = FactoredVectors.of(end.model - start.expand(len(chosen), -1))
                change.total(start.new_ones(len(chosen)))
            stack_losses.append(end.loss)
        if engine.device.type == "cuda":
            # a GPU has hardly begun when the host gets here, which would measure launches alone
            torch.cuda.synchronize(engine.device)
        return stack_losses

    engine.run_sgd(SgdRun(clients[:1], [0], 0, start.expand(1, -1), dataclasses.replace(config, steps=1)))  # warm up
    for _ in range(WORTH if engine.records else 0):
        train()
        if all(lane.settled for lane in engine.lanes):
            break
    now = clock(engine.device)
    while len(times) < _REPEATS and sum(times) < _SECONDS:
        began = now()
        losses = train()
        times.append(now() - began)
    # the least of all repeats: whatever disturbs a measurement makes it longer
    return torch.cat(losses), min(times) / (len(clients) * _STEPS)
