"""Clients that were not there while a model was trained."""

from piebald.adaptation.held_out import set_apart
from piebald.adaptation.methods import EPOCHS, Adaptation, AdaptationMethod, fit
from piebald.adaptation.newcomer_file import from_file

__all__ = ["EPOCHS", "Adaptation", "AdaptationMethod", "fit", "from_file", "set_apart"]
