"""Where a recipe runs: tasks in, results out, and a clock."""

from piebald.runtimes.federation import Federation
from piebald.runtimes.ray.ray_runtime import Ray
from piebald.runtimes.simulation.simulation import Simulation
from piebald.runtimes.simulation.simulator import Simulator

__all__ = ["Federation", "Ray", "Simulation", "Simulator"]
