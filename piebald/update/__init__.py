"""What befalls an update on its way, with an end at the client and an end at the centre."""

from piebald.update.attack import Attack, Collusion
from piebald.update.gaussian import Gaussian
from piebald.update.inner_product import InnerProduct
from piebald.update.little_is_enough import LittleIsEnough
from piebald.update.model_replacement import ModelReplacement
from piebald.update.random_update import RandomUpdate
from piebald.update.secure_sum import SecureSum
from piebald.update.sign_flip import SignFlip

__all__ = [
    "Attack",
    "Collusion",
    "Gaussian",
    "InnerProduct",
    "LittleIsEnough",
    "ModelReplacement",
    "RandomUpdate",
    "SecureSum",
    "SignFlip",
]
