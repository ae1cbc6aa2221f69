"""How a client trains: one method, one file; written for one client, pure."""

from piebald.training.adaptive_frequency import AdaptiveFrequency
from piebald.training.ditto import Ditto
from piebald.training.dp_sgd import DpSgd
from piebald.training.fine_tune import FineTune
from piebald.training.lowest_loss import LowestLoss
from piebald.training.lr_schedule import Constant, Cosine, Exponential, StepDecay
from piebald.training.proximal import Proximal
from piebald.training.scaffold import Scaffold
from piebald.training.sgd import Sgd, SgdSettings
from piebald.training.with_moments import WithMoments

__all__ = [
    "AdaptiveFrequency",
    "Constant",
    "Cosine",
    "Ditto",
    "DpSgd",
    "Exponential",
    "FineTune",
    "LowestLoss",
    "Proximal",
    "Scaffold",
    "Sgd",
    "SgdSettings",
    "StepDecay",
    "WithMoments",
]
