"""Data sets by name."""

from __future__ import annotations

from collections.abc import Callable

from piebald.data.dataset import DataSet
from piebald.data.digits import digits
from piebald.data.har import har
from piebald.data.mnist_writers import mnist_writers
from piebald.data.traffic import traffic
from piebald.errors import unknown

_LOADERS: dict[str, Callable[[], DataSet]] = {
    "digits": digits,
    "har": har,
    "mnist_writers": mnist_writers,
    "traffic": traffic,
}


def names() -> list[str]:
    """Names of all data sets, sorted; some need a prepared file."""
    return sorted(_LOADERS)


def load(name: str) -> DataSet:
    """A data set by its name.

    Raises:
        SettingError: there is no such data set, with the nearest name; or its file is not there.
    """
    if name not in _LOADERS:
        raise unknown("data set", name, _LOADERS)
    return _LOADERS[name]()
