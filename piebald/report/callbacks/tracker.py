"""Experiment trackers, MLflow, TensorBoard, and Weights & Biases: settings that open a callback, and what all are sent.

MLflow keeps runs in a file store, a database or at a server, TensorBoard event files in a folder, and Weights & Biases
offline folders, or its server where asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, cast

from piebald.contracts.component import Component, build
from piebald.core.errors import SettingError, install
from piebald.core.metrics import LOWER_IS_BETTER
from piebald.core.result_table import ResultTable
from piebald.report.callbacks.callback import Callback, RunStart
from piebald.report.tables import History, mean, worst_tenth

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from torch.utils.tensorboard.writer import SummaryWriter


class Writer(Protocol):
    """An open run of a tracker's own program."""

    def describe(self, parameters: Mapping[str, str | int | float | bool]) -> None:
        """Keep the run's settings."""

    def scalars(self, values: Mapping[str, float], version: int) -> None:
        """Keep numbers of one server step."""

    def artifacts(self, folder: Path) -> None:
        """Keep the files of a folder: the report's page and its pictures."""

    def close(self, status: str) -> None:
        """End the run."""


class Tracker(Component):
    """Settings of an experiment tracker.  Nothing is sent over a network unless a setting names an address."""

    axis = "tracker"
    package: ClassVar[str | None] = None  # that must be installed

    def open(self, run: RunStart) -> Writer:
        """Start the tracker's run, or go on with the one that this run folder began."""
        raise NotImplementedError

    def callback(self) -> Callback:
        """A callback that sends a run to this tracker."""
        return Tracking(self)


class Tracking(Callback):
    """Sends a run to a tracker: settings, the numbers of each server step and evaluation, and at the end the page.

    Names of numbers: `server/loss`, `server/bytes_up`, ... for a server step; `test/personal/accuracy/mean`,
    `.../worst_tenth` and, where there are several clusters, `.../cluster_2` for an evaluation.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._writer: Writer | None = None
        self._cluster_of: dict[int, int] = {}
        self._main: tuple[str, bool] = ("", True)  # the run's metric, and whether it is better where it is higher

    def on_start(self, run: RunStart) -> None:
        """Start the tracker's run."""
        self._main = str(run.meta.get("metric")), bool(run.meta.get("higher_is_better", True))
        self._writer = self._tracker.open(run)
        self._writer.describe(parameters(run.meta))

    def on_result(self, result: Mapping[str, Any]) -> None:
        """Remember which cluster a client is in."""
        if result.get("cluster") is not None:
            self._cluster_of[int(result["client"])] = int(result["cluster"])

    def on_server_step(self, step: Mapping[str, Any]) -> None:
        """Send the numbers of a server step."""
        version = int(step["version"])
        self._send({f"server/{name}": value for name, value in step.items() if name != "version"}, version)

    def on_evaluation(self, version: int, scores: Sequence[Mapping[str, Any]]) -> None:
        """Send means over clients, their worst tenth, and clusters."""
        self._send(summaries(scores, self._cluster_of, *self._main), version)

    def on_end(self, history: History, status: str) -> None:
        """Send the page and its pictures, and end the tracker's run."""
        if self._writer is None:
            return
        # a stopped run is resumed later, and its page would be that of a half
        if status == "finished" and history.path is not None:
            from piebald.report import write_report

            with tempfile.TemporaryDirectory() as folder:
                write_report([history.path], folder)
                self._writer.artifacts(Path(folder))
        self._writer.close(status)

    def _send(self, values: Mapping[str, Any], version: int) -> None:
        if self._writer is not None:
            self._writer.scalars({name: float(value) for name, value in values.items() if value is not None}, version)


def trackers_of(given: Sequence[str | Tracker | Mapping[str, Any]]) -> list[Tracker]:
    """Trackers from their names, tables or values, once their packages are found.

    Raises:
        SettingError: there is no such tracker or setting, or its package is missing.
    """
    if isinstance(given, str):
        raise SettingError(f"trackers must be a list, like ['{given}'], got {given!r}")
    trackers = [cast(Tracker, build("tracker", tracker)) for tracker in given]
    for tracker in trackers:
        if tracker.package is not None and find_spec(tracker.package) is None:
            raise SettingError(
                f"the package of tracker {tracker.kind!r} is missing: {install('trackers')}, or leave it out"
            )
    return trackers


def parameters(meta: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """A run's settings by name, those of components like "training.lr"; what is no single value is written as JSON."""
    facts = ("seed", "rounds", "model", "parameters", "shared", "clients", "objective", "metric", "keep", "piebald")
    table = meta["recipe"]["table"]
    values: dict[str, Any] = {"recipe": meta["recipe"]["name"]} | {name: meta.get(name) for name in facts}
    for axis, component in table.items():
        if isinstance(component, Mapping) and "kind" in component:
            values[axis] = component["kind"]
            values |= {f"{axis}.{name}": value for name, value in component.items() if name != "kind"}
        elif axis == "transforms":
            values[axis] = component
    return {
        name: value if isinstance(value, str | int | float) else json.dumps(value)
        for name, value in values.items()
        if value is not None
    }


def summaries(
    scores: Sequence[Mapping[str, Any]], cluster_of: Mapping[int, int], metric: str, higher: bool
) -> dict[str, float]:
    """Scores of clients as few numbers: the mean, the worst tenth (at least one client), and each cluster's mean.

    Args:
        scores: rows of the table of scores.
        cluster_of: the cluster of each client that is in one.
        metric, higher: the run's metric, and whether it is better where it is higher.  Of others, losses and errors are
            worse there.

    Examples:
        >>> row = {"split": "test", "model": "global", "metric": "accuracy"}
        >>> scores = [row | {"client": client, "value": value} for client, value in enumerate((0.5, 0.75, 1.0))]
        >>> summaries(scores, {}, "accuracy", True)
        {'test/global/accuracy/mean': 0.75, 'test/global/accuracy/worst_tenth': 0.5}
    """
    by_metric: dict[tuple[str, bool], dict[int | None, float]] = {}
    for row in scores:
        if row["value"] is not None:
            name = f"{row['split']}/{row['model']}/{row['metric']}"
            good = higher if row["metric"] == metric else row["metric"] not in LOWER_IS_BETTER
            by_metric.setdefault((name, good), {})[row["client"]] = float(row["value"])
    values: dict[str, float | None] = {}
    for (name, good), by_client in by_metric.items():
        if None in by_client:  # the common test set, which belongs to no client
            values[name] = by_client[None]
            continue
        # the worst first, as `worst_tenth` takes them
        ordered = sorted(by_client.values(), reverse=not good)
        values[f"{name}/mean"] = mean(ordered)
        values[f"{name}/worst_tenth"] = worst_tenth(ordered)
        members: dict[int, list[float]] = {}
        for client, value in by_client.items():
            if client is not None and client in cluster_of:
                members.setdefault(cluster_of[client], []).append(value)
        if len(members) > 1:
            values |= {f"{name}/cluster_{cluster}": mean(scored) for cluster, scored in sorted(members.items())}
    return {name: value for name, value in values.items() if value is not None}


def identity(run: RunStart) -> str:
    """A name by which a tracker finds the run again that a run folder began; runs in memory are never found again."""
    # the time tells apart a folder that was deleted and made again under the same path
    named = f"{run.meta.get('created')} {run.folder.resolve()}" if run.folder is not None else os.urandom(16).hex()
    return hashlib.sha256(named.encode()).hexdigest()[:16]


_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class Mlflow(Tracker):
    """Keeps runs in MLflow.

    Attributes:
        uri: where to: a folder, by default "mlruns" in the current one; "sqlite:///runs.db"; or a server's address.
        experiment: the name of the experiment, by default the recipe's.
    """

    package: ClassVar[str] = "mlflow"

    uri: str = "mlruns"
    experiment: str | None = None

    def open(self, run: RunStart) -> Writer:
        """Start a run, or go on with the one that this run folder began."""
        from mlflow import MlflowClient

        # a plain folder becomes a URI, as a relative path would follow later changes of the working directory
        uri = self.uri if ":" in self.uri else Path(self.uri).resolve().as_uri()
        with _file_store_allowed(uri):
            client = MlflowClient(uri)
            name = self.experiment or str(run.meta["recipe"]["name"])
            present = client.get_experiment_by_name(name)
            experiment = client.create_experiment(name) if present is None else present.experiment_id
            tags = {
                "piebald.run": identity(run),
                "piebald.folder": "" if run.folder is None else str(run.folder.resolve()),
                "piebald.label": str(run.meta.get("label")),
                "piebald.version": str(run.meta.get("piebald")),
            }
            # a run that was killed and resumed goes on in the same run of MLflow
            begun = client.search_runs([experiment], f"tags.`piebald.run` = '{identity(run)}'", max_results=1)
            if begun:
                number = begun[0].info.run_id
                client.update_run(number, status="RUNNING")
            else:
                title = f"{run.meta.get('label')} (seed {run.meta.get('seed')})"
                number = client.create_run(experiment, run_name=title, tags=tags).info.run_id
        return _MlflowRun(client, number, uri)


class _MlflowRun:
    def __init__(self, client: MlflowClient, number: str, uri: str) -> None:
        self._client, self._number, self._uri = client, number, uri

    def describe(self, parameters: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        with _file_store_allowed(self._uri):
            self._client.log_batch(self._number, params=[Param(name, str(value)) for name, value in parameters.items()])

    def scalars(self, values: Mapping[str, float], version: int) -> None:
        import time

        from mlflow.entities import Metric

        # MLflow counts milliseconds
        now = int(1000 * time.time())
        with _file_store_allowed(self._uri):
            metrics = [Metric(name, value, now, version) for name, value in values.items()]
            self._client.log_batch(self._number, metrics=metrics)

    def artifacts(self, folder: Path) -> None:
        with _file_store_allowed(self._uri):
            self._client.log_artifacts(self._number, str(folder), "report")

    def close(self, status: str) -> None:
        with _file_store_allowed(self._uri):
            self._client.set_terminated(self._number, _STATUS[status])


@contextmanager
def _file_store_allowed(uri: str) -> Iterator[None]:
    """Let MLflow use a plain folder, which it does only where this is asked for (`MLFLOW_ALLOW_FILE_STORE`)."""
    name = "MLFLOW_ALLOW_FILE_STORE"
    if not uri.startswith("file:") or name in os.environ:
        yield
        return
    os.environ[name] = "true"
    try:
        yield
    finally:
        del os.environ[name]


class Tensorboard(Tracker):
    """Writes event files: `tensorboard --logdir runs` shows all runs below a folder.

    Attributes:
        folder: where to; by default a folder "tensorboard" inside the run folder, or beside it for a run in memory.
    """

    package: ClassVar[str] = "tensorboard"

    folder: str | None = None

    def open(self, run: RunStart) -> Writer:
        """Write event files; those of steps that a resumed run repeats no longer count."""
        from torch.utils.tensorboard.writer import SummaryWriter

        name = f"{run.meta.get('label')}-seed-{run.meta.get('seed')}"
        inside = run.folder / "tensorboard" if run.folder is not None else Path("tensorboard") / name
        folder = inside if self.folder is None else Path(self.folder) / name
        return _Events(SummaryWriter(str(folder), purge_step=run.version + 1 if run.version else None))


class _Events:
    def __init__(self, writer: SummaryWriter) -> None:
        self._writer, self._version = writer, 0

    def describe(self, parameters: Mapping[str, str | int | float | bool]) -> None:
        settings = ResultTable(parameters.items(), ("setting", "value"))
        self._writer.add_text("settings", settings.markdown())

    def scalars(self, values: Mapping[str, float], version: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, version)
        self._version = version
        # so that a board that is open shows each step, and a kill loses none
        self._writer.flush()

    def artifacts(self, folder: Path) -> None:
        import matplotlib.image

        for picture in sorted(folder.glob("*.png")):
            pixels = matplotlib.image.imread(picture)
            self._writer.add_image(f"report/{picture.stem}", pixels, self._version, dataformats="HWC")

    def close(self, status: str) -> None:
        self._writer.close()


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
