"""Privacy: accounting, and secure aggregation."""

from piebald.privacy.secure_aggregation import SecureSum

__all__ = ["SecureSum"]
