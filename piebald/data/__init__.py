"""Rows and who holds them: data sets, clients, partitions, embeddings, and measures of unlikeness.

The public names here are those of the data sets; `data.partition` has the partitions and sources of clients.  Nothing
here trains a model.
"""

from typing import TYPE_CHECKING

from piebald.core.discovery import lazy_names

if TYPE_CHECKING:
    from piebald.data.clients.client_tables import train_validation_test_split as train_validation_test_split
    from piebald.data.clients.sources import cross_validation as cross_validation
    from piebald.data.partition.split import SplitSettings as SplitSettings
    from piebald.data.sets.breast_cancer import breast_cancer as breast_cancer
    from piebald.data.sets.census import census as census
    from piebald.data.sets.cifar10 import cifar10 as cifar10
    from piebald.data.sets.cifar100 import cifar100 as cifar100
    from piebald.data.sets.credit import credit as credit
    from piebald.data.sets.dataset import DataSet as DataSet
    from piebald.data.sets.dataset import Decoded as Decoded
    from piebald.data.sets.dataset import Owners as Owners
    from piebald.data.sets.digits import digits as digits
    from piebald.data.sets.fashion_mnist import fashion_mnist as fashion_mnist
    from piebald.data.sets.femnist import femnist as femnist
    from piebald.data.sets.folders import audio_folder as audio_folder
    from piebald.data.sets.folders import image_folder as image_folder
    from piebald.data.sets.har import har as har
    from piebald.data.sets.mnist import mnist as mnist
    from piebald.data.sets.mnist_writers import mnist_writers as mnist_writers
    from piebald.data.sets.named import load as load
    from piebald.data.sets.named import names as names
    from piebald.data.sets.office_caltech10 import office_caltech10 as office_caltech10
    from piebald.data.sets.speech_commands import speech_commands as speech_commands
    from piebald.data.sets.traffic import traffic as traffic

__getattr__, __dir__ = lazy_names(__name__)
