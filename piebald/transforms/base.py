"""The base class of transforms of updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from piebald.component import Part
from piebald.contracts import Assignment, Centre, Meeting, Secrets, Update

if TYPE_CHECKING:
    from torch import Tensor


class Stage(Part):
    """What befalls an update on its way.  Two ends: on each update before it leaves, on the pooled result at the
    centre.
    """

    axis = "update"
    hides_each: ClassVar[bool] = False  # the centre cannot see single updates (secure sums)
    colludes: ClassVar[bool] = False  # attackers look at one another's updates, see `collude`
    model_only: ClassVar[bool] = False  # it protects the model's change and no other named part

    def send(self, parts: Mapping[str, Tensor], keys: Sequence[int], clients: Sequence[int]) -> Mapping[str, Tensor]:
        """The client's end, on named parts [c, ...] with one random key for each of these clients."""
        return parts

    def collude(self, matrix: Tensor, clients: Sequence[int], key: int) -> Tensor:
        """The changes [n, s] of a commit's clients with those of colluding attackers replaced; in simulations only."""
        return matrix

    def receive(self, average: Tensor, count: int, weights: Sequence[float], key: int) -> Tensor:
        """The centre's end, on the averaged change [s] of `count` updates with these weights (they sum to 1)."""
        return average

    def nbytes(self, parts: Mapping[str, Tensor]) -> int:
        """Bytes on the wire of ONE client's parts, if this stage is the last to touch them."""
        return sum(part.numel() * part.element_size() for part in parts.values())

    def clash(self, recipe: Recipe) -> str | None:
        """Why this stage cannot work beside a recipe's other parts, or None."""
        return None

    def settled(self, recipe: Recipe) -> Stage:
        """The same with what clients must know of the recipe's other parts."""
        return self

    # what follows is for stages that hide each update (`hides_each`)

    def meet(self, clients: Sequence[int], centre: Centre) -> Meeting:
        """Let the clients of a commit agree on keys, before any of them trains."""
        raise NotImplementedError

    def seal(self, update: Update, assignment: Assignment, secrets: Secrets) -> Update:
        """What one client hands out instead of its update.

        Raises:
            Declined: the client does not hand out anything.
        """
        raise NotImplementedError

    def broken(self, update: Update, work: Work) -> str | None:
        """Why a sealed update cannot be one, or None."""
        raise NotImplementedError
