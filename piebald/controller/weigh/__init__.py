"""How much each update counts."""

from piebald.controller.weigh.coordinates import Median, TrimmedMean
from piebald.controller.weigh.credit import Credit
from piebald.controller.weigh.dvw import Dvw, Validate
from piebald.controller.weigh.fltrust import Fltrust
from piebald.controller.weigh.foolsgold import Foolsgold
from piebald.controller.weigh.geometric_median import GeometricMedian
from piebald.controller.weigh.gra import Gra
from piebald.controller.weigh.irls import Irls
from piebald.controller.weigh.krum import Bulyan, Krum, MultiKrum
from piebald.controller.weigh.linear import ByExamples, ByGradientNorm, Equal
from piebald.controller.weigh.norm_clipping import NormClipping
from piebald.controller.weigh.robust import Robust
from piebald.controller.weigh.staleness import ByStaleness

__all__ = [
    "Bulyan",
    "ByExamples",
    "ByGradientNorm",
    "ByStaleness",
    "Credit",
    "Dvw",
    "Equal",
    "Fltrust",
    "Foolsgold",
    "GeometricMedian",
    "Gra",
    "Irls",
    "Krum",
    "Median",
    "MultiKrum",
    "NormClipping",
    "Robust",
    "TrimmedMean",
    "Validate",
]
