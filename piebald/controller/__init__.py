"""What the centre does: the loop, its pace, groups, weights, step, community models and checkpoints."""

from piebald.controller.check import Check
from piebald.controller.loop import Controller, Measuring, Progress
from piebald.controller.pace import Asynchronous, Buffered, Deadline, Synchronous
from piebald.controller.step import Adam, CachedSwap, Mixing, Momentum, ToAverage, Yogi
from piebald.controller.stop import Stop

__all__ = [
    "Adam",
    "Asynchronous",
    "Buffered",
    "CachedSwap",
    "Check",
    "Controller",
    "Deadline",
    "Measuring",
    "Mixing",
    "Momentum",
    "Progress",
    "Stop",
    "Synchronous",
    "ToAverage",
    "Yogi",
]
