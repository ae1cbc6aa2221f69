"""Who is averaged with whom."""

from piebald.controller.group.cfl import Cfl
from piebald.controller.group.distfl import Distfl
from piebald.controller.group.ifca import Ifca
from piebald.controller.group.together import Together

__all__ = ["Cfl", "Distfl", "Ifca", "Together"]
