"""Which parameters leave a client, and which stay private."""

from piebald.core.discovery import lazy_classes

__getattr__, __dir__ = lazy_classes(__name__)
