"""Adapt a finished run to a client that took no part in it, with several methods, and choose the best one.

A newcomer starts as every client did, from the global model with the initial private parameters.  Each method then fits
some of the parameters to the newcomer's training rows by plain SGD and keeps the epoch with the lowest loss on its
validation rows.  The method with the lowest validation loss is the best.
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
from piebald.training.optimizers import Optimizer
from piebald.training.sgd import Sgd

if TYPE_CHECKING:
    from piebald.finished_run import Run

EPOCHS = 20
_BATCH_NORMS = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True, slots=True)
class AdaptationMethod:
    """The result of one adaptation method.

    Attributes:
        name: "global" (nothing is fitted), "private" (only the private layers: CGAU's conditioning, HDAFL's head),
            "head" (the last linear layer), "fine_tune" (all parameters), or "cluster" (nothing is fitted, but the
            newcomer takes the model of the cluster with the lowest loss on its training rows; the other methods then
            start there).
        fitted: the number of fitted parameters.
        epochs: passes over the training rows up to the epoch that was kept, 0 for the start.
        loss: the loss on validation rows.
        validation, test: the metric on these rows, None where it is not defined.
        gain: the gain of the metric on validation rows over "global", positive where this method is better.
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
    """A newcomer's model, and the methods that were tried.

    Attributes:
        client: the newcomer's name.
        metric: the metric of `methods`.
        methods: the results of all methods.
        best: the name of the method with the lowest validation loss.
        cluster: the number of the cluster that the newcomer starts from.
        model: the newcomer's model, ready to use.
        vector: the same model as a vector [p].
    """

    client: str
    metric: str
    methods: tuple[AdaptationMethod, ...]
    best: str
    cluster: int
    model: nn.Module
    vector: Tensor

    def table(self) -> dict[str, Any]:
        """The adaptation as plain values, without the model."""
        methods = [asdict(method) for method in self.methods]
        named = {"client": self.client, "metric": self.metric, "best": self.best, "cluster": self.cluster}
        return {**named, "methods": methods}

    @property
    def chosen(self) -> AdaptationMethod:
        """The best method."""
        return next(method for method in self.methods if method.name == self.best)


def fit(run: Run, clients: Clients, client: int = 0, *, epochs: int = EPOCHS, lr: float | None = None) -> Adaptation:
    """Adapt a finished run to one client that took no part in it.

    Args:
        run: the run.
        clients: the clients that include the newcomer; its validation rows choose the method, its test rows are only
            reported.
        client: the newcomer's number among them.
        epochs: the maximum number of passes over the training rows.
        lr: learning rate, by default that of the run's recipe.

    Raises:
        SettingError: there are no training or validation rows, or they do not fit the model.
    """
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise SettingError(f"epochs must be a whole number, at least 1, got {epochs!r}")
    if lr is not None and not 0 < lr < math.inf:
        raise SettingError(f"lr must be above 0, got {lr!r}")
    for split in ("train", "validation"):
        if not len(clients.rows(client, split)):
            raise SettingError(f"the newcomer {clients.names[client]!r} has no {split} rows: give it some")
    trial = _Trial(run, clients, client, epochs, lr)
    return trial.run_all()


class _Trial:
    """All methods for one newcomer."""

    def __init__(self, run: Run, clients: Clients, client: int, epochs: int, lr: float | None) -> None:
        self.finished, self.clients, self.client, self.epochs = run, clients, client, epochs
        sgd = run.work.trainer if isinstance(run.work.trainer, Sgd) else Sgd()  # a trainer of another kind has no rate
        rate = sgd.lr if lr is None else lr
        self.config = SgdConfig(rate, sgd.momentum, sgd.weight_decay, sgd.clip, sgd.batch)
        self.optimizer = sgd.optimizer
        self.engine = make_engine("sequential", run.work, clients, torch.device("cpu"), bfloat16=False)

    def run_all(self) -> Adaptation:
        """Try every method and keep the best."""
        start = self.finished.start(0)
        found = {"global": (start, 0, 0)}
        cluster = 0
        if len(self.finished.cluster_models) > 1:
            cluster = min(
                self.finished.cluster_models,
                key=lambda number: self._score(self.finished.start(number), "train")["loss"],
            )
            start = self.finished.start(cluster)
            found["cluster"] = (start, 0, 0)
        for name, fitted in self._fitted_tensors().items():
            vector, epoch = self._fitted(start, fitted)
            slots = self.finished.work.layout.slots
            found[name] = (vector, sum(slot.stop - slot.start for slot in slots if slot.name in fitted), epoch)
        methods = self._evaluated(found)
        best = min(methods, key=lambda method: method.loss if method.loss == method.loss else math.inf)
        vector = found[best.name][0]
        module = copy.deepcopy(self.finished.work.model)
        self.finished.work.layout.load(module, vector)
        name = str(self.clients.names[self.client])
        return Adaptation(name, self.finished.metric, tuple(methods), best.name, cluster, module.eval(), vector)

    def _fitted_tensors(self) -> dict[str, frozenset[str]]:
        """The names of the tensors that each method fits, without methods that would repeat another."""
        layout = self.finished.work.layout
        trained = frozenset(slot.name for slot in layout.slots if not slot.buffer)
        methods = {"private": layout.private & trained, "head": self._head() & trained, "fine_tune": trained}
        kept: dict[str, frozenset[str]] = {}
        for name, fitted in methods.items():
            if fitted and fitted not in kept.values():
                kept[name] = fitted
        return kept

    def _head(self) -> frozenset[str]:
        try:
            return matching(self.finished.work.model, ["classifier"])
        except ParameterError:  # no linear layer
            return frozenset()

    def _evaluated(self, found: dict[str, tuple[Tensor, int, int]]) -> list[AdaptationMethod]:
        has_test = bool(len(self.clients.rows(self.client, "test")))
        methods: list[AdaptationMethod] = []
        for name, (vector, fitted, epoch) in found.items():
            scores = self._score(vector, "validation")
            value = _number(scores[self.finished.metric])
            test = _number(self._score(vector, "test")[self.finished.metric]) if has_test else None
            first = methods[0].validation if methods else value
            sign = 1 if self.finished.higher_is_better else -1
            gain = None if value is None or first is None else sign * (value - first)
            methods.append(AdaptationMethod(name, fitted, epoch, scores["loss"], value, test, gain))
        return methods

    def _score(self, vector: Tensor, split: Split) -> dict[str, float]:
        scores, _ = self.engine.score([self.client], vector.unsqueeze(0), split)
        return {name: float(value[0]) for name, value in scores.items()}

    def _fitted(self, start: Tensor, fitted: frozenset[str]) -> tuple[Tensor, int]:
        """The model vector after the epoch with the lowest validation loss, and the number of that epoch."""
        best, least, epoch = start, self._score(start, "validation")["loss"], 0
        training = _PartialSgd(self.engine, start, fitted, self.config, self.optimizer)
        for number in range(1, self.epochs + 1):
            vector = training.epoch(self.client, number)
            loss = self._score(vector, "validation")["loss"]
            if loss < least or least != least:
                best, least, epoch = vector, loss, number
        return best, epoch


class _PartialSgd:
    """SGD on some tensors of a model; all others, including batch norm statistics, stay unchanged."""

    def __init__(
        self, engine: SequentialEngine, start: Tensor, fitted: frozenset[str], config: SgdConfig, optimizer: Optimizer
    ) -> None:
        self.engine, self.config = engine, config
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
        assert not isinstance(config.lr, Tensor)
        self.optimiser = optimizer.as_torch(
            [{"params": self.parameters}], config.lr, config.weight_decay, config.momentum
        )

    def epoch(self, client: int, number: int) -> Tensor:
        """Make one pass over the client's rows and return the model vector [p] after it."""
        engine = self.engine
        gathered = engine.row_loader.gather([client], "train")
        rng_key = engine.row_loader.rng_key(engine.work.seed, client, number, 0)
        with KeyedDropout() if engine.traits.dropout else nullcontext() as dropout, torch.random.fork_rng(devices=[]):
            torch.manual_seed(step_key(rng_key, 0))
            for step, batch in enumerate(batches(gathered.places[0], self.config, engine.traits.mixes, *rng_key)):
                if isinstance(dropout, KeyedDropout):
                    dropout.start(torch.tensor(step_key(rng_key, step)))
                loss = engine.work.objective.loss(self.module(gathered.x[batch]), gathered.y[batch]).mean()
                self.optimiser.zero_grad()
                torch.autograd.backward(loss)
                if self.config.clip is not None:
                    torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
                self.optimiser.step()
        return self._vector()

    def _vector(self) -> Tensor:
        """The current model vector [p], including tensors that are not fitted."""
        layout = self.engine.work.layout
        tensors = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        vector = torch.empty(layout.size)
        for name, view in layout.views(vector).items():
            view.copy_(tensors[name].detach())
        return vector


def _number(value: float) -> float | None:
    return None if value != value else value
