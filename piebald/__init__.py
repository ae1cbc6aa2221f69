"""Piebald: federated learning for clients that are not alike.

    partition -> training -> transforms -> server -> report

A partition says which client holds which rows.  A recipe has one component for each question of a method: how clients
train, which parameters they share, how updates are transformed on their way, when the server steps, which clients are
aggregated together, how their updates are combined, and how the global model moves.  It runs unchanged on every
runtime, and a report shows the results.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from piebald.core.discovery import NamedLikeModules, imported, module_of
from piebald.version import __version__ as __version__

if TYPE_CHECKING:
    from piebald import advice, data, models, vertical
    from piebald.advice import tuning
    from piebald.advice.adviser import advise
    from piebald.advice.tuning.search import tune
    from piebald.core.errors import ParameterError, PiebaldError, RunFolderError, RuntimeFault, SettingError
    from piebald.core.parameters import Layout
    from piebald.data import partition
    from piebald.data.partition import LazyClients, clients_from
    from piebald.methods import recipes
    from piebald.methods.recipe import Recipe
    from piebald.report import write_report
    from piebald.report.comparison import Comparison
    from piebald.report.export import load_weights
    from piebald.runs.compare import compare
    from piebald.runs.finished_run import Run
    from piebald.runs.run import adapt, resume, run
    from piebald.runtimes import Ray, Simulator
    from piebald.statistics import FederatedStatistics, Glm, Ledger, glm, statistics
    from piebald.statistics.trees import BoostedTrees, trees

__all__ = [
    "BoostedTrees",
    "Comparison",
    "FederatedStatistics",
    "Glm",
    "Layout",
    "LazyClients",
    "Ledger",
    "ParameterError",
    "PiebaldError",
    "Ray",
    "Recipe",
    "Run",
    "RunFolderError",
    "RuntimeFault",
    "SettingError",
    "Simulator",
    "adapt",
    "advice",
    "advise",
    "clients_from",
    "compare",
    "data",
    "glm",
    "load_weights",
    "models",
    "partition",
    "recipes",
    "resume",
    "run",
    "statistics",
    "trees",
    "tune",
    "tuning",
    "vertical",
    "write_report",
]

_HOMES = {
    "advice.adviser": ("advise",),
    "advice.tuning.search": ("tune",),
    "core.errors": ("ParameterError", "PiebaldError", "RunFolderError", "RuntimeFault", "SettingError"),
    "core.parameters": ("Layout",),
    "data.partition": ("LazyClients", "clients_from"),
    "methods.recipe": ("Recipe",),
    "report": ("write_report",),
    "report.comparison": ("Comparison",),
    "report.export": ("load_weights",),
    "runs.compare": ("compare",),
    "runs.finished_run": ("Run",),
    "runs.run": ("adapt", "resume", "run"),
    "runtimes": ("Ray", "Simulator"),
    "statistics": ("FederatedStatistics", "Glm", "Ledger", "glm", "statistics"),
    "statistics.trees": ("BoostedTrees", "trees"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = {"partition": "data", "recipes": "methods", "tuning": "advice"}  # public ones that lie inside a room

# `piebald.statistics` is the function, also once the room of that name has been imported
sys.modules[__name__].__class__ = NamedLikeModules


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used, so that `import piebald` and `piebald --help` are quick."""
    if name in _HOME_OF:
        return getattr(imported(f"piebald.{_HOME_OF[name]}"), name)
    if name in _MODULES:
        return imported(f"piebald.{_MODULES[name]}.{name}")
    return module_of(__name__, name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
