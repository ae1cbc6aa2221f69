"""How much each update counts."""

from piebald.controller.weigh.dvw import Dvw, Validate
from piebald.controller.weigh.linear import ByExamples, ByGradientNorm, Equal
from piebald.controller.weigh.staleness import ByStaleness

__all__ = ["ByExamples", "ByGradientNorm", "ByStaleness", "Dvw", "Equal", "Validate"]
