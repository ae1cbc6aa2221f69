"""A model as one flat float32 vector.

    [ shared parameters | shared buffers | private parameters | private buffers ]
      <---------------- shared --------->
      <------------------------------ size ------------------------------------->

Shared numbers come first, so that the slice `vector[:shared]` may leave a client and the rest must stay: no index list
can leak a private number.  A cohort is a matrix [n, size] of such vectors.

The vector contains every parameter that requires a gradient, once (tied weights have one slot), and every float buffer
(batch-norm statistics).  It does not contain frozen parameters and integer buffers (batch norm's
`num_batches_tracked`), which have the values of the template module at every client and are never sent.
"""

from __future__ import annotations

import copy
import hashlib
import math
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from piebald.core.arguments import checked_class
from piebald.core.errors import ParameterError, unknown
from piebald.core.machine import moved
from piebald.core.private_files import replaced
from piebald.core.reading import opened_tensors
from piebald.core.tensor_store import raw

M = TypeVar("M", bound=nn.Module)

_MOVED: MutableMapping[Tensor, dict[torch.device, weakref.ref[nn.Parameter]]] = WeakTensorKeyDictionary()

ROLES = {  # roles that patterns may name, and the layers that they stand for
    "classifier": "linear",
    "batch_norm": "batch-norm",
    "norm": "norm",
    "conditioning": "conditioning",
    "adapter": "adapter",
}
Part = Literal["all", "shared", "private"]  # of a model's parameters
_BATCH_NORMS = nn.modules.batchnorm._BatchNorm
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True, slots=True)
class Slot:
    """Position of one tensor of the module in the vector: `vector[start:stop].view(shape)`."""

    name: str
    shape: tuple[int, ...]
    start: int
    buffer: bool

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@checked_class
@dataclass(frozen=True)
class Layout:
    """Positions of a module's tensors in the flat vector, and the number of shared numbers.

    Attributes:
        slots: positions of the tensors, in order of the vector.
        shared: number of numbers, from the front, that may leave the client.
        size: number of all numbers.

    Examples:
        >>> model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        >>> layout = Layout.of(model, private=matching(model, ["classifier"]))
        >>> [slot.name for slot in layout.slots], layout.shared, layout.size
        (['0.weight', '0.bias', '1.weight', '1.bias'], 8, 11)
        >>> layout.flatten(model).shape
        torch.Size([11])
    """

    slots: tuple[Slot, ...]
    shared: int
    size: int

    @classmethod
    def of(cls, module: nn.Module, private: Iterable[str] = ()) -> Layout:
        """The layout of a module.

        Args:
            module: any module whose parameters are float32 and materialized.
            private: names of its tensors that stay with the client, see `matching`.

        Raises:
            ParameterError: a parameter is not float32, or there is no parameter to train.
        """
        keep = frozenset(private)
        tensors = dict(_trainable(module))
        order = sorted(
            tensors, key=lambda name: (name in keep, tensors[name][1])
        )  # stable: keeps the order of the module
        slots, start = [], 0
        for name in order:
            tensor, is_buffer = tensors[name]
            slots.append(Slot(name, tuple(tensor.shape), start, is_buffer))
            start = slots[-1].stop
        if not any(not slot.buffer for slot in slots):
            raise ParameterError(
                f"{type(module).__name__} has no parameter to train: set requires_grad on at least one"
            )
        shared = sum(slot.stop - slot.start for slot in slots if slot.name not in keep)
        return cls(tuple(slots), shared, start)

    def without(self, names: Collection[str]) -> Layout:
        """Return the layout of a model that has these tensors no more."""
        slots, start, shared = [], 0, 0
        for slot in self.slots:
            if slot.name not in names:
                slots.append(replace(slot, start=start))
                start = slots[-1].stop
                shared = start if slot.stop <= self.shared else shared
        return Layout(tuple(slots), shared, start)

    @cached_property
    def private(self) -> frozenset[str]:
        """Names of the tensors that stay with the client."""
        # a tensor without numbers at the border starts and stops at `shared`: it has nothing to keep private
        return frozenset(slot.name for slot in self.slots if slot.start >= self.shared and slot.stop > self.shared)

    @cached_property
    def shared_trained(self) -> int:
        """Number of shared numbers that are parameters.  They come first; from there to `shared` are buffers."""
        return sum(slot.stop - slot.start for slot in self.slots if not slot.buffer and slot.stop <= self.shared)

    @property
    def statistics(self) -> slice:
        """The shared numbers that are buffers: they are averaged, and never stepped, clipped, noised or compared."""
        return slice(self.shared_trained, self.shared)

    @cached_property
    def trained(self) -> tuple[slice, ...]:
        """The slices that hold parameters (at most two); the rest are buffers."""
        return self.trained_part("all")

    def parameters(self, part: Part = "all") -> tuple[Slot, ...]:
        """The slots of all parameters, or only of the shared or the private ones."""
        inside = {"all": (True, True), "shared": (True, False), "private": (False, True)}[part]
        return tuple(slot for slot in self.slots if not slot.buffer and inside[slot.start >= self.shared])

    def trained_part(self, part: Part) -> tuple[slice, ...]:
        """The slices that hold these parameters."""
        spans: list[slice] = []
        for slot in self.parameters(part):
            if slot.start == slot.stop:
                continue
            if spans and spans[-1].stop == slot.start:
                spans[-1] = slice(spans[-1].start, slot.stop)
            else:
                spans.append(slice(slot.start, slot.stop))
        return tuple(spans)

    @cached_property
    def variances(self) -> tuple[slice, ...]:
        """The shared slices that hold running variances of batch norm, which are never negative."""
        slots = [slot for slot in self.slots if slot.buffer and slot.name.rpartition(".")[2] == "running_var"]
        return tuple(slice(slot.start, slot.stop) for slot in slots if slot.stop <= self.shared)

    def least_variance(self, vector: Tensor) -> Tensor:
        """The smallest running variance of a vector [s], 0 where there is none: a scalar on the vector's device."""
        return torch.stack([vector.new_zeros(()), *(vector[variance].min() for variance in self.variances)]).min()

    def clamp_variances(self, vector: Tensor) -> Tensor:
        """Raise negative running variances of a vector [s] to 0, in place: clients may send any number."""
        for variance in self.variances:
            vector[variance].clamp_(min=0.0)
        return vector

    def views(self, vectors: Tensor) -> dict[str, Tensor]:
        """The module's tensors [..., *shape] as views of vectors [..., size]; writing to one writes to the other."""
        self.check(vectors)
        lead = vectors.shape[:-1]
        return {slot.name: vectors[..., slot.start : slot.stop].view((*lead, *slot.shape)) for slot in self.slots}

    def flatten(self, module: nn.Module) -> Tensor:
        """The module's numbers as one new vector [size] on the CPU."""
        tensors = dict(_trainable(module))
        vector = torch.empty(self.size)
        # by name and not by order: a module that was built again may list its tensors otherwise
        for slot, view in zip(self.slots, self.views(vector).values(), strict=True):
            if slot.name not in tensors:
                raise ParameterError(
                    f"the module has no tensor {slot.name!r}, which its layout names: use the layout's own model"
                )
            tensor = tensors[slot.name][0].detach()
            if tuple(tensor.shape) != slot.shape:
                raise ParameterError(f"{slot.name} must have shape {list(slot.shape)}, got {list(tensor.shape)}")
            view.copy_(tensor)
        return vector

    def taken(self, module: nn.Module) -> Tensor:
        """The same, in which the module's parameters lie from then on, see `lend`."""
        vector = self.flatten(module)
        self.lend(module, vector)
        return vector

    def load(self, module: nn.Module, vector: Tensor) -> None:
        """Write a vector [size] into a module, in place."""
        if vector.dim() != 1:
            raise ParameterError(f"load takes one vector of {self.size} numbers, got shape {list(vector.shape)}")
        tensors = {name: tensor for name, (tensor, _) in _trainable(module)}
        with torch.no_grad():
            for name, view in self.views(vector).items():
                if name not in tensors or tensors[name].shape != view.shape:
                    raise ParameterError(f"the module does not fit: {name} {list(view.shape)} is not among its tensors")
                tensors[name].copy_(view)

    def lend(self, module: nn.Module, vector: Tensor) -> None:
        """Have a module's parameters lie in a vector [size], so that both are in memory once.

        Nobody may write to either from then on.  Buffers stay where they are.
        """
        views = self.views(vector)
        for name, parameter in module.named_parameters():
            if name in views:
                parameter.data = views[name]

    def check(self, vectors: Tensor) -> None:
        """Refuse vectors that are not float32 [..., size]."""
        if vectors.dtype != torch.float32:
            raise ParameterError(f"a model vector must be float32, got {str(vectors.dtype).removeprefix('torch.')}")
        if vectors.dim() == 0 or vectors.shape[-1] != self.size:
            raise ParameterError(
                f"a model vector must have {self.size} numbers on its last axis, got shape {list(vectors.shape)}"
            )

    def save(self, vector: Tensor, path: Path | str) -> None:
        """Write a vector [size] as safetensors, with one named tensor per slot."""
        with replaced(Path(path)) as part:
            save_file({name: view.contiguous() for name, view in self.views(vector.cpu()).items()}, str(part))

    def read(self, path: Path | str) -> Tensor:
        """Read a vector [size] that `save` wrote; other names, shapes and types are refused."""
        vector = torch.empty(self.size)
        try:
            with opened_tensors(path) as file:
                stored = set(file.keys())
                views = self.views(vector)
                if unmatched := stored ^ set(views):
                    raise ParameterError(
                        f"{path} does not fit this model: {sorted(unmatched)[0]!r} is on one side only"
                    )
                for name, view in views.items():
                    tensor = file.get_tensor(name)
                    if tensor.shape != view.shape or tensor.dtype != torch.float32:
                        raise ParameterError(
                            f"{path}: {name} must be float32 {list(view.shape)}, "
                            f"got {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
                        )
                    view.copy_(tensor)
        except (OSError, SafetensorError) as error:
            raise ParameterError(f"{path} cannot be read as safetensors: {error}") from None
        return vector


def matching(module: nn.Module, patterns: Iterable[str]) -> frozenset[str]:
    """Names of a module's tensors that match any pattern.

    A pattern is a role, the name of a submodule ("features.0"), or a shell pattern over tensor names ("*.bias").
    Roles are "classifier" (the last linear layer, in the order of `named_modules`), "batch_norm" (parameters and
    statistics of every batch-norm layer), "norm" (those of every norm layer, also of a class of the user's
    called ...Norm), "conditioning" (every layer with that name) and "adapter" (low-rank adapters, as peft calls them).

    Raises:
        SettingError: a pattern matches no tensor of this module, so that a setting never silently has no effect.

    Examples:
        >>> sorted(matching(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), ["*.bias", "classifier"]))
        ['0.bias', '1.bias', '1.weight']
    """
    name_of = {id(tensor): name for name, (tensor, _) in _trainable(module)}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    # tied tensors: any of their names matches
    names = [(name, name_of[id(tensor)]) for name, tensor in tensors if id(tensor) in name_of]
    matched: set[str] = set()
    for pattern in patterns:
        hits = {slot for name, slot in names if _matches(module, pattern, name)}
        if not hits:
            layers = [
                name for name, layer in module.named_modules() if name and next(layer.parameters(), None) is not None
            ]
            if pattern in ROLES:
                raise ParameterError(
                    f"{pattern!r} means the model's {ROLES[pattern]} layers but it has none: name other layers"
                )
            roles = {role for role in ROLES if _layers(module, role)}
            raise unknown("layer or role of this model called", pattern, roles.union(layers))
        matched |= hits
    return frozenset(matched)


def moving_norm(module: nn.Module, layout: Layout) -> str | None:
    """The name of the first norm layer whose running statistics training moves and clients share, or None."""
    shared = {slot.name for slot in layout.slots if slot.stop <= layout.shared}
    for name, layer in copied(module).train().named_modules():  # frozen ones do not go along
        own = [f"{name}.{leaf}".removeprefix(".") for leaf, _ in layer.named_buffers(recurse=False)]
        if layer.training and isinstance(layer, nn.modules.batchnorm._NormBase) and shared.intersection(own):
            return str(name)
    return None


def head(module: nn.Module) -> str | None:
    """The name of the last linear layer, which the role "classifier" means, in the order of `named_modules`; or None
    where the model has none, or is one.
    """
    linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    return linear[-1] or None if linear else None


def _matches(module: nn.Module, pattern: str, name: str) -> bool:
    layers = _layers(module, pattern) if pattern in ROLES else {pattern} - {""}
    inside = (not layer or name == layer or name.startswith(f"{layer}.") for layer in layers)  # "": the model itself
    return any(inside) or fnmatchcase(name, pattern)


def _layers(module: nn.Module, role: str) -> set[str]:
    if role == "batch_norm":
        return {name for name, layer in module.named_modules() if isinstance(layer, _BATCH_NORMS)}
    if role == "norm":
        return {name for name, layer in module.named_modules() if _is_norm(layer)}
    if role == "conditioning":
        return {name for name, _ in module.named_modules() if name.rpartition(".")[2] == role}
    if role == "adapter":
        return {name for name, _ in module.named_modules() if name.rpartition(".")[2].startswith("lora_")}
    linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    return set(linear[-1:])


def _is_norm(layer: nn.Module) -> bool:
    """Return whether a layer is a norm: torch's own, or one such as `LlamaRMSNorm`, which derive from nothing else."""
    return isinstance(layer, _NORMS) or (type(layer).__name__.endswith("Norm") and not any(layer.children()))


def _trainable(module: nn.Module) -> Iterator[tuple[str, tuple[Tensor, bool]]]:
    """(name, (tensor, whether it is a buffer)) of all tensors in the vector, in the module's own order."""
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ParameterError(f"{name} has no shape yet: run the model once on an example before you pass it")
        if parameter.dtype != torch.float32:
            raise ParameterError(
                f"{name} must be float32, got {str(parameter.dtype).removeprefix('torch.')}: call model.float()"
            )
        yield name, (parameter, False)
    for name, buffer in module.named_buffers():
        if isinstance(buffer, nn.parameter.UninitializedBuffer):
            raise ParameterError(f"{name} has no shape yet: run the model once on an example before you pass it")
        if buffer.dtype.is_floating_point:
            if buffer.dtype != torch.float32:
                raise ParameterError(f"buffer {name} must be float32, got {str(buffer.dtype).removeprefix('torch.')}")
            yield name, (buffer, True)


def copied(module: M, device: torch.device | None = None) -> M:
    """A copy of a module that shares the numbers of its frozen parameters, so that they are in memory once.

    Args:
        module: any module; nothing may change its frozen parameters while there are copies.
        device: where the copy is to be; frozen parameters lie there once for all copies of this module.
    """
    # `copy.deepcopy` takes what its memo holds already in place of a copy
    memo = {
        id(parameter): _shared(parameter, device)
        for parameter in module.parameters()
        if not parameter.requires_grad and type(parameter) is nn.Parameter
    }
    duplicate = copy.deepcopy(module, memo)
    return duplicate if device is None else duplicate._apply(lambda tensor: moved(tensor, device))  # type: ignore[no-untyped-call]


def _shared(parameter: nn.Parameter, device: torch.device | None) -> nn.Parameter:
    """A frozen parameter over the same numbers, or over those that another copy has on this device already."""
    if device is None or parameter.device == device:
        return nn.Parameter(parameter.data, requires_grad=False)
    # weak on both sides: neither the module nor its copies are kept alive by this
    copies = _MOVED.setdefault(parameter, {})
    before = copies[device]() if device in copies else None
    shared = nn.Parameter(moved(parameter.data, device) if before is None else before.data, requires_grad=False)
    if before is None:
        copies[device] = weakref.ref(shared)
    return shared


def frozen_digest(module: nn.Module) -> str:
    """A digest of the names, shapes and numbers of a module's frozen parameters; "" where it has none.

    They are in no model vector, so two machines that train together must have the same.
    """
    digest, has_frozen = hashlib.sha256(), False
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            has_frozen = True
            # with name, type and shape: the same bytes may be another tensor's
            digest.update(f"{name} {parameter.dtype} {list(parameter.shape)}\n".encode())
            digest.update(raw(parameter))
    return digest.hexdigest() if has_frozen else ""


def pad(vector: Tensor, size: int) -> Tensor:
    """Append zeros to a vector [..., s], giving [..., size]."""
    return nn.functional.pad(vector, (0, size - vector.shape[-1])) if vector.shape[-1] < size else vector


def nbytes(vectors: Mapping[str, Tensor]) -> int:
    """Number of bytes of named vectors."""
    return sum(vector.numel() * vector.element_size() for vector in vectors.values())
