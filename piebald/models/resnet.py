"""Residual networks for small images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from piebald.core.model_settings import checked_network, shape, whole
from piebald.models.dense import FeatureClassifier


def _convolution(depth: int, channels: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """A convolution with batch norm, which adds the bias."""
    return [
        nn.Conv2d(depth, channels, kernel, stride=stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(channels),
    ]


class _Block(nn.Module):
    """Convolutions with a shortcut."""

    def __init__(self, depth: int, channels: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        if bottleneck:
            self.channels = 4 * channels
            layers = [*_convolution(depth, channels, 1), nn.ReLU(), *_convolution(channels, channels, 3, stride)]
            layers += [nn.ReLU(), *_convolution(channels, self.channels, 1)]
        else:
            self.channels = channels
            layers = [*_convolution(depth, channels, 3, stride), nn.ReLU(), *_convolution(channels, channels, 3)]
        self.inside = nn.Sequential(*layers)
        same = stride == 1 and depth == self.channels
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(depth, self.channels, 1, stride))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        joined: Tensor = self.relu(self.inside(x) + self.shortcut(x))
        return joined


@checked_network
class Resnet18(FeatureClassifier):
    """ResNet-18 in the form for CIFAR: a 3x3 stem and no pooling before the stages (He et al. 2016).

    11,173,962 parameters with inputs [3, 32, 32] and 10 outputs.

    Args:
        input_shape: [channels, height, width].
        outputs: number of classes, or of numbers to predict.
        width: channels of the first stage; each further one has twice as many.
    """

    blocks = (2, 2, 2, 2)
    bottleneck = False

    def __init__(self, input_shape: Sequence[int], outputs: int, width: int = 64) -> None:
        super().__init__()
        depth, _, _ = shape("the network", input_shape, "channels height width")
        layers: list[nn.Module] = [*_convolution(depth, whole("width", width), 3), nn.ReLU()]
        depth = width
        for stage, count in enumerate(self.blocks):
            for place in range(count):
                block = _Block(depth, width << stage, 2 if stage and not place else 1, self.bottleneck)
                layers.append(block)
                depth = block.channels
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(depth, whole("outputs", outputs))


class Resnet50(Resnet18):
    """ResNet-50 in the form for CIFAR: bottleneck blocks, a 3x3 stem and no pooling before the stages.

    23,520,842 parameters with inputs [3, 32, 32] and 10 outputs.

    Args:
        input_shape: [channels, height, width].
        outputs: number of classes, or of numbers to predict.
        width: channels of the first stage's bottlenecks.
    """

    blocks = (3, 4, 6, 3)
    bottleneck = True
