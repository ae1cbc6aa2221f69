"""What is done to an update between client and server."""

from piebald.transforms.gaussian import Gaussian

__all__ = [
    "Gaussian",
]
