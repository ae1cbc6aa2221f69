"""Models that some clients have in place of the run's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from piebald.core.errors import SettingError, shown
from piebald.core.parameters import Layout, copied
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
