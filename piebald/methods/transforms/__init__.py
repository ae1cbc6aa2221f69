"""What is done to an update between client and server."""

from piebald.core.discovery import lazy_classes

__getattr__, __dir__ = lazy_classes(__name__)
