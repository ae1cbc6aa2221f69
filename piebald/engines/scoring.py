"""The base of every engine, which keeps a module, loads models into it, and scores them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from piebald.contracts import PLAIN_PASSES, PassSettings, Split
from piebald.core import pytree
from piebald.core.machine import moved
from piebald.core.metrics import REPLICATES, Loss, mean_over_rows, survival_terms, weighed
from piebald.core.objective import METRICS, OBJECTIVES, accumulates, has_value_for_each
from piebald.core.parameters import Layout
from piebald.core.targets import IGNORED, TargetDomain, parted
from piebald.engines.device_copies import fit_to_device
from piebald.engines.model_traits import Traits
from piebald.engines.row_loader import Gathered, RowLoader
from piebald.methods.client_work import ClientWork

_MOST_OUTPUTS = 2**24  # numbers, such as those of a language model, from which a jackknife would take minutes
SCORE_ROWS = 2048  # rows in a forward pass that only scores: enough to be efficient, few enough for any activation


class ScoredRows:
    """The rows of some clients, one client after another.

    Attributes:
        sizes: how many rows each client has.
    """

    def __init__(self, gathered: Gathered, device: torch.device) -> None:
        self.sizes = [len(positions) for positions in gathered.positions]
        self._x, self._y = gathered.x, gathered.y
        self._index: Tensor | None = moved(torch.from_numpy(np.concatenate(gathered.positions)), device)

    def fetch_once(self) -> None:
        """Copy the inputs out of the pool, for who needs them several times."""
        self._y, self._x, self._index = self.targets(), self.inputs(slice(None)), None

    def inputs(self, here: slice) -> Any:
        """The inputs of some of the rows."""
        return pytree.take(self._x, here if self._index is None else self._index[here])

    def targets(self) -> Any:
        """The targets of all rows."""
        return self._y if self._index is None else pytree.take(self._y, self._index)


class ScoringEngine:
    """Scores models with one module whose tensors are views of a flat vector; its attributes are those of `Engine`.

    Attributes:
        module: the module.
        vector: the numbers that its tensors are views of.
        bfloat16: whether all passes run under autocast to bfloat16.
    """

    work: ClientWork
    row_loader: RowLoader
    traits: Traits
    device: torch.device
    bfloat16: bool
    module: nn.Module
    vector: Tensor
    _owned: bool  # whether the vector is this engine's own, and not the run's first one
    _integers: Mapping[str, Tensor]  # the module's buffers that are in no vector
    _conv2d: bool

    def _load(self, vector: Tensor) -> None:
        """Load a vector into the resident module, and reset its integer buffers."""
        self._own()
        with torch.no_grad():
            self.vector.copy_(vector)
            if self._integers:
                buffers = dict(self.module.named_buffers())
                for name, value in self._integers.items():
                    buffers[name].copy_(value)

    def _own(self) -> None:
        """Have a vector that may be written to."""
        if not self._owned:
            self.vector, self._owned = torch.empty_like(self.vector), True
            bind(self.module, self.work.layout, self.vector)

    def shaped(self, x: Any) -> Any:
        """On the CPU, images in channels-last format, on which torch's pooling and convolution are much faster there.

        On a GPU they stay as they are: in float32 cuDNN was slower so, and see `device_copies.rows_first`.
        """
        return pytree.mapped(_channels_last, x) if self._conv2d and self.device.type == "cpu" else x

    @contextlib.contextmanager
    def precision(self, passes: PassSettings = PLAIN_PASSES, vectorized: bool = False) -> Iterator[None]:
        """The context of forward passes: autocast, or nothing; of training with its settings, else of scoring.

        Under vmap, `vectorized`, attention is by plain products: the fused kernels have no form for many clients.
        """
        precision = "bfloat16" if self.bfloat16 and passes.precision == "float32" else passes.precision
        dtype = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[precision]
        with contextlib.ExitStack() as stack:
            if dtype is not None:
                stack.enter_context(torch.autocast(self.device.type, dtype))
            if vectorized:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            yield

    def score(
        self, clients: Sequence[int], model: Tensor, split: Split, metrics: bool = True
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Score models, as `contracts.ClientContext.score` describes."""
        (outputs,), targets, sizes = self._outputs(clients, [model], split)
        objective = self.work.objective
        scores = {"loss": self._loss_of_each(outputs, targets, sizes)}
        for name, metric in objective.metrics.items() if metrics else ():
            scores[name] = self._measured(metric, has_value_for_each(metric), outputs, targets, sizes)
        return scores, self._row_counts(targets, sizes)

    def losses(self, clients: Sequence[int], models: Sequence[Tensor], split: Split) -> Tensor:
        """Compare models by their losses, as `contracts.ClientContext.losses` describes."""
        outputs, targets, sizes = self._outputs(clients, models, split)
        return torch.stack(
            [self._loss_of_each(outputs_of_model, targets, sizes) for outputs_of_model in outputs], dim=1
        )

    def row_losses(self, clients: Sequence[int], model: Tensor, split: Split) -> tuple[Tensor, Tensor]:
        """The loss of each row, as `contracts.ClientContext.row_losses` describes."""
        (outputs,), targets, sizes = self._outputs(clients, [model], split)
        if self.work.objective.compares_rows:  # of which each event has a term
            return self._of_each_row(survival_terms, outputs, targets, sizes, _terms)
        return self._of_each_row(self.work.objective.loss, outputs, targets, sizes, weighted_losses)

    def row_scores(self, clients: Sequence[int], model: Tensor, split: Split) -> tuple[Tensor, Tensor]:
        """The main metric of each row, as `contracts.ClientContext.row_scores` describes."""
        (outputs,), targets, sizes = self._outputs(clients, [model], split)
        return self._of_each_row(self._main, outputs, targets, sizes, values_of_rows)

    def row_values(self, clients: Sequence[int], model: Tensor, split: Split, measure: Any) -> tuple[Tensor, Tensor]:
        """A measure of each row, as `contracts.ClientContext.row_values` describes."""
        (outputs,), targets, sizes = self._outputs(clients, [model], split)
        return self._of_each_row(measure, outputs, targets, sizes, each_loss)

    def constant_scores(
        self, clients: Sequence[int], constants: Tensor, split: Split
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Score constant outputs, as `contracts.ClientContext.constant_scores` describes."""
        rows, objective = ScoredRows(self.row_loader.gather(clients, split), self.device), self.work.objective
        targets, sizes = rows.targets(), rows.sizes
        repeats = moved(torch.tensor(sizes), self.device)
        outputs: Any = constants.to(self.device).repeat_interleave(repeats, 0).view(-1, *self.work.outputs)
        outputs = outputs if len(outputs) else None
        # a loss or a metric of the user's own may expect what only the model returns
        scores = {"loss": self._loss_of_each(outputs, targets, sizes)} if objective.domain is not None else {}
        for name, metric in objective.metrics.items():
            if hasattr(metric, "update") or has_value_for_each(metric):
                scores[name] = self._measured(metric, has_value_for_each(metric), outputs, targets, sizes)
        each = outputs if hasattr(self._main, "update") or has_value_for_each(self._main) else None
        values, counts = self._of_each_row(self._main, each, targets, sizes, values_of_rows)
        return scores, counts, values

    @property
    def _main(self) -> Any:
        """The main metric."""
        return next(iter(self.work.objective.metrics.values()), self.work.objective.loss)

    def _of_each_row(
        self,
        measure: Any,
        outputs: Any,
        targets: Any,
        sizes: list[int],
        values_of: Callable[[Any, Any, Any], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """A loss or a metric of each row that counts [c, rows], NaN behind them, and how many rows each client has [c].

        Args:
            measure, outputs, targets, sizes: as of `_measured`.
            values_of: makes the values of a client's rows from the measure, its outputs and its targets.
        """
        values = torch.full((len(sizes), max(sizes, default=0)), torch.nan, device=self.device)
        with torch.no_grad():
            for row, (out, target) in enumerate(by_client(outputs, targets, sizes)):
                out, target = self.with_targets(out, target)
                if pytree.count(target):
                    of_rows = values_of(measure, out, target)
                    values[row, : len(of_rows)] = of_rows
        return values, self._row_counts(targets, sizes)

    def counted(self, measure: Any, targets: Any) -> Tensor | None:
        """Return which rows count in a loss or a metric, or how much, None for all alike; a metric by name knows -100
        beside any loss.
        """
        plain, weights = parted(targets)
        by_name = any(measure is metric for metric in METRICS.values())
        if self.work.objective.domain is not None or not isinstance(plain, Tensor) or not by_name:
            return self.row_loader.counted(targets)
        rows = TargetDomain().known_rows(plain)
        return rows if weights is None else weights * rows

    def with_targets(self, outputs: Any, targets: Any, measure: Any = None) -> tuple[Any, Any]:
        """Outputs and targets of those rows that have a known target."""
        counted = self.counted(measure, targets) if pytree.count(targets) else None
        if counted is None or bool(counted.all()):
            return outputs, targets
        return pytree.take(outputs, counted > 0), pytree.take(targets, counted > 0)

    def _row_counts(self, targets: Any, sizes: list[int]) -> Tensor:
        """The number of each client's rows that count [c]."""
        counted = self.row_loader.counted(targets)
        if counted is None:
            return moved(torch.tensor(sizes), self.device)
        return torch.stack([(rows > 0).sum() for rows in torch.split(counted, sizes)])

    def confusion(self, clients: Sequence[int], model: Tensor, split: Split) -> Tensor:
        """Count rows by true and predicted class, as `contracts.ClientContext.confusion` describes."""
        (outputs,), targets, sizes = self._outputs(clients, [model], split)
        scores, targets = None if outputs is None else pytree.logits(outputs), parted(targets)[0]
        shape = self.work.outputs if scores is None else scores.shape[1:]
        classes = shape[0] if shape else 0
        matrices = torch.zeros(len(clients), classes, classes, device=self.device)
        for row, (out, target) in enumerate(by_client(scores, targets, sizes)):
            if sizes[row]:
                cells = target.long().flatten() * classes + out.argmax(1).flatten()
                labelled = target.flatten() != IGNORED
                own = matrices[row].view(-1)  # `bincount` would look for the largest cell, and make the host wait
                # -100 would be no cell: such rows add 0 to the first one
                own.index_add_(0, torch.where(labelled, cells, 0), labelled.to(own.dtype))
        return matrices

    def public_outputs(self, model: Tensor) -> Tensor:
        """Models' outputs for the public rows, as `contracts.ClientContext.public_outputs` describes."""
        gathered = self.row_loader.public(len(model))
        rows = ScoredRows(gathered._replace(positions=gathered.positions[:1]), self.device)
        self.module.eval()
        return torch.stack(
            [pytree.logits(self._outputs_of(client_model.unsqueeze(0), rows)).float() for client_model in model]
        )

    def _outputs(
        self, clients: Sequence[int], models: Sequence[Tensor], split: Split
    ) -> tuple[Iterator[Any], Any, list[int]]:
        """The outputs of one model [c, p] after another for the rows of all clients, joined, or None without rows; the
        targets of these rows; and how many rows each client has.
        """
        rows = ScoredRows(self.row_loader.gather(clients, split), self.device)
        if len(models) > 1 and sum(rows.sizes) <= SCORE_ROWS:
            rows.fetch_once()
        self.module.eval()
        return (self._outputs_of(model, rows) for model in models), rows.targets(), rows.sizes

    def _outputs_of(self, model: Tensor, rows: ScoredRows) -> Any:
        """The outputs of models [c, p]; one that all clients share runs over the rows of all of them at once."""
        together = len(model) == 1 or (model.stride(0) == 0 and not self.traits.pooled)
        sizes, start, outputs = [sum(rows.sizes)] if together else rows.sizes, 0, []
        with torch.no_grad():
            for client_model, size in zip(model[:1] if together else model, sizes, strict=True):
                if size:
                    self._load(client_model)
                    outputs += self._forward(rows, start, start + size)
                start += size
        return pytree.joined(outputs) if outputs else None

    def _forward(self, rows: ScoredRows, start: int, stop: int) -> list[Any]:
        made = []
        with self.precision():
            for at in range(start, stop, SCORE_ROWS):
                here = slice(at, min(at + SCORE_ROWS, stop))
                outputs = pytree.run(self.module, self.shaped(rows.inputs(here)))
                made.append(pytree.by_row(outputs, here.stop - here.start))
        return made

    def _loss_of_each(self, outputs: Any, targets: Any, sizes: list[int]) -> Tensor:
        """The loss of each client [c]."""
        objective = self.work.objective
        each = self.traits.each and objective.name in OBJECTIVES and not objective.compares_rows
        return self._measured(objective.loss, each, outputs, targets, sizes)

    def _measured(self, measure: Any, each: bool, outputs: Any, targets: Any, sizes: list[int]) -> Tensor:
        """A loss or a metric on each client's rows [c], NaN without rows; at once where it is known to have a value for
        `each` row, whatever the others are.
        """
        values = torch.full((len(sizes),), torch.nan, device=self.device)
        with torch.no_grad():
            if each and outputs is not None:
                counted = self.counted(measure, targets)
                parts = torch.split(measure(outputs, parted(targets)[0]).float(), sizes)
                if counted is None:
                    return torch.stack([client_values.mean() for client_values in parts])  # NaN without rows
                pairs = zip(parts, torch.split(counted, sizes), strict=True)
                return torch.stack([(client_values * rows).sum() / rows.sum() for client_values, rows in pairs])
            for row, (out, target) in enumerate(by_client(outputs, targets, sizes)):
                out, target = self.with_targets(out, target, measure)
                if pytree.count(target):
                    values[row] = value_of(measure, out, target)
        return values


def bind(module: nn.Module, layout: Layout, vector: Tensor) -> list[Tensor]:
    """Make a module's tensors views of `vector`, and return its parameters in the layout's order."""
    fit_to_device(module, vector.device)
    named, views = dict(module.named_parameters()), layout.views(vector)
    parameters: list[Tensor] = []
    for slot in layout.slots:
        view = views[slot.name]
        if slot.buffer:
            path, _, leaf = slot.name.rpartition(".")
            module.get_submodule(path)._buffers[leaf] = view
        else:
            # by `.data`: the parameter itself stays, and with it every other place of the module that it is tied to
            named[slot.name].data = view
            parameters.append(named[slot.name])
    return parameters


def _channels_last(x: Tensor) -> Tensor:
    if x.dim() != 4:
        return x
    _, channels, height, width = x.shape
    if channels == 1:  # both formats are the same with one channel: the strides tell torch which one is meant
        return x.as_strided(x.shape, (height * width, 1, width, 1))
    return x.contiguous(memory_format=torch.channels_last)


def _terms(measure: Any, outputs: Any, targets: Any) -> Tensor:
    terms: Tensor = measure(pytree.logits(outputs), *parted(targets))
    return terms


def value_of(measure: object, outputs: Any, targets: Any) -> Tensor:
    """A metric on one client's rows, from a torchmetrics object or a function whose values are averaged.

    Rows count by their weights, but with an object of the user's own, which is given none.
    """
    plain, weights = parted(targets)
    if accumulates(measure):
        measure.reset()  # type: ignore[attr-defined]
        known = targets if getattr(measure, "takes_weights", False) else plain
        measure.update(pytree.logits(outputs), known)  # type: ignore[attr-defined]
        return torch.as_tensor(measure.compute()).float().mean()  # type: ignore[attr-defined]
    values = weighed(measure, outputs, targets).float()  # type: ignore[arg-type]
    if weights is None or not values.dim():
        return values.mean()
    return mean_over_rows(values if values.dim() == 1 else values.flatten(1).mean(1), weights)


def each_loss(loss: Loss, outputs: Any, targets: Any) -> Tensor:
    """The loss of each row, also of a function that returns the mean over its rows."""
    targets, _ = parted(targets)
    values = loss(outputs, targets)
    if values.dim() and len(values) == pytree.count(targets):
        return values.flatten(1).mean(1) if values.dim() > 1 else values
    rows = [slice(row, row + 1) for row in range(pytree.count(targets))]
    return torch.stack([loss(pytree.take(outputs, row), pytree.take(targets, row)).mean() for row in rows])


def weighted_losses(loss: Loss, outputs: Any, targets: Any) -> Tensor:
    """The loss of each row by its weight, of which those of all rows have the mean 1."""
    losses, (_, weights) = each_loss(loss, outputs, targets), parted(targets)
    return losses if weights is None else losses * weights / weights.mean()


def pseudo_values(measure: object, outputs: Any, targets: Any) -> Tensor:
    """Values of rows for a metric of all rows together, such as an area under a curve, from a jackknife.

    Their mean is the metric, the variance of their mean estimates its variance, and that of the differences between two
    methods' values the variance of the difference.  Of the area under the ROC curve that is the one of DeLong et al.
    (1988), but for the order 1 / n.

    Source: Tukey, *Bias and confidence in not quite large samples*, Annals of Mathematical Statistics 1958.

    Returns:
        One for each row or, of more rows than `REPLICATES`, for each of so many groups that are drawn by the number of
        rows alone, so that all methods have the same ones.  All are NaN where the metric is undefined without a group,
        or outputs are too many.
    """
    count = pytree.count(targets)
    groups = min(count, REPLICATES) if pytree.logits(outputs).numel() <= _MOST_OUTPUTS else 0
    group = torch.randperm(count, generator=torch.Generator().manual_seed(count)) % groups
    kept = [torch.nonzero(group != number).flatten() for number in range(groups)] if groups > 1 else []
    parts = [(pytree.take(outputs, rows), pytree.take(targets, rows)) for rows in kept]
    without = torch.stack([value_of(measure, *part) for part in parts] or [torch.tensor(torch.nan)])
    values = value_of(measure, outputs, targets) + (groups - 1) * (without.mean() - without)
    return values if bool(values.isfinite().all()) else torch.full_like(values, torch.nan)


def values_of_rows(measure: Any, outputs: Any, targets: Any) -> Tensor:
    """The values of rows, of which a metric is the mean: its own, or those of a jackknife.

    Of weighted rows they are those of the linearised weighted mean: m + w (v - m) / mean(w), whose mean is m, and whose
    variance estimates that of m (Woodruff, *A simple method for approximating the variance of a complicated estimate*,
    Journal of the American Statistical Association 1971).
    """
    if not has_value_for_each(measure):
        return pseudo_values(measure, outputs, targets)
    values, (_, weights) = each_loss(measure, outputs, targets), parted(targets)
    if weights is None:
        return values
    mean = mean_over_rows(values, weights)
    return mean + weights * (values - mean) / weights.mean()


def by_client(outputs: Any, targets: Any, sizes: Sequence[int]) -> Iterator[tuple[Any, Any]]:
    """Outputs and targets of each client, from those of all clients one after another; nothing without rows."""
    if outputs is not None:
        yield from zip(pytree.split(outputs, sizes), pytree.split(targets, sizes), strict=True)
