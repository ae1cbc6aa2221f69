"""Listeners of a run: callbacks of users, and experiment trackers.

A tracker is one file with its settings and its writer; its package is imported when a run starts.  Nothing here may
change a run: listeners get copies, and their errors are warnings.
"""

from typing import TYPE_CHECKING

from piebald.core.discovery import lazy_names

if TYPE_CHECKING:
    from piebald.report.callbacks.callback import Callback as Callback
    from piebald.report.callbacks.callback import ObservedRecorder as ObservedRecorder
    from piebald.report.callbacks.callback import RunStart as RunStart
    from piebald.report.callbacks.tracker import Mlflow as Mlflow
    from piebald.report.callbacks.tracker import Tensorboard as Tensorboard
    from piebald.report.callbacks.tracker import Tracker as Tracker
    from piebald.report.callbacks.tracker import Wandb as Wandb
    from piebald.report.callbacks.tracker import trackers_of as trackers_of

__getattr__, __dir__ = lazy_names(__name__)
