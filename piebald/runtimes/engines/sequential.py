"""The sequential engine: one client after another, on one module whose tensors are views of a flat vector."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from piebald import pytree
from piebald.client_work import ClientWork
from piebald.contracts import LocalLoss, Rows, SgdConfig, SgdOutcome, Split
from piebald.errors import SettingError
from piebald.losses import IGNORED, Loss, for_training
from piebald.parameters import Layout, copied
from piebald.randomness import key
from piebald.runtimes.engines.keyed_dropout import KeyedDropout
from piebald.runtimes.engines.local_loss import LossEvaluator, at_the_top
from piebald.runtimes.engines.model_traits import Traits
from piebald.runtimes.engines.row_gradients import MAX_NUMBERS, RowGradients, noised, row_keys, shrink
from piebald.runtimes.engines.row_loader import Gathered, Places, RngKey, RowLoader, augmented, batches, planned_steps
from piebald.runtimes.engines.sgd_step import SgdRun, plain_step
from piebald.runtimes.engines.stepper import GroupSpan, Stepper, joined, tensor_spans
from piebald.runtimes.factored.client_state import StatePacker

SCORE_ROWS = 2048  # rows in a forward pass that only scores: enough to be efficient, few enough for any activation


class SequentialEngine:
    """Trains the clients of a stack one after another, and scores models; the base of all other engines."""

    name = "sequential"
    takes_factored = False

    def __init__(
        self, work: ClientWork, row_loader: RowLoader, traits: Traits, device: torch.device, bfloat16: bool = False
    ) -> None:
        if traits.mixes and work.row_privacy is not None:
            raise SettingError(
                f"{work.trainer.kind} clips each row's own gradient but this model mixes the rows of a batch: "
                "take one that does not, with group norm (nn.GroupNorm) in the place of batch norm"
            )
        self.work, self.row_loader, self.traits, self.device, self.bfloat16 = work, row_loader, traits, device, bfloat16
        self.module = copied(work.model, device)
        self.loss = for_training(work.objective.loss)
        self.vector = work.initial.to(device, copy=True)
        self.parameters = bind(self.module, work.layout, self.vector)
        self._integers = {
            name: value.clone() for name, value in self.module.named_buffers() if not value.dtype.is_floating_point
        }
        self._gradient = torch.zeros_like(self.vector)
        views = work.layout.views(self._gradient)
        self._names = [slot.name for slot in work.layout.slots if not slot.buffer]
        self._gradient_views = [views[name] for name in self._names]
        self._vectorizes: bool | None = None
        self._evaluator: LossEvaluator | None = None
        self._tensor_spans: dict[
            object, tuple[GroupSpan, ...]
        ] = {}  # by what they depend on: patterns are slow to match
        self._conv2d = any(isinstance(layer, nn.Conv2d) for layer in self.module.modules())

    @cached_property
    def packer(self) -> StatePacker:
        """Packs client state."""
        return StatePacker(self.work, self.row_loader, self.module)

    # -- training

    def run_sgd(self, run: SgdRun) -> SgdOutcome:
        """Train the clients of the stack one after another."""
        count = len(run.clients)
        end = torch.empty(count, self.work.layout.size, device=self.device)
        steps, losses = torch.zeros(count), torch.full((count,), torch.nan)
        gathered = self.row_loader.gather(run.clients, "train")
        stepper = self.stepper(
            run, end, [planned_steps(rows, run.config, self.traits.mixes) for rows in gathered.places]
        )
        for row in range(count):
            with self._randomness(run, row) as dropout:
                steps[row], losses[row] = self._train_one(run, row, gathered, stepper, dropout)
            end[row].copy_(self.vector)
        return SgdOutcome(end, steps.to(self.device), losses.to(self.device), stepper.ended(steps))

    def stepper(self, run: SgdRun, models: Tensor, planned: Sequence[int], layout: Layout | None = None) -> Stepper:
        """The optimizer of a run that trains these models [c, p] in so many steps each."""
        config, layout = run.config, layout or self.work.layout
        tensors: tuple[GroupSpan, ...] = ()
        if config.rule is not None:
            name = (config.groups, config.weight_decay, config.base_lr)
            if name not in self._tensor_spans:
                self._tensor_spans[name] = tensor_spans(config, self.work.layout, self.work.model)
            tensors = self._tensor_spans[name]
        return Stepper(run, models, layout.trained, joined(tensors), tensors, planned)

    def _train_one(
        self, run: SgdRun, row: int, gathered: Gathered, stepper: Stepper, dropout: KeyedDropout | None
    ) -> tuple[int, Tensor | float]:
        self._load(run.model[row])
        self.module.train()
        plain, total, taken = run.plain, torch.zeros((), device=self.device), 0
        rng_key = self.rng_key(run, row)
        for batch in batches(gathered.places[row], run.config, self.traits.mixes, *rng_key):
            if dropout is not None:
                dropout.start(torch.tensor(step_key(rng_key, taken), device=self.device))
            rows = augmented(gathered.take(torch.from_numpy(batch).to(self.device)), run.config, taken, rng_key)
            if run.config.privacy is None:
                loss, gradients = self._gradients(run, row, rows)
                if radius := run.config.sam_radius:
                    if dropout is not None:  # the same masks
                        dropout.start(torch.tensor(step_key(rng_key, taken), device=self.device))
                    again = functools.partial(self._gradients, run, row, rows)
                    ones, stacked = ([tensor.unsqueeze(0) for tensor in all_] for all_ in (self.parameters, gradients))
                    gradients = at_the_top(self.vector, ones, stacked, radius, again)[1]
            else:
                held = len(gathered.places[row])
                loss, gradients = self._private_gradients(rows, run.config, held, taken, rng_key, dropout)
            with torch.no_grad():
                if plain:
                    plain_step(self.parameters, gradients, self.vector, run, self.work.layout.trained, row)
                elif stepper.direct:
                    stepper.step_along(self.vector, gradients, row, taken)
                else:
                    torch._foreach_copy_(self._gradient_views, gradients)
                    stepper.step(self.vector, self._gradient, row, taken)
                total += loss
            taken += 1
        return taken, total / taken if taken else float("nan")

    def rng_key(self, run: SgdRun, row: int) -> RngKey:
        """The rng key of a client's run: of the task's secret where single rows are hidden, else of the run's seed."""
        seed = self.work.seed if run.config.privacy is None else run.secret or self.work.seed
        return self.row_loader.rng_key(seed, run.clients[row], run.rng_versions[row], run.phase)

    def _gradients(self, run: SgdRun, row: int, rows: Rows) -> tuple[Tensor, list[Tensor]]:
        """The mean loss of a batch and its gradients."""
        with self.precision():
            if run.local_loss is None:
                loss = self.loss(pytree.run(self.module, self.shaped(rows.x)), rows.y).mean()
            else:
                shaped = Rows(self.shaped(rows.x), rows.y)
                loss = self.evaluator(run.local_loss).mean_of_client(shaped, run.own, row)
        return loss.detach(), list(torch.autograd.grad(loss, self.parameters, materialize_grads=True))

    def evaluator(self, local: LocalLoss) -> LossEvaluator:
        """What evaluates a client's own loss on this engine's module, made once for each loss."""
        if self._evaluator is None or self._evaluator.local is not local:
            self._evaluator = LossEvaluator(local, self.work, self.loss, self.module, self.device)
        return self._evaluator

    # -- training with DP-SGD

    def _private_gradients(
        self,
        batch: Rows,
        config: SgdConfig,
        held: int,
        step: int,
        rng_key: RngKey,
        dropout: KeyedDropout | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The mean loss of a batch and the noisy gradients of DP-SGD; `held` is how many rows the client has."""
        assert config.privacy is not None
        summed = [torch.zeros_like(parameter) for parameter in self.parameters]
        total = torch.zeros((), device=self.device)
        keys = row_keys(torch.tensor([step_key(rng_key, step)], device=self.device), len(batch))[0]
        clipped = self._clipped if self.vectorizes(batch) else self._clipped_one_by_one
        for part in torch.split(torch.arange(len(batch)), max(1, MAX_NUMBERS // self.work.layout.size)):
            if not len(part):
                break  # a Poisson sample may be empty: then the step is noise
            here = part.to(self.device)
            found, loss = clipped(batch[here], keys[here], config.privacy.clip, dropout)
            torch._foreach_add_(summed, found)
            total += loss
        named = {name: one.unsqueeze(0) for name, one in zip(self._names, summed, strict=True)}
        lot = min(config.batch, held)
        hidden = noised(named, self.work.layout, config.privacy, [lot], step, [rng_key])
        return total / max(1, len(batch)), [one[0] for one in hidden]

    def _clipped(
        self, rows: Rows, keys: Tensor, clip: float, dropout: KeyedDropout | None
    ) -> tuple[list[Tensor], Tensor]:
        """The sum of these rows' clipped gradients, and the sum of their losses."""
        tensors = self.work.layout.views(self.vector.detach())
        with self.precision():
            every = torch.ones(len(rows), device=self.device)
            found, loss = self.row_gradients.one(tensors, rows, every, keys, clip, dropout)
        return [found[name] for name in self._names], loss

    def _clipped_one_by_one(
        self, rows: Rows, keys: Tensor, clip: float, dropout: KeyedDropout | None
    ) -> tuple[list[Tensor], Tensor]:
        """The same for models that vmap cannot run: recurrent ones, and those that draw random numbers themselves."""
        summed = [torch.zeros_like(parameter) for parameter in self.parameters]
        total = torch.zeros((), device=self.device)
        for row in range(len(rows)):
            if dropout is not None:
                dropout.start(keys[row])
            with self.precision():
                one = rows[row : row + 1]
                loss = self.loss(pytree.run(self.module, self.shaped(one.x)), one.y).mean()
            found = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
            share = float(shrink(torch.stack(torch._foreach_norm(found)).norm(), clip))
            torch._foreach_add_(summed, found, alpha=share)
            total += loss.detach()
        return summed, total

    @cached_property
    def row_gradients(self) -> RowGradients:
        """Computes gradients of single rows through vmap."""
        return RowGradients(self.module, self.work.layout, self.loss)

    def vectorizes(self, rows: Rows) -> bool:
        """Whether gradients of single rows can be computed through vmap; tried once, on two of some rows."""
        if self._vectorizes is None and len(rows):
            self._vectorizes = not self.traits.random and not self.padded and self._tried(rows[:2])
        return bool(self._vectorizes)

    def _tried(self, rows: Rows) -> bool:
        keys = torch.arange(len(rows)).to(self.device)
        with KeyedDropout() as dropout, warnings.catch_warnings():
            warnings.filterwarnings("error", message="There is a performance drop")  # vmap falls back to a loop
            expected, _ = self._clipped_one_by_one(rows, keys, 1.0, dropout)
            try:
                found, _ = self._clipped(rows, keys, 1.0, dropout)
            except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, UserWarning):
                return False
        return all(torch.allclose(a, b, rtol=1e-2, atol=1e-4) for a, b in zip(found, expected, strict=True))

    @cached_property
    def padded(self) -> bool:
        """Whether an embedding has a padding row: under torch's vmap it would get a gradient."""
        tables = (layer for layer in self.module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag))
        return any(table.padding_idx is not None for table in tables)

    # -- the module

    def _load(self, vector: Tensor) -> None:
        """Load a vector into the resident module, and reset its integer buffers."""
        with torch.no_grad():
            self.vector.copy_(vector)
            if self._integers:
                buffers = dict(self.module.named_buffers())
                for name, value in self._integers.items():
                    buffers[name].copy_(value)

    def shaped(self, x: Any) -> Any:
        """Images in channels-last format, on which torch's CPU pooling and convolution are much faster."""
        return pytree.mapped(_channels_last, x) if self._conv2d else x

    def precision(self) -> contextlib.AbstractContextManager[object]:
        """The context of forward passes: autocast to bfloat16, or nothing."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.bfloat16 else contextlib.nullcontext()

    @contextlib.contextmanager
    def _randomness(self, run: SgdRun, row: int) -> Iterator[KeyedDropout | None]:
        """Keyed dropout for models with dropout; a seeded global stream for models that draw other random numbers."""
        if self.traits.random:
            with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                torch.manual_seed(key("torch", *self.rng_key(run, row)) >> 1)
                yield None
        elif self.traits.dropout:
            with KeyedDropout() as dropout:
                yield dropout
        else:
            yield None

    # -- scoring

    def score(self, clients: Sequence[int], model: Tensor, split: Split) -> tuple[dict[str, Tensor], Tensor]:
        """Score models, as `contracts.ClientContext.score` describes."""
        outputs, targets = self._outputs(clients, model, split)
        measures = {"loss": self.work.objective.loss, **self.work.objective.metrics}
        with torch.no_grad():
            scores = {name: self._measure(measure, outputs, targets) for name, measure in measures.items()}
        return scores, torch.tensor([pytree.count(target) for target in targets], device=self.device)

    def row_losses(self, clients: Sequence[int], model: Tensor, split: Split) -> tuple[Tensor, Tensor]:
        """The loss of each row, as `contracts.ClientContext.row_losses` describes."""
        if self.work.objective.compares_rows:
            raise SettingError(
                f"the loss {self.work.objective.name!r} compares rows and has no value for a single one, which is "
                "needed here to choose among models: use another loss"
            )
        outputs, targets = self._outputs(clients, model, split)
        counts = torch.tensor([pytree.count(target) for target in targets], device=self.device)
        losses = torch.full((len(targets), int(counts.max())), torch.nan, device=self.device)
        with torch.no_grad():
            for row, (out, target) in enumerate(zip(outputs, targets, strict=False)):
                if pytree.count(target):
                    losses[row, : pytree.count(target)] = _each(self.work.objective.loss, out, target)
        return losses, counts

    def confusion(self, clients: Sequence[int], model: Tensor, split: Split) -> Tensor:
        """Count rows by true and predicted class, as `contracts.ClientContext.confusion` describes."""
        outputs, targets = self._outputs(clients, model, split)
        scores = [pytree.logits(out) for out in outputs]
        classes = max((out.shape[1] for out in scores if out.dim() > 1), default=0)
        matrices = torch.zeros(len(clients), classes, classes, device=self.device)
        for row, (out, target) in enumerate(zip(scores, targets, strict=False)):
            if pytree.count(target):
                cells = target.long().flatten() * classes + out.argmax(1).flatten()
                cells = cells[target.flatten() != IGNORED]
                matrices[row] = torch.bincount(cells, minlength=classes * classes).view(classes, classes)
        return matrices

    def _outputs(self, clients: Sequence[int], model: Tensor, split: Split) -> tuple[list[Any], list[Any]]:
        """Models' outputs for clients' rows, and the targets; one model for all clients runs over all their rows at
        once.
        """
        gathered = self.row_loader.gather(clients, split)
        self.module.eval()
        with torch.no_grad():
            outputs: list[Any]
            if (model.stride(0) == 0 and not self.traits.pooled) or len(clients) == 1:
                self._load(model[0])
                outputs_of_all = self._forward(gathered.x, np.concatenate(gathered.places))
                sizes = [len(places) for places in gathered.places]
                outputs = pytree.split(outputs_of_all, sizes) if outputs_of_all is not None else []
            else:
                outputs = []
                for row, places in enumerate(gathered.places):
                    self._load(model[row])
                    out = self._forward(gathered.x, places)
                    outputs.append(out if out is not None else torch.empty(0, device=self.device))
        targets = [pytree.take(gathered.y, torch.from_numpy(places).to(self.device)) for places in gathered.places]
        return outputs, targets

    def _forward(self, x: pytree.Tree, places: Places) -> Any:
        if len(places) == 0:
            return None
        chosen = torch.from_numpy(places).to(self.device)
        with self.precision():
            parts = torch.split(chosen, SCORE_ROWS)
            outputs = [pytree.run(self.module, self.shaped(pytree.take(x, part))) for part in parts]
        return pytree.joined([pytree.by_row(out, len(part)) for out, part in zip(outputs, parts, strict=True)])

    def _measure(self, measure: object, outputs: list[Any], targets: list[Any]) -> Tensor:
        values = torch.full((len(targets),), torch.nan, device=self.device)
        for row, (out, target) in enumerate(zip(outputs, targets, strict=False)):
            if pytree.count(target):
                values[row] = _value(measure, out, target)
        return values


def _value(measure: object, outputs: Any, targets: Any) -> Tensor:
    """A metric on one client's rows, from a torchmetrics object or a function whose values are averaged."""
    if hasattr(measure, "update") and hasattr(measure, "compute") and hasattr(measure, "reset"):
        measure.reset()
        measure.update(pytree.logits(outputs), targets)
        return torch.as_tensor(measure.compute()).float().mean()
    return measure(outputs, targets).float().mean()  # type: ignore[operator,no-any-return]


def _each(loss: Loss, outputs: Any, targets: Any) -> Tensor:
    """The loss of each row, also of a function that returns the mean over its rows."""
    values = loss(outputs, targets)
    if values.dim() and len(values) == pytree.count(targets):
        return values.flatten(1).mean(1) if values.dim() > 1 else values
    rows = [slice(row, row + 1) for row in range(pytree.count(targets))]
    return torch.stack([loss(pytree.take(outputs, row), pytree.take(targets, row)).mean() for row in rows])


def bind(module: nn.Module, layout: Layout, vector: Tensor) -> list[Tensor]:
    """Make a module's tensors views of `vector`, and return its parameters in the layout's order."""
    named = dict(module.named_parameters())
    parameters: list[Tensor] = []
    for slot in layout.slots:
        view = layout.views(vector)[slot.name]
        if slot.buffer:
            path, _, leaf = slot.name.rpartition(".")
            module.get_submodule(path)._buffers[leaf] = view
        else:
            named[slot.name].data = view
            parameters.append(named[slot.name])
    return parameters


def step_key(rng_key: RngKey, step: int) -> int:
    """The dropout key of one optimizer step."""
    return key("dropout", step, *rng_key) >> 1


def _channels_last(x: Tensor) -> Tensor:
    if x.dim() != 4:
        return x
    _, channels, height, width = x.shape
    if channels == 1:  # both formats are the same with one channel: the strides tell torch which one is meant
        return x.as_strided(x.shape, (height * width, 1, width, 1))
    return x.contiguous(memory_format=torch.channels_last)
