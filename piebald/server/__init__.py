"""The server: the loop that runs a recipe, its cluster models, checks, records and stopping."""

from piebald.server.evaluation import EvaluationPlan, RoundProgress
from piebald.server.loop import ServerLoop
from piebald.server.result_checks import ResultChecks
from piebald.server.stopping import StoppingCriteria

__all__ = ["EvaluationPlan", "ResultChecks", "RoundProgress", "ServerLoop", "StoppingCriteria"]
