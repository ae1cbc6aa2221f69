"""The simulator's settings: engine, clients trained at once, processes, and simulated devices."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BeforeValidator, Field, PlainSerializer, field_validator, model_validator

from piebald.contracts import Clients, Fleet
from piebald.contracts.component import build
from piebald.contracts.data import lacked_inputs
from piebald.core.errors import CannotTrain, SettingError, failure_reason
from piebald.core.machine import count_cores, device_named, one_thread, raise_if_lost, set_up_gpu
from piebald.core.randomness import generator
from piebald.engines.compilation import ENGINES as COMPILED
from piebald.engines.engine_choice import (
    DEFAULT_LANES,
    MEASURED,
    EngineChoice,
    agrees,
    counted,
    fastest,
    key_of,
    lane_counts,
    make_engine,
    stack_limit,
    stack_sizes,
)
from piebald.methods.client_work import ClientWork
from piebald.methods.training.sgd import Sgd
from piebald.runtimes.base import RuntimeSettings
from piebald.runtimes.simulation.simulation import Simulation
from piebald.runtimes.workers.forked import ForkedWorkers, check_forkable, in_fork
from piebald.runtimes.workers.pool import InProcess, WorkerPool, can_fork

_log = logging.getLogger(__name__)
_SMALL_ROUND = 0.02  # seconds: rounds shorter than this do not repay worker processes


def _fleet(table: Any) -> Any:
    """A fleet from its table; it must be a component, since a resumed run rebuilds the fleet from its fields."""
    if table is None:
        return None
    fleet = build("fleet", table)
    if not isinstance(fleet, Fleet):
        raise ValueError(f"must be one of piebald.data.partition's fleets or its table, got {table!r}")
    return fleet


AnyFleet = Annotated[
    Any, BeforeValidator(_fleet), PlainSerializer(lambda fleet: None if fleet is None else fleet.table())
]


class Simulated(RuntimeSettings):
    """Settings of every simulation, wherever its engines run.

    Attributes:
        engine: "sequential" (one client after another), "batched" (many at once through one module), "vmapped" (many at
            once through vmap), "reference" (slow and plain), or "auto", which measures and takes the fastest.
        stack: clients trained at once by the batched and the vmapped engine, and side by side by the sequential one
            where steps are recorded; None measures or chooses the number.
        workers: processes or actors that train, at most one for each client; None decides by the number of cores and
            the work there is.
        device: where engines compute, as torch calls it.
        deterministic: choose `engine` and `stack` by counting (`engines.choose.counted`) and no workers, never by
            measuring times, so that a run repeats bit for bit in another process.
        bfloat16: forward and backward passes under autocast.
        tf32: let an NVIDIA GPU round the inputs of matrix products and convolutions to 10 bits, which is faster and
            differs from the CPU in the third digit.
        compiled: passes through `torch.compile`, on NVIDIA's GPUs with CUDA graphs, for the engines "sequential" and
            "vmapped" and models without dropout; the first passes take minutes, and numbers differ in the last digits.
        recorded: start each training step as one CUDA graph, recorded once for each shape of batch: "auto" and true
            where steps can be recorded, false nowhere.  Numbers are the same.
        memory: bytes of client state kept in RAM; more goes to a temporary file.
        fleet: devices of the clients, instant by default.
    """

    axis = "runtime"  # without a kind: it cannot be chosen itself

    engine: Literal["auto", "sequential", "vmapped", "batched", "reference"] = "auto"
    stack: int | None = Field(default=None, ge=1)
    workers: int | None = Field(default=None, ge=0)
    device: str = "cpu"
    deterministic: bool = False
    bfloat16: bool = False
    tf32: bool = False
    compiled: bool = False
    recorded: Literal["auto"] | bool = "auto"
    memory: int = Field(default=4 << 30, ge=0)
    fleet: AnyFleet = None

    @model_validator(mode="after")
    def _check_device(self) -> Self:
        if self.engine == "reference" and self.device != "cpu":
            raise ValueError(f"engine 'reference' is for the CPU: name another one with device = {self.device!r}")
        if self.tf32 and not self.device.startswith("cuda"):
            raise ValueError(f"tf32 is for NVIDIA's GPUs: leave it out with device = {self.device!r}")
        if self.recorded is True and not self.device.startswith("cuda"):
            raise ValueError(f"recorded = true is for NVIDIA's GPUs: leave it out with device = {self.device!r}")
        if self.compiled and self.engine not in COMPILED:
            raise ValueError(f"compiled is for the engines {' and '.join(map(repr, COMPILED))}, got {self.engine!r}")
        return self

    def open(self, work: ClientWork, clients: Clients) -> Simulation:
        """Start simulating."""
        complete = self.engine != "auto" and self.workers is not None
        settings = self if complete else self.resolved(work, clients, len(clients))
        return Simulation(settings, work, clients)

    def worker_pool(self, work: ClientWork, clients: Clients, room: tuple[int, int]) -> WorkerPool:
        """The workers; `room` is the bytes of shared memory of a message, and how many clients' vectors fit into it."""
        raise NotImplementedError

    def share_of_gpu(self) -> float:
        """Return the share of a GPU's memory that one process may fill."""
        return 1 / max(1, self.workers or 1)

    def resolved(self, work: ClientWork, clients: Clients, expected: int) -> Self:
        """See `RuntimeSettings.resolved`."""
        return self.measured(work, clients, expected)

    def measured(self, work: ClientWork, clients: Clients, expected: int) -> Self:
        """Recall, measure or count, in this process, engine, stack and workers where they were left open."""
        if self.deterministic:
            return self._counted(work, clients, expected)
        device, engine, stack, workers = torch.device(self.device), self.engine, self.stack, self.workers
        forks = device.type == "cpu" and can_fork()
        cores = count_cores()
        seconds_per_step, sample = 0.0, [0]
        with one_thread(forks):
            if engine == "auto":
                stacks = stack_sizes(work, device, -(-expected // max(workers or 1, 1)))
                count = min(len(clients), max(stacks))
                # by the run's seed, so that a run that is repeated measures the same clients
                sample = generator("measure", work.seed).choice(len(clients), count, replace=False).tolist()
                chosen = self._fastest_or_plain(work, clients, device, sample, stacks)
                engine, seconds_per_step = chosen.engine, chosen.seconds_per_step  # type: ignore[assignment]
                stack = stack or chosen.stack
        if stack is None:
            stack = self._default_stack(engine)
        if workers is None:
            # not known where the engine is named: ten batches a client are then assumed
            rows = clients.size(sample[0], "train") if self.engine == "auto" else None
            batch = work.trainer.batch if isinstance(work.trainer, Sgd) else 20
            seconds = (
                expected
                * seconds_per_step
                * (work.trainer.epochs if isinstance(work.trainer, Sgd) else 1)
                * ((rows or 10 * batch) / batch)
            )
            small = self.engine == "auto" and seconds < _SMALL_ROUND
            workers = min(cores, expected) if forks and cores > 1 and expected > 1 and not small else 0
        workers = min(workers, len(clients))  # others would have nothing to do
        # larger stacks than each worker's share of the clients would leave other workers without any
        stack = min(stack, stack_limit(work, device, self.share_of_gpu()), -(-expected // max(workers, 1)))
        return self.model_copy(update={"engine": engine, "stack": stack, "workers": workers})

    def _default_stack(self, engine: str) -> int:
        """Return the clients that train at once where an engine is named and nothing else."""
        lanes = DEFAULT_LANES if self.recorded and self.device.startswith("cuda") else 1
        return 8 if engine in ("vmapped", "batched") else lanes

    def _fastest_or_plain(
        self, work: ClientWork, clients: Clients, device: torch.device, sample: Sequence[int], stacks: Sequence[int]
    ) -> EngineChoice:
        """Return the fastest choice, or the sequential engine where a client that was measured cannot train."""
        try:
            return self._fastest(work, clients, device, sample, stacks)
        except SettingError:
            raise
        except Exception as error:  # whatever the user's own code may raise
            raise_if_lost(error, device)
            _log.warning("engines cannot be measured, so the sequential one is taken: %s", failure_reason(error))
            return EngineChoice("sequential", 1, 0.0)

    def _fastest(
        self, work: ClientWork, clients: Clients, device: torch.device, sample: Sequence[int], stacks: Sequence[int]
    ) -> EngineChoice:
        """Return the choice of an earlier run like this one, if its losses are right, or else measure now."""
        sample = [client for client in sample if not lacked_inputs(clients, client)] or sample
        holding = [client for client in sample if clients.size(client, "train") not in (0, 1)] or sample
        sizes = [clients.size(client, "train") for client in holding]
        share, recorded = self.share_of_gpu(), bool(self.recorded)
        key = key_of(work, sizes, device, self.bfloat16, recorded)
        before, most = MEASURED.get(key), min(len(holding), stack_limit(work, device, share))
        usable = before is not None and before.stack <= most and before.stack in (*stacks, *lane_counts(stacks))
        if before is None or not usable or not agrees(before.engine, work, clients, device, self.bfloat16, holding):
            MEASURED[key] = fastest(work, clients, device, self.bfloat16, holding, stacks, share, recorded)
        return MEASURED[key]

    def _counted(self, work: ClientWork, clients: Clients, expected: int) -> Self:
        """Choose what was left open by counting alone."""
        device, workers = torch.device(self.device), self.workers or 0
        engine, stack = self.engine, self.stack
        if engine == "auto":
            with one_thread(device.type == "cpu" and can_fork()):
                try:
                    engine, counted_stack = counted(work, clients, device, self.bfloat16, expected)  # type: ignore[assignment]
                except CannotTrain:
                    engine, counted_stack = "sequential", 1
            stack = stack or counted_stack
        if stack is None:
            stack = self._default_stack(engine)
        stack = min(stack, stack_limit(work), expected)
        return self.model_copy(update={"engine": engine, "stack": stack, "workers": workers})


class Simulator(Simulated):
    """The settings of a simulation on this machine.

    Attributes:
        workers: processes, at most one for each client; 0 trains in this process, None decides by the number of cores
            and the work there is.  On a GPU, None is 0, and several processes share it and its memory.
        device: "cpu", "cuda", "cuda:1", "mps" (Apple's GPU, which no test has seen), or "auto" for the first GPU that
            is here, else the CPU.

    Examples:
        >>> import torch
        >>> import piebald
        >>> clients = piebald.clients_from([(torch.eye(4), torch.tensor([0, 1, 0, 1]))] * 3)
        >>> simulator = piebald.Simulator(engine="batched", stack=3, workers=0)
        >>> run = piebald.run("fedavg", clients, torch.nn.Linear(4, 2), rounds=2, runtime=simulator)
        >>> len(run.rounds)
        2
    """

    @field_validator("device")
    @classmethod
    def _existing_device(cls, name: str) -> str:
        return device_named(name)

    @model_validator(mode="after")
    def _check_workers(self) -> Self:
        if self.workers and (self.device == "mps" or (self.device != "cpu" and not can_fork())):
            raise ValueError(
                f"workers are for the CPU and, where processes fork, for NVIDIA's GPUs: leave them out, or set them to "
                f"0, with device = {self.device!r}"
            )
        return self

    def measured(self, work: ClientWork, clients: Clients, expected: int) -> Self:
        """See `Simulated`; for workers that share a GPU in a process of its own, after whose end this one can fork."""
        if self.device == "cpu" or not self.workers:
            return super().measured(work, clients, expected)
        check_forkable(self.device)
        choices = in_fork(lambda: _choices(super(Simulator, self).measured(work, clients, expected)))
        return self.model_copy(update=choices)

    def server_device(self) -> torch.device:
        """See `RuntimeSettings`; with the engine, where that is in this process."""
        return torch.device("cpu" if self.workers else self.device)

    def worker_pool(self, work: ClientWork, clients: Clients, room: tuple[int, int]) -> WorkerPool:
        """This process, or forked workers."""
        if self.device.startswith("cuda"):
            set_up_gpu(self.tf32, self.deterministic)
        device = torch.device(self.device)
        options = (device, self.bfloat16, self.compiled, bool(self.recorded))
        if self.workers and device.type != "cpu":
            check_forkable(self.device)
            make = lambda: make_engine(self.engine, work, clients, *options)  # noqa: E731
            return ForkedWorkers(make, work.layout.size, self.workers, *room)
        with one_thread(device.type == "cpu" and can_fork()):  # as it will compute
            engine = make_engine(self.engine, work, clients, *options)
        return (
            ForkedWorkers(lambda: engine, work.layout.size, self.workers, *room) if self.workers else InProcess(engine)
        )


def _choices(settings: Simulated) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in ("engine", "stack", "workers")}
