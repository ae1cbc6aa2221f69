"""Statistics over clients whose rows stay where they are, and generalised linear models of them."""

from piebald.privacy.ledger import Ledger
from piebald.statistics.describe import statistics
from piebald.statistics.linear_models import Glm, glm
from piebald.statistics.pooled_statistics import FederatedStatistics, NumberColumn, TextColumn

__all__ = ["FederatedStatistics", "Glm", "Ledger", "NumberColumn", "TextColumn", "glm", "statistics"]
