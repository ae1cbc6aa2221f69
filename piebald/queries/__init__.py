"""What clients are asked besides training."""

from piebald.queries.evaluate import Evaluate
from piebald.queries.server_rows import RootLoss, RootTraining
from piebald.queries.validate import Validate

__all__ = [
    "Evaluate",
    "RootLoss",
    "RootTraining",
    "Validate",
]
