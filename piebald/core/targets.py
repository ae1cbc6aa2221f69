"""What the targets of a loss may be: every loss by name states its domain, in which -100 means unknown.

Where targets are real numbers, NaN means unknown as well.  An unknown target counts in no loss and no metric; a row
whose targets are all unknown counts in no mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from piebald.core import pytree
from piebald.core.errors import SettingError
from piebald.core.pytree import Tree, described

IGNORED = -100  # a target that counts in no loss and no score, as in torch


def known(targets: Tensor) -> Tensor:
    """Return the mask of the targets that are known.

    Examples:
        >>> known(torch.tensor([1.0, -100.0, torch.nan]))
        tensor([ True, False, False])
    """
    mask = targets != IGNORED
    return mask & ~targets.isnan() if targets.dtype.is_floating_point else mask


class Weighted(NamedTuple):
    """Targets of rows, and how much each row counts in a mean [n], above 0."""

    targets: Any
    weights: Tensor


def parted(targets: Any) -> tuple[Any, Tensor | None]:
    """Return targets without the weights of rows, and these; None where all rows count alike."""
    return (targets.targets, targets.weights) if isinstance(targets, Weighted) else (targets, None)


def filled(targets: Tensor, mask: Tensor) -> Tensor:
    """Return targets with 0 where the mask says that they are unknown, so that no NaN reaches a gradient."""
    return torch.where(mask, targets, 0)


class Misfit(NamedTuple):
    """A target outside of a domain: where it is in its row, its row from 0, its value, what is allowed, and advice."""

    part: str
    row: int
    value: float
    allowed: str
    advice: str = ""

    def sentence(self, who: str) -> str:
        """Return the sentence about the target of `who`."""
        advice = f": {self.advice}" if self.advice else ""
        place = f"{self.part} of row {self.row + 1}" if self.part else f"row {self.row + 1}"
        return f"{who}: targets must be {self.allowed}, got {self.value:g} in {place}{advice}"


def _misfit(targets: Tensor, wrong: Tensor, allowed: str, part: str = "") -> Misfit | None:
    """Return the first target that a mask marks as wrong, or None."""
    if not bool(wrong.any()):
        return None
    place = wrong.nonzero()[0].tolist()
    value = float(targets[tuple(place)])
    return Misfit(part or (f"column {place[1] + 1}" if len(place) > 1 else ""), place[0], value, allowed)


@dataclass(frozen=True)
class TargetDomain:
    """The targets that a loss takes; by default finite real numbers."""

    def misfit(self, targets: Tree, outputs: Sequence[int]) -> Misfit | None:
        """Return the first target that the loss cannot take, or None.

        Args:
            targets: of some rows.
            outputs: the shape of the model's outputs for one row, empty where it is not known.

        Raises:
            SettingError: targets have another form.
        """
        return (
            _misfit(targets, known(targets) & ~targets.isfinite(), "finite numbers")
            if isinstance(targets, Tensor)
            else None
        )

    def without_misfits(self, targets: Tree, outputs: Sequence[int]) -> Tree:
        """Return targets in which those of a row count as unknown where the loss cannot take one of them.

        Args:
            targets, outputs: as in `misfit`.

        Examples:
            >>> ClassNumbers().without_misfits(torch.tensor([0, 7, 1]), [2])
            tensor([   0, -100,    1])
        """
        rows = range(pytree.count(targets))
        odd = torch.tensor([self.misfit(pytree.take(targets, [row]), outputs) is not None for row in rows])

        def unknown(leaf: Tensor) -> Tensor:
            signed = leaf if leaf.is_floating_point() else leaf.long()
            return signed.masked_fill(odd.view(-1, *[1] * (leaf.dim() - 1)), IGNORED)

        known: Tree = pytree.mapped(unknown, targets)
        return known

    def known_rows(self, targets: Tree, axes: int = 1) -> Tensor:
        """Return the mask of the rows that have a known target; the first `axes` axes count rows."""
        if not isinstance(targets, Tensor):
            return torch.ones(next(iter(_leaves(targets))).shape[:axes], dtype=torch.bool)
        mask = known(targets)
        return mask if mask.dim() == axes else mask.flatten(axes).any(axes)

    def prepared(self, targets: Tree, outputs: Sequence[int]) -> Tree:
        """Return targets as engines train on them."""
        return targets


@dataclass(frozen=True)
class ClassNumbers(TargetDomain):
    """Numbers of classes, or one-hot rows in their place.

    Attributes:
        last: whether the last axis of outputs counts classes; else the first one does.
        shifted: whether targets are tokens of the inputs, of which the first one of a row is not predicted.
    """

    last: bool = False
    shifted: bool = False

    def misfit(self, targets: Tree, outputs: Sequence[int]) -> Misfit | None:
        if not isinstance(targets, Tensor):
            return None
        if self._is_one_hot(targets, outputs):
            mask = known(targets).any(1)
            allowed, odd = "one-hot rows with a single 1 (all -100 where unknown)", (targets != 0) & (targets != 1)
            return _misfit(targets, mask[:, None] & odd, allowed) or _misfit(
                targets.sum(1), mask & (targets.sum(1) != 1), allowed, part="the sum"
            )
        # 1 << 62 where outputs are not known: no class number is too large then
        mask, classes = known(targets), (outputs[-1 if self.last else 0] if outputs else 1 << 62)
        wrong = mask & ((targets < 0) | (targets >= classes))
        allowed = f"class numbers from 0 to {classes - 1} (-100 where unknown)"
        first = _misfit(targets, wrong, allowed)
        if first is None or first.value < 0:
            return first
        if first.value == classes and int(targets[mask].min()) >= 1:
            return first._replace(advice="classes seem to be numbered from 1: subtract 1, or give their names as text")
        return first._replace(advice="give the model an output for each class, or number the classes from 0")

    def known_rows(self, targets: Tree, axes: int = 1) -> Tensor:
        return super().known_rows(targets[..., 1:] if self.shifted and isinstance(targets, Tensor) else targets, axes)

    def prepared(self, targets: Tree, outputs: Sequence[int]) -> Tree:
        if not isinstance(targets, Tensor) or not self._is_one_hot(targets, outputs):
            return targets
        return torch.where(known(targets).any(1), targets.argmax(1), IGNORED)

    def _is_one_hot(self, targets: Tensor, outputs: Sequence[int]) -> bool:
        """Return whether targets have a number for each output, which class numbers never have."""
        return not self.last and targets.dim() == 2 and len(outputs) == 1 and targets.shape[1] == outputs[0] > 1


@dataclass(frozen=True)
class Labels(TargetDomain):
    """Independent labels: 1 for yes, 0 for no."""

    def misfit(self, targets: Tree, outputs: Sequence[int]) -> Misfit | None:
        if not isinstance(targets, Tensor):
            return None
        return _misfit(targets, known(targets) & (targets != 0) & (targets != 1), "0 or 1 (-100 or NaN where unknown)")


@dataclass(frozen=True)
class TimesAndEvents(TargetDomain):
    """Survival times of at least 0, and events: 1, or 0 where censored."""

    def misfit(self, targets: Tree, outputs: Sequence[int]) -> Misfit | None:
        time, event = survival_pair(targets)
        early = known(time) & ~((time >= 0) & time.isfinite())
        odd = known(event) & (event != 0) & (event != 1)
        allowed = "finite times of at least 0 (-100 where unknown)"
        return _misfit(time, early, allowed, part="the time") or _misfit(
            event, odd, "events of 0 or 1 (-100 where unknown)", part="the event"
        )

    def known_rows(self, targets: Tree, axes: int = 1) -> Tensor:
        if axes == 1:
            time, event = survival_pair(targets)
            return known(time) & known(event)
        return super().known_rows(targets, axes)  # the loss of a batch is one value, whichever rows are known


@dataclass(frozen=True)
class Counts(TargetDomain):
    """Counts of at least 0, and exposures above 0 where there are any."""

    def misfit(self, targets: Tree, outputs: Sequence[int]) -> Misfit | None:
        count, exposure = counts_and_exposures(targets)
        negative = known(count) & ~((count >= 0) & count.isfinite())
        none = known(exposure) & ~((exposure > 0) & exposure.isfinite())
        allowed = "finite counts of at least 0 (-100 where unknown)"
        return _misfit(count, negative, allowed, part="the count") or _misfit(
            exposure, none, "finite exposures above 0 (-100 where unknown)", part="the exposure"
        )

    def known_rows(self, targets: Tree, axes: int = 1) -> Tensor:
        count, exposure = counts_and_exposures(targets, axes)
        return known(count) & known(exposure)


def counts_and_exposures(targets: Any, axes: int = 1) -> tuple[Tensor, Tensor]:
    """Counts [batch] and exposures [batch], 1 where targets have none, of targets [batch], [batch, 1] or [batch, 2].

    Args:
        targets: of some rows.
        axes: how many of the first axes count rows.

    Raises:
        SettingError: targets have another form.
    """
    if isinstance(targets, Tensor) and targets.dim() == axes:
        targets = targets.unsqueeze(-1)
    if not isinstance(targets, Tensor) or targets.dim() != axes + 1 or targets.shape[-1] not in (1, 2):
        raise SettingError(
            f"counts needs targets of a count, or of a count and an exposure, got {described(targets)}: give [n], or "
            "[n, 2]"
        )
    numbers = targets if targets.is_floating_point() else targets.float()
    count = numbers[..., 0]
    return count, numbers[..., 1] if numbers.shape[-1] == 2 else torch.ones_like(count)


def survival_pair(targets: Any) -> tuple[Tensor, Tensor]:
    """Times [batch] and events [batch] (1 event, 0 censored) of targets {"time", "event"}, (time, event) or [batch, 2].

    Raises:
        SettingError: targets have another form.
    """
    if isinstance(targets, Mapping) and {"time", "event"} <= set(targets):
        time, event = targets["time"], targets["event"]
    elif isinstance(targets, tuple) and len(targets) == 2:
        time, event = targets
    elif isinstance(targets, Tensor) and targets.dim() == 2 and targets.shape[1] == 2:
        time, event = targets.unbind(1)
    else:
        raise SettingError(
            f"survival needs targets of a time and an event (1, or 0 where censored), got {described(targets)}: give "
            "{'time': [n], 'event': [n]}"
        )
    return time.reshape(len(time)), event.reshape(len(event)).float()


def is_one_hot(targets: Tree) -> bool:
    """Return whether targets are rows [n, classes] of numbers with a single 1 and zeros.

    Examples:
        >>> is_one_hot(torch.tensor([[0, 1, 0], [1, 0, 0]])), is_one_hot(torch.tensor([[0, 1, 1]]))
        (True, False)
    """
    if not isinstance(targets, Tensor) or targets.dim() != 2 or targets.shape[1] < 2 or not len(targets):
        return False
    rows = targets[known(targets).any(1)]
    return bool(len(rows)) and bool(((rows == 0) | (rows == 1)).all()) and bool((rows.sum(1) == 1).all())


def _leaves(targets: Any) -> list[Tensor]:
    return list(targets.values()) if isinstance(targets, Mapping) else list(targets)
