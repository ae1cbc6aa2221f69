"""Feature shift on any data: noise, contrast, blur and sensor gain, different for each client.

Images [channels, height, width] are in [0, 1] and stay there; of other inputs the last axis is time.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from piebald.core.randomness import torch_generator
from piebald.data.partition.data_change import DataChange


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
        if x.dim() < 3:
            raise self.refuse(f"inputs must be images or signals, got rows {list(x.shape[1:])}")
        reach = max(int(3 * self.sigma + 0.5), 1)  # 99.7 % of the Gaussian's weight
        weight = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / self.sigma) ** 2)
        weight = (weight / weight.sum()).reshape(1, 1, -1)
        # A Gaussian is separable: two passes of one dimension instead of one of two.
        for axis in (-1, -2) if x.dim() > 3 else (-1,):
            lines = x.movedim(axis, -1)
            padded = functional.pad(lines.reshape(-1, 1, lines.shape[-1]), (reach, reach), mode="replicate")
            x = functional.conv1d(padded, weight).reshape(lines.shape).movedim(-1, axis)
        return x.contiguous()
