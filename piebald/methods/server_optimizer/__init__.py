"""Server optimizers, which move the global model by the averaged change."""

from piebald.core.discovery import lazy_classes

__getattr__, __dir__ = lazy_classes(__name__)
