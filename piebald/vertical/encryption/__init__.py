"""Encryption backends behind one interface: see `backend`."""

from __future__ import annotations

from piebald.vertical.encryption.backend import Backend, Evaluator, KeyOwner
from piebald.vertical.encryption.bfv import BfvBackend
from piebald.vertical.encryption.unencrypted import FixedBackend, PlainBackend

__all__ = ["Backend", "BfvBackend", "Evaluator", "FixedBackend", "KeyOwner", "PlainBackend"]
