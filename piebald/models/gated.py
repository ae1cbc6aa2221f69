"""Conditional gated units: h = tanh(W_f x + V_f c) * sigmoid(W_g x + V_g c) for a client c (CGAU).

With c the one-hot number of a client, V_f c and V_g c are two vectors, so each client holds only these two, and no
other client needs them: `Conditioning`, the private layers of the recipe `cgau`.  They are also the unit's biases.
Rieger, Høegh, Hansen 2020, section 3; without clients it is the unit of WaveNet and PixelCNN (van den Oord et al.
2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from piebald.core.arguments import Count, Share
from piebald.core.errors import SettingError
from piebald.core.model_settings import TwoWidths, checked_network, shape, size
from piebald.models.convolutional import FeatureClassifier


class Offsets(nn.Module):
    """Vectors that are added to a gated unit's filter, to its gate, or to both.

    Args:
        units: number of units.
        filter: whether there is a vector for the filter.
        gate: whether there is a vector for the gate.
    """

    def __init__(self, units: int, filter: bool = True, gate: bool = True) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.zeros(units)) if filter else None
        self.gate = nn.Parameter(torch.zeros(units)) if gate else None

    def forward(self) -> Tensor:
        """Both vectors, concatenated [2 * units], with zeros for a missing one."""
        halves = [self._half(vector) for vector in (self.filter, self.gate)]
        # of a vector that is there, so that the zeros have its type and device
        some = next(half for half in halves if half is not None)
        return torch.cat([torch.zeros_like(some) if half is None else half for half in halves])

    def _half(self, vector: Tensor | None) -> Tensor | None:
        return vector


@checked_network
class Conditioning(Offsets):
    """The client-specific vectors of a gated unit: V_f c, which modulates its filter, and V_g c, which opens its gate.

    A client's vectors start at 0, at a newcomer as well as at all clients in the first round.

    Args:
        units: number of units.
        filter: whether the filter is conditioned (the paper's client-specific modulation).
        gate: whether the gate is conditioned (client-specific expression).
        clients: None for a client's own two vectors [units].  A number for two matrices [units, clients] that all
            clients share, as in the paper's simulation; then the buffer `client` [clients] is the one-hot number of the
            client, and all zeros stand for an unknown client.
    """

    client: Tensor | None

    def __init__(self, units: Count, filter: bool = True, gate: bool = True, clients: Count | None = None) -> None:
        super().__init__(units, filter, gate)
        if clients is not None:
            for vector in (self.filter, self.gate):
                if vector is not None:
                    # replaced here, so that a client's own vectors and the shared matrices have the same names
                    vector.data = torch.zeros(units, clients)
        self.register_buffer("client", None if clients is None else torch.zeros(clients))

    def _half(self, vector: Tensor | None) -> Tensor | None:
        return vector if vector is None or self.client is None else vector @ self.client


class _Gated(nn.Module):
    """Base class of dense and convolutional gated units: the offsets of their product, and the gate.

    There is a bias that all clients share only if there is no private vector.  Beside a private vector it would be
    redundant and reveal the vector: both have the same gradient, so the change of the bias that a client sends would
    be the change of its vector.  `bias` adds it nevertheless, for comparisons.
    """

    def __init__(
        self, units: int, fan_in: int, filter: bool, gate: bool, clients: int | None, bias: bool | None
    ) -> None:
        super().__init__()
        everywhere = clients is not None if bias is None else bias
        # where all clients share the matrices nothing is private, so a bias reveals nothing
        f, g = everywhere or not filter, everywhere or not gate
        self.conditioning = Conditioning(units, filter, gate, clients) if filter or gate else None
        self.bias = Offsets(units, f, g) if f or g else None
        for vector in () if self.bias is None else self.bias.parameters():
            nn.init.uniform_(vector, -(fan_in**-0.5), fan_in**-0.5)  # as torch initializes those of a linear layer

    def offsets(self) -> Tensor:
        """The vector that is added to every row of the product [2 * units]."""
        if self.bias is None or self.conditioning is None:
            only = self.conditioning if self.bias is None else self.bias
            assert only is not None  # for the type checker: there is a bias wherever there is no conditioning
            alone: Tensor = only()
            return alone
        both: Tensor = self.bias() + self.conditioning()
        return both

    def gated(self, both: Tensor) -> Tensor:
        """Filter and gate [batch, 2 * units, ...] to the unit's output [batch, units, ...]."""
        f, g = both.chunk(2, dim=1)
        return f.tanh() * g.sigmoid()


@checked_network
class GatedUnit(_Gated):
    """A dense gated unit.  Filter and gate are one product, and conditioning is its bias.

    Args:
        inputs: number of inputs.
        units: number of outputs.
        filter: whether each client has its own vector in the filter.
        gate: whether each client has its own vector in the gate.
        clients: see `Conditioning`.
        bias: whether there is a shared bias; None adds it only without private vectors, since it would reveal them: a
            client's change of both is the same.
    """

    def __init__(
        self,
        inputs: Count,
        units: Count,
        filter: bool = True,
        gate: bool = True,
        clients: Count | None = None,
        bias: bool | None = None,
    ) -> None:
        super().__init__(units, inputs, filter, gate, clients, bias)
        # filter and gate in one matrix product; the offsets are its bias, so that they cost no pass of their own
        self.product = nn.Linear(inputs, 2 * units, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, inputs] to [batch, units], each in (-1, 1)."""
        return self.gated(functional.linear(x, self.product.weight, self.offsets()))


@checked_network
class GatedConvolution(_Gated):
    """A convolutional gated unit over one axis (signals) or two (images); all positions share a client's vectors.

    Args:
        inputs: number of input channels.
        units: number of output channels.
        kernel: length of the convolution's sides.
        axes: 1 or 2.
        dilation: distance between the positions that the kernel reads, as in WaveNet.
        filter: whether each client has its own vector in the filter.
        gate: whether each client has its own vector in the gate.
        clients: see `Conditioning`.
        bias: see `GatedUnit`.
    """

    def __init__(
        self,
        inputs: Count,
        units: Count,
        kernel: Count = 3,
        axes: int = 2,
        dilation: Count = 1,
        filter: bool = True,
        gate: bool = True,
        clients: Count | None = None,
        bias: bool | None = None,
    ) -> None:
        if axes not in (1, 2):
            raise SettingError(f"axes must be 1 (signals) or 2 (images), got {axes!r}")
        fan_in = inputs * kernel**axes
        super().__init__(units, fan_in, filter, gate, clients, bias)
        layer = nn.Conv1d if axes == 1 else nn.Conv2d
        # without a bias here: a shared one beside private vectors would reveal them
        self.product = layer(inputs, 2 * units, kernel, dilation=dilation, padding="same", bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, inputs, length] or [batch, inputs, height, width] to the same with `units` channels."""
        product = self.product
        convolve = functional.conv1d if isinstance(product, nn.Conv1d) else functional.conv2d
        both = convolve(x, product.weight, self.offsets(), padding="same", dilation=product.dilation)
        return self.gated(both)


@checked_network
class GatedClassifier(FeatureClassifier):
    """Gated units with dropout and a linear layer, over embeddings or other flat inputs (Rieger et al. 2020).

    The paper has two layers of 64 units for audio and of 128 for images.

    Args:
        input_shape: shape of one input, which is flattened.
        outputs: number of classes, or of numbers to predict.
        units: units of each gated layer.
        dropout: share of a layer's outputs that is dropped in training.
        filter: whether each client has its own vectors in the filters.
        gate: whether each client has its own vectors in the gates.
        clients: see `Conditioning`.
        bias: see `GatedUnit`.
    """

    def __init__(
        self,
        input_shape: Sequence[Count],
        outputs: Count,
        units: Sequence[Count] = (128, 128),
        dropout: Share = 0.5,
        filter: bool = True,
        gate: bool = True,
        clients: Count | None = None,
        bias: bool | None = None,
    ) -> None:
        super().__init__()
        sizes = [size(shape("gated_classifier", input_shape, "")), *units]
        layers = [
            nn.Sequential(GatedUnit(n_in, n_out, filter, gate, clients, bias), nn.Dropout(dropout))
            for n_in, n_out in pairwise(sizes)
        ]
        self.features = nn.Sequential(nn.Flatten(), *layers)
        self.classifier = nn.Linear(sizes[-1], outputs)


@checked_network
class PlainClassifier(FeatureClassifier):
    """The counterpart of `GatedClassifier` with ReLU instead of gated units, and without conditioning.

    Args:
        input_shape: shape of one input, which is flattened.
        outputs: number of classes, or of numbers to predict.
        units: units of each layer.
        dropout: share of a layer's outputs that is dropped in training.
        matched: widen all layers by one factor, so that there are as many parameters as in the gated classifier with
            these `units` (within half of those of a unit), since gates double them.
    """

    def __init__(
        self,
        input_shape: Sequence[Count],
        outputs: Count,
        units: Sequence[Count] = (128, 128),
        dropout: Share = 0.5,
        matched: bool = False,
    ) -> None:
        super().__init__()
        sizes = [size(shape("plain_classifier", input_shape, "")), *units]
        if matched:
            sizes = _matched(sizes, outputs)
        layers = [
            nn.Sequential(nn.Linear(n_in, n_out), nn.ReLU(), nn.Dropout(dropout)) for n_in, n_out in pairwise(sizes)
        ]
        self.features = nn.Sequential(nn.Flatten(), *layers)
        self.classifier = nn.Linear(sizes[-1], outputs)


@checked_network
class GatedCnn(FeatureClassifier):
    """Two gated convolutions, each followed by pooling, and a linear layer, for signals and images without extractor.

    Args:
        input_shape: [channels, length] or [channels, height, width], sides of at least 4.
        outputs: number of classes, or of numbers to predict.
        units: channels of the two convolutions.
        kernel: length of the convolutions' sides.
        dropout: share of the last layer's inputs that is dropped in training.
        filter: whether each client has its own vectors in the filters.
        gate: whether each client has its own vectors in the gates.
        clients: see `Conditioning`.
        bias: see `GatedUnit`.
    """

    def __init__(
        self,
        input_shape: Sequence[Count],
        outputs: Count,
        units: TwoWidths = (16, 32),
        kernel: Count = 3,
        dropout: Share = 0.0,
        filter: bool = True,
        gate: bool = True,
        clients: Count | None = None,
        bias: bool | None = None,
    ) -> None:
        super().__init__()
        axes = "channels length" if len(input_shape) == 2 else "channels height width"
        depth, *sides = shape("gated_cnn", input_shape, axes, least=4)
        first, second = units
        pool = nn.MaxPool1d if len(sides) == 1 else nn.MaxPool2d
        self.features = nn.Sequential(
            GatedConvolution(depth, first, kernel, len(sides), 1, filter, gate, clients, bias),
            pool(2),
            GatedConvolution(first, second, kernel, len(sides), 1, filter, gate, clients, bias),
            pool(2),
            nn.Flatten(),
            nn.Dropout(dropout),
        )
        self.classifier = nn.Linear(second * size([side // 4 for side in sides]), outputs)


def _parameters(sizes: Sequence[int], outputs: int, gates: bool) -> int:
    """Number of parameters in a classifier of these sizes; a gated one has either conditioning or biases."""
    hidden = sum((n_in + 1) * n_out for n_in, n_out in pairwise(sizes))
    return hidden * (2 if gates else 1) + (sizes[-1] + 1) * outputs


def _matched(sizes: Sequence[int], outputs: int) -> list[int]:
    """Sizes of plain layers in these proportions, with as many parameters as the gated classifier of these sizes."""
    target, first = _parameters(sizes, outputs, gates=True), sizes[1]
    # gates double the parameters, which grow at least linearly with the widths: twice the widths is enough
    candidates = [
        [sizes[0], *(max(1, round(size * width / first)) for size in sizes[1:])] for width in range(1, 2 * first + 2)
    ]
    return min(candidates, key=lambda candidate: abs(_parameters(candidate, outputs, gates=False) - target))
