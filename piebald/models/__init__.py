"""Networks by name: those of the papers in small and plain versions, pretrained ones, and models around a model.

Extractors, which are frozen, lie in `data.embeddings` and are offered here as well.  A network knows nothing of clients
and of how it is trained.
"""

from typing import TYPE_CHECKING

from piebald.core.discovery import lazy_names

if TYPE_CHECKING:
    from piebald.data.embeddings import LogMel as LogMel
    from piebald.data.embeddings import SqueezeNet as SqueezeNet
    from piebald.data.embeddings import embed as embed
    from piebald.data.embeddings import embedded as embedded
    from piebald.data.embeddings import squeezenet as squeezenet
    from piebald.models.convolutional import Cnn1d as Cnn1d
    from piebald.models.convolutional import Cnn1dBn as Cnn1dBn
    from piebald.models.convolutional import CnnBn as CnnBn
    from piebald.models.convolutional import LeafCnn as LeafCnn
    from piebald.models.convolutional import Logistic as Logistic
    from piebald.models.convolutional import MetisCnn as MetisCnn
    from piebald.models.convolutional import Mlp as Mlp
    from piebald.models.convolutional import MlpBn as MlpBn
    from piebald.models.convolutional import SmallCnn as SmallCnn
    from piebald.models.gated import Conditioning as Conditioning
    from piebald.models.gated import GatedClassifier as GatedClassifier
    from piebald.models.gated import GatedCnn as GatedCnn
    from piebald.models.gated import GatedConvolution as GatedConvolution
    from piebald.models.gated import GatedUnit as GatedUnit
    from piebald.models.gated import PlainClassifier as PlainClassifier
    from piebald.models.networks import build_model as build_model
    from piebald.models.networks import count_parameters as count_parameters
    from piebald.models.networks import names as names
    from piebald.models.pretrained_networks import PretrainedNetwork as PretrainedNetwork
    from piebald.models.pretrained_networks import pretrained as pretrained
    from piebald.models.resnet import Resnet18 as Resnet18
    from piebald.models.resnet import Resnet50 as Resnet50
    from piebald.models.resnet import Vgg11 as Vgg11
    from piebald.models.wrappers import NearestNeighbours as NearestNeighbours
    from piebald.models.wrappers import StandardisedInputs as StandardisedInputs

__getattr__, __dir__ = lazy_names(__name__)
