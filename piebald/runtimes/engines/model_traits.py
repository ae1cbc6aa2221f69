"""Properties of a model that decide how it can be run, found by trying it, since any `nn.Module` is allowed."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from piebald.client_work import ClientWork
from piebald.contracts import Rows
from piebald.errors import SettingError
from piebald.runtimes.engines.keyed_dropout import KeyedDropout


@dataclass(frozen=True, slots=True)
class Traits:
    """How a model and its loss behave.

    Attributes:
        mixes: the output of an example depends on the others in its batch (batch norm), so no batch may be padded.
        dropout: the model draws dropout masks that `KeyedDropout` can replace.
        random: it draws random numbers that cannot be replaced; it runs one client after another, seeded.
        each: the loss has one value for each example rather than one mean.
    """

    mixes: bool
    dropout: bool
    random: bool
    each: bool


def probe(work: ClientWork, rows: Rows) -> Traits:
    """Try the model on a few rows.

    Raises:
        SettingError: the model or the loss cannot take the clients' rows, or the model starts from numbers that are not
            finite.
    """
    for name, view in work.layout.views(work.initial).items():
        if not bool(torch.isfinite(view).all()):
            raise SettingError(
                f"the model starts with numbers in {name!r} that are not finite, so that no update could count: "
                "use finite ones (a mask of -1e9), or keep them out of the module's parameters and buffers"
            )
    module = copy.deepcopy(work.model).train().to(rows.x.device)
    x, y = rows.x[:4], rows.y[:4]
    if len(x) == 1:  # batch norm refuses a single row; a repeated one will do
        x, y = x.repeat(2, *[1] * (x.dim() - 1)), y.repeat(2, *[1] * (y.dim() - 1))
    with torch.no_grad(), torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        try:
            loss = work.objective.loss(_run(module, x, 0), y)
        except Exception as error:  # whatever the user's own code may raise
            raise SettingError(
                f"the model cannot be trained on these rows (inputs {list(x.shape)}, targets {list(y.shape)} "
                f"{str(y.dtype).removeprefix('torch.')}): {_first_line(error)}"
            ) from None
        if loss.dim() > 1 or (loss.dim() == 1 and len(loss) != len(x)):
            raise SettingError(f"the loss must give one value an example or one mean, got shape {list(loss.shape)}")
        random_plain = not torch.equal(_run(module, x, 0), _run(module, x, 1))
        random_keyed = random_plain and not torch.equal(_run(module, x, 0, keyed=True), _run(module, x, 1, keyed=True))
        changed = x.clone()
        changed[-1] = torch.where(changed[-1] == changed[0], changed[-1] + 1, changed[0]).to(x.dtype)
        first = [_run(module, rows, 0, keyed=not random_keyed)[0] for rows in (x, changed)]
        return Traits(
            mixes=not torch.allclose(first[0], first[1], atol=1e-6),
            dropout=random_plain and not random_keyed,
            random=random_keyed,
            each=loss.dim() == 1,
        )


def _run(module: nn.Module, x: Tensor, seed: int, keyed: bool = False) -> Tensor:
    """One training-mode forward pass from the same buffers each time."""
    fresh = copy.deepcopy(module)
    torch.manual_seed(seed)
    if not keyed:
        return fresh(x)  # type: ignore[no-any-return]
    with KeyedDropout() as dropout:
        dropout.start(torch.tensor(7, device=x.device))
        return fresh(x)  # type: ignore[no-any-return]


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
