"""The choice of each client among models that it could use, by its own validation rows."""

from piebald.choice.alone import local_work, plain_sgd, train_alone
from piebald.choice.best_for_each import BestForEach
from piebald.choice.guard import FEWEST_ROWS, Verdict, judge
from piebald.choice.record import reason, record

__all__ = [
    "FEWEST_ROWS",
    "BestForEach",
    "Verdict",
    "judge",
    "local_work",
    "plain_sgd",
    "reason",
    "record",
    "train_alone",
]
