"""Data sets by name."""

from __future__ import annotations

from piebald.core.arguments import checked
from piebald.core.discovery import imported
from piebald.core.errors import SettingError, unknown
from piebald.core.references import USERS, Reference
from piebald.data.sets.dataset import DataSet
from piebald.settings import plugins

_NAMES = (  # each is a function in a module of its name
    "breast_cancer", "census", "cifar10", "cifar100", "credit", "digits", "fashion_mnist", "femnist", "har", "mnist",
    "mnist_writers", "office_caltech10", "speech_commands", "traffic",
)  # fmt: skip
_ELSEWHERE = {  # names of other programs
    "emnist": "femnist has EMNIST's letters and digits by writer",
    "fmnist": "fashion_mnist",
    "cifar": "cifar10 or cifar100",
    "adult": "census",
    "shakespeare": "give the rows of LEAF's file as a source of your own",
}


def names() -> list[str]:
    """Names of all data sets, sorted; some need prepared files."""
    return sorted(_NAMES)


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
    if name in _NAMES:
        made: DataSet = getattr(imported(f"piebald.data.sets.{name}"), name)()
        return made
    if not isinstance(name, Reference):
        raise unknown("data set", name, _NAMES, _ELSEWHERE)
    value = plugins.call(name, "data set")
    if not isinstance(value, DataSet):
        raise SettingError(f"data set {name!r} must be a function that returns a DataSet, got {type(value).__name__}")
    return value
