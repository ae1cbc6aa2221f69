"""The tracker MLflow: runs in a file store, a database or at a server."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from piebald.report.callbacks.callback import RunStart
from piebald.report.callbacks.tracker import Tracker, Writer, identity

if TYPE_CHECKING:
    from mlflow import MlflowClient

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
