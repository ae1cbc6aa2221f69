"""Properties of a model that decide how it can be run, found by trying it, since any `nn.Module` is allowed."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from piebald.contracts import PLAIN_PASSES, PassSettings, Rows
from piebald.core import pytree
from piebald.core.errors import SettingError, shown
from piebald.core.machine import raise_if_lost
from piebald.core.metrics import weighed
from piebald.core.parameters import copied
from piebald.core.randomness import torch_seed
from piebald.core.targets import parted
from piebald.engines.batched_layers import KeyedDropout
from piebald.methods.client_work import ClientWork
from piebald.methods.training.sgd import Sgd

_FEW = 4  # rows of a trial


@dataclass(frozen=True, slots=True)
class Traits:
    """The behaviour of a model and its loss.

    Attributes:
        mixes: the output of an example depends on the others in its batch (batch norm), so no batch may be padded.
        dropout: the model draws dropout masks that `KeyedDropout` can replace.
        random: it draws random numbers that cannot be replaced; it runs one client after another, seeded.
        each: the loss has one value for each example rather than one mean.
        pooled: the output has a number for a whole batch, as the `.loss` of a Hugging Face model.
    """

    mixes: bool
    dropout: bool
    random: bool
    each: bool
    pooled: bool = False


def passes_of(work: ClientWork) -> PassSettings:
    """Return how the trainer's gradients are computed; plainly where it is no `Sgd`."""
    return work.trainer.passes if isinstance(work.trainer, Sgd) else PLAIN_PASSES


def probe(work: ClientWork, rows: Rows) -> Traits:
    """Try the model on a few rows, or on others of their form where rows are hidden.

    Raises:
        SettingError: the model or the loss cannot take the clients' rows, or the model starts from numbers that are not
            finite.
    """
    _check_finite(work)
    # a refusal may not tell of a row, so that where rows are hidden others stand for them
    return _probe(work, rows[:_FEW] if work.row_privacy is None else made_up(rows))


def _probe(work: ClientWork, few: Rows) -> Traits:
    """Try the model on these rows."""
    module, device = work.model, pytree.leaves(few.x)[0].device
    # batch norm refuses a single row; a repeated one will do
    few = few if len(few) > 1 else few[[0, 0]]
    x, y = pytree.mapped(_usable, few.x), few.y
    outputs = loss = None
    with torch.no_grad(), torch_seed(0, device):
        try:
            outputs, again = _run(module, x, 0), _run(module, x, 1)
            random_plain = not _equal(outputs, again)  # before the loss, which may write into what it is given
            loss = weighed(work.objective.loss, outputs, y)
        except Exception as error:  # whatever the user's own code may raise
            raise_if_lost(error, device)
            reason = _first_line(error)
            # in words of torch or of Python
            if outputs is not None and loss is None and isinstance(error, RuntimeError | TypeError):
                reason = (
                    "the loss cannot take (outputs, targets), outputs being "
                    f"{pytree.described(outputs)}: give targets and outputs the shapes that it needs, or another loss"
                )
            raise SettingError(
                f"the model cannot be trained on these rows (inputs {pytree.described(x)}, "
                f"targets {pytree.described(parted(y)[0])}): {reason}"
            ) from error
        _try_precision(work, module, x, y)
        if not isinstance(loss, Tensor) or loss.dim() > 1 or (loss.dim() == 1 and len(loss) != len(few)):
            got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"{shown(loss)}, which is no tensor"
            raise SettingError(f"the loss must give one value an example or one mean, got {got}")
        keyed = _run(module, x, 1, keyed=True) if random_plain else again
        random_keyed = random_plain and not _equal(_run(module, x, 0, keyed=True), keyed)
        # with the seed of `again` and `keyed`, so that nothing but the last row differs
        changed = _run(module, pytree.mapped(_with_another_last, x), 1, keyed=random_plain and not random_keyed)
        pairs = zip(_rows(again if random_keyed else keyed, len(few)), _rows(changed, len(few)), strict=True)
        alike = all(torch.allclose(a[0], b[0], atol=1e-6, equal_nan=True) for a, b in pairs)
        return Traits(
            # rows that are alike, such as zeros in place of an input that a client lacks, show no mixing
            mixes=_runs_batch_norm(module, x) or not alike,
            dropout=random_plain and not random_keyed,
            random=random_keyed,
            each=loss.dim() == 1,
            pooled=any(isinstance(leaf, Tensor) and leaf.dim() == 0 for leaf in pytree.leaves(outputs)),
        )


def _check_finite(work: ClientWork) -> None:
    extremes = work.initial.aminmax() if work.layout.size else ()  # NaN if any number is; one pass over the model
    if all(bool(torch.isfinite(extreme)) for extreme in extremes):
        return
    name = next(n for n, view in work.layout.views(work.initial).items() if not bool(torch.isfinite(view).all()))
    raise SettingError(
        f"the model starts with numbers in {name!r} that are not finite, so that no update could count: "
        "use finite ones (a mask of -1e9), or keep them out of the module's parameters and buffers"
    )


def _try_precision(work: ClientWork, module: nn.Module, x: Any, y: Any) -> None:
    """Refuse a precision in which the model cannot run."""
    precision = passes_of(work).precision
    if precision == "float32":
        return
    device = pytree.leaves(x)[0].device
    try:
        with torch.autocast(device.type, torch.bfloat16 if precision == "bfloat16" else torch.float16):
            work.objective.loss(_run(module, x, 0), y)
    except Exception as error:  # whatever the user's own code may raise
        raise_if_lost(error, device)
        raise SettingError(
            f"the model cannot run with precision = {precision!r} on device {device.type!r}: "
            f"{_first_line(error)}; choose another precision"
        ) from None


def _with_another_last(x: Tensor) -> Tensor:
    """Rows whose last one is not the same as the first; token ids stay in the vocabulary."""
    replacement = x[-1] + 1 if x.dtype.is_floating_point else torch.where(x[-1] > 0, x[-1].long() - 1, 1)
    return torch.cat([x[:-1], torch.where(x[-1] == x[0], replacement, x[0]).to(x.dtype).unsqueeze(0)])


def made_up(rows: Rows) -> Rows:
    """Return a few rows of the same form: real numbers around 0, whole numbers of 0 and 1, and targets of 0."""
    rng = torch.Generator().manual_seed(0)

    def inputs(leaf: Tensor) -> Tensor:
        numbers = torch.randn(_FEW, *leaf.shape[1:], generator=rng)
        return (numbers if leaf.is_floating_point() else numbers > 0).to(leaf.device, leaf.dtype)

    def targets(leaf: Tensor) -> Tensor:
        return leaf.new_zeros(_FEW, *leaf.shape[1:])

    return Rows(pytree.mapped(inputs, rows.x), pytree.mapped(targets, rows.y))


def _usable(leaf: Tensor) -> Tensor:
    """Return inputs [n, ...] with which a model can be tried: of NaN outputs nobody could tell whether they repeat."""
    # rows of questions may have more digits than a model's
    leaf = leaf.float() if leaf.dtype == torch.float64 else leaf
    return leaf.nan_to_num(0.0, 0.0, 0.0) if leaf.is_floating_point() else leaf


def _rows(outputs: Any, rows: int) -> list[Tensor]:
    """Return a model's outputs for each row, without those for all rows together."""
    return [leaf for leaf in pytree.leaves(outputs) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == rows]


def _equal(left: Any, right: Any) -> bool:
    pairs = zip(pytree.leaves(left), pytree.leaves(right), strict=True)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs if isinstance(a, Tensor))


def _run(module: nn.Module, x: pytree.Tree, seed: int, keyed: bool = False) -> Any:
    """One training-mode forward pass from the same buffers each time."""
    device = pytree.leaves(x)[0].device
    fresh = copied(module).train().to(device)
    with torch_seed(seed, device), KeyedDropout() if keyed else contextlib.nullcontext() as dropout:
        if dropout is not None:
            dropout.start(torch.tensor(7, device=device))
        return pytree.run(fresh, x)


def _runs_batch_norm(module: nn.Module, x: pytree.Tree) -> bool:
    """Return whether a batch norm normalises by these rows."""
    trial, ran = copied(module).train().to(pytree.leaves(x)[0].device), list[nn.Module]()
    for layer in trial.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training:
            layer.register_forward_hook(lambda layer, *_: ran.append(layer))
    pytree.run(trial, x)
    return bool(ran)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
