"""A newcomer's rows from a file, a folder or a function, read in the same way as the run's own data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from piebald import data
from piebald.contracts import Clients
from piebald.core.errors import SettingError
from piebald.core.references import USERS, is_reference, of_folder
from piebald.data.clients.client_tables import Reading, is_table, read_table
from piebald.data.clients.data_source import DataSource
from piebald.data.clients.owner import Owner, read_owners
from piebald.data.clients.pairs import from_pairs
from piebald.data.clients.sources import clients_of_table, recoded
from piebald.data.embeddings.embedded import embedded_by
from piebald.data.partition.split_settings import SplitSettings
from piebald.data.preparation import Preparation
from piebald.data.sets.dataset import DataSet
from piebald.data.sets.decoded import Decoded
from piebald.data.sets.named import named


def from_file(
    source: str,
    target: str | None,
    meta: Mapping[str, Any],
    validation: float = 0.2,
    test: float = 0.2,
    plugins: Sequence[str] = (),
) -> Clients:
    """A newcomer's rows as a client, read in the same way as the data of the run that `meta` describes.

    Args:
        source: see `DataSource.source`; a folder has one folder for each class.
        target: the column of a table to predict, by default the one of the run.  The inputs are the run's features, or
            else all other columns in the order of the file, without the run's client column.
        meta: the description of the run.
        validation, test: the shares of validation and test rows.
        plugins: modules of the user's that the run may name, see `piebald.resume`.

    Raises:
        SettingError: the rows cannot be read, or have unexpected content.
    """
    settings = of_folder("", plugins).mark(meta.get("settings") or {})
    newcomer = _rows(source, target, settings, meta, validation, test)
    if settings.get("extractor") is None:
        return newcomer
    return embedded_by(newcomer, settings["extractor"])


def _rows(
    source: str,
    target: str | None,
    settings: Mapping[str, Any],
    meta: Mapping[str, Any],
    validation: float,
    test: float,
) -> Clients:
    data_table, classes = settings.get("data") or {}, meta.get("classes")
    split = SplitSettings.of(settings.get("split"))
    path = Path(source)
    division = SplitSettings(validation=validation, test=test)
    loaded: Any
    if is_table(path) and not is_reference(source):
        target = target or data_table.get("target")
        frame = read_table(path, data_table.get("client"))
        if meta.get("preparation") is not None:
            return from_table(frame, target, meta, validation, test)
        division = _like_the_run(split, list(frame.columns), validation, test)
        frame = frame.drop(columns=[name for name in split.columns if name in frame and name not in division.columns])
        loaded = _of_table(path, frame, target, data_table, division)
    elif path.is_dir():
        loaded = _of_folder(path, settings)
    else:
        loaded = DataSource(source=USERS.mark(source)).load()
    if not isinstance(loaded, DataSet):
        return loaded  # type: ignore[no-any-return]
    if isinstance(loaded.x, Decoded):
        raise SettingError(f"{source} has rows that stay in their files: load them, or adapt to them from Python")
    has_names = loaded.classes is not None and classes is not None and path.suffix != ".npz"
    y = np.array(loaded.classes)[loaded.targets.numpy()] if has_names else loaded.y
    table = replace(from_pairs([Owner("newcomer", (loaded.x, y))], Reading()), keys=loaded.keys)
    return clients_of_table(table, division, classes=classes)


def from_table(frame: Any, target: str | None, meta: Mapping[str, Any], validation: float, test: float) -> Clients:
    """Return the rows of a table as a client, which are to be prepared as those of the run that `meta` describes.

    Args:
        frame: a pandas DataFrame with the columns of the run's tables, in any order.
        target, meta, validation, test: as of `from_file`.

    Raises:
        SettingError: a column is missing, or a target is none of the run's classes.
    """
    agreed = Preparation(**meta["preparation"])
    goal = target or (None if agreed.target is None else agreed.target.name)
    features = [name for name in agreed.names_in if name in frame.columns] or agreed.names_in
    source = DataSource(source="the newcomer", target=goal, features=features, regression=agreed.classes is None)
    division = _like_the_run(SplitSettings.of(meta.get("split")), list(frame.columns), validation, test)
    table = source.table_of(read_owners(frame), division, coded=True).of(None, "newcomer")
    y, classes = source.labels_of(table)
    if classes is not None and agreed.classes is not None:
        y, classes = recoded(y, classes, agreed.classes, "the newcomer"), list(agreed.classes)
    return clients_of_table(table, division, labels=(y, classes))


def _like_the_run(split: SplitSettings, columns: list[str], validation: float, test: float) -> SplitSettings:
    """Return how a newcomer's rows are divided: as the run's, by those of its columns that the newcomer has."""
    group = [name for name in split.groups if name in columns] or None
    order = split.order if split.order in columns else None
    stratify = None if isinstance(split.stratify, str) and split.stratify not in columns else split.stratify
    return SplitSettings(validation=validation, test=test, seed=split.seed, group=group, order=order, stratify=stratify)


def _of_table(
    path: Path, frame: Any, target: str | None, data_table: Mapping[str, Any], division: SplitSettings
) -> Any:
    """A table with the columns of the run's own."""
    if target is None:
        raise SettingError(f"{path} is a table: name the column to predict with --target COLUMN")
    client = data_table.get("client") if data_table.get("client") in frame.columns else None
    options = {name: data_table[name] for name in ("features", "regression", "tokens") if data_table.get(name)}
    return DataSource(source=str(path), client=client, target=target, **options).rows_of(frame, division)


def _of_folder(path: Path, settings: Mapping[str, Any]) -> Any:
    """Images or recordings in the size of the run's data set."""
    data_table = settings.get("data") or {}
    if not data_table:
        raise SettingError(f"{path} is a folder, but the run was started from Python: load it there and call adapt")
    if data_table.get("source") is not None:
        return DataSource(**{**data_table, "source": str(path), "client": None}).load()
    shape = named(data_table["name"]).input_shape
    if len(shape) == 3 and shape[1] == shape[2]:
        return data.image_folder(path, side=shape[1], channels=1 if shape[0] == 1 else 3)
    if len(shape) == 2 and shape[0] == 1:
        # samples a second of recordings
        return data.audio_folder(path, seconds=shape[1] / 16_000)
    raise SettingError(
        f"{path} is a folder, but the run's inputs {list(shape)} are neither square images nor recordings"
    )
