"""The choice of parameters that leave a client; the others stay private."""

from piebald.core.discovery import lazy_classes

__getattr__, __dir__ = lazy_classes(__name__)
