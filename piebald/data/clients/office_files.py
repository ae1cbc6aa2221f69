"""Tables in the files of other programs: Excel, Stata, SAS and SPSS."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from piebald.core.errors import SettingError, import_extra
from piebald.core.files import check_size, opened, regular

EXCEL, STATA, SPSS, SAS, XPORT = ".xlsx", ".dta", ".sav", ".sas7bdat", ".xpt"
OFFICE = (EXCEL, STATA, SPSS, SAS, XPORT)


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
    if suffix == SPSS:
        pyreadstat = import_extra("pyreadstat", "office", f"{path} is an SPSS file, which needs pyreadstat")
        _, about = pyreadstat.read_sav(str(path), metadataonly=True)
        check_size(path, 16 * (about.number_rows or 0) * max(about.number_columns, 1), size)
        frame, _ = pyreadstat.read_sav(str(path), apply_value_formats=True)
        return frame
    with opened(path) as file:
        if suffix == STATA:
            return pandas.read_stata(file)
        if suffix in (SAS, XPORT):
            kinds: dict[str, Any] = {SAS: ("sas7bdat", "infer"), XPORT: ("xport", "utf-8")}
            return pandas.read_sas(file, format=kinds[suffix][0], encoding=kinds[suffix][1])
        import_extra("openpyxl", "office", f"{path} is an Excel file, which needs openpyxl")
        with zipfile.ZipFile(file) as parts:
            check_size(path, sum(part.file_size for part in parts.infolist()), size)
        file.seek(0)
        sheets = pandas.read_excel(file, sheet_name=None, engine="openpyxl")
    held = {name: sheet for name, sheet in sheets.items() if len(sheet.columns)}
    if len(held) != 1:
        raise SettingError(
            f"{path} must have one sheet with a table, got {', '.join(map(str, held)) or 'none'}: save the one that is "
            "meant as a file of its own"
        )
    (frame,) = held.values()
    return frame.rename(columns=lambda name: str(name).strip())
