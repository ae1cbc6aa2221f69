"""Aggregators, which combine the updates of a step."""

from piebald.core.discovery import lazy_classes

__getattr__, __dir__ = lazy_classes(__name__)
