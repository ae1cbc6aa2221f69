"""Runtimes: tasks in, results out, and a clock.

Those of one user's machines are here: the simulator, its worker processes, and Ray; a federation of organisations is
`piebald.federation`.  A runtime knows the contracts and what clients do, and no recipe and no server.
"""

from typing import TYPE_CHECKING

from piebald.core.discovery import lazy_names

if TYPE_CHECKING:
    from piebald.runtimes.ray.actors import Ray as Ray
    from piebald.runtimes.simulation.simulation import Simulation as Simulation
    from piebald.runtimes.simulation.simulator import Simulator as Simulator

__getattr__, __dir__ = lazy_names(__name__)
