"""Networks without convolutions, which flatten inputs of any shape."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from piebald.core.model_settings import checked_network, shape, size, whole, widths


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

    def __init__(self, input_shape: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(size(shape("logistic", input_shape, "")), whole("outputs", outputs))

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

    def __init__(self, input_shape: Sequence[int], outputs: int, hidden: Sequence[int] = (128,)) -> None:
        super().__init__()
        sizes = [size(shape("mlp", input_shape, "")), *widths("hidden", hidden)]
        layers = [nn.Sequential(nn.Linear(n_in, n_out), nn.ReLU()) for n_in, n_out in pairwise(sizes)]
        self.features = nn.Sequential(nn.Flatten(), *layers)
        self.classifier = nn.Linear(sizes[-1], whole("outputs", outputs))
