"""Piebald: federated learning for clients that are not alike.

    partition -> training -> transforms -> server -> report

A partition says which client holds which rows.  A recipe has one component for each question of a method: how clients
train, which parameters they share, how updates are transformed on their way, when the server steps, which clients are
aggregated together, how their updates are combined, and how the global model moves.  It runs unchanged on every
runtime, and a report shows the results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from piebald.discovery import imported, module_of
from piebald.version import __version__ as __version__

if TYPE_CHECKING:
    from piebald import advice, data, models, partition, recipes, tuning, vertical
    from piebald.advice.adviser import advise
    from piebald.comparisons import compare
    from piebald.errors import ParameterError, PiebaldError, RunFolderError, RuntimeFault, SettingError
    from piebald.experiment import adapt, resume, run
    from piebald.export import load_weights
    from piebald.federated_statistics import FederatedStatistics, Glm, Ledger, glm, statistics
    from piebald.federated_trees import BoostedTrees, trees
    from piebald.finished_run import Run
    from piebald.parameters import Layout
    from piebald.partition import LazyClients, clients_from
    from piebald.recipe import Recipe
    from piebald.report import write_report
    from piebald.report.comparison import Comparison
    from piebald.runtimes import Ray, Simulator
    from piebald.tuning.search import tune

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
    "recipe": ("Recipe",),
    "errors": ("ParameterError", "PiebaldError", "RunFolderError", "RuntimeFault", "SettingError"),
    "comparisons": ("compare",),
    "experiment": ("adapt", "resume", "run"),
    "export": ("load_weights",),
    "federated_statistics": ("FederatedStatistics", "Glm", "Ledger", "glm", "statistics"),
    "federated_trees": ("BoostedTrees", "trees"),
    "finished_run": ("Run",),
    "parameters": ("Layout",),
    "partition": ("LazyClients", "clients_from"),
    "report": ("write_report",),
    "report.comparison": ("Comparison",),
    "runtimes": ("Ray", "Simulator"),
    "advice.adviser": ("advise",),
    "tuning.search": ("tune",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used, so that `import piebald` and `piebald --help` are quick."""
    if name in _HOME_OF:
        return getattr(imported(f"piebald.{_HOME_OF[name]}"), name)
    return module_of(__name__, name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
