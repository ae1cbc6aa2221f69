"""Privacy: accounting of budgets, the ledgers that keep them on disk, and secure aggregation.

Noise itself is a transform or a trainer of `methods`; here it is counted.  Nothing here trains, and nothing opens a
connection.
"""

from piebald.privacy.secure_aggregation import SecureAggregation

__all__ = ["SecureAggregation"]
