"""Search for settings of recipes by validation rows, so that each method is compared at its best."""

from piebald.tuning.budget import Budget, Cost
from piebald.tuning.search import Tuning, tune
from piebald.tuning.space import Choices, Range, SearchSpace, with_settings
from piebald.tuning.trial import Trial

__all__ = ["Budget", "Choices", "Cost", "Range", "SearchSpace", "Trial", "Tuning", "tune", "with_settings"]
