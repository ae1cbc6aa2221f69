"""Secure aggregation: the server learns the sum of a round's updates and nothing about any one of them."""

from piebald.privacy.secure_aggregation.transform import SecureAggregation

__all__ = ["SecureAggregation"]
