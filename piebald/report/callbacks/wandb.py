"""The tracker Weights & Biases: offline folders, or its server where asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from piebald.report.callbacks.callback import RunStart
from piebald.report.callbacks.tracker import Tracker, Writer, identity


class Wandb(Tracker):
    """Keeps runs for Weights & Biases, by default in files that `wandb sync` sends when you ask it to.

    Attributes:
        project: the name of the project.
        mode: "offline", or "online" to send everything at once.
        folder: where files are written: a folder "wandb" is made there; by default in the current folder.
    """

    package: ClassVar[str] = "wandb"

    project: str = "piebald"
    mode: Literal["offline", "online"] = "offline"
    folder: str = "."

    def open(self, run: RunStart) -> Writer:
        """Start a run; a resumed one has the same id."""
        import wandb

        opened = wandb.init(
            project=self.project,
            dir=self.folder,
            mode=self.mode,
            id=identity(run),
            # offline folders cannot be resumed, and wandb warns about the try
            resume="allow" if self.mode == "online" else None,
            name=f"{run.meta.get('label')} (seed {run.meta.get('seed')})",
            tags=[str(run.meta["recipe"]["name"])],
            settings=wandb.Settings(silent=True, console="off"),
        )
        return _WandbRun(opened)


class _WandbRun:
    def __init__(self, run: Any) -> None:
        self._run = run

    def describe(self, parameters: Mapping[str, Any]) -> None:
        # a resumed run may have other settings than its first part, such as more rounds
        self._run.config.update(dict(parameters), allow_val_change=True)

    def scalars(self, values: Mapping[str, float], version: int) -> None:
        self._run.log({**values, "server_step": version})  # an evaluation comes after its step: no `step` of wandb's

    def artifacts(self, folder: Path) -> None:
        import wandb

        artifact = wandb.Artifact("report", type="report")
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)
