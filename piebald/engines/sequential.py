"""The sequential engine: one client after another, on one module whose tensors are views of a flat vector."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from piebald.contracts import LocalLoss, Rows, SgdOutcome
from piebald.contracts.training import Gradients
from piebald.core import pytree
from piebald.core.errors import SettingError
from piebald.core.machine import moved
from piebald.core.metrics import for_training, mean_over_rows, nonzero
from piebald.core.parameters import Layout, Part, copied
from piebald.core.randomness import key, torch_seed
from piebald.engines.batched_layers import KeyedDropout, mix
from piebald.engines.compilation import compiled
from piebald.engines.device_copies import CohortCopies, moved_arrays
from piebald.engines.factored.client_state import StatePacker
from piebald.engines.model_traits import Traits, passes_of, probe
from piebald.engines.recorded_step import BY_HAND, Checkpointing, Lane, StepForm, recorder_for, side_by_side
from piebald.engines.row_gradients import MAX_NUMBERS, ClippingEngine, LossEvaluator, noised, row_keys, surviving
from piebald.engines.row_loader import (
    Gathered,
    Positions,
    RngKey,
    RowLoader,
    augmented,
    batches,
    pass_slices,
    planned_steps,
)
from piebald.engines.scoring import bind
from piebald.engines.sgd_step import (
    GroupSpan,
    Hidden,
    LossScale,
    SgdRun,
    Stepper,
    TableStepper,
    gradients_of_one,
    joined,
    plain_step,
    tensor_spans,
)
from piebald.engines.static_buffers import StaticBuffers, StepTables, padded, vectors_of
from piebald.methods.client_work import ClientWork

LARGE = 1 << 24  # parameters of a model whose memory counts more than the time to take it
MOST_LANES = 16  # clients that one engine trains side by side, one after another's step
_NOWHERE = np.zeros(0, dtype=np.int64)


class _LaneSteps(NamedTuple):
    """The data that all lanes of a run share: rows, tables, lengths of each client's batches, the optimizer, and the
    place of models [c, p] and losses [c].
    """

    rows: Gathered
    tables: StepTables
    lengths: list[list[int]]
    stepper: Stepper
    end: Tensor
    loss: Tensor


class SequentialEngine(ClippingEngine):
    """Trains the clients of a stack one after another, and scores models; the base of all other engines."""

    name = "sequential"
    takes_factored = False

    def __init__(
        self,
        work: ClientWork,
        row_loader: RowLoader,
        traits: Traits,
        device: torch.device,
        bfloat16: bool = False,
        recorded: bool = True,
    ) -> None:
        if traits.mixes and work.row_privacy is not None:
            raise SettingError(
                f"{work.trainer.kind} clips each row's own gradient but this model mixes the rows of a batch: "
                "take one that does not, with group norm (nn.GroupNorm) in place of batch norm"
            )
        if bfloat16 and passes_of(work).precision == "float16":
            raise SettingError(
                "bfloat16 = true of the runtime and precision = 'float16' of the training contradict each other: leave "
                "bfloat16 out"
            )
        self.work, self.row_loader, self.traits, self.device, self.bfloat16 = work, row_loader, traits, device, bfloat16
        self.recorded, self.make_recorder = recorded, recorder_for(device, recorded)
        self.notes: dict[str, str] = {}  # which steps are recorded, and why others are not
        self.copies = CohortCopies(device)
        self.module = copied(work.model, device)
        self.loss = for_training(work.objective.loss)
        self.parameters = self._let_go()
        # in no model vector, so each client has to begin with the template's (`_load`)
        self._integers = {
            name: value.clone() for name, value in self.module.named_buffers() if not value.dtype.is_floating_point
        }
        self._names = [slot.name for slot in work.layout.slots if not slot.buffer]
        self._evaluator: LossEvaluator | None = None
        self._checkpointing: Checkpointing | None = None
        # by what they depend on: patterns are slow to match
        self._tensor_spans: dict[object, tuple[GroupSpan, ...]] = {}
        self._own_engines: dict[int, SequentialEngine] = {}
        self._beside: list[SequentialEngine] = []  # what trains on further lanes
        self._trained: nn.Module = self.module  # in training: the module, or what it was compiled to
        self._conv2d = any(isinstance(layer, nn.Conv2d) for layer in self.module.modules())

    def _let_go(self) -> list[Tensor]:
        """Give up the vector, and return the module's parameters: until a model is loaded they are the run's first."""
        self.vector = moved(self.work.initial, self.device)
        self._owned = self.vector is not self.work.initial
        return bind(self.module, self.work.layout, self.vector)

    @cached_property
    def _gradient(self) -> Tensor:
        """The gradient of one model [p]; engines that train many at once have no use for it."""
        return torch.zeros_like(self.vector)

    @cached_property
    def _gradient_views(self) -> list[Tensor]:
        views = self.work.layout.views(self._gradient)
        return [views[name] for name in self._names]

    @cached_property
    def packer(self) -> StatePacker:
        """Packs client state."""
        return StatePacker(self.work, self.row_loader, self.module)

    def of(self, number: int | None) -> SequentialEngine:
        """The engine of one of the clients' own models, made when it is first needed; this one for the run's."""
        if number is None:
            return self
        if number not in self._own_engines:
            work, lacked = self.work.numbered(number), self.work.lacked(number)
            # a narrow part of this model behaves like it; with few channels, a trial might not show how
            narrow = self.work.held(number) is not None and not lacked
            traits = self.traits if narrow else self.row_loader.tried(lambda rows: probe(work, rows), lacked)
            self._own_engines[number] = self._sibling(type(self), work, traits)
        return self._own_engines[number]

    def _sibling(self, kind: type[SequentialEngine], work: ClientWork, traits: Traits) -> SequentialEngine:
        """Another engine with the settings of this one."""
        sibling = kind(work, self.row_loader, traits, self.device, self.bfloat16, self.recorded)
        sibling.notes = self.notes
        if self._trained is not self.module:
            sibling.compile()
        return sibling

    def compile(self) -> None:
        """Compile the passes of training, see `compilation.compiled`."""
        module = compiled(self.module, self.traits, self.device, self.recorded)
        assert isinstance(module, nn.Module)  # as what it was made of
        self._trained = module

    # -- training

    def run_sgd(self, run: SgdRun) -> SgdOutcome:
        """Train the clients of the stack one after another."""
        count, tables = len(run.clients), self.reads_tables(run)
        # what was trained in place is handed over, without a copy
        alone = count == 1 and not tables and self.device.type == "cpu" and self.work.layout.size > LARGE
        if alone:
            self._own()
        end = self.vector[None] if alone else torch.empty(count, self.work.layout.size, device=self.device)
        gathered = self.row_loader.for_training(run.clients, run.config)
        planned = [planned_steps(rows, run.config, self.traits.mixes, run.only_step) for rows in gathered.positions]
        stepper, keys = self.stepper(run, end, planned), self._step_keys(run, planned)
        if tables:
            return self._train_on_lanes(run, gathered, stepper, end)
        rows, losses, skipped = self._batches(run, gathered), list[Tensor](), [0] * count
        for row, steps in enumerate(planned):
            scale = LossScale.of(run.config.passes, self.device)
            with self._randomness(run, row) as dropout, self._saving_memory(run, steps, dropout):
                # `rows` runs on from client to client: a batch too many here would shift those of all later ones
                client_batches = itertools.islice(rows, steps)
                losses.append(self._train_one(run, row, gathered, client_batches, keys[row], stepper, dropout, scale))
            if alone:
                self._let_go()
            else:
                end[row].copy_(self.vector)
            skipped[row] = 0 if scale is None else scale.skipped
        counts = torch.tensor([steps - lost for steps, lost in zip(planned, skipped, strict=True)], dtype=torch.float32)
        return SgdOutcome(end, moved(counts, self.device), torch.stack(losses), stepper.ended(counts))

    def _batches(self, run: SgdRun, gathered: Gathered) -> Iterator[Tensor]:
        """Positions of every client's mini-batches on the device, one client after another."""
        return moved_arrays(
            (
                batch
                for row, positions in enumerate(gathered.positions)
                for batch in self.batches_of(run, row, positions)
            ),
            self.device,
        )

    def batches_of(self, run: SgdRun, row: int, positions: Positions) -> Iterator[Positions]:
        """Positions of the rows of each of a client's steps."""
        return batches(positions, run.config, self.traits.mixes, *self._own_key(run, row), only=run.only_step)

    def _step_keys(self, run: SgdRun, planned: Sequence[int]) -> Sequence[Tensor | None]:
        """The dropout keys [steps] of each client's steps, None where nothing is drawn from them."""
        if not self.traits.dropout and not run.config.step.hides_rows:
            return [None] * len(planned)
        rng_keys, first = [self.rng_key(run, row) for row in range(len(planned))], run.first_step
        drawn = [
            step_key(rng_key, first + step)
            for rng_key, steps in zip(rng_keys, planned, strict=True)
            for step in range(steps)
        ]
        # a single copy to the device: one for each client would cost more than what it carries
        return torch.split(moved(torch.tensor(drawn, dtype=torch.int64), self.device), list(planned))

    def stepper(self, run: SgdRun, models: Tensor, planned: Sequence[int], layout: Layout | None = None) -> Stepper:
        """The optimizer of a run that trains these models [c, p] in so many steps each."""
        config, layout = run.config, layout or self.work.layout
        tensors: tuple[GroupSpan, ...] = ()
        if config.rule is not None:
            name = (config.groups, config.weight_decay, config.base_lr, config.part)
            if name not in self._tensor_spans:
                self._tensor_spans[name] = tensor_spans(config, self.work.layout, self.work.model)
            tensors = self._tensor_spans[name]
        return Stepper(run, models, layout.trained_part(config.part), joined(tensors), tensors, planned)

    def _train_one(
        self,
        run: SgdRun,
        row: int,
        gathered: Gathered,
        positions: Iterable[Tensor],
        keys: Tensor | None,
        stepper: Stepper,
        dropout: KeyedDropout | None,
        scale: LossScale | None,
    ) -> Tensor:
        """Train one client in the resident module on these batches of rows; returns its mean loss."""
        self._load(run.model[row])
        self.module.train()
        total, number = torch.zeros((), device=self.device), 0
        for batch in positions:
            rows = gathered.take(batch)
            if run.config.augmentation:
                rows = augmented(rows, run.config, run.first_step + number, self.rng_key(run, row))
            key = None if keys is None else keys[number]
            draw = functools.partial(self._start, dropout, key)
            hidden: Hidden | None = None
            if run.config.step.hides_rows:
                assert key is not None
                lot = min(run.config.step_rows, len(gathered.positions[row]))
                hidden = functools.partial(self._hidden_gradients, rows, run, row, lot, number, key, dropout)
            loss, gradients = self._step_gradients(run, row, rows, draw, scale, hidden)
            with torch.no_grad():
                if scale is None or scale.takes_step():
                    self._descend(gradients, stepper, row, number, 0 if scale is None else scale.skipped)
                total += loss
            del gradients  # or they would lie beside those of the next step
            number += 1
        return total / number if number else torch.full_like(total, torch.nan)

    def _descend(
        self, gradients: Sequence[Tensor], stepper: Stepper, row: int, number: int = 0, skipped: int = 0
    ) -> None:
        """The optimizer's step of a client in the resident module; the arguments are those of `Stepper.step`."""
        run, part = stepper.run, stepper.run.config.part
        if run.plain:
            parameters = self._of_part(self.parameters, part)
            plain_step(parameters, gradients, self.vector, run, stepper.spans, row, stepper.rate(row))
        elif stepper.direct:
            stepper.step_along(self.vector, gradients, row, number, skipped)
        else:
            torch._foreach_copy_(self._of_part(self._gradient_views, part), list(gradients))
            stepper.step(self.vector, self._gradient, row, number, skipped)

    # -- training by steps that read tables, which can be recorded

    def reads_tables(self, run: SgdRun) -> bool:
        """Return whether the steps of a run read what differs between them from tables, and so may be recorded."""
        if self.make_recorder is None:
            return False
        if reason := self._unrecorded(run):
            self.notes[f"{self.name}, {reason}"] = BY_HAND
        return not reason

    def _unrecorded(self, run: SgdRun) -> str:
        """Return why steps of a run could not be recorded, whatever the model is; "" where they may be."""
        if self.traits.random:
            return "the model draws numbers from torch's own generators"
        if run.config.step.hides_rows:
            return "rows and noise of DP-SGD are drawn on the host"
        if run.config.augmentation:
            return "augmentation draws from a generator of the host"
        if run.config.passes.precision == "float16":
            return "the host asks whether a float16 step was made"
        return ""

    @cached_property
    def lane(self) -> Lane:
        """The recorded steps of the resident module."""
        assert self.make_recorder is not None
        return Lane(self.make_recorder, self.device, self.notes)

    @cached_property
    def static(self) -> StaticBuffers:
        """Buffers of the resident module's steps; those of rows and tables serve all lanes."""
        return StaticBuffers(self.device)

    @property
    def records(self) -> bool:
        """True if steps are recorded where that can be."""
        return self.make_recorder is not None and self.recorded

    @property
    def lanes(self) -> list[Lane]:
        """All lanes on which this engine trains."""
        # by `__dict__`, since asking for the property would make a lane
        return [engine.lane for engine in (self, *self._beside) if "lane" in engine.__dict__]

    def _lanes(self, count: int) -> list[SequentialEngine]:
        """So many engines that train side by side, each on its own lane; this one is the first."""
        while len(self._beside) < min(count, MOST_LANES) - 1:
            self._beside.append(self._sibling(SequentialEngine, self.work, self.traits))
        return [self, *self._beside[: count - 1]]

    def _train_on_lanes(self, run: SgdRun, gathered: Gathered, stepper: Stepper, end: Tensor) -> SgdOutcome:
        """Train the clients of a stack side by side: the host starts a step of each lane in turn."""
        run = run.formed()  # if a lane formed sums of factors, the others would not wait for it
        count, planned = len(run.clients), stepper.planned
        loss = torch.full((count,), torch.nan, device=self.device)
        rows = self.static.rows(gathered, self.row_loader.lasts(gathered))
        steps = _LaneSteps(rows, *self._step_tables(run, gathered, stepper), stepper, end, loss)
        engines = self._lanes(1 if run.config.passes.checkpointing else count)  # of which memory is short
        side_by_side(
            [
                (engine.lane.recorder, engine._train_in_turn(run, range(first, count, len(engines)), steps))
                for first, engine in enumerate(engines)
            ]
        )
        steps_taken = torch.tensor(planned, dtype=torch.float32)
        return SgdOutcome(end, moved(steps_taken, self.device), loss, stepper.ended(steps_taken))

    def _step_tables(self, run: SgdRun, gathered: Gathered, stepper: Stepper) -> tuple[StepTables, list[list[int]]]:
        """The tables of a run, client by client, and how many rows each client's batches have."""
        plans = [list(self.batches_of(run, row, positions)) for row, positions in enumerate(gathered.positions)]
        lengths, most = [[len(batch) for batch in plan] for plan in plans], max(stepper.planned)
        longest = max((length for client_lengths in lengths for length in client_lengths), default=0)
        width = max(longest, min(run.config.step_rows, 2 * longest))  # most often the same for all runs
        # every client has `most` rows in the tables, so that client k's first step is at row k * most
        positions = torch.cat([padded([*plan, *[_NOWHERE] * (most - len(plan))], width) for plan in plans])
        keys, first = None, run.first_step
        if self.traits.dropout:
            drawn = [
                step_key(self.rng_key(run, row), first + step) for row in range(len(plans)) for step in range(most)
            ]
            keys = self.static.table("keys", torch.tensor(drawn, dtype=torch.int64))
        rates, numbers = (
            self.static.table(name, part.reshape(-1))
            for name, part in zip(("rates", "numbers"), stepper.tables(), strict=True)
        )
        return StepTables(self.static.table("positions", positions), None, keys, rates, numbers), lengths

    def _train_in_turn(self, run: SgdRun, clients: Iterable[int], steps: _LaneSteps) -> Iterator[bool]:
        """Train some clients of a stack one after another on this engine's lane; yields False after each step."""
        lane, most, clients = self.lane, max(steps.stepper.planned), list(clients)
        remaining = Counter(length for row in clients for length in steps.lengths[row])
        total = self.static.like("total", steps.loss[0])
        for row in clients:
            resident = self.static.run(run, slice(row, row + 1), steps.stepper.state)
            stepper = TableStepper(steps.stepper, resident, functools.partial(steps.tables.of_step, lane.number))
            self._load(run.model[row])
            lane.number.fill_(row * most)
            total.zero_()
            buffers = self._buffers(steps, stepper, total)
            form = self.form(resident, *buffers)
            step = functools.partial(self._take_step, steps, stepper, total)
            for length in steps.lengths[row]:
                remaining[length] -= 1
                lane.step(form._replace(rows=(length,)), functools.partial(step, length), remaining[length], buffers)
                yield False
            steps.end[row].copy_(self.vector)
            steps.loss[row].copy_(total / len(steps.lengths[row]))  # NaN without steps
            for name, vectors in steps.stepper.state.items():
                vectors[row].copy_(resident.state[name][0])

    def form(self, run: SgdRun, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> StepForm:
        """The form of the steps of a run whose vectors are buffers, but for the rows of a batch."""
        loss = None if run.local_loss is None else self.evaluator(run.local_loss)
        # a recording reads and writes addresses: with other buffers it would take freed memory for them
        addresses = tuple((buffer.data_ptr(), tuple(buffer.shape)) for buffer in (*reads, *writes))
        return StepForm((), repr(run.config), run.prox, loss, addresses)

    def _take_step(self, steps: _LaneSteps, stepper: TableStepper, total: Tensor, length: int) -> None:
        """One step of the resident module on a batch of so many rows, all by the tables."""
        self.module.train()
        tables, number, run = steps.tables, self.lane.number, stepper.run
        positions, key = tables.row(tables.positions, number), tables.row(tables.keys, number)
        assert positions is not None
        with self._randomness(run, 0) as dropout, self._saving_memory(run, 1, dropout):
            draw = functools.partial(self._start, dropout, key)
            loss, gradients = self._step_gradients(run, 0, steps.rows.take(positions[:length]), draw, None)
        with torch.no_grad():
            self._descend(gradients, stepper, 0)
            total += loss
            number += 1

    def _buffers(self, steps: _LaneSteps, stepper: TableStepper, total: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors that a step reads, and those that it writes to."""
        run = stepper.run
        gathers = run.config.passes.accumulate > 1 or not (run.plain or stepper.direct)
        return (
            [*self.module_reads(run), *steps.tables.held, *pytree.leaves(steps.rows.x), *pytree.leaves(steps.rows.y)],
            [self.vector, total, *self._integer_buffers, *run.state.values(), *([self._gradient] if gathers else [])],
        )

    def module_reads(self, run: SgdRun) -> list[Tensor]:
        """Return the tensors that a pass of the module reads and no step writes to, and the vectors of a run."""
        evaluated = [] if run.local_loss is None else self.evaluator(run.local_loss).tensors
        return [*self._frozen, *evaluated, *vectors_of(run)]

    @cached_property
    def _frozen(self) -> list[Tensor]:
        return [parameter for parameter in self.module.parameters() if not parameter.requires_grad]

    @cached_property
    def _integer_buffers(self) -> list[Tensor]:
        return [buffer for name, buffer in self.module.named_buffers() if name in self._integers]

    def rng_key(self, run: SgdRun, row: int) -> RngKey:
        """The rng key of what is drawn in a client's steps: dropout, augmentations and noise.

        Members of a masked sum draw the same.  Otherwise a server could look for a seed, or for names of clients, with
        which dropout leaves nothing of all members but one.
        """
        seed, name, version, phase = self._own_key(run, row)
        alike = self.work.masking is not None and not run.config.step.hides_rows
        return (seed, "", version, phase) if alike else (seed, name, version, phase)

    def _own_key(self, run: SgdRun, row: int) -> RngKey:
        """The rng key of a client's run: of what noise is drawn from where single rows are hidden, else of the seed."""
        seed = run.secret or self.work.noise_seed if run.config.step.hides_rows else self.work.seed
        return self.row_loader.rng_key(seed, run.clients[row], run.rng_versions[row], run.phase)

    def _of_part(self, tensors: list[Tensor], part: Part) -> list[Tensor]:
        """Those of the parameters, or of the positions for their gradients, that belong to a part of the model."""
        if part == "all":
            return tensors
        return [tensors[self._names.index(slot.name)] for slot in self.work.layout.parameters(part)]

    def _step_gradients(
        self,
        run: SgdRun,
        row: int,
        rows: Rows,
        draw: Callable[[int], None],
        scale: LossScale | None,
        hidden: Hidden | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The mean loss of a step's rows and the gradients that it takes; `draw` starts the dropout masks of each of
        its passes.
        """
        parameters = self._of_part(self.parameters, run.config.part)
        compute = functools.partial(self._summed, run, row, rows, parameters, draw, scale)
        if not run.config.step.changes_gradients:
            return compute()
        return gradients_of_one(run.config.step, self.vector, parameters, compute, hidden)

    def _summed(
        self,
        run: SgdRun,
        row: int,
        rows: Rows,
        parameters: list[Tensor],
        draw: Callable[[int], None],
        scale: LossScale | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The mean loss of a step's rows and its gradients, from as many passes as it has batches."""
        parts = pass_slices(len(rows), run.config, self.traits.mixes)
        if len(parts) == 1 and scale is None:
            draw(0)
            return self._gradients(run, row, rows, parameters)
        # gradients may share their numbers with one another, so they are summed and scaled in the engine's own vector
        summed, total = self._of_part(self._gradient_views, run.config.part), torch.zeros((), device=self.device)
        for number, part in enumerate(parts):
            draw(number)
            here = rows[part]
            loss, gradients = self._gradients(run, row, here, parameters, self.share_of(here, rows), scale)
            total += loss
            if number:
                torch._foreach_add_(summed, gradients)
            else:
                torch._foreach_copy_(summed, gradients)
            del gradients
        if scale is not None:
            scale.unscale(summed)
        return total, summed

    def share_of(self, part: Rows, rows: Rows) -> float | Tensor:
        """The share that a part of a step's rows has in the mean loss of the step."""
        counted, counted_in_all = self.row_loader.counted(part.y), self.row_loader.counted(rows.y)
        if counted is None or counted_in_all is None:
            return len(part) / len(rows)
        # no target of the step may be known: then its loss is 0 and not 0 / 0
        return counted.sum() / nonzero(counted_in_all.sum())

    @staticmethod
    def _start(dropout: KeyedDropout | None, key: Tensor | None, part: int) -> None:
        if dropout is not None and key is not None:
            dropout.start(part_key(key, part))

    def _gradients(
        self,
        run: SgdRun,
        row: int,
        rows: Rows,
        parameters: list[Tensor],
        share: float | Tensor = 1.0,
        scale: LossScale | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The mean loss of a batch and its gradients, times its share of a step's rows; gradients are scaled."""
        with self.precision(run.config.passes):
            counted = self.row_loader.counted(rows.y)
            if run.local_loss is None:
                losses = self.loss(pytree.run(self._trained, self.shaped(rows.x)), rows.y)
                loss = mean_over_rows(losses, counted) if losses.dim() == 1 else losses.mean()
            else:
                shaped = Rows(self.shaped(rows.x), rows.y)
                loss = self.evaluator(run.local_loss).mean_of_client(shaped, run.own, row, counted)
        loss = loss * share if isinstance(share, Tensor) or share != 1 else loss
        scaled = loss if scale is None else loss * scale.factor
        return loss.detach(), list(torch.autograd.grad(scaled, parameters, materialize_grads=True))

    def evaluator(self, local: LocalLoss) -> LossEvaluator:
        """Return the evaluator of a client's own loss on this engine's module, made once for each loss."""
        if self._evaluator is None or self._evaluator.local is not local:
            self._evaluator = LossEvaluator(local, self.work, self.loss, self.module, self.device)
        return self._evaluator

    # -- training with DP-SGD

    def _hidden_gradients(
        self,
        batch: Rows,
        run: SgdRun,
        row: int,
        lot: float,
        number: int,
        key: Tensor,
        dropout: KeyedDropout | None,
        clip: float,
        deviation: float,
    ) -> Gradients:
        """The mean loss [1] of a batch and its hidden gradients, [1, ...] each (`contracts.StepPoint.hidden`).

        `lot` is the expected number of rows, `key` the step's dropout key.
        """
        config = run.config
        if config.passes.precision == "float16":
            raise SettingError(
                "whether a float16 step is skipped would tell of hidden rows: take precision = 'bfloat16'"
            )
        summed = [torch.zeros_like(parameter) for parameter in self.parameters]
        total = torch.zeros((), device=self.device)
        keys = row_keys(key.unsqueeze(0), len(batch))[0]
        at_once = self.vectorizes(batch) and not config.passes.checkpointing
        # a row at least, however large the model is
        size = max(1, MAX_NUMBERS // self.work.layout.size)
        size = size if config.passes.accumulate == 1 else min(size, config.batch)
        for start in range(0, len(batch), size):  # a Poisson sample may be empty: then the step is noise
            here = slice(start, start + size)
            arguments = (batch[here], keys[here], clip, dropout, config.passes)
            with surviving(self.device) as results:
                if at_once:
                    results.append(self._clipped(*arguments))
            sums, loss = results[0] if results else self._clipped_one_by_one(*arguments)
            torch._foreach_add_(summed, sums)
            total += loss
        named = {name: gradient.unsqueeze(0) for name, gradient in zip(self._names, summed, strict=True)}
        step = run.first_step + number
        hidden = noised(named, self.work.layout, deviation, [lot], step, [self.rng_key(run, row)])
        counted = self.row_loader.counted(batch.y)
        count = max(1, len(batch)) if counted is None else counted.sum().clamp(min=1)
        return (total / count).unsqueeze(0), hidden

    # -- the module

    def _saving_memory(
        self, run: SgdRun, steps: int, dropout: KeyedDropout | None
    ) -> contextlib.AbstractContextManager[None]:
        """The context of a client's steps: checkpointed layers, or nothing."""
        layers = run.config.passes.checkpointing
        if not layers or not steps:
            return contextlib.nullcontext()
        if self._checkpointing is None:
            self._checkpointing = Checkpointing(self.module, layers, self.traits.random)
        return self._checkpointing.steps(dropout)

    @contextlib.contextmanager
    def _randomness(self, run: SgdRun, row: int) -> Iterator[KeyedDropout | None]:
        """Keyed dropout for models with dropout; a seeded global stream for models that draw other random numbers."""
        if self.traits.random:
            step = () if run.only_step is None else (run.only_step,)
            # without the lowest bit, as torch's generators take 63 bits at most
            with torch_seed(key("torch", *self.rng_key(run, row), *step) >> 1, self.device):
                yield None
        elif self.traits.dropout:
            with KeyedDropout() as dropout:
                yield dropout
        else:
            yield None


def step_key(rng_key: RngKey, step: int) -> int:
    """The dropout key of one optimizer step."""
    # 63 bits: keys are kept in int64 tensors, which could not hold an unsigned number of 64
    return key("dropout", step, *rng_key) >> 1


def part_key(key: Tensor, part: int) -> Tensor:
    """The dropout key of one pass of a step; that of the first one is the step's."""
    return mix(key + part) if part else key
