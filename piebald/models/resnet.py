"""Deep networks for images: residual networks and VGG-11."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from piebald.core.arguments import Count
from piebald.core.model_settings import checked_network, shape
from piebald.models.convolutional import FeatureClassifier

Stem = Literal["cifar", "imagenet"]


def _stem(depth: int, width: int, form: Stem) -> list[nn.Module]:
    """What comes before the stages: for large images 7x7 with stride 2 and pooling."""
    if form == "cifar":
        return [*_convolution(depth, width, 3), nn.ReLU()]
    return [*_convolution(depth, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]


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
        # only then can input and output be added without a projection (He et al. 2016, option B)
        same = stride == 1 and depth == self.channels
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(depth, self.channels, 1, stride))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        joined: Tensor = self.relu(self.inside(x) + self.shortcut(x))
        return joined


@checked_network
class Resnet18(FeatureClassifier):
    """ResNet-18 (He et al. 2016), by default in the form for CIFAR.

    11,173,962 parameters with inputs [3, 32, 32] and 10 outputs.

    Args:
        input_shape: [channels, height, width].
        outputs: number of classes, or of numbers to predict.
        width: channels of the first stage; each further one has twice as many.
        stem: what comes before the stages: "cifar" for small images, a 3x3 convolution and no pooling; "imagenet", as
            published, a 7x7 convolution with stride 2 and max pooling, after which a side is a quarter as long.
    """

    blocks = (2, 2, 2, 2)
    bottleneck = False

    def __init__(self, input_shape: Sequence[Count], outputs: Count, width: Count = 64, stem: Stem = "cifar") -> None:
        super().__init__()
        depth, _, _ = shape("the network", input_shape, "channels height width")
        layers = _stem(depth, width, stem)
        depth = width
        for stage, count in enumerate(self.blocks):
            for index in range(count):
                # each stage but the first halves the image in its first block
                block = _Block(depth, width << stage, 2 if stage and not index else 1, self.bottleneck)
                layers.append(block)
                depth = block.channels
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(depth, outputs)


class Resnet50(Resnet18):
    """ResNet-50, with bottleneck blocks, by default in the form for CIFAR.

    23,520,842 parameters with inputs [3, 32, 32] and 10 outputs.

    Args:
        input_shape: [channels, height, width].
        outputs: number of classes, or of numbers to predict.
        width: channels of the first stage's bottlenecks.
        stem: what comes before the stages, see `Resnet18`.
    """

    blocks = (3, 4, 6, 3)
    bottleneck = True


_STAGES = ((1,), (2,), (4, 4), (8, 8), (8, 8))  # convolutions of each stage, in multiples of the width


@checked_network
class Vgg11(FeatureClassifier):
    """Eight 3x3 convolutions with batch norm in five stages with pooling after each, then averaged over the image.

    Configuration A of Simonyan and Zisserman 2015, with global average pooling instead of the hidden linear layers
    (DistFL, 2021).  9,228,362 parameters with inputs [3, 32, 32] and 10 outputs.  Pooling is left out once an
    image is too small for it.

    Args:
        input_shape: [channels, height, width].
        outputs: number of classes, or of numbers to predict.
        width: channels of the first convolution; the last have eight times as many.
    """

    def __init__(self, input_shape: Sequence[Count], outputs: Count, width: Count = 64) -> None:
        super().__init__()
        depth, height, length = shape("vgg11", input_shape, "channels height width")
        layers: list[nn.Module] = []
        side = min(height, length)
        for stage in _STAGES:
            for times in stage:
                layers += [*_convolution(depth, times * width, 3), nn.ReLU()]
                depth = times * width
            if side >= 2:
                layers.append(nn.MaxPool2d(2))
                side //= 2
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(depth, outputs)
