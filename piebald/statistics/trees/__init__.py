"""Gradient-boosted trees over clients whose rows stay where they are."""

from piebald.statistics.trees.boost import trees
from piebald.statistics.trees.boosted_trees import BoostedTrees

__all__ = ["BoostedTrees", "trees"]
