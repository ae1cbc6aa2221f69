"""Where a recipe runs: assignments in, arrivals out, and a clock."""

from piebald.runtimes.simulator import Simulation, Simulator

__all__ = ["Simulation", "Simulator"]
