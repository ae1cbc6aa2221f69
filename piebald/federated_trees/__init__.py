"""Gradient-boosted trees over clients whose rows stay where they are."""

from piebald.federated_trees.boost import trees
from piebald.federated_trees.boosted_trees import BoostedTrees

__all__ = ["BoostedTrees", "trees"]
