"""The sequential engine: one client after another, on one resident module whose tensors are views of one flat vector."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from piebald.client_work import ClientWork
from piebald.contracts import SgdConfig, SgdOutcome, Split
from piebald.errors import SettingError
from piebald.parameters import Layout
from piebald.randomness import key
from piebald.runtimes.engines.keyed_dropout import KeyedDropout
from piebald.runtimes.engines.model_traits import Traits
from piebald.runtimes.engines.row_gradients import ROOM, Rowwise, noised, row_keys, shrink
from piebald.runtimes.engines.row_loader import Gathered, Places, RowLoader, batches
from piebald.runtimes.engines.sgd_step import SgdRun, advance, slide
from piebald.runtimes.factored.client_state import StatePacker

SCORE_ROWS = (
    2048  # rows a forward pass when only scoring: large enough to be efficient, small enough for any activation
)


class SequentialEngine:
    """Trains the clients of a stack one after another and scores models.  Base of the engines that only train
    differently.
    """

    name = "sequential"
    lazy = False

    def __init__(
        self, work: ClientWork, feed: RowLoader, traits: Traits, device: torch.device, bfloat16: bool = False
    ) -> None:
        if traits.mixes and work.row_privacy is not None:
            raise SettingError(
                f"{work.trainer.kind} clips each row's own gradient but this model mixes the rows of a batch: "
                "take one that does not, with group norm (nn.GroupNorm) in the place of batch norm"
            )
        self.work, self.feed, self.traits, self.device, self.bfloat16 = work, feed, traits, device, bfloat16
        self.module = copy.deepcopy(work.model).to(device)
        self.vector = work.initial.to(device, copy=True)
        self.parameters = bind(self.module, work.layout, self.vector)
        self._integers = {
            name: value.clone() for name, value in self.module.named_buffers() if not value.dtype.is_floating_point
        }
        self._gradient = torch.zeros_like(self.vector)
        views = work.layout.views(self._gradient)
        self._names = [slot.name for slot in work.layout.slots if not slot.buffer]
        self._gradient_views = [views[name] for name in self._names]
        self._vectorises: bool | None = None
        self._conv2d = any(isinstance(layer, nn.Conv2d) for layer in self.module.modules())

    @cached_property
    def packer(self) -> StatePacker:
        """Knows which layers see the rows, and packs what clients remember of them."""
        return StatePacker(self.work, self.feed, self.module)

    # -- training

    def walk(self, walk: SgdRun) -> SgdOutcome:
        """Train every client of the stack in turn."""
        count = len(walk.clients)
        end = torch.empty(count, self.work.layout.size, device=self.device)
        keeps = walk.velocity is not None or walk.descent.momentum > 0
        velocity = torch.zeros_like(end) if keeps else None
        if velocity is not None and walk.velocity is not None:
            velocity.copy_(walk.velocity)
        steps, losses = torch.zeros(count), torch.full((count,), torch.nan)
        pool = self.feed.gather(walk.clients, "train")
        for row in range(count):
            with self._randomness(walk, row) as dropout:
                steps[row], losses[row] = self._walk_one(walk, row, pool, velocity, dropout)
            end[row].copy_(self.vector)
        return SgdOutcome(end, steps.to(self.device), losses.to(self.device), velocity)

    def _walk_one(
        self, walk: SgdRun, row: int, pool: Gathered, velocity: Tensor | None, dropout: KeyedDropout | None
    ) -> tuple[int, Tensor | float]:
        self._load(walk.model[row])
        self.module.train()
        u = velocity[row] if velocity is not None else None
        plain, total, taken = walk.plain, torch.zeros((), device=self.device), 0
        words = self.feed.words(self.work.seed, walk.clients[row], walk.moments[row], walk.phase)
        for batch in batches(pool.places[row], walk.descent, self.traits.mixes, *words):
            if dropout is not None:
                dropout.start(torch.tensor(step_key(words, taken), device=self.device))
            if walk.descent.privacy is None:
                loss, gradients = self._gradients(pool, batch)
            else:
                loss, gradients = self._hidden(pool, batch, walk.descent, len(pool.places[row]), taken, words, dropout)
            with torch.no_grad():
                if plain:
                    slide(self.parameters, gradients, self.vector, walk, self.work.layout.trained, row)
                else:
                    torch._foreach_copy_(self._gradient_views, gradients)
                    advance(self.vector, self._gradient, u, walk, self.work.layout.trained, row)
                total += loss
            taken += 1
        return taken, total / taken if taken else float("nan")

    def _gradients(self, pool: Gathered, batch: Places) -> tuple[Tensor, list[Tensor]]:
        """The mean loss of a batch and its gradients."""
        chosen = torch.from_numpy(batch).to(self.device)
        x, y = pool.x.index_select(0, chosen), pool.y.index_select(0, chosen)
        with self.precision():
            loss = self.work.objective.loss(self.module(self.shaped(x)), y).mean()
        return loss.detach(), list(torch.autograd.grad(loss, self.parameters, materialize_grads=True))

    # -- training that hides single rows

    def _hidden(
        self,
        pool: Gathered,
        batch: Places,
        descent: SgdConfig,
        rows: int,
        step: int,
        words: tuple[int | str, ...],
        dropout: KeyedDropout | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The mean loss of a batch and what DP-SGD steps along; `rows` are the client's."""
        assert descent.privacy is not None
        summed = [torch.zeros_like(parameter) for parameter in self.parameters]
        total = torch.zeros((), device=self.device)
        keys = row_keys(torch.tensor([step_key(words, step)], device=self.device), len(batch))[0]
        clipped = self._clipped if self.vectorises(pool) else self._clipped_one_by_one
        for part in torch.split(torch.arange(len(batch)), max(1, ROOM // self.work.layout.size)):
            if not len(part):
                break  # a Poisson sample may be empty: then the step is noise
            chosen = torch.from_numpy(batch[part.numpy()]).to(self.device)
            x, y = pool.x.index_select(0, chosen), pool.y.index_select(0, chosen)
            found, loss = clipped(x, y, keys[part.to(self.device)], descent.privacy.clip, dropout)
            torch._foreach_add_(summed, found)
            total += loss
        named = {name: one.unsqueeze(0) for name, one in zip(self._names, summed, strict=True)}
        lot = min(descent.batch, rows)
        hidden = noised(named, self.work.layout, descent.privacy, [lot], step, [words])
        return total / max(1, len(batch)), [one[0] for one in hidden]

    def _clipped(
        self, x: Tensor, y: Tensor, keys: Tensor, clip: float, dropout: KeyedDropout | None
    ) -> tuple[list[Tensor], Tensor]:
        """The sum of these rows' clipped gradients, and of their losses."""
        tensors = self.work.layout.views(self.vector.detach())
        with self.precision():
            found, loss = self.rowwise.one(tensors, x, y, x.new_ones(len(x)).float(), keys, clip, dropout)
        return [found[name] for name in self._names], loss

    def _clipped_one_by_one(
        self, x: Tensor, y: Tensor, keys: Tensor, clip: float, dropout: KeyedDropout | None
    ) -> tuple[list[Tensor], Tensor]:
        """The same for models that vmap cannot take: recurrent ones, or such that draw numbers of their own."""
        summed = [torch.zeros_like(parameter) for parameter in self.parameters]
        total = torch.zeros((), device=self.device)
        for row in range(len(x)):
            if dropout is not None:
                dropout.start(keys[row])
            with self.precision():
                loss = self.work.objective.loss(self.module(self.shaped(x[row : row + 1])), y[row : row + 1]).mean()
            found = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
            share = float(shrink(torch.stack(torch._foreach_norm(found)).norm(), clip))
            torch._foreach_add_(summed, found, alpha=share)
            total += loss.detach()
        return summed, total

    @cached_property
    def rowwise(self) -> Rowwise:
        """Makes gradients of single rows through vmap."""
        return Rowwise(self.module, self.work.layout, self.work.objective.loss)

    def vectorises(self, pool: Gathered) -> bool:
        """Whether gradients of single rows can be made through vmap, found out once by trying it on two of them."""
        if self._vectorises is None:
            self._vectorises = not self.traits.random and not self.padded and self._tried(pool)
        return self._vectorises

    def _tried(self, pool: Gathered) -> bool:
        chosen = torch.from_numpy(np.concatenate(pool.places)[:2]).to(self.device)
        x, y, keys = pool.x.index_select(0, chosen), pool.y.index_select(0, chosen), torch.arange(len(chosen))
        with KeyedDropout() as dropout, warnings.catch_warnings():
            warnings.filterwarnings("error", message="There is a performance drop")  # vmap that is a loop inside
            expected, _ = self._clipped_one_by_one(x, y, keys.to(self.device), 1.0, dropout)
            try:
                found, _ = self._clipped(x, y, keys.to(self.device), 1.0, dropout)
            except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, UserWarning):
                return False
        return all(torch.allclose(a, b, rtol=1e-2, atol=1e-4) for a, b in zip(found, expected, strict=True))

    @cached_property
    def padded(self) -> bool:
        """Whether there is a padding row in an embedding: torch's vmap forgets that it has no gradient."""
        tables = (layer for layer in self.module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag))
        return any(table.padding_idx is not None for table in tables)

    # -- the module

    def _load(self, vector: Tensor) -> None:
        """Make a vector the resident module's numbers, and its integer buffers the template's."""
        with torch.no_grad():
            self.vector.copy_(vector)
            if self._integers:
                buffers = dict(self.module.named_buffers())
                for name, value in self._integers.items():
                    buffers[name].copy_(value)

    def shaped(self, x: Tensor) -> Tensor:
        """Images channels-last, which torch's CPU pooling and convolution run much faster on."""
        if not self._conv2d or x.dim() != 4:
            return x
        _, channels, height, width = x.shape
        if channels == 1:  # both formats look alike with one channel: say which one is meant through the strides
            return x.as_strided(x.shape, (height * width, 1, width, 1))
        return x.contiguous(memory_format=torch.channels_last)

    def precision(self) -> contextlib.AbstractContextManager[object]:
        """The context that forward passes run in."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.bfloat16 else contextlib.nullcontext()

    @contextlib.contextmanager
    def _randomness(self, walk: SgdRun, row: int) -> Iterator[KeyedDropout | None]:
        """Keyed dropout for models that have some; a seeded global stream for models that draw in other ways."""
        if self.traits.random:
            with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                torch.manual_seed(
                    key("torch", *self.feed.words(self.work.seed, walk.clients[row], walk.moments[row], walk.phase))
                    >> 1
                )
                yield None
        elif self.traits.dropout:
            with KeyedDropout() as dropout:
                yield dropout
        else:
            yield None

    # -- scoring

    def score(self, clients: Sequence[int], model: Tensor, split: Split) -> tuple[dict[str, Tensor], Tensor]:
        """See `contracts.ClientContext.score`."""
        outputs, targets = self._outputs(clients, model, split)
        measures = {"loss": self.work.objective.loss, **self.work.objective.metrics}
        with torch.no_grad():
            scores = {name: self._measure(measure, outputs, targets) for name, measure in measures.items()}
        return scores, torch.tensor([len(target) for target in targets], device=self.device)

    def confusion(self, clients: Sequence[int], model: Tensor, split: Split) -> Tensor:
        """See `contracts.ClientContext.confusion`."""
        outputs, targets = self._outputs(clients, model, split)
        classes = max((out.shape[1] for out in outputs if out.dim() > 1), default=0)
        matrices = torch.zeros(len(clients), classes, classes, device=self.device)
        for row, (out, target) in enumerate(zip(outputs, targets, strict=False)):
            if len(target):
                cells = target.long().flatten() * classes + out.argmax(1).flatten()
                matrices[row] = torch.bincount(cells, minlength=classes * classes).view(classes, classes)
        return matrices

    def _outputs(self, clients: Sequence[int], model: Tensor, split: Split) -> tuple[list[Tensor], list[Tensor]]:
        """What models say about clients' rows, and the targets.  One model for all clients is run over their joined
        rows at once.
        """
        pool = self.feed.gather(clients, split)
        self.module.eval()
        with torch.no_grad():
            outputs: list[Tensor]
            if model.stride(0) == 0 or len(clients) == 1:
                self._load(model[0])
                joined = self._forward(pool.x, np.concatenate(pool.places))
                sizes = [len(places) for places in pool.places]
                outputs = list(torch.split(joined, sizes)) if joined is not None else []
            else:
                outputs = []
                for row, places in enumerate(pool.places):
                    self._load(model[row])
                    out = self._forward(pool.x, places)
                    outputs.append(out if out is not None else torch.empty(0, device=self.device))
        targets = [pool.y.index_select(0, torch.from_numpy(places).to(self.device)) for places in pool.places]
        return outputs, targets

    def _forward(self, x: Tensor, places: Places) -> Tensor | None:
        if len(places) == 0:
            return None
        chosen = torch.from_numpy(places).to(self.device)
        with self.precision():
            outputs = [self.module(self.shaped(x.index_select(0, part))) for part in torch.split(chosen, SCORE_ROWS)]
        return torch.cat(outputs).float() if len(outputs) > 1 else outputs[0].float()

    def _measure(self, measure: object, outputs: list[Tensor], targets: list[Tensor]) -> Tensor:
        values = torch.full((len(targets),), torch.nan, device=self.device)
        for row, (out, target) in enumerate(zip(outputs, targets, strict=False)):
            if len(target):
                values[row] = _value(measure, out, target)
        return values


def _value(measure: object, outputs: Tensor, targets: Tensor) -> Tensor:
    """A metric on one client's rows: a torchmetrics object, or a function whose values are averaged."""
    if hasattr(measure, "update") and hasattr(measure, "compute") and hasattr(measure, "reset"):
        measure.reset()
        measure.update(outputs, targets)
        return torch.as_tensor(measure.compute()).float().mean()
    return measure(outputs, targets).float().mean()  # type: ignore[operator,no-any-return]


def bind(module: nn.Module, layout: Layout, vector: Tensor) -> list[Tensor]:
    """Make a module's tensors views of `vector`, and hand back its parameters in the layout's order."""
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


def step_key(words: tuple[int | str, ...], step: int) -> int:
    """The dropout key of one optimiser step."""
    return key("dropout", step, *words) >> 1
