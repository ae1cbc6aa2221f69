"""Schedulers, which decide when the server requests training, and when it steps."""

from piebald.core.discovery import lazy_classes

__getattr__, __dir__ = lazy_classes(__name__)
