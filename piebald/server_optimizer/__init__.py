"""How the global model moves, given the averaged update."""

from piebald.server_optimizer.adaptive import Adam, Yogi
from piebald.server_optimizer.average import ToAverage
from piebald.server_optimizer.cached_average import CachedSwap
from piebald.server_optimizer.mixing import Mixing
from piebald.server_optimizer.momentum import Momentum

__all__ = [
    "Adam",
    "CachedSwap",
    "Mixing",
    "Momentum",
    "ToAverage",
    "Yogi",
]
