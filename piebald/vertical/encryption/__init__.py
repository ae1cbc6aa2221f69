"""Encryption behind one interface: see `base`."""

from __future__ import annotations

from piebald.vertical.encryption.backend import Backend, Evaluator, KeyOwner
from piebald.vertical.encryption.bfv import Bfv
from piebald.vertical.encryption.fixed_point import FixedPoint
from piebald.vertical.encryption.paillier import Paillier
from piebald.vertical.encryption.plain import Plain

__all__ = ["Backend", "Bfv", "Evaluator", "FixedPoint", "KeyOwner", "Paillier", "Plain"]
