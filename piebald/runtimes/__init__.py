"""Where a recipe runs: assignments in, arrivals out, and a clock."""

from piebald.runtimes.ray import Ray
from piebald.runtimes.simulation import Simulation
from piebald.runtimes.simulator import Simulator

__all__ = ["Ray", "Simulation", "Simulator"]
