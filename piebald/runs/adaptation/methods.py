"""Adapt a finished run to a client that took no part in it, with several methods, and choose the best one.

A newcomer starts as every client did, from the global model with the initial private parameters.  Each method then fits
some of the parameters to the newcomer's training rows by plain SGD and keeps the epoch with the lowest loss on its
validation rows.  Beside them stands what the newcomer would have without the run: a model trained alone.  The method
with the lowest validation loss is the best, unless a shared model is as good by the guard of `choice.judge`.
"""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from piebald.contracts import Clients, SgdConfig, Split
from piebald.core import pytree
from piebald.core.errors import ParameterError, SettingError
from piebald.core.metrics import mean_over_rows
from piebald.core.parameters import copied, matching
from piebald.core.randomness import torch_seed
from piebald.engines.batched_layers import KeyedDropout
from piebald.engines.engine_choice import make_engine
from piebald.engines.row_loader import augmented, batches
from piebald.engines.sequential import SequentialEngine, step_key
from piebald.methods.choice import plain_sgd, reason
from piebald.methods.choice.candidates import Candidates
from piebald.methods.client_work import ClientWork
from piebald.methods.training.optimizers import Optimizer

if TYPE_CHECKING:
    from piebald.runs.finished_run import Run

EPOCHS = 20
_WORDS = {
    "global": "the global model",
    "cluster": "the cluster's model",
    "private": "the model with fitted private layers",
    "head": "the model with a fitted last layer",
    "fine_tune": "the fine-tuned model",
    "mixed": "the mixed model",
    "local": "the model trained alone",
}
_BATCH_NORMS = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True, slots=True)
class AdaptationMethod:
    """The result of one adaptation method.

    Attributes:
        name: "global" (nothing is fitted), "private" (only the private layers: CGAU's conditioning, HDAFL's head),
            "head" (the last linear layer), "fine_tune" (all parameters), or "cluster" (nothing is fitted, but the
            newcomer takes the model of the cluster with the lowest loss on its training rows; the other methods then
            start there), "mixed" (a mixture, parameter by parameter, of that start and one of the other models), or
            "local" (trained alone from the run's initial model, with at least as many passes as a client of the run
            made).
        fitted: the number of fitted parameters.
        epochs: passes over the training rows up to the epoch that was kept, 0 for the start.
        loss: the loss on validation rows.
        validation, test: the metric on these rows, None where it is not defined.
        gain: the gain of the metric on validation rows over "global", positive where this method is better.
        of, share: the method in a mixture, and its share in it; else None.
    """

    name: str
    fitted: int
    epochs: int
    loss: float
    validation: float | None
    test: float | None
    gain: float | None
    of: str | None = None
    share: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Adaptation:
    """A newcomer's model, and the methods that were tried.

    Attributes:
        client: the newcomer's name.
        metric: the metric of `methods`.
        methods: the results of all methods.
        best: the name of the chosen method.
        why: the reason, in one sentence.
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
    why: str = ""

    def table(self) -> dict[str, Any]:
        """The adaptation as plain values, without the model."""
        methods = [asdict(method) for method in self.methods]
        named: dict[str, Any] = {"client": self.client, "metric": self.metric, "best": self.best, "why": self.why}
        named |= {"cluster": self.cluster}
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
    for split in ("train", "validation"):
        if not len(clients.rows(client, split)):
            raise SettingError(f"the newcomer {clients.names[client]!r} has no {split} rows: give it some")
    trial = _Trial(run, clients, client, epochs, lr)
    return trial.run_all()


class _Trial:
    """All methods for one newcomer."""

    def __init__(self, run: Run, clients: Clients, client: int, epochs: int, lr: float | None) -> None:
        self.finished, self.clients, self.client, self.epochs = run, clients, client, epochs
        sgd = plain_sgd(run.work.trainer)
        rate = sgd.lr if lr is None else lr
        self.config = SgdConfig(
            rate, sgd.momentum, sgd.weight_decay, sgd.clip, sgd.batch, sgd.batches, augmentation=sgd.augmentation,
            passes=sgd.passes,
        )  # fmt: skip
        self.optimizer = sgd.optimizer
        # on the CPU, one after another: what the run was made with need not be on this machine
        self.engine = make_engine("sequential", run.work, clients, torch.device("cpu"), bfloat16=False)
        self.offer = Candidates(lambda models: self.engine.losses([client], models, "validation"))
        self.fitted: dict[str, int] = {}  # how many numbers each method fits

    def run_all(self) -> Adaptation:
        """Try every method and choose the best."""
        run, offer, cluster = self.finished, self.offer, 0
        start = run.start(0)
        offer.models["global"] = start[None]
        if len(run.cluster_models) > 1:
            # by training rows: the validation rows are kept for the choice among methods
            cluster = min(run.cluster_models, key=lambda number: self._score(run.start(number), "train")["loss"])
            start = run.start(cluster)
            offer.models["cluster"] = start[None]
        shared = 0 if run.work.layout.private else len(offer.models)  # with initial private layers it is of no use
        for name, tensors in fitted_tensors(run.work).items():
            self.fit(name, start, tensors, self.epochs)
        everything = frozenset(slot.name for slot in run.work.layout.slots if not slot.buffer)
        self.fit("local", run.work.initial, everything, max(self.epochs, self._passes()))
        offer.add_mixture(start[None], list(self.fitted))
        offer.put_in_order(list(_WORDS))
        return self._chosen(shared, cluster)

    def fit(self, name: str, start: Tensor, tensors: frozenset[str], epochs: int) -> None:
        """Add the model that results from fitting some tensors, after the pass with the lowest validation loss."""
        training = _PartialSgd(self.engine, start, tensors, self.config, self.optimizer)
        passes = (training.epoch(self.client, number)[None] for number in range(1, epochs + 1))
        self.offer.add_best_pass(name, ([model] for model in chain([start[None]], passes)))
        slots = self.finished.work.layout.slots
        self.fitted[name] = sum(slot.stop - slot.start for slot in slots if slot.name in tensors)

    def _chosen(self, shared: int, cluster: int) -> Adaptation:
        models, names = self.offer.models, list(self.offer.models)
        rows = [self.engine.row_losses([self.client], model, "validation")[0] for model in models.values()]
        losses = torch.cat(rows)
        verdict = self.offer.verdict(losses, shared)
        vector = models[names[verdict.chosen]][0]
        module = copy.deepcopy(self.finished.work.model)
        self.finished.work.layout.load(module, vector)
        return Adaptation(
            client=str(self.clients.names[self.client]),
            metric=self.finished.metric,
            methods=tuple(self._evaluated()),
            best=names[verdict.chosen],
            cluster=cluster,
            model=module.eval(),
            vector=vector,
            why=reason(verdict, names, shared, losses.shape[1], _WORDS),
        )

    def _passes(self) -> int:
        """Return the passes over its rows that the most active client of the run made."""
        tasks = Counter(
            row["client"] for row in self.finished.results if row["kind"] == "train" and row["status"] == "ok"
        )
        return max(tasks.values(), default=0) * plain_sgd(self.finished.work.trainer).epochs

    def _evaluated(self) -> list[AdaptationMethod]:
        has_test = bool(len(self.clients.rows(self.client, "test")))
        metric, sign = self.finished.metric, 1 if self.finished.higher_is_better else -1
        methods: list[AdaptationMethod] = []
        for name, model in self.offer.models.items():
            scores = self._score(model[0], "validation")
            value = _number(scores[metric])
            test = _number(self._score(model[0], "test")[metric]) if has_test else None
            # the global model comes first (`put_in_order`), and gains are over it
            first = methods[0].validation if methods else value
            gain = None if value is None or first is None else sign * (value - first)
            of, share = self.offer.mixture[0] if name == "mixed" else (None, None)
            trained = of or name
            (epochs,) = self.offer.epochs.get(trained, [0])
            fitted = self.fitted.get(trained, 0)
            methods.append(AdaptationMethod(name, fitted, epochs, scores["loss"], value, test, gain, of, share))
        return methods

    def _score(self, vector: Tensor, split: Split) -> dict[str, float]:
        scores, _ = self.engine.score([self.client], vector.unsqueeze(0), split)
        return {name: float(value[0]) for name, value in scores.items()}


def fitted_tensors(work: ClientWork) -> dict[str, frozenset[str]]:
    """Return the names of the tensors that each method fits, without methods that would repeat another."""
    trained = frozenset(slot.name for slot in work.layout.slots if not slot.buffer)
    try:
        head = matching(work.model, ["classifier"])
    except ParameterError:  # no linear layer
        head = frozenset()
    methods: dict[str, frozenset[str]] = {}
    for name, tensors in {"private": work.layout.private, "head": head, "fine_tune": trained}.items():
        if tensors & trained and tensors & trained not in methods.values():
            methods[name] = tensors & trained
    return methods


class _PartialSgd:
    """SGD on some tensors of a model; all others, including batch norm statistics, stay unchanged."""

    def __init__(
        self, engine: SequentialEngine, start: Tensor, fitted: frozenset[str], config: SgdConfig, optimizer: Optimizer
    ) -> None:
        self.engine, self.config = engine, config
        self.module = copied(engine.work.model).train()
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
        seeded = torch_seed(step_key(rng_key, 0), engine.device)
        with KeyedDropout() if engine.traits.dropout else nullcontext() as dropout, seeded:
            for step, batch in enumerate(batches(gathered.positions[0], self.config, engine.traits.mixes, *rng_key)):
                if isinstance(dropout, KeyedDropout):
                    dropout.start(torch.tensor(step_key(rng_key, step)))
                rows = augmented(gathered.take(batch), self.config, step, rng_key)
                losses = engine.loss(pytree.run(self.module, rows.x), rows.y)
                loss = mean_over_rows(losses, engine.row_loader.counted(rows.y)) if losses.dim() else losses
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
    # NaN alone differs from itself
    return None if value != value else value
