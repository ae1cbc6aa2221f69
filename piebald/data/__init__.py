"""Real data sets, one a file, and the value they all are."""

from piebald.data.dataset import DataSet, Owners
from piebald.data.digits import digits
from piebald.data.har import har
from piebald.data.mnist_writers import mnist_writers
from piebald.data.registry import load, names
from piebald.data.traffic import traffic

__all__ = ["DataSet", "Owners", "digits", "har", "load", "mnist_writers", "names", "traffic"]
