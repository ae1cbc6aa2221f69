"""Privacy: accounting, and secure aggregation."""

from piebald.privacy.secure_aggregation import SecureAggregation

__all__ = ["SecureAggregation"]
