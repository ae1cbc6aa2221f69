"""Fit a finished run to a client that took no part in it, and find which way of doing so is best.

A newcomer starts as every client did, from the global model with the first private numbers.  Each way then fits
some of the numbers to the newcomer's training rows by plain SGD and keeps the epoch of least loss on its validation
rows; the least loss over all ways decides between them.
"""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from piebald.contracts import Clients, SgdConfig, Split
from piebald.errors import ParameterError, SettingError
from piebald.parameters import matching
from piebald.runtimes.engines.choose import make_engine
from piebald.runtimes.engines.keyed_dropout import KeyedDropout
from piebald.runtimes.engines.row_loader import batches
from piebald.runtimes.engines.sequential import SequentialEngine, step_key

if TYPE_CHECKING:
    from piebald.finished_run import Run

EPOCHS = 20
_BATCH_NORMS = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True, slots=True)
class AdaptationMethod:
    """What one way came to.

    Attributes:
        name: "global" (nothing is fitted), "private" (the private layers alone: CGAU's conditioning, HDAFL's head),
            "head" (the last linear layer), "fine_tune" (everything), or "group" (nothing is fitted, but the newcomer
            takes the model of the group that suits its training rows best; the other ways then start there).
        fitted: how many numbers were fitted.  epochs: passes over the training rows that were kept, 0 for the start.
        loss: on validation rows.  validation, test: the metric on these rows, None where it cannot be told.
        gain: of the metric on validation rows over "global", above 0 where this way is better.
    """

    name: str
    fitted: int
    epochs: int
    loss: float
    validation: float | None
    test: float | None
    gain: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Adaptation:
    """A newcomer's model and how it was found.

    Attributes:
        client: the newcomer's name.
        metric: the metric that `ways` are told in.
        ways: everything that was tried.
        best: name of the way of least validation loss.
        group: number of the community that the newcomer starts from.
        model: the newcomer's model, ready to use.
        vector: the same as numbers [p].
    """

    client: str
    metric: str
    ways: tuple[AdaptationMethod, ...]
    best: str
    group: int
    model: nn.Module
    vector: Tensor

    def table(self) -> dict[str, Any]:
        """Plain values, without the model."""
        ways = [asdict(way) for way in self.ways]
        return {"client": self.client, "metric": self.metric, "best": self.best, "group": self.group, "ways": ways}

    @property
    def chosen(self) -> AdaptationMethod:
        """The best way."""
        return next(way for way in self.ways if way.name == self.best)


def fit(run: Run, clients: Clients, client: int = 0, *, epochs: int = EPOCHS, lr: float | None = None) -> Adaptation:
    """Fit a finished run to one client that took no part in it.

    Args:
        run: the run.
        clients: who holds the newcomer's rows; its validation part chooses, its test part is only reported.
        client: its number there.
        epochs: passes over the training rows, at most.
        lr: learning rate, by default that of the run's recipe.

    Raises:
        SettingError: there are no rows to train on or to choose by, or they do not fit the model.
    """
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise SettingError(f"epochs must be a whole number, at least 1, got {epochs!r}")
    if lr is not None and not 0 < lr < math.inf:
        raise SettingError(f"lr must be above 0, got {lr!r}")
    for split in ("train", "validation"):
        if not len(clients.rows(client, split)):
            raise SettingError(f"the newcomer {clients.names[client]!r} has no {split} rows: give it some")
    trial = _Trial(run, clients, client, epochs, lr)
    return trial.carried_out()


class _Trial:
    """All ways for one newcomer."""

    def __init__(self, run: Run, clients: Clients, client: int, epochs: int, lr: float | None) -> None:
        self.run, self.clients, self.client, self.epochs = run, clients, client, epochs
        rule = run.work.trainer
        self.descent = SgdConfig(
            lr=getattr(rule, "lr", 0.05) if lr is None else lr,
            momentum=getattr(rule, "momentum", 0.0),
            weight_decay=getattr(rule, "weight_decay", 0.0),
            clip=getattr(rule, "clip", None),
            batch=getattr(rule, "batch", 20),
        )
        self.engine = make_engine("sequential", run.work, clients, torch.device("cpu"), bfloat16=False)

    def carried_out(self) -> Adaptation:
        """Try every way and keep the best."""
        start = self.run.start(0)
        found = {"global": (start, 0, 0)}
        group = 0
        if len(self.run.groups) > 1:
            group = min(self.run.groups, key=lambda number: self._score(self.run.start(number), "train")["loss"])
            start = self.run.start(group)
            found["group"] = (start, 0, 0)
        for name, fitted in self._ways().items():
            vector, epoch = self._fitted(start, fitted)
            slots = self.run.work.layout.slots
            found[name] = (vector, sum(slot.stop - slot.start for slot in slots if slot.name in fitted), epoch)
        ways = self._told(found)
        best = min(ways, key=lambda way: way.loss if way.loss == way.loss else math.inf)
        vector = found[best.name][0]
        module = copy.deepcopy(self.run.work.model)
        self.run.work.layout.load(module, vector)
        name = str(self.clients.names[self.client])
        return Adaptation(name, self.run.metric, tuple(ways), best.name, group, module.eval(), vector)

    def _ways(self) -> dict[str, frozenset[str]]:
        """Names of the tensors that each way fits; a way that would repeat another is left out."""
        layout = self.run.work.layout
        trained = frozenset(slot.name for slot in layout.slots if not slot.buffer)
        ways = {"private": layout.private & trained, "head": self._head() & trained, "fine_tune": trained}
        kept: dict[str, frozenset[str]] = {}
        for name, fitted in ways.items():
            if fitted and fitted not in kept.values():
                kept[name] = fitted
        return kept

    def _head(self) -> frozenset[str]:
        try:
            return matching(self.run.work.model, ["classifier"])
        except ParameterError:  # no linear layer
            return frozenset()

    def _told(self, found: dict[str, tuple[Tensor, int, int]]) -> list[AdaptationMethod]:
        has_test = bool(len(self.clients.rows(self.client, "test")))
        ways: list[AdaptationMethod] = []
        for name, (vector, fitted, epoch) in found.items():
            scores = self._score(vector, "validation")
            value = _number(scores[self.run.metric])
            test = _number(self._score(vector, "test")[self.run.metric]) if has_test else None
            first = ways[0].validation if ways else value
            sign = 1 if self.run.higher_is_better else -1
            gain = None if value is None or first is None else sign * (value - first)
            ways.append(AdaptationMethod(name, fitted, epoch, scores["loss"], value, test, gain))
        return ways

    def _score(self, vector: Tensor, split: Split) -> dict[str, float]:
        scores, _ = self.engine.score([self.client], vector.unsqueeze(0), split)
        return {name: float(value[0]) for name, value in scores.items()}

    def _fitted(self, start: Tensor, fitted: frozenset[str]) -> tuple[Tensor, int]:
        """The numbers after the epoch of least validation loss, and which epoch that was."""
        best, least, epoch = start, self._score(start, "validation")["loss"], 0
        walker = _Walker(self.engine, start, fitted, self.descent)
        for number in range(1, self.epochs + 1):
            vector = walker.epoch(self.client, number)
            loss = self._score(vector, "validation")["loss"]
            if loss < least or least != least:
                best, least, epoch = vector, loss, number
        return best, epoch


class _Walker:
    """SGD on some tensors of a model while all others, batch norm's statistics among them, stay as they are."""

    def __init__(self, engine: SequentialEngine, start: Tensor, fitted: frozenset[str], descent: SgdConfig) -> None:
        self.engine, self.descent = engine, descent
        self.module = copy.deepcopy(engine.work.model).train()
        engine.work.layout.load(self.module, start)
        self.parameters: list[Tensor] = []
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(name in fitted)
            if name in fitted:
                self.parameters.append(parameter)
        for layer in self.module.modules():
            if isinstance(layer, _BATCH_NORMS) and not any(one.requires_grad for one in layer.parameters()):
                layer.eval()
        self.optimiser = torch.optim.SGD(
            self.parameters, descent.lr, descent.momentum, weight_decay=descent.weight_decay
        )

    def epoch(self, client: int, number: int) -> Tensor:
        """One pass over the client's rows; the model's numbers [p] after it."""
        engine = self.engine
        gathered = engine.row_loader.gather([client], "train")
        rng_key = engine.row_loader.rng_key(engine.work.seed, client, number, 0)
        with KeyedDropout() if engine.traits.dropout else nullcontext() as dropout, torch.random.fork_rng(devices=[]):
            torch.manual_seed(step_key(rng_key, 0))
            for step, batch in enumerate(batches(gathered.places[0], self.descent, engine.traits.mixes, *rng_key)):
                if isinstance(dropout, KeyedDropout):
                    dropout.start(torch.tensor(step_key(rng_key, step)))
                loss = engine.work.objective.loss(self.module(gathered.x[batch]), gathered.y[batch]).mean()
                self.optimiser.zero_grad()
                torch.autograd.backward(loss)
                if self.descent.clip is not None:
                    torch.nn.utils.clip_grad_norm_(self.parameters, self.descent.clip)
                self.optimiser.step()
        return self._vector()

    def _vector(self) -> Tensor:
        """All numbers as they are now [p], those of tensors that are not fitted among them."""
        layout = self.engine.work.layout
        tensors = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        vector = torch.empty(layout.size)
        for name, view in layout.views(vector).items():
            view.copy_(tensors[name].detach())
        return vector


def _number(value: float) -> float | None:
    return None if value != value else value
