"""What one client does with an assignment: pure, written for one client."""

from piebald.client.adaptive import Adaptive
from piebald.client.ditto import Ditto
from piebald.client.dp_sgd import DpSgd
from piebald.client.evaluate import Evaluate
from piebald.client.fine_tune import FineTune
from piebald.client.lowest_loss import LowestLoss
from piebald.client.proximal import Proximal
from piebald.client.scaffold import Scaffold
from piebald.client.schedule import Constant, Cosine, Exponential, StepDecay
from piebald.client.sgd import Sgd, Training
from piebald.client.share import AllBut, Everything, Nothing, OneHot, Only
from piebald.client.with_moments import WithMoments

__all__ = [
    "Adaptive",
    "AllBut",
    "Constant",
    "Cosine",
    "Ditto",
    "DpSgd",
    "Evaluate",
    "Everything",
    "Exponential",
    "FineTune",
    "LowestLoss",
    "Nothing",
    "OneHot",
    "Only",
    "Proximal",
    "Scaffold",
    "Sgd",
    "StepDecay",
    "Training",
    "WithMoments",
]
