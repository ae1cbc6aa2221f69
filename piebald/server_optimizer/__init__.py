"""How the global model moves, given the averaged update."""

from piebald.server_optimizer.adaptive import Adam, Yogi
from piebald.server_optimizer.average import ServerSgd
from piebald.server_optimizer.cached_average import CachedAverage
from piebald.server_optimizer.mixing import Mixing
from piebald.server_optimizer.momentum import Momentum

__all__ = [
    "Adam",
    "CachedAverage",
    "Mixing",
    "Momentum",
    "ServerSgd",
    "Yogi",
]
