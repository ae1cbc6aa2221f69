"""A backdoor in the data: a trigger on the input stands for one class."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field
from torch import Tensor

from piebald.data.partition.data_change import DataChange, check_classes
from piebald.data.partition.split import Ints


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
