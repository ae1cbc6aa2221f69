"""Where a recipe runs: assignments in, arrivals out, and a clock."""

from piebald.runtimes.federation import Federation
from piebald.runtimes.ray import Ray
from piebald.runtimes.simulation import Simulation
from piebald.runtimes.simulator import Simulator

__all__ = ["Federation", "Ray", "Simulation", "Simulator"]
