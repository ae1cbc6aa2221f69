"""Encryption behind one interface: see `base`."""

from __future__ import annotations

from piebald.transfer.backends.base import Backend, Evaluator, Owner
from piebald.transfer.backends.bfv import Bfv
from piebald.transfer.backends.fixed import Fixed
from piebald.transfer.backends.paillier import Paillier
from piebald.transfer.backends.plain import Plain

__all__ = ["Backend", "Bfv", "Evaluator", "Fixed", "Owner", "Paillier", "Plain"]
