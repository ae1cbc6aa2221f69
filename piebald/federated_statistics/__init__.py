"""Statistics over clients whose rows stay where they are, and generalised linear models of them."""

from piebald.federated_statistics.describe import statistics
from piebald.federated_statistics.linear_models import Glm, glm
from piebald.federated_statistics.pooled_statistics import FederatedStatistics, NumberColumn, TextColumn
from piebald.privacy.ledger import Ledger

__all__ = ["FederatedStatistics", "Glm", "Ledger", "NumberColumn", "TextColumn", "glm", "statistics"]
