"""Small networks with batch norm for signals and for feature vectors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from piebald.core.model_settings import checked_network, shape, size, whole, widths
from piebald.models.dense import FeatureClassifier


@checked_network
class Cnn1dBn(FeatureClassifier):
    """Two convolutions along time, each with batch norm and halved by pooling, and one linear layer.

    The network for human activity recognition in DistFL (2021).

    Args:
        input_shape: [channels, length], a length of at least 4.
        outputs: number of classes, or of numbers to predict.
        channels: channels of the two convolutions.
        kernel: length of the convolutions, odd.
    """

    def __init__(
        self, input_shape: Sequence[int], outputs: int, channels: Sequence[int] = (32, 64), kernel: int = 9
    ) -> None:
        super().__init__()
        depth, length = shape("cnn_1d_bn", input_shape, "channels length", least=4)
        first, second = widths("channels", channels, 2)
        reach = whole("kernel", kernel) // 2
        self.features = nn.Sequential(
            nn.Conv1d(depth, first, 2 * reach + 1, padding=reach, bias=False),  # batch norm adds the bias
            nn.BatchNorm1d(first),
            nn.ReLU(),
            nn.MaxPool1d(2),
            nn.Conv1d(first, second, 2 * reach + 1, padding=reach, bias=False),
            nn.BatchNorm1d(second),
            nn.ReLU(),
            nn.MaxPool1d(2),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(second * (length // 4), whole("outputs", outputs))


@checked_network
class MlpBn(FeatureClassifier):
    """Linear layers with batch norm between them: for features of a frozen extractor, such as Office-Caltech10's.

    Args:
        input_shape: shape of one input, with any number of axes.
        outputs: number of classes, or of numbers to predict.
        hidden: widths of the hidden layers.
    """

    def __init__(self, input_shape: Sequence[int], outputs: int, hidden: Sequence[int] = (64,)) -> None:
        super().__init__()
        before, layers = size(shape("mlp_bn", input_shape, "")), []
        for width in widths("hidden", hidden):
            layers += [nn.Linear(before, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()]
            before = width
        self.features = nn.Sequential(nn.Flatten(), *layers)
        self.classifier = nn.Linear(before, whole("outputs", outputs))
