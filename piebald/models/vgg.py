"""VGG-11 with batch norm and global average pooling."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from piebald.core.model_settings import checked_network, shape, whole
from piebald.models.dense import FeatureClassifier

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

    def __init__(self, input_shape: Sequence[int], outputs: int, width: int = 64) -> None:
        super().__init__()
        depth, height, length = shape("vgg11", input_shape, "channels height width")
        whole("width", width)
        layers: list[nn.Module] = []
        side = min(height, length)
        for stage in _STAGES:
            for times in stage:
                layers += [
                    nn.Conv2d(depth, times * width, 3, padding=1, bias=False),  # batch norm adds the bias
                    nn.BatchNorm2d(times * width),
                    nn.ReLU(),
                ]
                depth = times * width
            if side >= 2:
                layers.append(nn.MaxPool2d(2))
                side //= 2
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(depth, whole("outputs", outputs))
