"""Clusterings, which say whose updates are aggregated together."""

from piebald.core.discovery import lazy_classes

__getattr__, __dir__ = lazy_classes(__name__)
