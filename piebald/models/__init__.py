"""The networks of the papers, small and plain."""

from piebald.models.convolutional import Cnn1d, CnnBn, LeafCnn, MetisCnn, SmallCnn
from piebald.models.dense import Logistic, Mlp
from piebald.models.embedded import embedded
from piebald.models.extractors import SqueezeNet, embed, squeezenet
from piebald.models.gated import (
    Conditioning,
    GatedClassifier,
    GatedCnn,
    GatedConvolution,
    GatedUnit,
    PlainClassifier,
)
from piebald.models.log_mel import LogMel
from piebald.models.registry import build_model, names

__all__ = [
    "Cnn1d",
    "CnnBn",
    "Conditioning",
    "GatedClassifier",
    "GatedCnn",
    "GatedConvolution",
    "GatedUnit",
    "LeafCnn",
    "LogMel",
    "Logistic",
    "MetisCnn",
    "Mlp",
    "PlainClassifier",
    "SmallCnn",
    "SqueezeNet",
    "build_model",
    "embed",
    "embedded",
    "names",
    "squeezenet",
]
