"""Attack success rates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from piebald.core.arguments import checked, checked_class
from piebald.core.errors import SettingError
from piebald.core.pytree import single

if TYPE_CHECKING:
    from piebald.contracts import Rows


@checked_class
class AttackSuccess:
    """Attack success rate of flipped labels: a metric of runs (DistFL, eq. 9, averaged over the flipped classes).

    Of the test rows of class a, the share that the model takes for b, where a was flipped to b; then the mean over the
    flipped classes that have rows.  NaN where none has.  Give it to `piebald.run` as a metric:
    ``metrics={"accuracy": accuracy, "attack_success": AttackSuccess({0: 4, 4: 0})}``.

    Args:
        flips: what each flipped class became.
    """

    higher_is_better = False

    def __init__(self, flips: Mapping[int, int]) -> None:
        if not flips or any(a == b for a, b in flips.items()):
            raise SettingError(f"flips must say what each flipped class became, like {{0: 4, 4: 0}}, got {flips!r}")
        self.flips = dict(flips)
        self.reset()

    @classmethod
    def of_pairs(cls, pairs: tuple[tuple[int, int], ...]) -> AttackSuccess:
        """For classes swapped in pairs, as the change `flip_pairs` does it."""
        return cls({a: b for pair in pairs for a, b in (pair, pair[::-1])})

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The rate of these rows alone."""
        self.reset()
        self.update(outputs, targets)
        return self.compute()

    def reset(self) -> None:
        """Forget all rows."""
        self._rows = dict.fromkeys(self.flips, 0)
        self._hits = dict.fromkeys(self.flips, 0)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count rows: logits [n, classes] and true classes [n]."""
        predicted = outputs.argmax(1)
        for source, goal in self.flips.items():
            of_source = targets == source
            self._rows[source] += int(of_source.sum())
            self._hits[source] += int((predicted[of_source] == goal).sum())

    def compute(self) -> Tensor:
        """The rate so far."""
        rates = [self._hits[source] / rows for source, rows in self._rows.items() if rows]
        return torch.tensor(sum(rates) / len(rates) if rates else math.nan)


class Trigger(Protocol):
    """A mark on inputs, such as `partition.Backdoor`."""

    target: int

    def mark(self, x: Tensor) -> Tensor:
        """Inputs [n, ...] with the trigger on every one."""


@checked
def backdoor_success(model: nn.Module, rows: Rows, trigger: Trigger) -> float:
    """Of clean rows of other classes, the share that the marked input puts into the target class.

    Args:
        model: any module, e.g. `run.model()`.
        rows: clean test rows, e.g. a federation's `common`.
        trigger: the change that poisoned the clients.
    """
    x, y = (single(part, "the backdoor's success") for part in (rows.x, rows.y))
    of_others = y != trigger.target
    if not bool(of_others.any()):
        return math.nan
    was = model.training
    model.eval()
    with torch.no_grad():
        predicted = torch.cat([model(part).argmax(1) for part in torch.split(trigger.mark(x[of_others]), 1024)])
    model.train(was)
    return float((predicted == trigger.target).float().mean())
