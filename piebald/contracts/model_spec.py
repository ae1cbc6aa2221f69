"""The model of a run, and what it is trained for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from piebald.core.objective import Objective
    from piebald.core.parameters import Layout
    from piebald.core.pytree import Form


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model with everything that fixes what it computes: the same on the server and on every client.

    Attributes:
        model: the module; its own parameters are not used, `initial` is.
        layout: where each tensor lies in the flat vector, and which are shared.
        initial: [p], the parameters that the run starts from.
        objective: the loss and the metrics.
        seed: of the run.
        shape: of one input, see `pytree.Form`.  outputs: of the scores that the model returns for one input.
        public_rows: how many rows all clients have in common.  public_digest: their digest, "" where there are none.
        noise_key: in a simulation with noise, a digest of all that its results follow from, else "".
    """

    model: nn.Module
    layout: Layout
    initial: Tensor
    objective: Objective
    seed: int
    shape: Form
    outputs: tuple[int, ...]
    public_rows: int = field(default=0, kw_only=True)
    public_digest: str = field(default="", kw_only=True)
    noise_key: str = field(default="", kw_only=True)

    @property
    def noise_seed(self) -> int | str:
        """What protects is drawn from this in a simulation: two runs with other settings may not share their noise."""
        return f"{self.seed} {self.noise_key}" if self.noise_key else self.seed
