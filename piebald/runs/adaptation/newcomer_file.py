"""A newcomer's rows from a file, a folder or a function, read in the same way as the run's own data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from piebald.contracts import Clients
from piebald.contracts.data import blank_row
from piebald.core import pytree
from piebald.core.errors import SettingError
from piebald.core.references import USERS, of_folder
from piebald.data.clients.data_source import DataSource
from piebald.data.clients.own_rows import RunRows, client_among
from piebald.data.clients.owner import is_frame, read_owners
from piebald.data.embeddings.embedded import embedded_by
from piebald.data.partition.split_settings import SplitSettings
from piebald.data.preparation import Preparation
from piebald.data.preparation.settings import PrepareSettings

_SIZES = ("side", "channels", "seconds", "rate")  # of images and recordings


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
    about, extractor = settings.get("data") or {}, settings.get("extractor")
    # those of a named data set are in the form of its rows
    sizes = {name: about[name] for name in _SIZES if name in about and about.get("source") is not None}
    given = DataSource(source=USERS.mark(source), **sizes)
    if Path(source).is_dir():
        # an extractor reads images as the run's data have them, and hides their shape
        given = given if extractor is not None else given.of_shape(pytree.form(blank_row(meta["rows"]).x))
    elif Path(source).suffix != ".npz":
        given = given.model_copy(update={"client": about.get("client")})
    newcomer = _client(given.read(), source, target, about, meta, validation, test)
    return newcomer if extractor is None else embedded_by(newcomer, extractor)


def from_table(frame: Any, target: str | None, meta: Mapping[str, Any], validation: float, test: float) -> Clients:
    """Return the rows of a table as a client, which are to be prepared as those of the run that `meta` describes.

    Args:
        frame: a pandas DataFrame with the columns of the run's tables, in any order.
        target, meta, validation, test: as of `from_file`.

    Raises:
        SettingError: a column is missing, or a target is none of the run's classes.
    """
    return _client(frame, "the newcomer", target, {}, meta, validation, test)


def _client(
    content: Any, source: str, target: str | None, about: Mapping[str, Any], meta: Mapping[str, Any],
    validation: float, test: float,
) -> Clients:  # fmt: skip
    """Return rows as a client; `about` is the run's section [data]."""
    agreed = None if meta.get("preparation") is None else Preparation(**meta["preparation"])
    split = SplitSettings.of(meta.get("split"))
    owner = read_owners(content, pair=True)[0]
    if owner.name is not None or owner.clients is not None:
        return DataSource(source=source).rows_of(content)  # type: ignore[return-value]  # they are clients already
    division = _like_the_run(split, owner.columns, validation, test)
    regression, goal, features = bool(about.get("regression")), target or about.get("target"), about.get("features")
    if owner.is_table and agreed is not None:
        goal = goal or (None if agreed.target is None else agreed.target.name)
        features = [name for name in agreed.names_in if name in owner.columns] or agreed.names_in
        regression = agreed.classes is None
    if owner.is_table and goal is None:
        raise SettingError(f"{source} is a table: name the column to predict with --target COLUMN")
    if is_frame(content):  # columns that say how rows are divided are no inputs
        gone = [name for name in split.columns if name in owner.columns and name not in division.columns]
        content = content.drop(columns=gone)
    run = RunRows(
        meta.get("classes") if agreed is None else agreed.classes,
        columns={"client": about.get("client"), "tokens": about.get("tokens")},
        prepare=None if agreed is None else PrepareSettings(),
        split=division,
    )
    named: dict[str, Any] = {"target": goal, "features": features} if owner.is_table else {}
    given = DataSource(source=source, regression=regression, **named)
    return client_among(read_owners(content, pair=True), given, "newcomer", run, division)[0]


def _like_the_run(split: SplitSettings, columns: list[str], validation: float, test: float) -> SplitSettings:
    """Return how a newcomer's rows are divided: as the run's, by those of its columns that the newcomer has."""
    group = [name for name in split.groups if name in columns] or None
    order = split.order if split.order in columns else None
    stratify = None if isinstance(split.stratify, str) and split.stratify not in columns else split.stratify
    return SplitSettings(validation=validation, test=test, seed=split.seed, group=group, order=order, stratify=stratify)
