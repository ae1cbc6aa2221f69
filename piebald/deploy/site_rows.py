"""The rows of a site, from the source in its settings."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from piebald.adaptation import from_file
from piebald.contracts import Clients, Rows, Split
from piebald.errors import SettingError
from piebald.partition import LazyClients
from piebald.partition.collate import Collate
from piebald.partition.convert import is_several

SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class SiteSource(BaseModel):
    """Source of a site's rows.

    Attributes:
        source: a .csv, .parquet or .npz file, a folder of images or recordings, or "file.py:function" for a function
            without arguments that returns (x, y), or a mapping with such a pair for train, validation and test.
        target: the column of a table to predict.
        test, validation: shares of the rows to hold out, where they are not split yet.
        tokens, collate, length: as of `LazyClients`, for a function whose inputs are token ids or sequences of unequal
            length.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    target: str | None = None
    test: float = Field(default=0.2, ge=0, lt=1)
    validation: float = Field(default=0.1, ge=0, lt=1)
    tokens: bool = False
    collate: Collate = "stack"
    length: int | None = Field(default=None, ge=1)


class SiteRows:
    """All clients by name, with the rows of one of them (`contracts.Clients`)."""

    def __init__(self, names: Sequence[str], number: int, rows: Mapping[Split, Rows], classes: Sequence[str] | None):
        self.names, self.classes = names, classes
        self.common: Rows | None = None
        self._number, self._rows = number, rows
        self._none = rows["train"][:0]

    def __len__(self) -> int:
        return len(self.names)

    def rows(self, client: int, split: Split) -> Rows:
        """The rows of a split; none for other clients than the one."""
        return self._rows[split] if client == self._number else self._none

    def size(self, client: int, split: Split) -> int:
        """Number of rows."""
        return len(self.rows(client, split))

    def counts(self, client: int, split: Split) -> Sequence[int] | None:
        """Not disclosed."""
        return None


def rows_of_one(clients: Clients, number: int) -> SiteRows:
    """One client's rows of a partition, without those of the others."""
    rows = {split: clients.rows(number, split) for split in SPLITS}
    return SiteRows([str(clients.names[n]) for n in range(len(clients))], number, rows, clients.classes)


def own_rows(
    source: SiteSource, folder: Path, names: Sequence[str], number: int, classes: Sequence[str] | None, settings: Any
) -> SiteRows:
    """Load a site's own rows.

    Args:
        source: where they are, relative to `folder`.
        folder: folder of the source.
        names: names of all clients.
        number: client number of this site.
        classes: names of the classes, as in the run's terms.
        settings: the experiment's settings as plain values.

    Raises:
        SettingError: they cannot be read, or have another form.
    """
    if (load := _function(source, folder)) is not None:
        made: Clients = _given(load, source, str(names[number]), classes)
    else:
        meta = {"classes": classes, "settings": settings}
        made = from_file(str(folder / source.source), source.target, meta, source.validation, source.test)
    return SiteRows(names, number, {split: made.rows(0, split) for split in SPLITS}, classes)


def rows_before_a_run(source: SiteSource, folder: Path, name: str) -> SiteRows:
    """Load a site's own rows before a run has said which classes there are: those that the targets name are taken.

    Args:
        source: where they are, relative to `folder`.
        folder: folder of the source.
        name: name of the site.

    Raises:
        SettingError: they cannot be read.
    """
    load = _function(source, folder)
    if load is None:
        return own_rows(source, folder, [name], 0, None, {})
    loaded = load()
    targets = [pair[1] for pair in (loaded.values() if isinstance(loaded, Mapping) else [loaded])]
    arrays = [np.asarray(y) for y in targets if not is_several(y)]
    texts = [y for y in arrays if y.dtype.kind in "UOS"]
    classes = sorted({str(value) for y in texts for value in y.ravel()}) or None
    made = _given(lambda: loaded, source, name, classes)
    return SiteRows([name], 0, {split: made.rows(0, split) for split in SPLITS}, classes)


def missing_source(source: SiteSource, folder: Path) -> str | None:
    """Why the source of a site's rows is not there, or None."""
    path, colon, _ = source.source.rpartition(":")
    place = folder / (path if colon and path.endswith(".py") else source.source)
    return None if place.exists() else f"there is no file or folder {str(place)!r} with this site's rows"


def _function(source: SiteSource, folder: Path) -> Callable[[], Any] | None:
    """The site's own function that returns its rows, or None where its source is a file."""
    path, colon, function = source.source.rpartition(":")
    if not colon or not path.endswith(".py"):
        return None
    load = loader(folder / path, function)
    return lambda: _own(load, f"{path}:{function}")


def _given(load: Callable[[], Any], source: SiteSource, name: str, classes: Sequence[str] | None) -> Clients:
    """The rows that a function returns, as a client."""
    return LazyClients(
        1,
        lambda _: load(),
        names=[name],
        classes=classes,
        validation=source.validation,
        test=source.test,
        tokens=source.tokens,
        collate=source.collate,
        length=source.length,
    )


def loader(path: Path, name: str) -> Callable[[], Any]:
    """Import a function from the site's own Python file."""
    spec = importlib.util.spec_from_file_location("site_data", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise SettingError(f"there is no file {str(path)!r} to load the site's data with")
    module = importlib.util.module_from_spec(spec)
    execute = spec.loader.exec_module
    _own(lambda: execute(module), str(path))
    found = getattr(module, name, None)
    if not callable(found):
        raise SettingError(f"{path} has no function {name!r}: name one that returns (x, y)")
    return found  # type: ignore[no-any-return]


def _own(call: Callable[[], Any], what: str) -> Any:
    """Run the site's own code; what it raises, and that it ends the process, becomes one sentence."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise SettingError(f"{what} fails, so the site has no rows: {type(error).__name__}: {error}") from error
