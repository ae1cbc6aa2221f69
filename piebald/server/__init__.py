"""The server: the loop that runs a recipe, its cluster models, checks, records and stopping.

It asks a runtime for results and takes them one at a time.  What a step computes is the recipe's; where clients run and
what is left on disk are not known here.
"""

from piebald.server.evaluation import EvaluationPlan, RoundProgress
from piebald.server.loop import ServerLoop
from piebald.server.result_checks import ResultChecks
from piebald.server.stopping import StoppingCriteria

__all__ = ["EvaluationPlan", "ResultChecks", "RoundProgress", "ServerLoop", "StoppingCriteria"]
