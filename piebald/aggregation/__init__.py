"""How much each update counts."""

from piebald.aggregation.coordinate_wise import Median, TrimmedMean
from piebald.aggregation.credit import Credit
from piebald.aggregation.dvw import Dvw
from piebald.aggregation.fltrust import Fltrust
from piebald.aggregation.foolsgold import Foolsgold
from piebald.aggregation.geometric_median import GeometricMedian
from piebald.aggregation.gra import Gra
from piebald.aggregation.irls import Irls
from piebald.aggregation.krum import Bulyan, Krum, MultiKrum
from piebald.aggregation.linear import EqualWeighted, ExampleWeighted, GradientNormWeighted
from piebald.aggregation.norm_clipping import NormClipping
from piebald.aggregation.robust import Robust
from piebald.aggregation.staleness import StalenessWeighted
from piebald.queries.validate import Validate

__all__ = [
    "Bulyan",
    "Credit",
    "Dvw",
    "EqualWeighted",
    "ExampleWeighted",
    "Fltrust",
    "Foolsgold",
    "GeometricMedian",
    "Gra",
    "GradientNormWeighted",
    "Irls",
    "Krum",
    "Median",
    "MultiKrum",
    "NormClipping",
    "Robust",
    "StalenessWeighted",
    "TrimmedMean",
]
