"""What another version of Piebald wrote is refused in one sentence."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from piebald.core.errors import RunFolderError, SettingError
from piebald.federation.credentials import provisioning
from piebald.federation.operate.experiment_queue import FORMAT, ExperimentQueue
from piebald.storage import schema
from piebald.storage.store import RunStore


@pytest.mark.parametrize("number", [-1, 0, schema.SCHEMA + 1])
@pytest.mark.parametrize("opened", [RunStore.open, RunStore.open_read_only])
def test_a_schema_of_another_version_is_refused(opened, number: int, tmp_path: Path) -> None:
    with RunStore.create(tmp_path / "run", {"seed": 1}):
        pass
    with closing(sqlite3.connect(tmp_path / "run" / schema.DATABASE)) as db:
        db.execute(f"PRAGMA user_version = {number}")
    with pytest.raises(RunFolderError, match=f"has schema {number} but this Piebald reads schema {schema.SCHEMA}: "):
        opened(tmp_path / "run")


@pytest.mark.parametrize("number", [None, 0, provisioning.FORMAT + 1, "1"])
def test_credentials_of_another_version_are_refused(number: object, tmp_path: Path) -> None:
    described = provisioning.Description.model_validate({"host": "localhost", "sites": ["north"]})
    provisioning.provision(described, tmp_path)
    path = tmp_path / "north" / "credentials.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": number}))
    with pytest.raises(SettingError, match=f"have format .*, this Piebald reads {provisioning.FORMAT}: install"):
        provisioning.read(tmp_path / "north")


@pytest.mark.parametrize("name", ["0001.json", "0001.state.json"])
@pytest.mark.parametrize("number", [None, FORMAT - 1, FORMAT + 1])
def test_queues_of_another_version_are_refused(name: str, number: object, tmp_path: Path) -> None:
    queue = ExperimentQueue(tmp_path)
    queue.change(queue.add("fedavg", "", tmp_path / "run"), state="stopped")
    path = queue.folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": number}))
    with pytest.raises(SettingError, match=f"has format {number}, this Piebald reads {FORMAT}: install"):
        queue.entries()
