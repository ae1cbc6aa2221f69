"""Clients that were not there while a model was trained."""

from piebald.newcomers.apart import set_apart
from piebald.newcomers.file import from_file
from piebald.newcomers.ways import EPOCHS, Adaptation, Way, fit

__all__ = ["EPOCHS", "Adaptation", "Way", "fit", "from_file", "set_apart"]
