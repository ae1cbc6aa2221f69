"""Piebald: federated learning for clients that are not alike.

    partition -> training -> transforms -> server -> report

A partition says which client holds which rows.  A recipe has one component for each question of a method: how clients
train, which parameters they share, how updates are transformed on their way, when the server steps, which clients are
aggregated together, how their updates are combined, and how the global model moves.  It runs unchanged on every
runtime, and a report shows the results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from piebald.core.discovery import lazy_names
from piebald.version import __version__ as __version__

if TYPE_CHECKING:
    from piebald import advice as advice
    from piebald import data as data
    from piebald import models as models
    from piebald import vertical as vertical
    from piebald.advice import tuning as tuning
    from piebald.advice.adviser import advise as advise
    from piebald.advice.tuning.search import tune as tune
    from piebald.core.errors import ParameterError as ParameterError
    from piebald.core.errors import PiebaldError as PiebaldError
    from piebald.core.errors import RunFolderError as RunFolderError
    from piebald.core.errors import RuntimeFault as RuntimeFault
    from piebald.core.errors import SettingError as SettingError
    from piebald.core.parameters import Layout as Layout
    from piebald.data import partition as partition
    from piebald.data.partition import LazyClients as LazyClients
    from piebald.data.partition import clients_from as clients_from
    from piebald.inference.descriptions import correlations as correlations
    from piebald.inference.descriptions import group_means as group_means
    from piebald.inference.linear_models import Glm as Glm
    from piebald.inference.linear_models import glm as glm
    from piebald.inference.pooled_statistics import FederatedStatistics as FederatedStatistics
    from piebald.inference.statistics_at_sites import statistics as statistics
    from piebald.inference.survival import cox as cox
    from piebald.inference.survival import survival as survival
    from piebald.inference.trees.boosted_trees import BoostedTrees as BoostedTrees
    from piebald.inference.trees.site_clients import trees as trees
    from piebald.methods.catalog import recipes as recipes
    from piebald.methods.recipe import Recipe as Recipe
    from piebald.privacy.ledger import Ledger as Ledger
    from piebald.report import write_report as write_report
    from piebald.report.comparison import Comparison as Comparison
    from piebald.report.export import load_weights as load_weights
    from piebald.runs.compare import compare as compare
    from piebald.runs.compare import open as open
    from piebald.runs.estimators import FederatedClassifier as FederatedClassifier
    from piebald.runs.estimators import FederatedRegressor as FederatedRegressor
    from piebald.runs.finished_run import Run as Run
    from piebald.runs.run import adapt as adapt
    from piebald.runs.run import resume as resume
    from piebald.runs.run import run as run
    from piebald.runtimes import Ray as Ray
    from piebald.runtimes import Simulator as Simulator

__getattr__, _names = lazy_names(__name__)


def __dir__() -> list[str]:
    return sorted([*_names(), "__version__"])
