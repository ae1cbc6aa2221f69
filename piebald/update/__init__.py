"""What befalls an update on its way, with an end at the client and an end at the centre."""

from piebald.update.gaussian import Gaussian

__all__ = ["Gaussian"]
