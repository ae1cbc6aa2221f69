"""The seam between a method and SGD, and the contracts of a forward and a backward pass.

`Sgd` and every engine walk through the steps of a task alike.  A method changes a step in one of three places:

    along what it goes, and which rows it sees    a `LocalStep`, as `SgdConfig.step`
    how parameters move along that                an `UpdateRule`, as `SgdConfig.rule`
    everything, on several vectors                a `VectorStep`, called by `ClientContext.run_steps`

No engine knows any of them by name, so a new one runs on all engines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np
from torch import Tensor

from piebald.core.noise import NoiseSource
from piebald.core.randomness import long_key

Gradients: TypeAlias = "tuple[Tensor, Sequence[Tensor]]"  # mean losses [c], and [c, ...] for each trained parameter


class StepPoint(Protocol):
    """The models [c, p] of some clients at a step, and gradients of the mean loss of the step's batch there."""

    def gradients(self, away: Iterable[Tensor] | None = None) -> Gradients:
        """Return the mean losses [c] and the gradients at the models, [c, ...] for each trained parameter.

        Dropout draws the same masks at every call, and batch norm's running statistics are those of the first one.

        Args:
            away: a distance [c, ...] for each trained parameter by which the models are moved for this call.  It is
                read before anything is computed: it may be made of gradients, which are lost at the next call.
        """

    def hidden(self, clip: float, deviation: float, /) -> Gradients:
        """Return the mean losses [c] and hidden gradients, for a step that `hides_rows`.

        Each row's own gradient is shortened to the length `clip` (Euclidean, over all parameters), Gaussian noise of
        this standard deviation is added to the sum of the rows, and that is divided by the expected number of rows.
        """


@dataclass(frozen=True)
class LocalStep:
    """A step of SGD on one batch of each client; this class is the plain one.

    A subclass is a frozen dataclass that overrides what a method changes.  What it returns goes into the optimizer:
    momentum, weight decay, a proximal term, learning rates and clipping are as in any other run.

    Attributes:
        rows: the client's "own" training rows, or the "public" ones that all clients have; the targets of public rows
            are their positions, for a `LocalLoss` that knows what they stand for.
        hides_rows: true if single rows are hidden, as in DP-SGD.  Batches are then `lots`, whatever is random is drawn
            from numbers that only the client knows, and `StepPoint.hidden` may be called.

    Examples:
        >>> @dataclass(frozen=True)
        ... class SignStep(LocalStep):
        ...     def gradients(self, point):
        ...         losses, gradients = point.gradients()
        ...         return losses, [gradient.sign() for gradient in gradients]
        >>> LocalStep().changes_gradients, SignStep().changes_gradients
        (False, True)
    """

    rows: ClassVar[Literal["own", "public"]] = "own"
    hides_rows: ClassVar[bool] = False

    def seen(self, count: int) -> int | None:
        """Return how many of a client's rows a run sees, drawn anew for each run; None for all."""
        return None

    def lots(self, count: int, size: int, steps: int, rng_key: Sequence[int | str]) -> Iterator[np.ndarray[Any, Any]]:
        """Yield which of a client's `count` rows each of the steps takes, `size` of them in the mean."""
        raise NotImplementedError

    def gradients(self, point: StepPoint) -> Gradients:
        """Return the mean losses [c] and what the step goes along, [c, ...] for each trained parameter."""
        return point.gradients()

    @property
    def changes_gradients(self) -> bool:
        """True if a step goes along something else than the gradient at the models."""
        return type(self).gradients is not LocalStep.gradients


PLAIN_STEP = LocalStep()


@dataclass(frozen=True)
class RowPrivacy(LocalStep):
    """Noisy sums of clipped gradients of single rows (DP-SGD, Abadi et al. 2016, algorithm 1).

    Attributes:
        clip: C, longest gradient of one row (Euclidean norm over all parameters).
        noise: sigma, standard deviation of the noise on the sum of a step's rows, in clips.

    Examples:
        >>> lots = RowPrivacy(clip=1.0, noise=1.0).lots(count=1000, size=50, steps=3, rng_key=("seed",))
        >>> [30 < len(rows) < 70 for rows in lots]
        [True, True, True]
    """

    hides_rows = True

    clip: float
    noise: float

    def lots(self, count: int, size: int, steps: int, rng_key: Sequence[int | str]) -> Iterator[np.ndarray[Any, Any]]:
        """Yield Poisson samples, as accountants of DP-SGD assume: each row is in a step independently of all others.

        Whoever knows which rows are in a lot gains nothing from sampling, so lots are drawn as noise is.
        """
        for step in range(steps):
            drawn = NoiseSource.repeatable(long_key("poisson", step, *rng_key)).uniform(count)
            yield np.flatnonzero(drawn < size / count)

    def gradients(self, point: StepPoint) -> Gradients:
        return point.hidden(self.clip, self.noise * self.clip)


Precision = Literal["float32", "bfloat16", "float16"]
Batches = Literal["equal", "exact"]


def batch_count(count: int, size: int, batches: Batches, mixes: bool) -> int:
    """Return how many batches an epoch has.

    Args:
        count: rows.
        size: rows of a batch, at most; where a row would be alone, one more.
        batches: how rows are divided, see `SgdConfig`.
        mixes: whether the model mixes the rows of a batch (batch norm), so that none may have a single row.
    """
    number = math.ceil(count / size)
    alone = count % size == 1 if batches == "exact" else count < 2 * number
    return number - 1 if mixes and alone and number > 1 else number


@dataclass(frozen=True, slots=True)
class PassSettings:
    """The forward and backward passes of a step of `SgdConfig`.  Parameters, updates and an optimizer's state are
    float32 whatever is chosen here.

    Attributes:
        precision: of the passes; other than float32 under `torch.autocast`.
        loss_scale: with float16, what the loss is multiplied by at the beginning of a run, see `torch.amp.GradScaler`.
        accumulate: passes of which a step sums the gradients; it has as many times the rows of a batch.
        checkpointing: layers that keep no activations for the backward pass and compute them again, as in
            `training.checkpointing`.
    """

    precision: Precision = "float32"
    loss_scale: float = 65536.0
    accumulate: int = 1
    checkpointing: tuple[str, ...] = ()

    @property
    def alone(self) -> bool:
        """True if clients train one after another, as none may be skipped with others, or memory is short."""
        return self.precision == "float16" or self.accumulate > 1 or bool(self.checkpointing)


PLAIN_PASSES = PassSettings()


@dataclass(frozen=True, slots=True, eq=False)
class RowOutputs:
    """A model's features and outputs for one client's rows.

    Attributes:
        features: what goes into the last linear layer [n, d].
        outputs: what comes out of the model [n, classes].
        labels: the rows' classes [n], below 0 for those that do not count.
    """

    features: Tensor
    outputs: Tensor
    labels: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LossBatch:
    """One client's batch, as a `LocalLoss` sees it.

    Attributes:
        losses: the objective's loss, (outputs, targets) to one value for each row or to their mean.
        outputs, targets: [b, ...]; targets may be several tensors, and those of mixed rows.
        mask: [b], 1 for rows and 0 for those that only fill a batch up: a loss for each row need not look at it.
        own: the tensors that were given for this client, by name.
        features: what goes into the last linear layer [b, d], under "model" for the model that is trained and under
            their names for the `LocalLoss.anchors`.
    """

    losses: Callable[[Any, Any], Tensor]
    outputs: Tensor
    targets: Any
    mask: Tensor
    own: Mapping[str, Tensor]
    features: Mapping[str, Tensor]


class LocalLoss(Protocol):
    """A loss in place of the objective's while a client trains, for `ClientContext.run_sgd`."""

    @property
    def reads_features(self) -> bool:
        """True if it is given features.  The model then needs a linear layer, see `parameters.head`."""

    @property
    def anchors(self) -> tuple[str, ...]:
        """Names of the client's own tensors that are models [p]: their features go along, in evaluation mode."""

    def batch_loss(self, batch: LossBatch) -> Tensor:
        """The loss of each row [b], written for one client, or one value for all of them."""
