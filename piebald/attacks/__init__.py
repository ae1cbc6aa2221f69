"""Malicious clients: what some clients send instead of their updates."""

from piebald.attacks.base import Attack, Collusion
from piebald.attacks.inner_product import InnerProduct
from piebald.attacks.little_is_enough import LittleIsEnough
from piebald.attacks.model_replacement import ModelReplacement
from piebald.attacks.random_update import RandomUpdate
from piebald.attacks.sign_flip import SignFlip

__all__ = [
    "Attack",
    "Collusion",
    "InnerProduct",
    "LittleIsEnough",
    "ModelReplacement",
    "RandomUpdate",
    "SignFlip",
]
