"""A model that reads inputs as they are, and gives another one their standard scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from piebald.core.arguments import checked_class
from piebald.core.errors import SettingError


@checked_class
class StandardisedInputs(nn.Module):
    """A model behind the constants of standard scores, (x - mean) / deviation, which are kept as buffers.

    Args:
        network: the model that reads standard scores.
        mean, deviation: of each number of an input, flattened, as a run with `[data] standardise` records them.  Zeros
            and ones of the right number are enough where `load_weights` fills them in.

    Raises:
        SettingError: they are not as long.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, network: nn.Module, mean: Sequence[float], deviation: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(deviation):
            raise SettingError(f"mean and deviation must be as long, got {len(mean)} and {len(deviation)}")
        self.network = network
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float64))
        self.register_buffer("deviation", torch.tensor(deviation, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of the network for inputs [n, ...]; scores are computed in float64, as for training."""
        shape = (1, *x.shape[1:])
        scores = (x.double() - self.mean.reshape(shape)) / self.deviation.reshape(shape)
        outputs: Tensor = self.network(scores.to(x.dtype))
        return outputs
