"""The seam between a method and SGD: which rows a step of local training sees, and along what it goes.

`Sgd` and every engine walk through the steps of a task alike.  A method changes a step in one of three places:

    along what it goes, and which rows it sees    a `LocalStep`, as `SgdConfig.step`
    how parameters move along that                an `UpdateRule`, as `SgdConfig.rule`
    everything, on several vectors                a `VectorStep`, called by `ClientContext.run_steps`

No engine knows any of them by name, so a new one runs on all engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np

from piebald.core.noise import NoiseSource
from piebald.core.randomness import long_key

if TYPE_CHECKING:
    from torch import Tensor

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
