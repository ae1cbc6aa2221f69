"""The version of Piebald, in a module that imports nothing."""

from __future__ import annotations

__version__ = "0.1.0"
