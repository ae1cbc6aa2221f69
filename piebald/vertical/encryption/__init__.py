"""Encryption backends behind one interface: see `backend`."""

from __future__ import annotations

from piebald.vertical.encryption.backend import Backend, Evaluator, FixedBackend, KeyOwner, PlainBackend
from piebald.vertical.encryption.bfv import BfvBackend

__all__ = ["Backend", "BfvBackend", "Evaluator", "FixedBackend", "KeyOwner", "PlainBackend"]
