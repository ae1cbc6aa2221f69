"""Layers that a whole stack of clients goes through at once, each client's rows with its own numbers.

The rows of c clients lie behind one another in one batch [c * b, ...], so all that has no parameters (activations,
pooling, reshaping) runs as it is, and only layers with parameters need to know where one client ends.  What cannot be
taken this way is left to other engines.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from piebald.parameters import Layout, Slot
from piebald.runtimes.engines.matrix_products import gram
from piebald.runtimes.factored.factors import Factor, Weights


@dataclass(slots=True, eq=False)
class BatchedPass:
    """What the layers of one module are told about the step under way.

    Attributes:
        count: c, clients in the batch.
        tensors: by slot name [c, ...], their numbers; parameters are leaves of autograd.
        shares: how much there is in factored layers of each of their starts, and `scale` the factor of each earlier
            step's gradient.
        rows: which of all steps' rows are in the batch, for layers that have looked ahead.
        batch: where the batch lies, and how often it had been written to when the step began.
        hook: a scalar that needs a gradient, so that factored layers are called back.
    """

    count: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    shares: list[float] = field(default_factory=lambda: [1.0])
    scale: list[float] = field(default_factory=list)
    rows: slice = field(default_factory=lambda: slice(0))
    batch: tuple[int, int] = (0, 0)
    hook: Tensor | None = None


class Layer(nn.Module):
    """A layer in its joined form; its tensors come from the turn, under the names they have in the layout."""

    def __init__(self, prefix: str, original: nn.Module, turn: BatchedPass) -> None:
        super().__init__()
        self.prefix, self.turn = prefix, turn
        self.original = [original]  # in a list, so that its parameters are not ours

    def tensor(self, name: str) -> Tensor | None:
        """One of the layer's tensors [c, ...], or None where the original has none."""
        return self.turn.tensors.get(f"{self.prefix}{name}")

    def each(self, x: Tensor, run: Callable[..., Tensor], *names: str) -> Tensor:
        """Run a function on every client's rows and tensors."""
        tensors = [self.tensor(name) for name in names]
        count = self.turn.count
        if count == 1:
            return run(x, *[None if tensor is None else tensor[0] for tensor in tensors])
        split = [[None] * count if tensor is None else tensor.unbind(0) for tensor in tensors]
        return torch.cat([run(part, *own) for part, *own in zip(x.chunk(count), *split, strict=True)])


class Dense(Layer):
    """`nn.Linear` with weights of each client's own."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, count = self.tensor("weight"), self.tensor("bias"), self.turn.count
        assert weight is not None
        if count == 1:
            return functional.linear(x, weight[0], None if bias is None else bias[0])
        rows = x.reshape(count, -1, x.shape[-1])
        wide = weight.transpose(1, 2)
        out = torch.bmm(rows, wide) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, wide)
        return out.view(*x.shape[:-1], -1)


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """All the rows x [c, r, in] that a layer will see, in the order of the steps, what each of its starts makes of them
    [c, r, out], and their products with one another [c, r, r].
    """

    x: Tensor
    made: list[Tensor]
    gram: Tensor


class Factored(Layer):
    """`nn.Linear` whose weights are never formed: what clients start from and are steered by, and the factors of what
    came since (see `lowrank`).
    """

    def __init__(self, prefix: str, original: nn.Module, turn: BatchedPass, slot: Slot) -> None:
        super().__init__(prefix, original, turn)
        self.slot = slot

    def begin(self, starts: Sequence[Weights]) -> None:
        """Start a walk from weights, and perhaps others that gradients are shifted by; `Turn.shares` has theirs."""
        self.starts = starts
        self.x, self.d, self.inner = list[Tensor](), list[Tensor](), list[Tensor]()
        self.made: list[list[Tensor]] = []  # of each step, what all starts but the first make of its rows
        self.ahead: Ahead | None = None

    def look_ahead(self, x: Tensor) -> None:
        """Multiply the rows x [c, r, in] of all steps at once, where it is known that they will be the inputs."""
        own = gram(x)
        self.ahead = Ahead(x, [start.times(x, lambda rows: own if rows is x else None) for start in self.starts], own)

    def forward(self, x: Tensor) -> Tensor:
        bias, rows = self.tensor("bias"), x.reshape(self.turn.count, -1, x.shape[-1])
        out: Tensor = _Product.apply(rows, bias, self.turn.hook, self)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], -1)

    def factor(self, order: Tensor | None = None, places: Tensor | None = None) -> Factor:
        """How far the weights have moved, by steps; for `order` and `places` see there."""
        whole = None if self.ahead is None else self.ahead.x
        return Factor(self.slot, self.x, self.d, whole, order, None if whole is None else places)

    def taken(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """What the starts make of a step's rows x [c, b, in], [c, b, out], and x's products with all steps' rows up to
        now, [c, b, b'] each; x is kept.
        """
        count, ahead, shares = len(x), self.ahead, self.turn.shares
        if ahead is None or (x.data_ptr(), x._version) != self.turn.batch:  # perhaps dropout came in between
            self.ahead = None
            self.x.append(x)
            out, *others = [start.times(x) for start in self.starts]
            out = out if shares[0] == 1.0 else out.mul_(shares[0])
            grams = [torch.bmm(x, past[:count].transpose(1, 2)) for past in self.x]
        else:
            rows = self.turn.rows
            self.x.append(ahead.x[:count, rows])
            out, *others = [made[:count, rows] for made in ahead.made]
            out = out * shares[0]
            grams = [ahead.gram[:count, rows, span] for span in self._spans()]
        for made, share in zip(others, shares[1:], strict=True):
            out.add_(made, alpha=share)
        self.made.append(others)
        return out, grams

    def back(self, d: Tensor) -> Tensor:
        """The gradient at the inputs that comes through the starts, from that at the outputs."""
        shares = self.turn.shares
        made = self.starts[0].back(d)
        made = made if shares[0] == 1.0 else made.mul_(shares[0])
        for start, share in zip(self.starts[1:], shares[1:], strict=True):
            if share:
                made.add_(start.back(d), alpha=share)
        return made

    def _spans(self) -> list[slice]:
        """Where each step's rows lie among those of all."""
        ends = itertools.accumulate((past.shape[1] for past in self.x), initial=0)
        return [slice(lo, hi) for lo, hi in itertools.pairwise(ends)]

    def moved(self, scale: Tensor, shares: Sequence[Tensor]) -> Tensor:
        """Squares [c] of how far the weights have moved, from the factor of each step's gradient [c, steps], and how
        much each of the starts [c] has come or gone.
        """
        total = scale.new_zeros(len(scale))
        for step, inner in enumerate(self.inner):
            mine = scale[: len(inner), step]
            earlier = (inner[:, :step] * scale[: len(inner), :step]).sum(1)
            total[: len(inner)] += mine * (mine * inner[:, step] + 2 * earlier)
        for place, share in enumerate(shares):
            if bool(share.any()):
                total += share * (2 * self._along(place, scale) + share * self._square(place, len(scale)))
        return total

    def _along(self, place: int, scale: Tensor) -> Tensor:
        """Inner products [c] of a start with what steps have added."""
        total = scale.new_zeros(len(scale))
        for step, (x, d) in enumerate(zip(self.x, self.d, strict=True)):
            made = self.made[step][place - 1] if place else self.starts[0].times(x)
            total[: len(x)] += (made * d).sum((1, 2)) * scale[: len(x), step]
        return total

    def _square(self, place: int, count: int) -> Tensor:
        """Squared lengths [c] of a start."""
        ahead, start = self.ahead, self.starts[place]
        if ahead is None:
            return start.square(count)
        made, own = ahead.made[place], ahead.gram
        return start.square(
            count, lambda rows: made if rows is ahead.x else None, lambda rows: own if rows is ahead.x else None
        )


class _Product(Function):
    """x [c, b, in] times the weights that a `Factored` layer stands for, plus bias [c, out].

    With W = sum_i a_i W_i + sum_t b_t D_t^T X_t:  x W^T = sum_i a_i x W_i^T + sum_t b_t (x X_t^T) D_t, and the
    gradient's way back is  d W = sum_i a_i d W_i + sum_t b_t (d D_t^T) X_t.  The small products of rows with rows also
    give the inner products of gradients, <D_s^T X_s, D_t^T X_t> = sum((X_s X_t^T) * (D_s D_t^T)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, hook: Tensor, layer: Factored) -> Tensor:
        count = len(x)
        out, grams = layer.taken(x.detach())  # else the whole pass behind it would be kept
        for one, d, scale in zip(grams, layer.d, layer.turn.scale, strict=False):
            out.baddbmm_(one, d[:count], alpha=scale)
        if bias is not None:
            out += bias.unsqueeze(1)
        ctx.layer, ctx.grams, ctx.biased = layer, grams, bias is not None
        return out

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor, None]:
        layer, count = ctx.layer, len(d)
        to_x = layer.back(d) if ctx.needs_input_grad[0] else None
        layer.d.append(d)
        grams = [torch.bmm(d, past[:count].transpose(1, 2)) for past in layer.d]
        if to_x is not None:
            for one, x, scale in zip(grams, layer.x, layer.turn.scale, strict=False):
                to_x.baddbmm_(one, x[:count], alpha=scale)
        inner = [(one * two).sum((1, 2)) for one, two in zip(ctx.grams, grams, strict=True)]
        layer.inner.append(torch.stack(inner, dim=1))
        return to_x, d.sum(1) if ctx.biased else None, d.new_zeros(()), None


class Convolution(Layer):
    """Convolutions, one client after another: one of a client's batch fills the processor, grouped ones do not."""

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self.original[0]
        return self.each(x, layer._conv_forward, "weight", "bias")


class Normalisation(Layer):
    """Batch norm over each client's own rows, with running statistics of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return self.each(x, self._one, "running_mean", "running_var", "weight", "bias")

    def _one(self, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        layer: Any = self.original[0]
        return functional.batch_norm(x, mean, var, weight, bias, self.training, layer.momentum, layer.eps)


class RowNormalisation(Layer):
    """Layer norm: rows are scaled alike, then by each client's own numbers."""

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self.original[0]
        weight, bias, count = self.tensor("weight"), self.tensor("bias"), self.turn.count
        rows = functional.layer_norm(x, layer.normalized_shape, None, None, layer.eps)
        rows = rows.view(count, -1, *layer.normalized_shape)
        if weight is not None:
            rows = rows * weight.unsqueeze(1)
        if bias is not None:
            rows = rows + bias.unsqueeze(1)
        return rows.view(x.shape)


class Lookup(Layer):
    """An embedding whose table is each client's own."""

    def forward(self, x: Tensor) -> Tensor:
        table = self.tensor("weight")
        assert table is not None
        count, size = self.turn.count, table.shape[1]
        offset = torch.arange(count, device=x.device).mul_(size).view(count, *[1] * x.dim())
        places = x.view(count, -1, *x.shape[1:]) + offset
        rows = functional.embedding(places, table.flatten(0, 1)).view(*x.shape, -1)
        layer: Any = self.original[0]
        if layer.padding_idx is None:
            return rows
        return torch.where((x == layer.padding_idx).unsqueeze(-1), rows.detach(), rows)  # padding has no gradient


_FORMS: dict[type[nn.Module], type[Layer]] = {
    nn.Linear: Dense,
    nn.Conv1d: Convolution,
    nn.Conv2d: Convolution,
    nn.BatchNorm1d: Normalisation,
    nn.BatchNorm2d: Normalisation,
    nn.LayerNorm: RowNormalisation,
    nn.Embedding: Lookup,
}


def join(
    model: nn.Module, layout: Layout, factored: Sequence[str]
) -> tuple[nn.Module, BatchedPass, list[Factored]] | None:
    """A module's joined form with the turn that its layers follow, or None where a layer has none.

    Args:
        model: any module; it is copied.
        layout: its layout.
        factored: names of the weights of dense layers that are not to be formed.
    """
    module, turn, made = copy.deepcopy(model), BatchedPass(), list[Factored]()
    slots = {slot.name: slot for slot in layout.slots}
    covered: set[str] = set()
    for path, layer in list(module.named_modules()):
        prefix = f"{path}." if path else ""
        own = {f"{prefix}{name}" for name, _ in layer.named_parameters(recurse=False)}
        own |= {f"{prefix}{name}" for name, buffer in layer.named_buffers(recurse=False) if buffer.is_floating_point()}
        if not own or not own & slots.keys():  # nothing of its own, or frozen and so the same for all clients
            continue
        form = _FORMS.get(type(layer))
        if form is None or not path or not own <= slots.keys() or not _plain(layer):
            return None
        covered |= own
        parent, _, name = path.rpartition(".")
        if f"{prefix}weight" in factored:
            made.append(Factored(prefix, layer, turn, slots[f"{prefix}weight"]))
        joined = made[-1] if f"{prefix}weight" in factored else form(prefix, layer, turn)
        setattr(module.get_submodule(parent), name, joined)
    return (module, turn, made) if covered == slots.keys() else None


def _plain(layer: nn.Module) -> bool:
    """Whether a layer is used in the way that its joined form knows."""
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        return False
    if isinstance(layer, nn.Embedding):
        return layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
    if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
        return layer.momentum is not None and layer.track_running_stats
    return True
