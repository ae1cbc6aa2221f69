"""Listeners of a run: callbacks of your own, and experiment trackers."""

from typing import TYPE_CHECKING

from piebald.discovery import lazy_names

if TYPE_CHECKING:
    from piebald.callbacks.base import Callback as Callback
    from piebald.callbacks.base import RunStart as RunStart
    from piebald.callbacks.mlflow import Mlflow as Mlflow
    from piebald.callbacks.recorder import ObservedRecorder as ObservedRecorder
    from piebald.callbacks.tensorboard import Tensorboard as Tensorboard
    from piebald.callbacks.tracker import Tracker as Tracker
    from piebald.callbacks.tracker import trackers_of as trackers_of
    from piebald.callbacks.wandb import Wandb as Wandb

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "base": ("Callback", "RunStart"),
        "mlflow": ("Mlflow",),
        "recorder": ("ObservedRecorder",),
        "tensorboard": ("Tensorboard",),
        "tracker": ("Tracker", "trackers_of"),
        "wandb": ("Wandb",),
    },
)
