"""Real data sets, one per file, as values of the class `DataSet`."""

from piebald.data.breast_cancer import breast_cancer
from piebald.data.census import census
from piebald.data.cifar10 import cifar10
from piebald.data.cifar100 import cifar100
from piebald.data.credit import credit
from piebald.data.data_sets import load, names
from piebald.data.dataset import DataSet, Owners
from piebald.data.decoded import Decoded
from piebald.data.digits import digits
from piebald.data.fashion_mnist import fashion_mnist
from piebald.data.femnist import femnist
from piebald.data.folders import audio_folder, image_folder
from piebald.data.har import har
from piebald.data.mnist_writers import mnist_writers
from piebald.data.office_caltech10 import office_caltech10
from piebald.data.speech_commands import speech_commands
from piebald.data.traffic import traffic

__all__ = [
    "DataSet",
    "Decoded",
    "Owners",
    "audio_folder",
    "breast_cancer",
    "census",
    "cifar10",
    "cifar100",
    "credit",
    "digits",
    "fashion_mnist",
    "femnist",
    "har",
    "image_folder",
    "load",
    "mnist_writers",
    "names",
    "office_caltech10",
    "speech_commands",
    "traffic",
]
