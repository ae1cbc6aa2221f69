"""Questions before training, over clients whose rows stay where they are.

Here lie descriptive statistics, generalised linear models, survival analysis and boosted trees, each of rows on
this machine and of rows at the sites of a federation, and the questions (`queries`) that sites answer.  Nothing here
trains a model by a recipe,
and nothing below `cli` and `experiments` knows this room.
"""

from piebald.privacy.ledger import Ledger
from piebald.statistics.describe import statistics
from piebald.statistics.linear_models import Glm, MixedGlm, PooledGlm, glm
from piebald.statistics.pooled_statistics import FederatedStatistics, NumberColumn, TextColumn
from piebald.statistics.survival import Cox, Survival, cox, survival

__all__ = [
    "Cox", "FederatedStatistics", "Glm", "Ledger", "MixedGlm", "NumberColumn", "PooledGlm", "Survival", "TextColumn",
    "cox", "glm", "statistics", "survival",
]  # fmt: skip
