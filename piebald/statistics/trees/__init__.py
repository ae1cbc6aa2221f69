"""Gradient-boosted trees over clients whose rows stay where they are.

Here lie the trees themselves (`forest`), the ways in which they grow (with xgboost at a client, `histograms`
from sums over clients), rounds of boosting (`rounds`) and the clients of such rounds, on this machine
(`local_clients`) and at sites (`site_clients`).  The questions that sites answer are in `statistics.queries`; nothing
below `cli` and `experiments` knows this room.
"""

from typing import TYPE_CHECKING

from piebald.core.discovery import lazy_names

if TYPE_CHECKING:
    from piebald.statistics.trees.boosted_trees import BoostedTrees as BoostedTrees
    from piebald.statistics.trees.experiment import trees as trees

# the section [trees] of an experiment file is read in every run, and needs the settings alone
__getattr__, __dir__ = lazy_names(__name__)
