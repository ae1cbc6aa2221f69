"""The cluster models that a run takes over from a finished one, and the server state that still means the same."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor

from piebald.contracts import Checkpoint
from piebald.methods.client_work import ClientWork


def fitting_models(
    checkpoint: Checkpoint, work: ClientWork, same: Collection[str], in_order: bool
) -> tuple[Checkpoint, list[str]]:
    """What fits of a checkpoint, in the form that `ClusterModels.restore` takes, and a list of it in words.

    Clusters and what components keep speak of clients by number, so they are taken only where the numbers are the same.

    Args:
        checkpoint: of the finished run (`ServerLoop.state`).
        work: what clients do in the new run.
        same: axes on which both runs have the same component, and "trainer" where the kind of training is the same.
        in_order: whether all clients of the finished run are there, with the same numbers.
    """
    values = checkpoint.values["cluster_models"]
    whole = in_order and "clustering" in same
    main, several = int(values.get("main", 0)), len(values["clusters"]) > 1
    numbers = {int(number): int(number) for number in values["clusters"]} if whole else {main: 0}
    cached = whole and "server_optimizer" in same and any("cache" in one for one in values["clusters"].values())
    tensors: dict[str, Tensor] = {}
    for number, what, own, tensor in _parts(checkpoint):
        if number in numbers and _fits(what, own, tensor, work, same, cached):
            tensors["/".join(["cluster", str(numbers[number]), what, *filter(None, [own])])] = tensor
    kinds = {name.split("/")[2] for name in tensors}
    told = [f"{len(numbers)} cluster models" if whole and several else "the global model"]
    told += ["the server optimizer's state"] if "optimizer_state" in kinds else []
    told += ["what the server sends besides the model"] if "server_vectors" in kinds else []
    if cached:
        tensors |= {name: tensor for name, tensor in checkpoint.tensors.items() if name.startswith("last/")}
        told.append("the last models of clients")
    kept = [one for one in values["kept"] if in_order and one[0] in same and (whole or one[0] != "clustering")]
    for axis, number, _ in kept:
        here = f"kept/{axis}/{number}/"
        tensors |= {name: tensor for name, tensor in checkpoint.tensors.items() if name.startswith(here)}
    told += [f"the state of {axis}" for axis in sorted({one[0] for one in kept if one[2]})]
    clusters: dict[str, dict[str, Any]] = {
        str(new): {"committed": 0} | ({"cache": values["clusters"][str(old)]["cache"]} if cached else {})
        for old, new in numbers.items()
    }
    plain = {"cluster_of": values["cluster_of"] if whole else [], "clusters": clusters, "kept": kept}
    return Checkpoint(tensors, plain), told


def _parts(checkpoint: Checkpoint) -> Iterator[tuple[int, str, str, Tensor]]:
    """The tensors of clusters: the cluster's number, what they are, their own name or "", and the tensor."""
    for name, tensor in checkpoint.tensors.items():
        kind, _, rest = name.partition("/")
        if kind == "cluster":
            number, what, *own = rest.split("/")
            yield int(number), what, "/".join(own), tensor


def _fits(what: str, own: str, tensor: Tensor, work: ClientWork, same: Collection[str], cached: bool) -> bool:
    if what == "server_vectors":
        mine = work.server_vectors().get(own)
        return "trainer" in same and mine is not None and mine.shape == tensor.shape
    return what == "model" or (what == "optimizer_state" and "server_optimizer" in same) or (what == "cache" and cached)
