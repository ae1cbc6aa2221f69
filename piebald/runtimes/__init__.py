"""Where a recipe runs: tasks in, results out, and a clock."""

from piebald.runtimes.federation import Federation
from piebald.runtimes.ray.settings import Ray
from piebald.runtimes.simulation.settings import Simulator
from piebald.runtimes.simulation.simulation import Simulation

__all__ = ["Federation", "Ray", "Simulation", "Simulator"]
