"""The server: the loop that runs a recipe, its cluster models, checks, records and stopping."""

from piebald.server.loop import Controller, Measuring, Progress
from piebald.server.result_checks import Check
from piebald.server.stopping import Stop

__all__ = ["Check", "Controller", "Measuring", "Progress", "Stop"]
