"""Where a recipe runs: tasks in, results out, and a clock."""

from typing import TYPE_CHECKING

from piebald.discovery import lazy_names

if TYPE_CHECKING:
    from piebald.runtimes.federation import Federation as Federation
    from piebald.runtimes.ray.ray_runtime import Ray as Ray
    from piebald.runtimes.simulation.simulation import Simulation as Simulation
    from piebald.runtimes.simulation.simulator import Simulator as Simulator

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "federation": ("Federation",),
        "ray.ray_runtime": ("Ray",),
        "simulation.simulation": ("Simulation",),
        "simulation.simulator": ("Simulator",),
    },
)
