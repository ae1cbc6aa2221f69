"""Small networks for images, signals and feature vectors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from piebald.core.arguments import Count
from piebald.core.model_settings import TwoWidths, checked_network, shape, size


class FeatureClassifier(nn.Module):
    """Base class of networks whose last layer, `classifier`, stands on `features` of the inputs."""

    features: nn.Module
    classifier: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Inputs [batch, ...] to logits [batch, outputs]."""
        logits: Tensor = self.classifier(self.features(x))
        return logits


@checked_network
class Logistic(nn.Module):
    """Logistic regression: one linear layer.

    Args:
        input_shape: shape of one input, with any number of axes.
        outputs: number of classes, or of numbers to predict.
    """

    def __init__(self, input_shape: Sequence[Count], outputs: Count) -> None:
        super().__init__()
        self.classifier = nn.Linear(size(shape("logistic", input_shape, "")), outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Inputs [batch, ...] to logits [batch, outputs]."""
        logits: Tensor = self.classifier(x.flatten(1))
        return logits


@checked_network
class Mlp(FeatureClassifier):
    """Linear layers with ReLU between them (McMahan et al. 2017 use two hidden layers of 200).

    Args:
        input_shape: shape of one input, with any number of axes.
        outputs: number of classes, or of numbers to predict.
        hidden: widths of the hidden layers.
    """

    def __init__(self, input_shape: Sequence[Count], outputs: Count, hidden: Sequence[Count] = (128,)) -> None:
        super().__init__()
        sizes = [size(shape("mlp", input_shape, "")), *hidden]
        layers = [nn.Sequential(nn.Linear(n_in, n_out), nn.ReLU()) for n_in, n_out in pairwise(sizes)]
        self.features = nn.Sequential(nn.Flatten(), *layers)
        self.classifier = nn.Linear(sizes[-1], outputs)


def _two_convolutions(
    depth: int, first: int, second: int, kernel: int = 5, axes: int = 2, norm: bool = False
) -> list[nn.Module]:
    """Convolutions over one axis or two, each with pooling that halves sides: at the end second * (h // 4) * (w // 4).

    Those with batch norm, which adds the bias, have an odd kernel.
    """
    convolution, normal, pool = (nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d) if axes == 1 else (
        nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d
    )  # fmt: skip
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((depth, first, second)):
        layers.append(convolution(inputs, outputs, kernel, padding=kernel // 2 if norm else "same", bias=not norm))
        layers += [*([normal(outputs)] if norm else []), nn.ReLU(), pool(2)]
    return [*layers, nn.Flatten()]


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
        self, input_shape: Sequence[Count], outputs: Count, channels: TwoWidths = (32, 64), kernel: Count = 9
    ) -> None:
        super().__init__()
        depth, length = shape("cnn_1d_bn", input_shape, "channels length", least=4)
        first, second = channels
        # an even kernel is made longer by one, as only with an odd one this padding keeps the length
        odd = kernel // 2 * 2 + 1
        self.features = nn.Sequential(*_two_convolutions(depth, first, second, odd, axes=1, norm=True))
        self.classifier = nn.Linear(second * (length // 4), outputs)


@checked_network
class MlpBn(FeatureClassifier):
    """Linear layers with batch norm between them: for features of a frozen extractor, such as Office-Caltech10's.

    Args:
        input_shape: shape of one input, with any number of axes.
        outputs: number of classes, or of numbers to predict.
        hidden: widths of the hidden layers.
    """

    def __init__(self, input_shape: Sequence[Count], outputs: Count, hidden: Sequence[Count] = (64,)) -> None:
        super().__init__()
        before, layers = size(shape("mlp_bn", input_shape, "")), []
        for width in hidden:
            # batch norm adds the bias
            layers += [nn.Linear(before, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()]
            before = width
        self.features = nn.Sequential(nn.Flatten(), *layers)
        self.classifier = nn.Linear(before, outputs)


@checked_network
class LeafCnn(FeatureClassifier):
    """LEAF's network for FEMNIST (Caldas et al. 2018): two 5x5 convolutions with pooling, two linear layers.

    6,603,710 parameters with inputs [1, 28, 28] and 62 outputs.

    Args:
        input_shape: [channels, height, width], sides of at least 4.
        outputs: number of classes, or of numbers to predict.
        channels: channels of the two convolutions.
        hidden: width of the hidden linear layer.
    """

    def __init__(
        self, input_shape: Sequence[Count], outputs: Count, channels: TwoWidths = (32, 64), hidden: Count = 2048
    ) -> None:
        super().__init__()
        depth, height, width = shape("the network", input_shape, "channels height width", least=4)
        first, second = channels
        self.features = nn.Sequential(
            *_two_convolutions(depth, first, second),
            nn.Linear(second * (height // 4) * (width // 4), hidden),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(hidden, outputs)


@checked_network
class SmallCnn(LeafCnn):
    """LEAF's network with few channels: 17,042 parameters with inputs [1, 28, 28] and 10 outputs.

    The size of the network in table 4 of HDAFL (Yang, Beliard, Rossi 2020), for many clients at once.

    Args:
        input_shape: [channels, height, width], sides of at least 4.
        outputs: number of classes, or of numbers to predict.
        channels: channels of the two convolutions.
        hidden: width of the hidden linear layer.
    """

    def __init__(
        self, input_shape: Sequence[Count], outputs: Count, channels: TwoWidths = (4, 8), hidden: Count = 40
    ) -> None:
        super().__init__(input_shape, outputs, channels, hidden)


@checked_network
class MetisCnn(FeatureClassifier):
    """Two 5x5 convolutions with pooling and three linear layers, for CIFAR-10 and for digits (Metis, section VI).

    Metis (Stripelis, Ambite 2020) says "2-CNN" without sizes; these are the sizes of TensorFlow's CIFAR-10 tutorial,
    which McMahan et al. 2017 used as well, without its local response normalisation: 1,756,426 parameters with inputs
    [3, 32, 32] and 10 outputs.

    Args:
        input_shape: [channels, height, width], sides of at least 4.
        outputs: number of classes, or of numbers to predict.
        channels: channels of the two convolutions.
        hidden: widths of the two hidden linear layers.
    """

    def __init__(
        self,
        input_shape: Sequence[Count],
        outputs: Count,
        channels: TwoWidths = (64, 64),
        hidden: TwoWidths = (384, 192),
    ) -> None:
        super().__init__()
        depth, height, width = shape("metis_cnn", input_shape, "channels height width", least=4)
        first, second = channels
        wide, narrow = hidden
        self.features = nn.Sequential(
            *_two_convolutions(depth, first, second),
            nn.Linear(second * (height // 4) * (width // 4), wide),
            nn.ReLU(),
            nn.Linear(wide, narrow),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(narrow, outputs)


@checked_network
class CnnBn(FeatureClassifier):
    """3x3 convolutions with batch norm, each followed by pooling, and one linear layer.

    For methods that treat batch norm separately (FedBN), and for domains that differ in contrast.

    Args:
        input_shape: [channels, height, width], sides of at least 4.
        outputs: number of classes, or of numbers to predict.
        channels: channels of the two convolutions.
    """

    def __init__(self, input_shape: Sequence[Count], outputs: Count, channels: TwoWidths = (16, 32)) -> None:
        super().__init__()
        depth, height, width = shape("cnn_bn", input_shape, "channels height width", least=4)
        first, second = channels
        self.features = nn.Sequential(*_two_convolutions(depth, first, second, 3, norm=True))
        self.classifier = nn.Linear(second * (height // 4) * (width // 4), outputs)


@checked_network
class Cnn1d(FeatureClassifier):
    """Two convolutions along time, each followed by pooling, and two linear layers: packet sizes, sensor signals.

    Args:
        input_shape: [channels, length], a length of at least 4.
        outputs: number of classes, or of numbers to predict.
        channels: channels of the two convolutions.
        hidden: width of the hidden linear layer.
        kernel: length of the convolutions, odd.
    """

    def __init__(
        self,
        input_shape: Sequence[Count],
        outputs: Count,
        channels: TwoWidths = (32, 64),
        hidden: Count = 128,
        kernel: Count = 5,
    ) -> None:
        super().__init__()
        depth, length = shape("cnn_1d", input_shape, "channels length", least=4)
        first, second = channels
        self.features = nn.Sequential(
            *_two_convolutions(depth, first, second, kernel, axes=1),
            # two poolings, each of which drops an odd position at the end
            nn.Linear(second * (length // 4), hidden),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(hidden, outputs)
