"""Malicious clients: what some clients send instead of their updates."""

from piebald.core.discovery import lazy_classes

__getattr__, __dir__ = lazy_classes(__name__)
