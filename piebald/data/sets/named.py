"""Data sets by name."""

from __future__ import annotations

from collections.abc import Callable

from piebald.core.arguments import checked
from piebald.core.errors import SettingError, unknown
from piebald.core.references import USERS, Reference
from piebald.data.sets.breast_cancer import breast_cancer
from piebald.data.sets.census import census
from piebald.data.sets.cifar10 import cifar10
from piebald.data.sets.cifar100 import cifar100
from piebald.data.sets.credit import credit
from piebald.data.sets.dataset import DataSet
from piebald.data.sets.digits import digits
from piebald.data.sets.fashion_mnist import fashion_mnist
from piebald.data.sets.femnist import femnist
from piebald.data.sets.har import har
from piebald.data.sets.mnist import mnist
from piebald.data.sets.mnist_writers import mnist_writers
from piebald.data.sets.office_caltech10 import office_caltech10
from piebald.data.sets.speech_commands import speech_commands
from piebald.data.sets.traffic import traffic
from piebald.settings import plugins

_LOADERS: dict[str, Callable[[], DataSet]] = {
    "breast_cancer": breast_cancer,
    "census": census,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "credit": credit,
    "digits": digits,
    "fashion_mnist": fashion_mnist,
    "femnist": femnist,
    "har": har,
    "mnist": mnist,
    "mnist_writers": mnist_writers,
    "office_caltech10": office_caltech10,
    "speech_commands": speech_commands,
    "traffic": traffic,
}

_ELSEWHERE = {  # names of other programs
    "emnist": "femnist has EMNIST's letters and digits by writer",
    "fmnist": "fashion_mnist",
    "cifar": "cifar10 or cifar100",
    "adult": "census",
    "shakespeare": "give the rows of LEAF's file as a source of your own",
}


def names() -> list[str]:
    """Names of all data sets, sorted; some need prepared files."""
    return sorted(_LOADERS)


@checked
def load(name: str) -> DataSet:
    """Load a data set by its name.

    Args:
        name: one of `names()`, or "module:name" for a function of a plugin without arguments that returns a `DataSet`.

    Raises:
        SettingError: there is no such data set, or its file is missing.

    Examples:
        >>> import piebald as pb
        >>> pb.data.load("digits")
        <DataSet 'digits': 1797 rows of [1, 8, 8], 10 classes>
    """
    return named(USERS.mark(name))


def named(name: str) -> DataSet:
    """`load`, where a name is one of `names()` or a reference, and other text names nothing."""
    if name in _LOADERS:
        return _LOADERS[name]()
    if not isinstance(name, Reference):
        raise unknown("data set", name, _LOADERS, _ELSEWHERE)
    value = plugins.call(name, "data set")
    if not isinstance(value, DataSet):
        raise SettingError(f"data set {name!r} must be a function that returns a DataSet, got {type(value).__name__}")
    return value
