"""Gradient-boosted trees over clients: their form on the wire, how a client grows them, and rounds of boosting."""
