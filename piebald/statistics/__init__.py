"""Questions before training, over clients whose rows stay where they are.

Here lie descriptive statistics, generalised linear models and boosted trees, each of rows on this machine and of rows
at the sites of a federation, and the questions (`queries`) that sites answer.  Nothing here trains a model by a recipe,
and nothing below `cli` and `experiments` knows this room.
"""

from piebald.privacy.ledger import Ledger
from piebald.statistics.describe import statistics
from piebald.statistics.linear_models import Glm, glm
from piebald.statistics.pooled_statistics import FederatedStatistics, NumberColumn, TextColumn

__all__ = ["FederatedStatistics", "Glm", "Ledger", "NumberColumn", "TextColumn", "glm", "statistics"]
