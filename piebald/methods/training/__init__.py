"""Trainers: how a client trains, one method in each file; pure functions, written for one client."""

from piebald.core.discovery import lazy_classes

__getattr__, __dir__ = lazy_classes(__name__)
