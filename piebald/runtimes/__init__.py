"""Runtimes: tasks in, results out, and a clock."""

from typing import TYPE_CHECKING

from piebald.core.discovery import lazy_names

if TYPE_CHECKING:
    from piebald.runtimes.ray.settings import Ray as Ray
    from piebald.runtimes.simulation.simulation import Simulation as Simulation
    from piebald.runtimes.simulation.simulator import Simulator as Simulator

__getattr__, __dir__ = lazy_names(__name__)
