"""How much each update counts."""

from piebald.controller.weigh.linear import ByExamples, ByGradientNorm, Equal

__all__ = ["ByExamples", "ByGradientNorm", "Equal"]
