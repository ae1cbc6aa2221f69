"""Search for settings of recipes by validation rows, so that each method is compared at its best.

Search spaces, budgets, trials and their storage lie here, and the clients as a search sees them.  Test rows never reach
a trial; they are opened one folder up, after the choice.
"""

from piebald.advice.tuning.search import Tuning, tune
from piebald.advice.tuning.space import Budget, Choices, Cost, Range, SearchSpace, with_settings
from piebald.advice.tuning.trial_runs import Trial

__all__ = ["Budget", "Choices", "Cost", "Range", "SearchSpace", "Trial", "Tuning", "tune", "with_settings"]
