"""Digests by which a site's rows are known where questions about them are counted: of what the site has.

It is found before anything that a server chooses, such as columns, an extractor or the size of images: else another
choice would be another set of rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from piebald.core.reading.files import opened
from piebald.data.clients.client_tables import is_table, read_table
from piebald.data.clients.data_source import DataSource
from piebald.privacy.question_ledger import Records, as_records, records_of


def place_of(source: DataSource, folder: Path) -> Path | None:
    """Return the folder that a site's rows lie in, None for those of an installed module or a named data set."""
    if source.source is None:
        return None
    path, colon, _ = source.source.rpartition(":")
    if colon and not path.endswith(".py"):
        return None
    return (folder / (path if colon else source.source)).resolve().parent


def row_records(source: DataSource, folder: Path, site: str, value: Any) -> Records | None:
    """Return the digests of a site's rows, None where they are known by the numbers that are trained on.

    Args:
        source: where they are, relative to `folder`.
        folder: folder of the source.
        site: name of the site, whose rows alone count where a column or folders name owners.
        value: what was read.
    """
    place = None if source.source is None or ":" in source.source else folder / source.source
    if place is not None and place.is_dir():
        folder_of_site = place / site if source.client is not None and (place / site).is_dir() else place
        return as_records(_digest(path) for path in sorted(folder_of_site.rglob("*")) if path.is_file())
    if place is not None and is_table(place):
        value = read_table(place, source.client)  # as the site says, whatever column the run names
    return _records(value, source.client, site)


def _records(value: Any, client: str | None, site: str) -> Records | None:
    if isinstance(value, Mapping):
        parts = [_records(part, client, site) for part in value.values()]
        records = [part for part in parts if part is not None]
        return np.unique(np.concatenate(records)) if records and len(records) == len(parts) else None
    if type(value).__module__.partition(".")[0] == "pandas":
        return _of_frame(value, client, site)
    if not isinstance(value, tuple) or not all(isinstance(part, np.ndarray) and part.dtype != object for part in value):
        return None
    is_own = np.array([str(owner) for owner in value[2]]) == site if len(value) == 3 else slice(None)
    return records_of([part[is_own] for part in value[:2]])


def _of_frame(frame: Any, client: str | None, site: str) -> Records:
    """Return the digests of a table's rows, which its order and the names of its columns do not change."""
    import pandas
    from pandas.api.types import is_numeric_dtype

    if client is not None and client in frame:
        frame = frame[frame[client].astype(str) == site]
    total = np.zeros(len(frame), dtype=np.uint64)
    for _, column in frame.items():
        numbers = is_numeric_dtype(column)
        # float64 for all numbers: 1 and 1.0, as another reader or a missing value beside it gives it, are one row
        plain = column.to_numpy("float64", na_value=np.nan) if numbers else column.astype(str).to_numpy(object)
        # sums of hashes are meant to wrap around at 2**64
        with np.errstate(over="ignore"):
            total += pandas.util.hash_array(plain)
    return np.unique(total)


def _digest(path: Path) -> bytes:
    with opened(path) as file:
        return hashlib.file_digest(file, "blake2b").digest()
