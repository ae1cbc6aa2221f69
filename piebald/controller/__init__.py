"""What the centre does: the loop, its pace, groups, weights, step, community models and checkpoints."""

from piebald.controller.check import Check
from piebald.controller.loop import Controller, Measuring, Progress
from piebald.controller.pace import Asynchronous, Synchronous
from piebald.controller.step import Adam, Momentum, ToAverage, Yogi

__all__ = [
    "Adam",
    "Asynchronous",
    "Check",
    "Controller",
    "Measuring",
    "Momentum",
    "Progress",
    "Synchronous",
    "ToAverage",
    "Yogi",
]
