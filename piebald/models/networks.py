"""Networks by name, with seeded initial parameters.

Models around another model: its nearest neighbours, its inputs as standard scores, and embeddings of categories.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from piebald.contracts import RowOutputs
from piebald.core import pytree
from piebald.core.arguments import Count, check_some, checked, checked_class
from piebald.core.errors import SettingError, shown, unknown
from piebald.core.model_settings import bounded_build
from piebald.core.moments import InputHooks
from piebald.core.parameters import head
from piebald.core.randomness import key, torch_seed
from piebald.core.reading.files import memory
from piebald.core.references import USERS, Reference
from piebald.methods.choice.neighbours import interpolated, neighbour_shares
from piebald.models.batch_norm import Cnn1dBn, MlpBn
from piebald.models.convolutional import Cnn1d, CnnBn, LeafCnn, MetisCnn, SmallCnn
from piebald.models.dense import Logistic, Mlp
from piebald.models.gated import GatedClassifier, GatedCnn, PlainClassifier
from piebald.models.pretrained import pretrained
from piebald.models.resnet import Resnet18, Resnet50
from piebald.models.vgg import Vgg11

_MODELS: dict[str, Callable[..., nn.Module]] = {
    "cnn_1d": Cnn1d,
    "cnn_1d_bn": Cnn1dBn,
    "cnn_bn": CnnBn,
    "gated_classifier": GatedClassifier,
    "gated_cnn": GatedCnn,
    "leaf_cnn": LeafCnn,
    "metis_cnn": MetisCnn,
    "logistic": Logistic,
    "mlp": Mlp,
    "plain_classifier": PlainClassifier,
    "mlp_bn": MlpBn,
    "pretrained": pretrained,
    "resnet18": Resnet18,
    "resnet50": Resnet50,
    "small_cnn": SmallCnn,
    "vgg11": Vgg11,
}


InputShape = Sequence[int] | Sequence[Sequence[int]] | Mapping[str, Sequence[int]]
_TENSORS = 2000  # more than any of these networks has
_MOST_TENSORS = 20_000  # of a network of the user's, too


def names() -> list[str]:
    """Names of all networks, sorted."""
    return sorted(_MODELS)


@checked
def count_parameters(name: str, input_shape: InputShape, outputs: int, most: int, **settings: Any) -> int:
    """Count the parameters of a network, without memory for them.

    It is built on torch's meta device, and no further than the limit, so that absurd settings cost nothing.

    Args:
        name, input_shape, outputs, settings: see `build_model`.
        most: the largest number allowed.

    Raises:
        SettingError: there are more parameters than `most`, or more tensors than any of these networks has; or as
            `build_model`.

    Examples:
        >>> count_parameters("logistic", [8], outputs=3, most=100)
        27
    """
    with bounded_build(f"model {name!r}", most, _TENSORS) as counts:
        network(name, input_shape, outputs, device="meta", **settings)
    return counts[0]


@checked
def build_model(
    name: str, input_shape: InputShape, outputs: Count, seed: int = 0, device: str = "cpu", **settings: Any
) -> nn.Module:
    """Make a network whose initial parameters depend only on its name, its settings and the seed.

    The global random state of torch is not changed.

    Args:
        name: one of `names()`, or "module:name" for a class or function of a plugin that makes a module.  It gets those
            of `input_shape`, `outputs` and `seed` that its signature names.
        input_shape: shape of one input, without the batch axis; a tuple or dict of shapes where inputs are several.
        outputs: number of classes, or of numbers to predict; at least 1.
        seed: seed of the initial parameters.
        device: where it is made; "meta" makes one without numbers.
        settings: settings of the network, e.g. `hidden=(200, 200)`.

    Returns:
        The network, float32, in training mode.

    Raises:
        SettingError: a name or setting is unknown, or a value is invalid.

    Examples:
        >>> import piebald as pb
        >>> pb.models.build_model("mlp", input_shape=[4], outputs=2, hidden=[8]).classifier
        Linear(in_features=8, out_features=2, bias=True)
    """
    return network(USERS.mark(name), input_shape, outputs, seed, device, **settings)


def network(
    name: str, input_shape: InputShape, outputs: int, seed: int = 0, device: str = "cpu", **settings: Any
) -> nn.Module:
    """`build_model`, where a name is one of `names()` or a reference, and other text names nothing."""
    make, accepted = _maker(name)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise SettingError(f"seed must be a whole number, got {seed!r}")
    derived: dict[str, Any] = {"input_shape": input_shape, "outputs": outputs, "seed": seed}
    if name in _MODELS and name != "pretrained" and not pytree.is_single(pytree.formed(input_shape)):
        raise SettingError(
            f"model {name!r} takes inputs of one tensor, the data have {pytree.plain(pytree.formed(input_shape))}: "
            "use a module of your own"
        )
    for setting in settings:
        if setting not in accepted or setting in derived:
            raise unknown(
                f"setting of model {name!r} called", setting, [name for name in accepted if name not in derived]
            )
    if name not in _MODELS:
        check_some(make, {n: value for n, value in settings.items() if isinstance(value, str | bool | int | float)})
    try:
        target_device = torch.device(device)
    except RuntimeError:
        raise SettingError(f"device must be one that torch knows, like 'cpu' or 'meta', got {shown(device)}") from None
    room = memory() // 8  # parameters and their gradients
    with (
        torch_seed(key(seed, "model", name) >> 1),
        target_device,
        bounded_build(f"model {name!r}", room, _MOST_TENSORS),
    ):
        module = make(**{argument: value for argument, value in derived.items() if argument in accepted}, **settings)
    if not isinstance(module, nn.Module):
        raise SettingError(f"model {name!r} must make a torch.nn.Module, got {type(module).__name__}")
    return module


def _maker(name: str) -> tuple[Callable[..., Any], list[str]]:
    """The class or function that makes a network, and the names of its arguments."""
    if name in _MODELS:
        return _MODELS[name], list(inspect.signature(_MODELS[name]).parameters)
    if not isinstance(name, Reference):
        raise unknown("model", name, _MODELS)
    maker = name.resolved("model")
    if not callable(maker) or isinstance(maker, nn.Module):
        raise SettingError(f"model {name!r} must be a class or function that makes a module, got {maker!r}")
    parameters = inspect.signature(maker).parameters.values()
    return maker, [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]


class NearestNeighbours(nn.Module):
    """A classifier that interpolates its probabilities with those of the nearest remembered rows (`choice.KnnPer`).

    It takes what the module takes, and returns log probabilities [n, classes].  It remembers the rows'
    features and classes as buffers, so its state discloses them.

    Args:
        module: a classifier with a last linear layer.
        x: inputs of the rows to remember.
        y: their classes [n]; rows below 0 are left out.
        k: neighbours that vote, at least 1.
        lam: weight of the neighbours, in [0, 1]; with 0 the module's own outputs are returned.
        scale: of distances, above 0.

    Raises:
        SettingError: the module has no layer before a linear one, a setting is out of range, or no row has a class.
    """

    memory: Tensor
    labels: Tensor

    @checked
    def __init__(
        self, module: nn.Module, x: pytree.Tree, y: Tensor, *, k: int = 10, lam: float = 0.5, scale: float = 1.0
    ) -> None:
        super().__init__()
        last = head(module)
        if last is None:
            raise SettingError("module must end with a linear layer behind another one, and this one does not")
        if k < 1 or not 0 <= lam <= 1 or not scale > 0:
            raise SettingError(f"k must be at least 1, lam in [0, 1] and scale above 0, got {k}, {lam} and {scale}")
        self.module, self.k, self.lam, self.scale, self._last = module.eval(), k, lam, scale, last
        labelled = y >= 0
        if not bool(labelled.any()):
            raise SettingError("y must have the class of at least one row, and has none: nothing can be remembered")
        with torch.no_grad():
            _, features = self._run(x)
        self.register_buffer("memory", features[labelled])
        self.register_buffer("labels", y[labelled].long())

    def forward(self, x: Any) -> Tensor:
        """Log probabilities of rows."""
        outputs, features = self._run(x)
        if self.lam == 0:
            return outputs
        remembered = RowOutputs(self.memory, outputs, self.labels)
        return interpolated(outputs, neighbour_shares(features, remembered, self.k, self.scale), self.lam)

    def _run(self, x: Any) -> tuple[Tensor, Tensor]:
        """The module's outputs, and what went into its last linear layer."""
        with InputHooks(self.module, [self._last]) as inputs:
            outputs = pytree.logits(pytree.run(self.module, x))
        return outputs, inputs.seen[self._last].flatten(1)


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


def embedding_size(categories: int) -> int:
    """Return how many numbers stand for a category of a column, 1.6 c^0.56 and at most 50 (fastai's rule)."""
    return min(50, round(1.6 * math.pow(categories, 0.56)))


def with_embeddings(make: Callable[[int], nn.Module], width: int, categories: Mapping[int, int]) -> nn.Module:
    """Return a model that reads numbers of categories through embeddings, which it learns with its other layers.

    The layers of the model keep their names; those of the embeddings are `categories.0`, `categories.1`, ...

    Args:
        make: makes the model for inputs of a width.
        width: how many numbers an input has.
        categories: how many categories there are in a column, by its place in the input: numbers from 0, with -1 for
            all others and -2 for gaps (`Preparation.embedded`).
    """
    sizes = {place: embedding_size(count) for place, count in categories.items()}
    module = make(width - len(sizes) + sum(sizes.values()))
    tables = [nn.Embedding(categories[place] + 2, size) for place, size in sizes.items()]
    for table in tables:
        nn.init.normal_(table.weight, std=0.1)
    module.add_module("categories", nn.ModuleList(tables))
    plain = [place for place in range(width) if place not in sizes]

    def embed(own: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace numbers of categories by their embeddings; a copy of the module has its own."""
        x, columns = inputs[0], own.get_submodule("categories")
        assert isinstance(columns, nn.ModuleList)
        parts = [x[:, plain]]
        for place, table in zip(sizes, columns, strict=True):
            parts.append(table((x[:, place] + 2).long().clamp(0, categories[place] + 1)))
        return (torch.cat(parts, dim=1), *inputs[1:])

    module.register_forward_pre_hook(embed)
    return module
