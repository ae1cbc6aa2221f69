"""Real data sets, one per file, as values of the class `DataSet`."""

from typing import TYPE_CHECKING

from piebald.discovery import lazy_names

if TYPE_CHECKING:
    from piebald.data.breast_cancer import breast_cancer as breast_cancer
    from piebald.data.census import census as census
    from piebald.data.cifar10 import cifar10 as cifar10
    from piebald.data.cifar100 import cifar100 as cifar100
    from piebald.data.credit import credit as credit
    from piebald.data.data_sets import load as load
    from piebald.data.data_sets import names as names
    from piebald.data.dataset import DataSet as DataSet
    from piebald.data.dataset import Owners as Owners
    from piebald.data.decoded import Decoded as Decoded
    from piebald.data.digits import digits as digits
    from piebald.data.fashion_mnist import fashion_mnist as fashion_mnist
    from piebald.data.femnist import femnist as femnist
    from piebald.data.folders import audio_folder as audio_folder
    from piebald.data.folders import image_folder as image_folder
    from piebald.data.har import har as har
    from piebald.data.mnist_writers import mnist_writers as mnist_writers
    from piebald.data.office_caltech10 import office_caltech10 as office_caltech10
    from piebald.data.speech_commands import speech_commands as speech_commands
    from piebald.data.traffic import traffic as traffic

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "breast_cancer": ("breast_cancer",),
        "census": ("census",),
        "cifar10": ("cifar10",),
        "cifar100": ("cifar100",),
        "credit": ("credit",),
        "data_sets": ("load", "names"),
        "dataset": ("DataSet", "Owners"),
        "decoded": ("Decoded",),
        "digits": ("digits",),
        "fashion_mnist": ("fashion_mnist",),
        "femnist": ("femnist",),
        "folders": ("audio_folder", "image_folder"),
        "har": ("har",),
        "mnist_writers": ("mnist_writers",),
        "office_caltech10": ("office_caltech10",),
        "speech_commands": ("speech_commands",),
        "traffic": ("traffic",),
    },
)
