"""Models that some clients have in place of the run's, among them smaller versions of its network.

A smaller version has the first channels of each hidden layer (HeteroFL), or adapters of a lower rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from piebald.core.errors import SettingError, shown
from piebald.core.parameters import Layout, copied, head
from piebald.core.randomness import generator


@dataclass(frozen=True, slots=True, eq=False)
class ClientModel:
    """A model that some clients have.

    Attributes:
        model: the module.
        layout: where each of its tensors lies in the model's vector [p'], and which s' numbers are shared.
        initial: [p'], the parameters that it starts from.
        outputs: shape of the scores that it returns for one input.
        held: [s'] int64, where its shared numbers lie among the s shared numbers of the run's model, increasing; None
            where they are the same.
        lacks: names of the inputs that these clients lack, because of which they have a part of the run's model.
        silent: [m] int64, where those shared numbers of the run's model lie that they have and have no say for.
    """

    model: nn.Module
    layout: Layout
    initial: Tensor
    outputs: tuple[int, ...]
    held: Tensor | None = None
    lacks: frozenset[str] = frozenset()
    silent: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ClientModels:
    """The assignment of models to clients.

    Attributes:
        models: the models that are not the run's.
        numbers: of each client's model among these, None for the run's; clients beyond the last begin with the first
            again.
        drawn: the numbers that each training task draws one from, with equal chances; empty where a client trains its
            own model.
        asked: whether clients are asked about each other's models.
        seed: of these draws.
    """

    models: tuple[ClientModel, ...]
    numbers: tuple[int | None, ...]
    drawn: tuple[int | None, ...] = ()
    asked: bool = False
    seed: int = 0

    @property
    def by_task(self) -> bool:
        """True if a client's tasks may be about other models than its own."""
        return bool(self.drawn) or self.asked

    def number(self, client: int) -> int | None:
        """The number of a client's model, None for the run's, which the server uses itself."""
        return None if client < 0 else self.numbers[client % len(self.numbers)]

    def trained(self, client: int, version: int) -> int | None:
        """The number of the model that a training task at this version is about."""
        if not self.drawn:
            return self.number(client)
        return self.drawn[int(generator("width", self.seed, client, version).integers(len(self.drawn)))]

    def plain(self) -> dict[str, Any]:
        """Return the tensors of each client's model, as plain values for the run folder."""
        layouts = [[[slot.name, list(slot.shape)] for slot in model.layout.slots] for model in self.models]
        draws = {"drawn": list(self.drawn)} if self.drawn else {}
        return {"numbers": list(self.numbers), "layouts": layouts, **draws}


def nested_positions(whole: Layout, part: Layout) -> Tensor:
    """Return the positions of a narrower model's numbers [p'] in the whole model's vector [p].

    They increase within each tensor.

    Each tensor of the narrower model is the corner of the tensor of the same name: its first rows, columns, and so on.

    Raises:
        SettingError: a tensor has no such counterpart.
    """
    slots, positions = {slot.name: slot for slot in whole.slots}, []
    for slot in part.slots:
        counterpart = slots.get(slot.name)
        fits = counterpart is not None and len(counterpart.shape) == len(slot.shape)
        if counterpart is None or not fits or any(a > b for a, b in zip(slot.shape, counterpart.shape, strict=True)):
            raise SettingError(f"{slot.name} {list(slot.shape)} does not fit into the whole model")
        # the corner of a tensor of positions is where the corner of the tensor lies
        places = torch.arange(counterpart.start, counterpart.stop).view(counterpart.shape)
        positions.append(places[tuple(slice(size) for size in slot.shape)].flatten())
    return torch.cat(positions)


def nested_model(module: nn.Module, layout: Layout, initial: Tensor, outputs: tuple[int, ...]) -> ClientModel:
    """Return a narrower model of some clients, which starts from corners of the tensors of the run's.

    Args:
        module: the narrower model.
        layout, initial, outputs: of the run's model, see `ClientModel`.
    """
    part = Layout.of(module, layout.private)
    places = nested_positions(layout, part)
    return ClientModel(module, part, initial[places], outputs, places[: part.shared])


def part_without(
    module: nn.Module,
    layout: Layout,
    outputs: tuple[int, ...],
    tensors: Collection[str],
    inputs: frozenset[str],
    silent: Collection[str] = (),
) -> ClientModel:
    """Return a model without some tensors, which stay as they are in it.

    Args:
        module, layout, outputs: the whole model.
        tensors: names of those that only some inputs reach.
        inputs: names of these inputs, which clients of the part lack.
        silent: names of tensors for which these clients have no say.
    """
    model, part = copied(module), layout.without(tensors)
    for name, parameter in model.named_parameters():
        if name in tensors:
            # frozen, such tensors are in no model vector, and so never leave a client that lacks their inputs
            parameter.requires_grad_(False)
    held = nested_positions(layout, part)[: part.shared]
    slots = [slot for slot in layout.slots if slot.name in silent and slot.stop <= layout.shared]
    places = torch.cat([torch.arange(slot.start, slot.stop) for slot in slots]) if slots else None
    return ClientModel(model, part, part.flatten(model), outputs, held, inputs, places)


def check_shared(layouts: Sequence[Layout], recipe: str) -> None:
    """Refuse clients' models whose shared tensors are not those of the first one.

    Args:
        layouts: of the models.
        recipe: the recipe's name.

    Raises:
        SettingError: shared tensors differ.
    """
    first, *rest = [
        {slot.name: slot.shape for slot in layout.slots if slot.stop <= layout.shared} for layout in layouts
    ]
    for tensors in rest:
        # in their order as well: what is averaged are positions in a vector, without names
        if list(tensors.items()) != list(first.items()):
            name = next(
                (tensor for tensor in [*first, *tensors] if first.get(tensor) != tensors.get(tensor)), next(iter(first))
            )
            raise SettingError(
                f"{recipe} averages what clients share, but {name} is not alike in the models of all clients: keep "
                "such layers private, choose fedproto, fedmd or local, or give heterofl one model"
            )


def pattern_for_client(patterns: Sequence[str], name: str) -> str:
    """The first of these patterns that fits a client's name.

    Raises:
        SettingError: none does.
    """
    for pattern in patterns:
        if pattern == name or fnmatchcase(name, pattern):
            return pattern
    raise SettingError(f"model has no entry for client {name!r}: name it, or give '*' for all others")


def fitting_patterns(patterns: Iterable[str], name: str) -> list[str]:
    """Return those patterns that fit a client's name: the name itself first, then longer ones before shorter ones.

    The order in which they are given does not count, since a table that was sent or stored has none.

    Examples:
        >>> fitting_patterns(["*", "ward 1", "ward *", "lab *"], "ward 1")
        ['ward 1', 'ward *', '*']
    """
    fitting = [pattern for pattern in patterns if pattern == name or fnmatchcase(name, pattern)]
    # patterns of one length are ordered by themselves, for want of any other order that lasts
    return sorted(fitting, key=lambda pattern: (pattern != name, -len(pattern), pattern))


def idle_pattern_reason(patterns: Collection[str], names: Sequence[str], setting: str) -> str | None:
    """Return why a table by clients' names or patterns does not fit the clients of a run, or None."""
    idle = next((p for p in patterns if not any(fitting_patterns([p], name) for name in names)), None)
    if idle is None:
        return None
    return f"{setting} has an entry for {idle!r}, but no client has this name: the clients are {shown(list(names))}"


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CLOSE = 1e-4  # relative difference of outputs that were summed in another order


class _Scaled(nn.Module):
    """A layer whose output is divided by the share of channels that the network has."""

    ratio: float

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)
        return output / self.ratio


class ScaledLinear(_Scaled, nn.Linear):
    """A linear layer with the scaler."""


class ScaledConv1d(_Scaled, nn.Conv1d):
    """A convolution in one dimension with the scaler."""


class ScaledConv2d(_Scaled, nn.Conv2d):
    """A convolution in two dimensions with the scaler."""


class ScaledConv3d(_Scaled, nn.Conv3d):
    """A convolution in three dimensions with the scaler."""


_SCALED: dict[type[nn.Module], type[_Scaled]] = {
    nn.Linear: ScaledLinear,
    nn.Conv1d: ScaledConv1d,
    nn.Conv2d: ScaledConv2d,
    nn.Conv3d: ScaledConv3d,
}


def width(channels: int, ratio: float) -> int:
    """Return the number of a layer's channels in a network of this ratio: rounded up, as in the paper's program.

    Examples:
        >>> width(10, 0.7), width(9, 0.5)
        (7, 5)
    """
    return math.ceil(round(channels * ratio, 6))  # 10 * 0.7 is 7.000000000000001


def narrowed(model: nn.Module, ratio: float, shape: object, scaler: bool) -> nn.Module:
    """A network with the first channels of each hidden layer, `width` of them.

    Inputs and the outputs of the last linear layer stay whole.  How many inputs a layer has follows from what comes
    out of the layers before it, so a flattened picture loses whole channels.

    Args:
        model: a network of linear layers, convolutions and batch norms; its parameters are copied.
        ratio: share of the channels, above 0 and below 1.
        shape: of one input.
        scaler: divide the outputs of each narrowed linear layer and convolution by the ratio.

    Raises:
        SettingError: the network has other layers, or the narrower one would not be a part of it.
    """
    last = head(model)
    if last is None or not isinstance(shape, tuple) or not all(isinstance(side, int) for side in shape):
        raise SettingError(_refusal(model, "ends in no linear layer after others, or has several inputs"))
    _check_layers(model)
    narrow = copied(model).eval()
    # one input shows by its way through the layers how many inputs each of them has left
    x = torch.randn((1, *shape), generator=torch.Generator().manual_seed(0))
    hooks, visited = [], set[str]()

    def cut(name: str) -> None:
        layer = narrow.get_submodule(name)

        def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            _cut_layer(layer, inputs[0], 1.0 if name == last else ratio, again=name in visited)
            visited.add(name)

        hooks.append(layer.register_forward_pre_hook(before))

    for name, layer in narrow.named_modules():
        if isinstance(layer, (nn.Linear, *_CONVOLUTIONS, *_BATCH_NORMS)):
            cut(name)
    try:
        with torch.no_grad():
            outputs, expected = narrow(x), _part_of(model, narrow)(x)
    except SettingError:
        raise
    except Exception as error:  # whatever the user's own forward may raise at sizes that it does not expect
        raise SettingError(_refusal(model, f"fails with fewer channels ({str(error).splitlines()[0]})")) from None
    finally:
        for hook in hooks:
            hook.remove()
    # a forward of the user's own may divide by a width, say, and then the narrow network is no part of the wide one
    alike = isinstance(outputs, Tensor) and outputs.shape == expected.shape
    if not alike or not torch.allclose(outputs, expected, rtol=_CLOSE, atol=_CLOSE):
        raise SettingError(_refusal(model, "computes something else with fewer channels than with the others at zero"))
    for name, layer in narrow.named_modules() if scaler else ():
        if name != last and type(layer) in _SCALED:
            # only the class is exchanged: parameters keep their names and places, so the layout fits as before
            layer.__class__ = _SCALED[type(layer)]
            layer.ratio = ratio
    return narrow.train(model.training)


def _part_of(model: nn.Module, narrow: nn.Module) -> nn.Module:
    """The whole network with 0 for all numbers that the narrower one has not: both compute the same."""
    whole = copied(model).eval()
    small = {**dict(narrow.named_parameters()), **dict(narrow.named_buffers())}
    with torch.no_grad():
        for name, tensor in [*whole.named_parameters(), *whole.named_buffers()]:
            if tensor.dim():
                corner = tuple(slice(size) for size in small[name].shape)
                masked = torch.zeros_like(tensor)
                masked[corner] = tensor[corner]
                tensor.copy_(masked)
    return whole


def _check_layers(model: nn.Module) -> None:
    """Refuse layers whose channels cannot be left out one by one."""
    layers = (nn.Linear, *_CONVOLUTIONS, *_BATCH_NORMS)
    for name, layer in model.named_modules():
        tensors_of_layer = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        # by exact type: a subclass may use its channels in another way
        if tensors_of_layer and type(layer) not in layers:
            raise SettingError(_refusal(model, f"has a {type(layer).__name__} ({name or 'itself'})"))
        if isinstance(layer, _CONVOLUTIONS) and layer.groups != 1:
            raise SettingError(_refusal(model, f"has a convolution in groups ({name})"))
    # a tied tensor would have to be cut in two ways
    tensors = [id(tensor) for _, tensor in model.named_parameters(remove_duplicate=False)]
    if len(set(tensors)) < len(tensors):
        raise SettingError(_refusal(model, "has tied parameters"))


def _refusal(model: nn.Module, reason: str) -> str:
    return (
        f"a model of several widths is made of linear layers, convolutions and batch norms, whose channels can be left "
        f"out, and ends in a linear layer, but {type(model).__name__} {reason}: choose another model, or widths = [1.0]"
    )


def _cut_layer(layer: nn.Module, x: Tensor, ratio: float, again: bool) -> None:
    """Leave as many inputs in a layer as come, and this share of its outputs."""
    if isinstance(layer, nn.Linear):
        count = x.shape[-1]
        sizes: Sequence[int] = (layer.out_features if again else width(layer.out_features, ratio), count)
        layer.out_features, layer.in_features = sizes
    elif isinstance(layer, _CONVOLUTIONS):
        count = x.shape[1]
        sizes = (layer.out_channels if again else width(layer.out_channels, ratio), count)
        layer.out_channels, layer.in_channels = sizes
    else:
        assert isinstance(layer, _BATCH_NORMS)
        layer.num_features = x.shape[1]
        sizes = (x.shape[1],)
    for name, parameter in [*layer.named_parameters(recurse=False)]:
        corner = tuple(slice(size) for size in sizes[: parameter.dim()])
        setattr(layer, name, nn.Parameter(parameter.detach()[corner].clone(), parameter.requires_grad))
    for name, buffer in [*layer.named_buffers(recurse=False)]:
        if buffer.dim():
            setattr(layer, name, buffer[: sizes[0]].clone())


_INNER, _OUTER = "lora_A", "lora_B"  # as peft calls them


class AdapterPair(NamedTuple):
    """The names of an adapter's two tensors: W x + B A x.

    Attributes:
        inner: of A [rank, inputs].
        outer: of B [outputs, rank].
    """

    inner: str
    outer: str


def adapter_pairs(names: Iterable[str]) -> list[AdapterPair]:
    """The adapters among tensors of these names, which are called lora_A and lora_B as in peft."""
    ordered = [*names]
    known_names, pairs = set(ordered), []
    for name in ordered:
        words = name.split(".")
        if _INNER in words:
            outer = ".".join(_OUTER if word == _INNER else word for word in words)
            if outer in known_names:
                pairs.append(AdapterPair(name, outer))
    return pairs


def with_rank(model: nn.Module, rank: int) -> nn.Module:
    """A copy of a model whose adapters have the first `rank` rows of A and columns of B only; the rest is the same.

    Their output is multiplied by the same factor as before, so it is what the model's own is with zeros elsewhere.

    Raises:
        SettingError: the model has no adapters, or none of so high a rank.
    """
    pairs = adapter_pairs(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    if not pairs:
        raise SettingError(
            f"ranks need low-rank adapters, and {type(model).__name__} has none: load it with adapter = 'lora', or "
            "name the matrices of your own lora_A and lora_B"
        )
    smaller = copied(model)
    for pair in pairs:
        inner, outer = smaller.get_parameter(pair.inner), smaller.get_parameter(pair.outer)
        if inner.dim() != 2 or outer.dim() != 2 or inner.shape[0] != outer.shape[1]:
            raise SettingError(
                f"adapters are matrices A [rank, inputs] and B [outputs, rank], got {pair.inner} {list(inner.shape)} "
                f"and {pair.outer} {list(outer.shape)}"
            )
        if rank > len(inner):
            raise SettingError(f"ranks must be at most {len(inner)}, that of the model's adapters, got {shown(rank)}")
        _replace(smaller, pair.inner, nn.Parameter(inner.detach()[:rank].clone()))
        _replace(smaller, pair.outer, nn.Parameter(outer.detach()[:, :rank].clone()))
    return smaller


def _replace(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    layer = model.get_submodule(path)
    setattr(layer, leaf, parameter)
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = parameter.shape
