"""The contract test of data sets."""

from __future__ import annotations

from collections.abc import Callable

import torch

from piebald.core.errors import shown
from piebald.core.pytree import single
from piebald.data.partition.by_owner import ByOwner
from piebald.data.partition.iid import Iid
from piebald.data.sets.dataset import DataSet
from piebald.testing.component import promises


@promises(object, "what loads a data set")
def check_data_set(load: Callable[[], DataSet]) -> None:
    """Check that a data set is always the same, has numbers that models can take, and can be divided among clients.

    Args:
        load: a function without arguments that returns the data set.

    Raises:
        AssertionError: it breaks one of these promises.
    """
    assert callable(load), f"what loads a data set must be a function without arguments, got {shown(load)}"
    data, again = load(), load()
    assert isinstance(data, DataSet), f"a data set must be a DataSet, got {type(data).__name__}"
    subject = f"data set {data.name!r}"
    assert len(data) > 0, f"{subject}: it has no rows"
    x, x_again = data.inputs[:], again.inputs[:]
    assert isinstance(x, torch.Tensor), f"{subject}: its inputs must be tensors"
    assert x.dtype in (torch.float32, torch.uint8, torch.int64), (
        f"{subject}: inputs must be float32, uint8 images or int64 tokens, got {x.dtype}"
    )
    assert bool(x.isfinite().all()), f"{subject}: inputs must be finite"
    if x.dtype == torch.uint8:
        assert x.dim() == 4, f"{subject}: uint8 inputs must be images [n, channels, height, width], got {list(x.shape)}"
    same = torch.equal(x, x_again) and torch.equal(data.targets, again.targets)
    assert same, f"{subject}: loaded twice, its rows differ"
    y = data.targets
    if data.classes is None:
        assert y.dtype == torch.float32, f"{subject}: without classes, targets must be float32, got {y.dtype}"
        assert bool(y.isfinite().all()), f"{subject}: targets must be finite"
    else:
        assert y.dtype == torch.int64, f"{subject}: class numbers must be int64, got {y.dtype}"
    clients = Iid(clients=2).split(data)
    rows = clients.rows(0, "train")
    kind = single(rows.x, subject).dtype
    assert kind in (torch.float32, torch.int64), f"{subject}: clients get inputs of {kind}"
    for owner, owners in data.owners.items():
        assert len(set(owners.names)) == len(owners.names), f"{subject}: two owners {owner!r} have one name"
        assert len(ByOwner(owner=owner).split(data)) <= len(owners.names)
