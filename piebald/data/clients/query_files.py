"""Queries of databases in files: a first line with SQLAlchemy's URL, and a SELECT after it.

    -- postgresql+psycopg://registry.hospital.example/visits
    SELECT age, ward, ill FROM visits WHERE consent

So neither an experiment file nor a run folder has what opens the database, and each site has a file of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from piebald.core.errors import SettingError, install
from piebald.core.reading.files import regular

QUERY = ".sql"
_ROWS = 100_000  # that are fetched at once
_LONGEST = 1 << 20  # bytes of a query
_FORM = "the database in its first line, like -- sqlite:///visits.db, and a SELECT after it"


def read_query(path: Path) -> Iterator[Any]:
    """Yield the rows of a query as pandas DataFrames, fetched in chunks; nothing is ever written.

    Raises:
        SettingError: the file has another form, SQLAlchemy or a driver is missing, or the database refuses.
        OSError: the file cannot be read.
    """
    if regular(path) > _LONGEST:
        raise SettingError(f"{path} is too long for a query: write {_FORM}")
    place, _, query = path.read_text(encoding="utf-8-sig").strip().partition("\n")
    if not place.startswith("--") or not re.match(r"\s*(select|with)\b", query, re.IGNORECASE):
        raise SettingError(f"{path} must have {_FORM}")
    try:
        import sqlalchemy
    except ImportError:
        raise SettingError(f"{path} asks a database, which needs SQLAlchemy: {install('sql')}") from None
    import pandas

    try:
        url = _located(sqlalchemy.make_url(place[2:].strip()), path.parent)
        engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.pool.NullPool)  # nobody asks a second time
        with engine.connect().execution_options(stream_results=True) as connection:
            connection.begin()  # and rolled back at the end, where pandas would commit what "WITH ... DELETE" does
            for rows in pandas.read_sql(query, connection, chunksize=_ROWS):
                if twice := next((column for column in rows.columns[rows.columns.duplicated()]), None):
                    raise SettingError(f"{path}: column {twice!r} occurs twice: rename one of them with AS")
                yield rows
    except ModuleNotFoundError as error:
        raise SettingError(f"{path} asks a database whose driver is missing: pip install {error.name}") from None
    except (sqlalchemy.exc.SQLAlchemyError, pandas.errors.DatabaseError) as error:
        cause = error.__cause__ or error
        reason = " ".join(str(getattr(cause, "orig", None) or cause).split())
        raise SettingError(f"{path}: the database does not answer the query: {reason}") from None


def _located(url: Any, folder: Path) -> Any:
    """Return a URL whose file, where it has one, is found from the folder of the query.

    Raises:
        SettingError: there is no such file, which SQLite would make.
    """
    if url.get_backend_name() != "sqlite":
        return url
    file = folder / (url.database or "")
    if not file.is_file():
        raise SettingError(f"there is no database {file}: correct the first line of the query")
    # only for reading, since Python begins no transaction before "WITH ... DELETE", which could be rolled back
    return url.set(database=file.resolve().as_uri()).update_query_dict({"mode": "ro", "uri": "true"})
