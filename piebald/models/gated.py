"""Conditional gated units: h = tanh(W_f x + V_f c) * sigmoid(W_g x + V_g c) for a client c (CGAU).

With c the one-hot number of a client, V_f c and V_g c are two vectors, so each client holds just these two and nobody
else needs them: `Conditioning`, the private layers of the recipe `cgau`.  They are the unit's biases, too.  Rieger,
Høegh, Hansen 2020, section 3; the unit without clients is that of WaveNet and PixelCNN (van den Oord et al. 2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from piebald.errors import SettingError
from piebald.models.checks import shape, size, whole, widths


class Offsets(nn.Module):
    """What is added to a gated unit's filter and to its gate: a vector each, or to one of them only.

    Args:
        units: of the gated unit.
        filter: whether the filter has one.
        gate: whether the gate has one.
    """

    def __init__(self, units: int, filter: bool = True, gate: bool = True) -> None:
        super().__init__()
        whole("units", units)
        self.filter = nn.Parameter(torch.zeros(units)) if filter else None
        self.gate = nn.Parameter(torch.zeros(units)) if gate else None

    def forward(self) -> Tensor:
        """The vectors behind one another [2 * units], zeros for one that is not there."""
        halves = [self._half(vector) for vector in (self.filter, self.gate)]
        some = next(half for half in halves if half is not None)
        return torch.cat([torch.zeros_like(some) if half is None else half for half in halves])

    def _half(self, vector: Tensor | None) -> Tensor | None:
        return vector


class Conditioning(Offsets):
    """What tells clients apart inside a gated unit: V_f c, which modulates its filter, and V_g c, which opens its gate.

    A client's vectors start at 0: so does a newcomer, and so does everybody in the first round.

    Args:
        units: of the gated unit.
        filter: whether the filter is conditioned (the paper's client-specific modulation).
        gate: whether the gate is conditioned (client-specific expression).
        clients: None for a client's own two vectors [units].  A number for two matrices [units, clients] that all
            clients share, as the paper simulates it; then the buffer `client` [clients] says who one is, and all 0
            means a stranger.
    """

    client: Tensor | None

    def __init__(self, units: int, filter: bool = True, gate: bool = True, clients: int | None = None) -> None:
        super().__init__(units, filter, gate)
        if clients is not None:
            for vector in (self.filter, self.gate):
                if vector is not None:
                    vector.data = torch.zeros(units, whole("clients", clients))
        self.register_buffer("client", None if clients is None else torch.zeros(clients))

    def _half(self, vector: Tensor | None) -> Tensor | None:
        return vector if vector is None or self.client is None else vector @ self.client


class _Gated(nn.Module):
    """What dense and convolutional gated units share: the offsets of their one product, and the gate itself.

    There is a bias that all clients share only where there is no private vector.  Beside one it would change nothing
    that can be computed, and it would tell the vector: both have the same gradient, so the change of the bias that a
    client sends would be the change of its vector.  `bias` adds it all the same, to compare.
    """

    def __init__(
        self, units: int, fan_in: int, filter: bool, gate: bool, clients: int | None, bias: bool | None
    ) -> None:
        super().__init__()
        for name, value in (("filter", filter), ("gate", gate)):
            if not isinstance(value, bool):
                raise SettingError(f"{name} must be true or false, got {value!r}")
        everywhere = clients is not None if bias is None else bias
        f, g = everywhere or not filter, everywhere or not gate
        self.conditioning = Conditioning(units, filter, gate, clients) if filter or gate else None
        self.bias = Offsets(units, f, g) if f or g else None
        for vector in () if self.bias is None else self.bias.parameters():
            nn.init.uniform_(vector, -(fan_in**-0.5), fan_in**-0.5)  # as torch starts those of a linear layer

    def offsets(self) -> Tensor:
        """What is added to every row of the product [2 * units]."""
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


class GatedUnit(_Gated):
    """A dense gated unit.  Filter and gate are one product, and conditioning is its bias, not added to every row.

    Args:
        inputs: numbers that come in.
        units: numbers that go out.
        filter: whether each client has its own vector in the filter.
        gate: whether it has one in the gate.
        clients: see `Conditioning`.
        bias: whether there is a shared bias, too; None for one only where there is no private vector, since beside one
            it would give the vector away: a client's change of both is the same.
    """

    def __init__(
        self,
        inputs: int,
        units: int,
        filter: bool = True,
        gate: bool = True,
        clients: int | None = None,
        bias: bool | None = None,
    ) -> None:
        super().__init__(units, whole("inputs", inputs), filter, gate, clients, bias)
        self.product = nn.Linear(inputs, 2 * units, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, inputs] to [batch, units], each in (-1, 1)."""
        return self.gated(functional.linear(x, self.product.weight, self.offsets()))


class GatedConvolution(_Gated):
    """A convolutional gated unit over one axis (signals) or two (images); all positions share a client's vectors.

    Args:
        inputs: channels that come in.
        units: channels that go out.
        kernel: length of the convolution's sides.
        axes: 1 or 2.
        dilation: positions between two that are read, as WaveNet has it.
        filter: whether each client has its own vector in the filter.
        gate: whether it has one in the gate.
        clients: see `Conditioning`.
        bias: see `GatedUnit`.
    """

    def __init__(
        self,
        inputs: int,
        units: int,
        kernel: int = 3,
        axes: int = 2,
        dilation: int = 1,
        filter: bool = True,
        gate: bool = True,
        clients: int | None = None,
        bias: bool | None = None,
    ) -> None:
        if axes not in (1, 2):
            raise SettingError(f"axes must be 1 (signals) or 2 (images), got {axes!r}")
        fan_in = whole("inputs", inputs) * whole("kernel", kernel) ** axes
        super().__init__(units, fan_in, filter, gate, clients, bias)
        layer = nn.Conv1d if axes == 1 else nn.Conv2d
        reach = whole("dilation", dilation)
        self.product = layer(inputs, 2 * units, kernel, dilation=reach, padding="same", bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, inputs, length] or [batch, inputs, height, width] to the same with `units` channels."""
        product = self.product
        convolve = functional.conv1d if isinstance(product, nn.Conv1d) else functional.conv2d
        both = convolve(x, product.weight, self.offsets(), padding="same", dilation=product.dilation)
        return self.gated(both)


class GatedClassifier(nn.Module):
    """Gated units with dropout and a linear layer, over embeddings or other flat inputs (Rieger et al. 2020).

    The paper has two layers of 64 units for audio and of 128 for images.

    Args:
        input_shape: of one input, any; it is flattened.
        outputs: classes, or numbers to predict.
        units: of each gated layer.
        dropout: share of a layer's outputs that is dropped in training.
        filter: whether each client has its own vectors in the filters.
        gate: whether it has them in the gates.
        clients: see `Conditioning`.
        bias: see `GatedUnit`.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        outputs: int,
        units: Sequence[int] = (128, 128),
        dropout: float = 0.5,
        filter: bool = True,
        gate: bool = True,
        clients: int | None = None,
        bias: bool | None = None,
    ) -> None:
        super().__init__()
        sizes = [size(shape("gated_classifier", input_shape, "")), *widths("units", units)]
        layers = [
            nn.Sequential(GatedUnit(n_in, n_out, filter, gate, clients, bias), nn.Dropout(_share(dropout)))
            for n_in, n_out in pairwise(sizes)
        ]
        self.features = nn.Sequential(nn.Flatten(), *layers)
        self.classifier = nn.Linear(sizes[-1], whole("outputs", outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Inputs [batch, ...] to logits [batch, outputs]."""
        logits: Tensor = self.classifier(self.features(x))
        return logits


class PlainClassifier(nn.Module):
    """The twin of `GatedClassifier` with ReLU in the place of gated units, and without conditioning.

    Args:
        input_shape: of one input, any; it is flattened.
        outputs: classes, or numbers to predict.
        units: of each layer.
        dropout: share of a layer's outputs that is dropped in training.
        matched: widen all layers by one factor, so that there are as many numbers as in the gated classifier of these
            `units` (within half a unit's), since gates double them.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        outputs: int,
        units: Sequence[int] = (128, 128),
        dropout: float = 0.5,
        matched: bool = False,
    ) -> None:
        super().__init__()
        sizes = [size(shape("plain_classifier", input_shape, "")), *widths("units", units)]
        whole("outputs", outputs)
        if matched:
            sizes = _matched(sizes, outputs)
        layers = [
            nn.Sequential(nn.Linear(n_in, n_out), nn.ReLU(), nn.Dropout(_share(dropout)))
            for n_in, n_out in pairwise(sizes)
        ]
        self.features = nn.Sequential(nn.Flatten(), *layers)
        self.classifier = nn.Linear(sizes[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Inputs [batch, ...] to logits [batch, outputs]."""
        logits: Tensor = self.classifier(self.features(x))
        return logits


class GatedCnn(nn.Module):
    """Two gated convolutions, each halved by pooling, and a linear layer, for signals and images without an extractor.

    Args:
        input_shape: [channels, length] or [channels, height, width], sides of at least 4.
        outputs: classes, or numbers to predict.
        units: channels of the two convolutions.
        kernel: length of their sides.
        dropout: share of the last layer's inputs that is dropped in training.
        filter: whether each client has its own vectors in the filters.
        gate: whether it has them in the gates.
        clients: see `Conditioning`.
        bias: see `GatedUnit`.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        outputs: int,
        units: Sequence[int] = (16, 32),
        kernel: int = 3,
        dropout: float = 0.0,
        filter: bool = True,
        gate: bool = True,
        clients: int | None = None,
        bias: bool | None = None,
    ) -> None:
        super().__init__()
        axes = "channels length" if len(input_shape) == 2 else "channels height width"
        depth, *sides = shape("gated_cnn", input_shape, axes, least=4)
        first, second = widths("units", units, 2)
        pool = nn.MaxPool1d if len(sides) == 1 else nn.MaxPool2d
        self.features = nn.Sequential(
            GatedConvolution(depth, first, kernel, len(sides), 1, filter, gate, clients, bias),
            pool(2),
            GatedConvolution(first, second, kernel, len(sides), 1, filter, gate, clients, bias),
            pool(2),
            nn.Flatten(),
            nn.Dropout(_share(dropout)),
        )
        self.classifier = nn.Linear(second * size([side // 4 for side in sides]), whole("outputs", outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Inputs [batch, channels, ...] to logits [batch, outputs]."""
        logits: Tensor = self.classifier(self.features(x))
        return logits


def _share(dropout: float) -> float:
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise SettingError(f"dropout must be a share of at least 0 and below 1, got {dropout!r}")
    return float(dropout)


def _numbers(sizes: Sequence[int], outputs: int, gates: bool) -> int:
    """Numbers in a classifier of these sizes; a gated one has either conditioning or biases."""
    hidden = sum((n_in + 1) * n_out for n_in, n_out in pairwise(sizes))
    return hidden * (2 if gates else 1) + (sizes[-1] + 1) * outputs


def _matched(sizes: Sequence[int], outputs: int) -> list[int]:
    """Sizes of plain layers, in the proportions of these, with the numbers of the gated classifier of these."""
    wanted, first = _numbers(sizes, outputs, gates=True), sizes[1]
    tried = [
        [sizes[0], *(max(1, round(one * width / first)) for one in sizes[1:])] for width in range(1, 2 * first + 2)
    ]
    return min(tried, key=lambda one: abs(_numbers(one, outputs, gates=False) - wanted))
