"""Models around another model: its nearest neighbours, its inputs as standard scores, and embeddings of categories."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from piebald.contracts import RowOutputs
from piebald.core import pytree
from piebald.core.arguments import Count, Positive, checked, checked_class
from piebald.core.errors import SettingError
from piebald.core.moments import InputHooks
from piebald.core.parameters import head
from piebald.methods.choice.knn_per import interpolated, neighbour_shares


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
        self, module: nn.Module, x: pytree.Tree, y: Tensor, *, k: Count = 10,
        lam: Annotated[float, Field(ge=0, le=1)] = 0.5, scale: Positive = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        last = head(module)
        if last is None:
            raise SettingError("module must end with a linear layer behind another one, and this one does not")
        # evaluation mode: features must not depend on the rows that come along, nor on dropout
        self.module, self.k, self.lam, self.scale, self._last = module.eval(), k, lam, scale, last
        if not pytree.leaves(x):
            raise SettingError("x must have the inputs of rows, and has none")
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
        # of `outputs` only the number of classes is read
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
        # float64, as the data were standardised: float32 would give other inputs than training had
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
    sizes = {index: embedding_size(count) for index, count in categories.items()}
    module = make(width - len(sizes) + sum(sizes.values()))
    tables = [nn.Embedding(categories[index] + 2, size) for index, size in sizes.items()]
    for table in tables:
        # with torch's deviation of 1, each of many random numbers would weigh as much as a standard score
        nn.init.normal_(table.weight, std=0.1)
    module.add_module("categories", nn.ModuleList(tables))
    plain = [index for index in range(width) if index not in sizes]

    def embed(own: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace numbers of categories by their embeddings; a copy of the module has its own."""
        # looked up in `own`, not closed over: copies of the module would all train the first one's tables
        x, columns = inputs[0], own.get_submodule("categories")
        assert isinstance(columns, nn.ModuleList)
        parts = [x[:, plain]]
        for index, table in zip(sizes, columns, strict=True):
            # shifted by 2 for gaps and others; clamped, as an index out of range stops a GPU with no message of use
            parts.append(table((x[:, index] + 2).long().clamp(0, categories[index] + 1)))
        return (torch.cat(parts, dim=1), *inputs[1:])

    module.register_forward_pre_hook(embed)
    return module
