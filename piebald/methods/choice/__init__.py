"""The choice of each client among models that it could use, by its own validation rows."""

from piebald.methods.choice.alone import local_work, plain_sgd, train_alone
from piebald.methods.choice.best_for_each import BestForEach, reason
from piebald.methods.choice.candidates import FEWEST_ROWS, Verdict, judge
from piebald.methods.choice.final_models import KEEPS, own_choice
from piebald.methods.choice.knn_per import KnnPer

__all__ = [
    "FEWEST_ROWS",
    "KEEPS",
    "BestForEach",
    "KnnPer",
    "Verdict",
    "judge",
    "local_work",
    "own_choice",
    "plain_sgd",
    "reason",
    "train_alone",
]
