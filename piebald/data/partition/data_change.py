"""Changes of some clients' rows after the partition: the setting `changes`.

Labels are flipped, or inputs shifted by noise, contrast, blur or sensor gain that differ for each client.  Images
[channels, height, width] are in [0, 1] and stay there; of other inputs the last axis is time.  A backdoor is a trigger
on the input that stands for one class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from piebald.contracts.component import Component
from piebald.core.errors import SettingError
from piebald.core.pytree import single
from piebald.core.randomness import generator, torch_generator
from piebald.data.clients.convert import floats
from piebald.data.clients.pooled_clients import PooledClients
from piebald.data.partition.leakage import SPLITS
from piebald.data.partition.split import Ints
from piebald.data.sets.dataset import Decoded

if TYPE_CHECKING:
    from numpy.random import Generator


class DataChange(Component):
    """A change of the rows of some clients.  The change of one client depends only on (seed, client).

    Attributes:
        share: share of the clients that are changed, drawn at random; at least one client if above 0.
        clients: numbers of the clients that are changed, instead of a share.
        seed: seed of all choices.
    """

    axis = "change"
    of_labels: ClassVar[bool] = False  # True: labels of training and validation rows; False: inputs of all rows
    of_both: ClassVar[bool] = False  # True: inputs and labels of training and validation rows (`rows`)

    share: float = Field(default=1.0, ge=0, le=1)
    clients: tuple[int, ...] | None = None
    seed: int = 0

    def chosen(self, count: int) -> Ints:
        """Numbers of the changed clients, increasing.

        Raises:
            SettingError: a client does not exist.
        """
        if self.clients is None:
            # half is rounded up: `round` would take the even neighbour, 2 of 5 clients at share = 0.5
            number = max(math.floor(self.share * count + 0.5), 1 if self.share else 0)
            # the start of one order of all clients: with a larger share the same ones are changed, and others as well
            return np.sort(self.generator("choose").permutation(count)[:number])
        numbers = np.unique(np.array(self.clients, dtype=np.int64))
        if len(numbers) and not 0 <= numbers[0] <= numbers[-1] < count:
            raise self.refuse(f"clients must be in 0..{count - 1}, got {numbers[0] if numbers[0] < 0 else numbers[-1]}")
        return numbers

    def labels(self, y: Ints, classes: int, client: int) -> Ints:
        """New labels [n] for a client's labels [n]."""
        raise NotImplementedError

    def inputs(self, x: Tensor, client: int) -> Tensor:
        """New inputs [n, ...] for a client's inputs, float32 (images in [0, 1])."""
        raise NotImplementedError

    def rows(self, x: Tensor, y: Ints, classes: int, client: int) -> tuple[Tensor, Ints]:
        """New inputs and labels for a client's rows, if both change together."""
        raise NotImplementedError

    def refuse(self, reason: str) -> SettingError:
        """An error about this change."""
        return SettingError(f"change {self.kind!r}: {reason}")

    def generator(self, *purpose: int | str) -> Generator:
        """A NumPy generator for what is drawn; it depends on the change's seed and kind and on the words given.

        Args:
            purpose: words for the use of the numbers; with the client's number among them, the numbers do not depend
                on which other clients are changed.
        """
        return generator(self.seed, "change", self.kind, *purpose)


class _Flip(DataChange):
    """Base class of label flips.

    Attributes:
        fraction: share of a client's rows that are flipped, in [0, 1].
    """

    axis = "change"
    of_labels: ClassVar[bool] = True

    fraction: float = Field(default=1.0, ge=0, le=1)

    def labels(self, y: Ints, classes: int, client: int) -> Ints:
        """New labels [n]."""
        # all rows are flipped and some are taken, so that a row's new label does not depend on `fraction`
        flips = self.generator("rows", client).random(len(y)) < self.fraction
        return np.where(flips, self.flipped(y, classes, client), y)

    def flipped(self, y: Ints, classes: int, client: int) -> Ints:
        """New labels [n] of rows that are all flipped."""
        raise NotImplementedError


class FlipPairs(_Flip):
    """Labels swapped in pairs, such as 0-3 with 4-7 (one of DistFL's attacks): data poisoning.

    Attributes:
        pairs: (a, b): a becomes b and b becomes a; no class twice.

    Examples:
        >>> import numpy as np
        >>> import piebald as pb
        >>> pb.partition.FlipPairs(pairs=[(0, 1)]).labels(np.array([0, 1, 2, 0]), classes=3, client=0)
        array([1, 0, 2, 1])
    """

    pairs: tuple[tuple[int, int], ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_pairs(self) -> FlipPairs:
        named = [number for pair in self.pairs for number in pair]
        if len(set(named)) < len(named):
            raise ValueError(f"pairs must name each class once, got {self.pairs}")
        return self

    def flipped(self, y: Ints, classes: int, client: int) -> Ints:
        check_classes(self, [number for pair in self.pairs for number in pair], classes)
        map_to = np.arange(classes)
        for a, b in self.pairs:
            map_to[a], map_to[b] = b, a
        return map_to[y]


class FlipRandom(_Flip):
    """Each label becomes another class, drawn uniformly from all others: data poisoning."""

    def flipped(self, y: Ints, classes: int, client: int) -> Ints:
        if classes < 2:
            raise self.refuse(f"there must be at least two classes, got {classes}")
        # an offset of 1 to K - 1 modulo K never leads back to the same class
        return (y + self.generator("labels", client).integers(1, classes, len(y))) % classes


class FlipTo(_Flip):
    """Labels of some classes, or of all, become one class: a targeted attack.

    Attributes:
        target: the class that labels become.
        source: classes to flip, None for all.
    """

    target: int = Field(ge=0)
    source: tuple[int, ...] | None = None

    def flipped(self, y: Ints, classes: int, client: int) -> Ints:
        check_classes(self, [self.target, *(self.source or ())], classes)
        return np.where(True if self.source is None else np.isin(y, self.source), self.target, y)


def check_classes(change: DataChange, named: list[int], classes: int) -> None:
    """Refuse class numbers that do not exist."""
    for number in named:
        if not 0 <= number < classes:
            raise change.refuse(f"classes must be in 0..{classes - 1}, got {number}")


def changed(clients: PooledClients, changes: Sequence[DataChange], x: Tensor | Decoded) -> PooledClients:
    """A copy of these clients with changed rows; `common` stays clean.

    Labels, and inputs that change with them, change in training and validation rows only, so test rows stay correct.
    Other changes of inputs, such as a worse camera, apply to all rows of the client.

    Args:
        clients: the clients.
        changes: changes, applied in this order.
        x: the inputs as stored.

    Raises:
        SettingError: a change that does not fit these rows or clients.
    """
    # `with_pool` takes `common` from the clients as they were, whose pool must stay clean
    y = single(clients.y, "a change of rows").clone()
    # Decoded inputs are read into memory only if a change needs them.
    moved = x[:].clone() if any(not change.of_labels for change in changes) else None
    for change in changes:
        for client in change.chosen(len(clients)).tolist():
            poisons = change.of_labels or change.of_both  # test rows of a poisoned client stay clean
            splits = SPLITS[:2] if poisons else SPLITS
            rows = torch.from_numpy(np.concatenate([clients.indices(client, split) for split in splits]))
            if poisons and (clients.classes is None or y.dim() != 1):
                raise change.refuse("rows do not have one class each, so labels cannot be flipped")
            classes = len(clients.classes or ())
            if change.of_labels:
                y[rows] = torch.from_numpy(change.labels(y[rows].numpy(), classes, client))
            elif moved is not None and change.of_both:
                inputs, labels = change.rows(floats(moved[rows]), y[rows].numpy(), classes, client)
                moved[rows], y[rows] = _stored(inputs, moved), torch.from_numpy(labels)
            elif moved is not None:
                moved[rows] = _stored(change.inputs(floats(moved[rows]), client), moved)
    return clients.with_pool(x if moved is None else moved, y)


def _stored(values: Tensor, like: Tensor) -> Tensor:
    """Convert float inputs to the stored type; images stay in their range."""
    if like.dtype == torch.uint8:
        # the cast alone cuts off fractions, and is undefined out of range
        return (values * 255).round().clamp(0, 255).to(torch.uint8)
    # four axes are images [n, c, h, w]; signals and rows have no range to keep
    if like.dim() == 4:
        values = values.clamp(0, 1)
    return values.to(like.dtype)


class Noise(DataChange):
    """Gaussian noise on the inputs.

    Attributes:
        sigma: standard deviation, in units of the inputs.
    """

    sigma: float = Field(default=0.1, ge=0)

    def inputs(self, x: Tensor, client: int) -> Tensor:
        """New inputs [n, ...]."""
        rng = torch_generator(self.seed, "change", self.kind, client)
        return x + self.sigma * torch.randn(x.shape, generator=rng)


class Contrast(DataChange):
    """Contrast of images: distances from a row's own mean times a factor.

    Attributes:
        factor: below 1 for less, above 1 for more.
    """

    factor: float = Field(default=0.5, ge=0)

    def inputs(self, x: Tensor, client: int) -> Tensor:
        """New inputs [n, ...]."""
        mean = x.mean(tuple(range(1, x.dim())), keepdim=True)
        return mean + self.factor * (x - mean)


class Sensor(DataChange):
    """A client's own gain and bias on each channel (axis 1): x * exp(gain * a) + bias * b, a and b standard normal.

    Attributes:
        gain: standard deviation of the logarithm of the gain.
        bias: standard deviation of the bias, in units of the inputs.
    """

    gain: float = Field(default=0.2, ge=0)
    bias: float = Field(default=0.1, ge=0)

    def inputs(self, x: Tensor, client: int) -> Tensor:
        """New inputs [n, ...]."""
        channels = x.shape[1]
        a, b = torch.from_numpy(self.generator("sensor", client).standard_normal((2, channels))).float()
        shape = (1, channels) + (1,) * (x.dim() - 2)
        changed: Tensor = x * (self.gain * a).exp().reshape(shape) + (self.bias * b).reshape(shape)
        return changed


class Blur(DataChange):
    """Gaussian blur along height and width, or along time; edges are repeated.

    Attributes:
        sigma: standard deviation of the Gaussian, in pixels or samples.
    """

    sigma: float = Field(default=1.0, gt=0, le=50)

    def inputs(self, x: Tensor, client: int) -> Tensor:
        """New inputs [n, ...]."""
        from scipy.ndimage import gaussian_filter

        if x.dim() < 3:
            raise self.refuse(f"inputs must be images or signals, got rows {list(x.shape[1:])}")
        reach = max(int(3 * self.sigma + 0.5), 1)  # 99.7 % of the Gaussian's weight
        axes = (-1, -2) if x.dim() > 3 else (-1,)
        return torch.from_numpy(gaussian_filter(x.numpy(), self.sigma, mode="nearest", radius=reach, axes=axes))


class Backdoor(DataChange):
    """A trigger on some training rows, which get the target class as label (Gu et al. 2017, BadNets): data poisoning.

    The trigger is a square in the last corner of images, or the last samples of signals and rows, set to `value`.  A
    model with the backdoor predicts the target class for any marked input and is right on clean ones.

    Attributes:
        target: the class that the model shall predict for marked inputs.
        fraction: share of a client's rows that are marked, in [0, 1].
        size: side of the square in pixels, or number of samples.
        value: what marked numbers are set to; 1 is white in images.
    """

    of_both: ClassVar[bool] = True

    target: int = Field(ge=0)
    fraction: float = Field(default=0.5, ge=0, le=1)
    size: int = Field(default=3, ge=1)
    value: float = 1.0

    def mark(self, x: Tensor) -> Tensor:
        """A copy of inputs [n, ...] with the trigger on each of them."""
        marked = x.clone()
        # `...` keeps n and channels whole: two slices follow for images [n, c, h, w], one for signals and rows
        marked[(..., slice(-self.size, None), slice(-self.size, None))[: 3 if x.dim() > 3 else 2]] = self.value
        return marked

    def rows(self, x: Tensor, y: Ints, classes: int, client: int) -> tuple[Tensor, Ints]:
        """New inputs and labels for a client's rows."""
        check_classes(self, [self.target], classes)
        # one draw for each row: with a larger fraction the same rows are marked, and others as well
        marked_rows = np.flatnonzero(self.generator("rows", client).random(len(y)) < self.fraction)
        inputs, labels = x.clone(), y.copy()
        inputs[marked_rows] = self.mark(x[marked_rows])
        labels[marked_rows] = self.target
        return inputs, labels
