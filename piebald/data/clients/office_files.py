"""Tables in the files of other programs: Excel, Stata, SAS and SPSS."""

from __future__ import annotations

import datetime
import re
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.parsers import expat

from piebald.core.errors import SettingError, import_extra, shown
from piebald.core.files import check_size, opened, regular
from piebald.core.reading import check_members

EXCEL, STATA, SPSS, SAS, XPORT = ".xlsx", ".dta", ".sav", ".sas7bdat", ".xpt"
OFFICE = (EXCEL, STATA, SPSS, SAS, XPORT)
_READERS: dict[str, tuple[str, str, dict[str, Any]]] = {  # of pyreadstat
    SPSS: ("SPSS", "read_sav", {"apply_value_formats": True}),
    SAS: ("SAS", "read_sas7bdat", {}),
    XPORT: ("SAS", "read_xport", {}),
}
_CELL = re.compile(r"([A-Za-z]{0,3})([0-9]{0,9})")  # of which XFD1048576 is the last one
_WHOLE = 2.0**53  # up to which a float64 has each whole number
_ZEROS = re.compile(r"0\d+")


def read_office(path: Path, suffix: str) -> Any:
    """Return the rows of a file as a pandas DataFrame: of an Excel file those of the only sheet, with names in row 1.

    Values that Stata and SPSS have labels for are these labels.

    Args:
        path: the file.
        suffix: one of `OFFICE`.

    Raises:
        SettingError: a library is missing, or there are several sheets.
        OSError, ValueError: it cannot be read, is damaged, or expands too far.
    """
    try:
        return _read(path, suffix)
    except (SettingError, OSError, MemoryError, ValueError):
        raise
    except Exception as error:  # the readers of damaged files have errors of their own kinds
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _read(path: Path, suffix: str) -> Any:
    import pandas

    size = regular(path)
    if suffix in _READERS:
        program, reader, options = _READERS[suffix]
        # pandas has wrong zeros of .xpt, takes no dates there, and refuses version 8 of it
        pyreadstat = import_extra("pyreadstat", "office", f"{path} is an {program} file, which needs pyreadstat")
        read = getattr(pyreadstat, reader)
        _, about = read(str(path), metadataonly=True)
        # texts may be as long as they are declared: where rows are compressed, many letters take a few bytes
        row = sum(max(16, width) for width in about.variable_storage_width.values())
        check_size(path, (about.number_rows or 0) * max(row, 16), size, "replace it, or save it with shorter texts")
        frame, _ = read(str(path), **options)
        return _as_of_text(frame)
    with opened(path) as file:
        if suffix == STATA:
            return pandas.read_stata(file)
        import_extra("openpyxl", "office", f"{path} is an Excel file, which needs openpyxl")
        with zipfile.ZipFile(file) as parts:
            check_members(path, parts.infolist(), size)
            for part in parts.infolist():
                rows, columns = _extent(parts, part)
                # rows and cells before those that are there are made as empty ones
                check_size(path, 8 * rows * columns, size)
        file.seek(0)
        sheets = pandas.read_excel(file, sheet_name=None, engine="openpyxl", dtype=object)
    held = {name: sheet for name, sheet in sheets.items() if len(sheet.columns)}
    if len(held) != 1:
        names = shown(", ".join(map(str, held)), 100)[1:-1] or "none"
        raise SettingError(
            f"{path} must have one sheet with a table, got {names}: save the one that is meant as a file of its own"
        )
    (frame,) = held.values()
    texts = {name: [text for text in frame[name] if isinstance(text, str)] for name in frame}
    # the file has a text once, however many cells have it
    check_size(path, sum(len(text) for column in texts.values() for text in column), size)
    frame = frame.infer_objects()
    for name, column in texts.items():
        # as in a text file: 007 is no number
        if column and not any(map(_ZEROS.fullmatch, column)):
            with suppress(ValueError, TypeError):
                frame[name] = pandas.to_numeric(frame[name])
    frame.columns = [str(name).strip() for name in frame.columns]
    if twice := next((name for name in frame.columns if [*frame.columns].count(name) > 1), None):
        raise SettingError(f"{path}: column {twice!r} occurs twice: rename one of them")
    return frame


def _as_of_text(frame: Any) -> Any:
    """Return a table as a text file would have it, where a program knows no whole numbers, or has dates as objects."""
    import pandas

    for name in frame.columns:
        column = frame[name]
        if column.dtype.kind == "f" and len(column):
            if (column == column.round()).all() and column.abs().max() < _WHOLE:
                frame[name] = column.astype("int64")
        elif not isinstance(column.dtype, pandas.CategoricalDtype) and column.dtype.kind not in "iubM":
            column = column.mask(column == "")  # these programs have no other gaps in text
            dates = column.notna().any() and all(isinstance(value, datetime.date) for value in column.dropna())
            frame[name] = pandas.to_datetime(column, errors="coerce") if dates else column
    return frame


def _extent(parts: zipfile.ZipFile, part: zipfile.ZipInfo) -> tuple[int, int]:
    """Return the last row and column that a part of an Excel file names; 0 where it is no sheet."""
    rows = columns = 0

    def note(tag: str, attributes: dict[str, str]) -> None:
        nonlocal rows, columns
        kind = tag.rpartition(":")[2]
        if kind in ("row", "c") and "r" in attributes:
            if (cell := _CELL.fullmatch(attributes["r"])) is None:
                raise ValueError(f"a sheet has a cell {shown(attributes['r'], 40)}")
            number = 0
            for letter in cell[1].upper():
                number = 26 * number + ord(letter) - ord("A") + 1
            rows, columns = max(rows, int(cell[2] or 0)), max(columns, number)

    parser = expat.ParserCreate()
    parser.StartElementHandler = note
    with suppress(expat.ExpatError), parts.open(part) as file:  # such as of a picture, or what no reader reads either
        parser.ParseFile(file)
    return rows, columns
