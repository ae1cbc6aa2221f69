"""Augmentation: training rows that are changed at random before each step, never those that models are evaluated on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from piebald.contracts import Component, ModelSpec, Rows
from piebald.core import pytree
from piebald.core.errors import SettingError
from piebald.core.machine import moved
from piebald.core.metrics import MixedTargets
from piebald.core.targets import Weighted, parted
from piebald.settings import plugins


class Augmentation(Component):
    """A random change of a batch: one of the setting `augmentation` of a trainer, which are applied in their order.

    The numbers of each step belong to the client, its task and the step alone, so that they repeat wherever the client
    trains and whenever a run is resumed.

    Attributes:
        inputs: names of the inputs that change, where there are several; by default all that can.
    """

    axis = "augmentation"
    mixes_rows: ClassVar[bool] = False  # whether a row of the result may depend on other rows of the batch

    inputs: tuple[str, ...] = ()

    def augment(self, rows: Rows, rng: torch.Generator) -> Rows:
        """The changed batch; the given one stays as it is.

        Args:
            rows: a batch of one client.
            rng: the source of all randomness, on the CPU.
        """
        return Rows(self.changed(rows.x, lambda x: self.augment_inputs(x, rng)), rows.y)

    def augment_inputs(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """The changed inputs [b, ...] of one tensor."""
        raise NotImplementedError

    def takes(self, shape: Sequence[int]) -> bool:
        """Return whether it changes inputs of this shape [...]."""
        return True

    def changed(self, x: pytree.Tree, change: Callable[[Tensor], Tensor]) -> Any:
        """Inputs after a change of those that it is for: real numbers of a shape that it takes."""
        if isinstance(x, Tensor):
            return change(x)
        parts = {name: self._meant(name, part) for name, part in pytree.named_leaves(x)}
        leaves = [change(part) if parts[name] else part for name, part in pytree.named_leaves(x)]
        return dict(zip(parts, leaves, strict=True)) if isinstance(x, Mapping) else tuple(leaves)

    def _meant(self, name: str, part: Tensor) -> bool:
        return (not self.inputs or name in self.inputs) and part.dtype.is_floating_point and self.takes(part.shape[1:])

    def unsupported(self, spec: ModelSpec) -> str | None:
        """Return why it cannot be used for a model's inputs and loss, or None."""
        single = pytree.is_single(spec.shape)
        names = [""] if single else [name for name, _ in pytree.named_leaves(spec.shape)]
        shapes = dict(zip(names, pytree.shapes(spec.shape), strict=True))
        for name in self.inputs:
            if name not in shapes:
                return f"augmentation {self.kind!r}: there is no input {name!r}, there are {', '.join(shapes)}"
        chosen = {name: shape for name, shape in shapes.items() if not self.inputs or name in self.inputs}
        if not any(self.takes(shape) for shape in chosen.values()):
            return f"augmentation {self.kind!r} is for images [channels, height, width], got inputs {chosen}"
        return None


class _OfImages(Augmentation):
    axis = "augmentation"

    def takes(self, shape: Sequence[int]) -> bool:
        return len(shape) == 3


class RandomCrop(_OfImages):
    """Images with a border of zeros, cut back to their size at a random place: they move by up to `padding` pixels.

    Attributes:
        padding: width of the border in pixels, at least 1; 4 is usual for CIFAR (He et al. 2016).
    """

    padding: int = Field(default=4, ge=1)

    def augment_inputs(self, x: Tensor, rng: torch.Generator) -> Tensor:
        height, width = x.shape[-2:]
        # drawn on the CPU, so that a GPU draws the same places
        by = moved(torch.randint(0, 2 * self.padding + 1, (2, len(x)), generator=rng), x.device)
        down = (by[0].unsqueeze(1) + torch.arange(height, device=x.device))[:, None, :, None]
        right = (by[1].unsqueeze(1) + torch.arange(width, device=x.device))[:, None, None, :]
        row, channel = (torch.arange(size, device=x.device) for size in x.shape[:2])
        # one gather for the whole batch, where a loop over images would cost a launch for each
        wide = functional.pad(x, [self.padding] * 4)
        return wide[row[:, None, None, None], channel[None, :, None, None], down, right]


class HorizontalFlip(_OfImages):
    """Images that are mirrored left to right with some probability.

    Attributes:
        probability: in [0, 1].

    Examples:
        >>> import torch
        >>> image = torch.arange(3.0).view(1, 1, 1, 3)
        >>> HorizontalFlip(probability=1.0).augment_inputs(image, torch.Generator()).flatten().tolist()
        [2.0, 1.0, 0.0]
    """

    probability: float = Field(default=0.5, ge=0, le=1)

    def augment_inputs(self, x: Tensor, rng: torch.Generator) -> Tensor:
        # a choice of `where` and not of rows: shapes that depend on numbers would make a GPU wait
        flipped = moved(torch.rand(len(x), generator=rng) < self.probability, x.device)
        return torch.where(flipped[:, None, None, None], x.flip(-1), x)


class GaussianNoise(Augmentation):
    """Inputs with Gaussian noise on each number.  It does not protect privacy, since it is drawn from the run's seed.

    Attributes:
        deviation: standard deviation, above 0, in the unit of the inputs (images are in [0, 1]).
    """

    deviation: float = Field(default=0.1, gt=0)

    def augment_inputs(self, x: Tensor, rng: torch.Generator) -> Tensor:
        return x + self.deviation * moved(torch.randn(x.shape, generator=rng).to(x.dtype), x.device)


class MixUp(Augmentation):
    """Mix-up (Zhang et al. 2018): share x_i + (1 - share) x_j with a random other row j of the batch, the share drawn
    once for a batch from Beta(alpha, alpha); the loss is mixed as the targets are, with the same share.

    Attributes:
        alpha: above 0; the paper uses 0.1 to 0.4 for ImageNet and 1 for CIFAR-10.
    """

    mixes_rows = True

    alpha: float = Field(default=0.2, gt=0)

    def augment(self, rows: Rows, rng: torch.Generator) -> Rows:
        # torch has no beta distribution that takes a generator
        drawn = np.random.Generator(np.random.Philox(int(torch.randint(1 << 62, (), generator=rng))))
        share = float(drawn.beta(self.alpha, self.alpha))
        first = pytree.leaves(rows.y)[0]
        # a permutation, so that each row is a partner once
        order = moved(torch.randperm(len(rows), generator=rng), first.device)
        partners = rows[order]
        shares = torch.full((len(rows),), share, device=first.device)
        x = pytree.mapped(lambda first_leaf, two: _mixed(first_leaf, two, share), rows.x, partners.x)
        return Rows(x, MixedTargets(rows.y, partners.y, shares))

    def unsupported(self, spec: ModelSpec) -> str | None:
        if spec.objective.name == "model" or spec.objective.compares_rows:
            return f"augmentation 'mix_up' mixes the losses of two targets, which {spec.objective.name!r} has not"
        return super().unsupported(spec)


def _mixed(first: Tensor, second: Tensor, share: float) -> Tensor:
    if not first.dtype.is_floating_point:
        raise SettingError(
            f"augmentation 'mix_up' mixes real numbers, got {str(first.dtype).removeprefix('torch.')}: leave it out"
        )
    return share * first + (1 - share) * second


class FunctionAugmentation(Augmentation):
    """A function `f(x, y, rng)` of the user, which returns the changed x and y.

    In Python, the function itself may be given in place of this component.  It must be found by its module and name
    wherever clients train, so it is no lambda.  It gets inputs and targets [b, ...] in the form that the clients' rows
    have, and must draw all random numbers from the `torch.Generator` rng.

    Attributes:
        function: "module:name", or the function.
        by_row: whether it gets each row as a batch of one, so that no row can depend on another one; DP-SGD needs this.
    """

    function: Annotated[str, plugins.function_name("augmentation")]
    by_row: bool = False

    def references(self) -> tuple[str, ...]:
        return (self.function,)

    def augment(self, rows: Rows, rng: torch.Generator) -> Rows:
        if not self.by_row:
            return self._called(rows, rng)
        # the function sees one row alone, whatever it does: the bound on a row's gradient holds only then
        single_rows = [self._called(rows[row : row + 1], rng) for row in range(len(rows))]
        return Rows(
            pytree.joined([row_result.x for row_result in single_rows]),
            pytree.joined([row_result.y for row_result in single_rows]),
        )

    def _called(self, rows: Rows, rng: torch.Generator) -> Rows:
        targets, weights = parted(rows.y)
        # copies, since a function that writes in place would change the client's rows for all later steps
        copied = [pytree.mapped(torch.clone, tree) for tree in (rows.x, targets)]
        try:
            x, y = plugins.find(self.function, "augmentation")(*copied, rng)
            fits = pytree.kinds(x) == pytree.kinds(rows.x) and pytree.count(x) == pytree.count(y) == len(rows)
        except Exception as error:  # whatever the user's own code may raise
            raise SettingError(f"the augmentation {self.function} fails: {type(error).__name__}: {error}") from error
        if not fits:
            raise SettingError(
                f"the augmentation {self.function} must return inputs and targets of the same rows and form, "
                f"{pytree.described(rows.x)}, got {pytree.described(x)} with {pytree.count(y)} targets"
            )
        return Rows(x, y if weights is None else Weighted(y, weights))


def unfit(augmentations: Sequence[Augmentation], spec: ModelSpec) -> str | None:
    """Return why augmentations do not fit a model, or None."""
    return next(filter(None, (augmentation.unsupported(spec) for augmentation in augmentations)), None)


def mixing(augmentations: Sequence[Augmentation]) -> str | None:
    """The kind of the first augmentation after which a row may depend on others of its batch, or None."""
    for augmentation in augmentations:
        if augmentation.mixes_rows or (isinstance(augmentation, FunctionAugmentation) and not augmentation.by_row):
            return augmentation.kind
    return None
