"""Layers for a whole stack of clients at once, with each client's own parameters, and dropout that follows from a key.

The rows of c clients are concatenated into one batch [c * b, ...], so everything without parameters (activations,
pooling, reshaping) runs as it is, and only layers with parameters need to know where one client ends.  Models with
layers that have no batched form are left to other engines.

torch draws dropout masks from one global stream, so a client's mask would depend on which clients ran before it or
in the same batch.  Inside `KeyedDropout` `torch.nn.functional.dropout` and its channel-wise variants (and so all
`nn.Dropout*` modules) hash (key, call, position) instead.  The key may be batched by `vmap`: then every client of a
stack has its own masks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from piebald.core.parameters import Layout, Slot, copied
from piebald.engines.device_copies import rows_first
from piebald.engines.factored.factors import Factor, Weights


@dataclass(slots=True, eq=False)
class BatchedPass:
    """The tensors and settings that the layers of one module read during a step.

    Attributes:
        count: c, clients in the batch.
        tensors: their tensors [c, ...] by slot name; parameters are leaves of autograd.
        shares: coefficients of the terms that factored layers start from.
        scale: coefficients of each earlier step's gradient in factored layers.
        rows: which of all steps' rows are in the batch, for layers that have looked ahead.
        batch: data pointer of the batch, and its version counter when the step began.
        hook: a scalar that needs a gradient, so that factored layers are called in the backward pass.
        in_one_piece: whether gradients of weights have to lie in memory as the weights do.
    """

    count: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    shares: list[float] = field(default_factory=lambda: [1.0])
    scale: list[float] = field(default_factory=list)
    rows: slice = field(default_factory=lambda: slice(0))
    batch: tuple[int, int] = (0, 0)
    hook: Tensor | None = None
    in_one_piece: bool = False


class Layer(nn.Module):
    """A layer in its batched form; its tensors come from the pass, under the names they have in the layout."""

    def __init__(self, prefix: str, original: nn.Module, batched_pass: BatchedPass) -> None:
        super().__init__()
        self.prefix, self.batched_pass = prefix, batched_pass
        self.original = [original]  # in a list, so that its parameters are not registered here

    @property
    def weight(self) -> Any:
        """The original's weight without its numbers, for a layer around this one that looks at its type (peft's)."""
        original: Any = self.original[0]
        return torch.empty_like(original.weight, device="meta")

    def tensor(self, name: str) -> Tensor | None:
        """One of the layer's tensors [c, ...], or None where the original has none."""
        return self.batched_pass.tensors.get(f"{self.prefix}{name}")

    def each(self, x: Tensor, run: Callable[..., Tensor], *names: str) -> Tensor:
        """Run a function on every client's rows and tensors."""
        tensors = [self.tensor(name) for name in names]
        count = self.batched_pass.count
        if count == 1:
            return run(x, *[None if tensor is None else tensor[0] for tensor in tensors])
        split = [[None] * count if tensor is None else tensor.unbind(0) for tensor in tensors]
        return torch.cat([run(part, *each) for part, *each in zip(x.chunk(count), *split, strict=True)])


class Dense(Layer):
    """`nn.Linear` with separate weights for each client."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, count = self.tensor("weight"), self.tensor("bias"), self.batched_pass.count
        assert weight is not None
        if count == 1:
            return functional.linear(x, weight[0], None if bias is None else bias[0])
        rows = x.reshape(count, -1, x.shape[-1])
        if self.batched_pass.in_one_piece:
            product: Tensor = _InOnePiece.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
            return product.view(*x.shape[:-1], -1)
        wide = weight.transpose(1, 2)
        out = torch.bmm(rows, wide) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, wide)
        return out.view(*x.shape[:-1], -1)


class _InOnePiece(Function):
    """x [c, b, in] times weights [c, out, in], plus bias [c, out].

    Autograd's own gradient of the weights is a transposed view, which an optimizer would have to copy.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        wide = weight.transpose(1, 2)
        return torch.bmm(x, wide) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, wide)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        to_x = torch.bmm(d, weight) if ctx.needs_input_grad[0] else None
        return to_x, torch.bmm(d.transpose(1, 2), x), d.sum(1) if ctx.biased else None


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """Products computed before the first step.

    Attributes:
        x: all rows [c, r, in] that a layer will see, in the order of the steps.
        made: outputs [c, r, out] for them of each of the terms that the layer starts from.
        gram: their inner products [c, r, r], where a start is a sum over the same rows; otherwise each step computes
            those with earlier rows, which are half of them.
    """

    x: Tensor
    made: list[Tensor]
    gram: Tensor | None


class FactoredDense(Layer):
    """`nn.Linear` whose weights are never formed: the terms that clients start from, and factors of what was added
    since (see `factored.factors`).
    """

    def __init__(self, prefix: str, original: nn.Module, batched_pass: BatchedPass, slot: Slot) -> None:
        super().__init__(prefix, original, batched_pass)
        self.slot = slot

    def begin(self, starts: Sequence[Weights]) -> None:
        """Start a run of SGD from the first of these weights; gradients are shifted by the others."""
        self.starts = starts
        self.x, self.d, self.inner = list[Tensor](), list[Tensor](), list[Tensor]()
        self.made: list[list[Tensor]] = []  # outputs at each step of all starts but the first
        self.ahead: Ahead | None = None

    def look_ahead(self, x: Tensor) -> None:
        """Compute products of the rows x [c, r, in] of all steps at once, where they are known to be the inputs."""
        gram = (
            torch.bmm(x, x.transpose(1, 2))
            if any(rows is x for start in self.starts for rows, _ in start.products)
            else None
        )
        self.ahead = Ahead(x, [start.times(x, lambda rows: gram if rows is x else None) for start in self.starts], gram)

    def forward(self, x: Tensor) -> Tensor:
        bias, rows = self.tensor("bias"), x.reshape(self.batched_pass.count, -1, x.shape[-1])
        out: Tensor = _Product.apply(rows, bias, self.batched_pass.hook, self)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], -1)

    def factor(self, order: Tensor | None = None, positions: Tensor | None = None) -> Factor:
        """The change of the weights, by steps; `order` and `positions` as in `Factor`."""
        whole = None if self.ahead is None else self.ahead.x
        return Factor(self.slot, self.x, self.d, whole, order, None if whole is None else positions)

    def start_outputs(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Outputs [c, b, out] of the starts for a step's rows x [c, b, in], and inner products of x with all steps'
        rows so far, [c, b, b'] each; x is kept.
        """
        count, ahead, shares = len(x), self.ahead, self.batched_pass.shares
        # not these rows: perhaps dropout came in between
        if ahead is None or (x.data_ptr(), x._version) != self.batched_pass.batch:
            self.ahead = None
            self.x.append(x)
            out, *shifted = [start.times(x) for start in self.starts]
            out = out if shares[0] == 1.0 else out.mul_(shares[0])
            grams = [torch.bmm(x, past[:count].transpose(1, 2)) for past in self.x]
        else:
            rows = self.batched_pass.rows
            self.x.append(ahead.x[:count, rows])
            out, *shifted = [outputs[:count, rows] for outputs in ahead.made]
            out = out * shares[0]
            if ahead.gram is None:
                inner = torch.bmm(self.x[-1], ahead.x[:count, : rows.stop].transpose(1, 2))
            else:
                inner = ahead.gram[:count, rows]
            grams = [inner[:, :, span] for span in self._spans()]
        for shifted_outputs, share in zip(shifted, shares[1:], strict=True):
            out.add_(shifted_outputs, alpha=share)
        self.made.append(shifted)
        return out, grams

    def back(self, d: Tensor) -> Tensor:
        """The part of the gradient at the inputs that comes through the starts, from the gradient at the outputs."""
        shares = self.batched_pass.shares
        gradient = self.starts[0].back(d)
        gradient = gradient if shares[0] == 1.0 else gradient.mul_(shares[0])
        for start, share in zip(self.starts[1:], shares[1:], strict=True):
            if share:
                gradient.add_(start.back(d), alpha=share)
        return gradient

    def _spans(self) -> list[slice]:
        """Return the place of each step's rows among the rows of all steps."""
        ends = itertools.accumulate((past.shape[1] for past in self.x), initial=0)
        return [slice(lo, hi) for lo, hi in itertools.pairwise(ends)]

    def moved(self, scale: Tensor, shares: Sequence[Tensor]) -> Tensor:
        """Squared lengths [c] of the change of the weights.

        Args:
            scale: coefficient of each step's gradient [c, steps].
            shares: change of the coefficient of each of the starts [c].
        """
        total = scale.new_zeros(len(scale))
        for step, inner in enumerate(self.inner):
            coefficient = scale[: len(inner), step]
            # each pair of steps once, and twice in the sum: the square of a sum of gradients
            earlier = (inner[:, :step] * scale[: len(inner), :step]).sum(1)
            total[: len(inner)].add_(coefficient * (coefficient * inner[:, step] + 2 * earlier))
        for index, share in enumerate(shares):
            if bool(share.any()):
                total += share * (2 * self._along(index, scale) + share * self._square(index, len(scale)))
        return total

    def _along(self, place: int, scale: Tensor) -> Tensor:
        """Inner products [c] of a start with the sum of the steps' gradients."""
        total = scale.new_zeros(len(scale))
        for step, (x, d) in enumerate(zip(self.x, self.d, strict=True)):
            outputs = self.made[step][place - 1] if place else self.starts[0].times(x)
            total[: len(x)].add_((outputs * d).sum((1, 2)) * scale[: len(x), step])
        return total

    def _square(self, place: int, count: int) -> Tensor:
        """Squared lengths [c] of a start."""
        ahead, start = self.ahead, self.starts[place]
        if ahead is None:
            return start.square(count)
        outputs, gram = ahead.made[place], ahead.gram
        return start.square(
            count, lambda rows: outputs if rows is ahead.x else None, lambda rows: gram if rows is ahead.x else None
        )


class _Product(Function):
    """x [c, b, in] times the weights that a `FactoredDense` layer stands for, plus bias [c, out].

    With W = sum_i a_i W_i + sum_t b_t D_t^T X_t:  x W^T = sum_i a_i x W_i^T + sum_t b_t (x X_t^T) D_t, and the
    gradient at x is  d W = sum_i a_i d W_i + sum_t b_t (d D_t^T) X_t.  The small products of rows with rows also
    give the inner products of gradients, <D_s^T X_s, D_t^T X_t> = sum((X_s X_t^T) * (D_s D_t^T)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, hook: Tensor, layer: FactoredDense) -> Tensor:
        count = len(x)
        out, grams = layer.start_outputs(x.detach())  # else the whole graph behind it would be kept
        # not strict: the last gram, of x with itself, belongs to this step, which has no gradient yet
        for gram, d, scale in zip(grams, layer.d, layer.batched_pass.scale, strict=False):
            out.baddbmm_(gram, d[:count], alpha=scale)
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
            # not strict: this step's own gradient is in no weights yet, so it has no coefficient
            for gram, x, scale in zip(grams, layer.x, layer.batched_pass.scale, strict=False):
                to_x.baddbmm_(gram, x[:count], alpha=scale)
        inner = [(input_gram * two).sum((1, 2)) for input_gram, two in zip(ctx.grams, grams, strict=True)]
        layer.inner.append(torch.stack(inner, dim=1))
        return to_x, d.sum(1) if ctx.biased else None, d.new_zeros(()), None


class Convolution(Layer):
    """Convolutions, one client after another: one client's batch fills the processor, grouped ones do not."""

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self.original[0]
        return self.each(x, layer._conv_forward, "weight", "bias")


class BatchNorm(Layer):
    """Batch norm over each client's rows, with separate running statistics for each client."""

    def forward(self, x: Tensor) -> Tensor:
        return self.each(x, self._of_client, "running_mean", "running_var", "weight", "bias")

    def _of_client(self, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        layer: Any = self.original[0]
        x = x if x.device.type == "cpu" else rows_first(x)
        return functional.batch_norm(x, mean, var, weight, bias, self.training, layer.momentum, layer.eps)


class LayerNorm(Layer):
    """Layer norm: all rows are normalized together, then scaled by each client's own parameters."""

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self.original[0]
        weight, bias, count = self.tensor("weight"), self.tensor("bias"), self.batched_pass.count
        rows = functional.layer_norm(x, layer.normalized_shape, None, None, layer.eps)
        rows = rows.view(count, -1, *layer.normalized_shape)
        if weight is not None:
            rows = rows * weight.unsqueeze(1)
        if bias is not None:
            rows = rows + bias.unsqueeze(1)
        return rows.view(x.shape)


class EmbeddingTable(Layer):
    """An embedding with a separate table for each client."""

    def forward(self, x: Tensor) -> Tensor:
        table = self.tensor("weight")
        assert table is not None
        count, size = self.batched_pass.count, table.shape[1]
        # client k's rows begin at k * size of the joined tables: one lookup serves all clients
        offset = torch.arange(count, device=x.device).mul_(size).view(count, *[1] * x.dim())
        positions = x.view(count, -1, *x.shape[1:]) + offset
        rows = functional.embedding(positions, table.flatten(0, 1)).view(*x.shape, -1)
        layer: Any = self.original[0]
        if layer.padding_idx is None:
            return rows
        return torch.where((x == layer.padding_idx).unsqueeze(-1), rows.detach(), rows)  # padding has no gradient


_BATCHED: dict[type[nn.Module], type[Layer]] = {
    nn.Linear: Dense,
    nn.Conv1d: Convolution,
    nn.Conv2d: Convolution,
    nn.BatchNorm1d: BatchNorm,
    nn.BatchNorm2d: BatchNorm,
    nn.LayerNorm: LayerNorm,
    nn.Embedding: EmbeddingTable,
}


def batch_layers(
    model: nn.Module, layout: Layout, factored: Sequence[str]
) -> tuple[nn.Module, BatchedPass, list[FactoredDense]] | None:
    """Put a module into its batched form.

    Args:
        model: any module; it is copied.
        layout: its layout.
        factored: names of the weights of dense layers that are not to be formed.

    Returns:
        The module, the pass that its layers read, and its factored layers; None where a layer has no batched form.
    """
    module, batched_pass, factored_layers = copied(model), BatchedPass(), list[FactoredDense]()
    slots = {slot.name: slot for slot in layout.slots}
    covered: set[str] = set()
    for path, layer in list(module.named_modules()):
        prefix = f"{path}." if path else ""
        names = {f"{prefix}{name}" for name, _ in layer.named_parameters(recurse=False)}
        names |= {
            f"{prefix}{name}" for name, buffer in layer.named_buffers(recurse=False) if buffer.is_floating_point()
        }
        if not names or not names & slots.keys():  # no tensors, or frozen ones that are the same for all clients
            continue
        form = _BATCHED.get(type(layer))
        # without a path the model is a single layer, which has no parent that could hold its batched form
        if form is None or not path or not names <= slots.keys() or not _plain(layer):
            return None
        covered |= names
        parent, _, name = path.rpartition(".")
        if f"{prefix}weight" in factored:
            factored_layers.append(FactoredDense(prefix, layer, batched_pass, slots[f"{prefix}weight"]))
        batched = factored_layers[-1] if f"{prefix}weight" in factored else form(prefix, layer, batched_pass)
        setattr(module.get_submodule(parent), name, batched)
    # a number of the vector that is in no batched layer would be one for all clients
    return (module, batched_pass, factored_layers) if covered == slots.keys() else None


def _plain(layer: nn.Module) -> bool:
    """Return whether a layer is used in the way that its batched form supports."""
    # hooks are registered at the original, which its batched form does not call
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        return False
    if isinstance(layer, nn.Embedding):
        return layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
    if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
        return layer.momentum is not None and layer.track_running_stats
    return True


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


# splitmix64's odd constants (Steele, Lea, Flood 2014): good avalanche with two multiplications
_STEP = _signed(0x9E3779B97F4A7C15)
_MIX = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def mix(z: Tensor) -> Tensor:
    """Hash int64 numbers to int64 numbers, wrapping like unsigned ones."""
    # torch's shift of int64 drags the sign along; the masks make it the logical one that splitmix64 needs
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX[0]
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX[1]
    return z ^ ((z >> 31) & ((1 << 33) - 1))


class KeyedDropout(TorchFunctionMode):
    """While active, dropout is a function of `key` and the number of the call.

    The key is an int64 tensor without axes, perhaps batched by vmap, or [c] where the rows of c clients are
    concatenated in one batch.
    """

    key: Tensor
    call: int

    def start(self, key: Tensor) -> None:
        """Begin a forward pass with this key."""
        self.key, self.call = key, 0

    def uniform(self, shape: torch.Size | tuple[int, ...], device: torch.device) -> Tensor:
        """Uniform numbers in [0, 1) of this shape for the next call."""
        # or two dropout layers of one pass would have the same mask
        self.call += 1
        clients = self.key.numel() if self.key.dim() else 1  # one key, or one for each client in the batch
        place = torch.arange(torch.Size(shape).numel() // clients, device=device)
        offset = _signed(self.call * _STEP % (1 << 64))  # Python's integers do not wrap
        start = mix(self.key + offset).unsqueeze(-1)
        # 24 bits, which a float32 holds exactly: with more, rounding could give 1.0
        return ((mix(start + place * _STEP) >> 40) & 0xFFFFFF).view(shape).float() / float(1 << 24)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shape = _MASK_SHAPES.get(func)
        if shape is None:
            return func(*args, **(kwargs or {}))
        return self._drop(shape, *args, **(kwargs or {}))

    def _drop(
        self,
        shape: Callable[[Tensor], tuple[int, ...]],
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        if not training or p == 0.0:
            return input
        if p == 1.0:
            # 1 / (1 - p) would be infinite, and 0 times infinity NaN
            return input * 0.0
        survives = (self.uniform(shape(input), input.device) >= p).to(input.dtype)
        return input * (survives / (1.0 - p))


_MASK_SHAPES: dict[Callable[..., Any], Callable[[Tensor], tuple[int, ...]]] = {
    functional.dropout: lambda x: tuple(x.shape),
    functional.dropout1d: lambda x: (*x.shape[:-1], 1),
    functional.dropout2d: lambda x: (*x.shape[:2], *[1] * (x.dim() - 2)),  # three axes are [batch, channel, length]
    functional.dropout3d: lambda x: (*x.shape[:-3], 1, 1, 1),
}
