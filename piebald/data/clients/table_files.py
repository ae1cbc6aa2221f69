"""Tables in files: CSV with its separators, encodings and ways to write numbers, Parquet, files of other programs, and
queries of databases.

What can be read in one way alone is read so, and said; what cannot is refused in a sentence with file, column and row.
"""

from __future__ import annotations

import codecs
import csv
import difflib
import io
import itertools
import logging
import os
import re
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from piebald.core.errors import SettingError, shown
from piebald.core.reading import check_text_table, read_parquet, separator_line, unpacked
from piebald.core.tensor_store import blocks, large_array, rows_at_once
from piebald.data.clients.office_files import EXCEL, OFFICE, read_office
from piebald.data.clients.query_files import QUERY, read_query
from piebald.data.clients.stored_table import joined_chunks
from piebald.data.preparation.column_models import LONGEST_UNIT
from piebald.data.preparation.columns import GAPS, ROWS, RowsOfFile, coded_words, factorized, is_numeric, row_number
from piebald.data.preparation.written_forms import OR, are_like_dates, date_readings, number_readings, units_among

SEPARATORS = {".csv": ",", ".tsv": "\t"}
OTHERS = (",", ";", "\t", "|")  # what files with these suffixes have as well
PARQUET = (".parquet", ".pq")
KINDS_OF_FILES = ".csv, .tsv, .parquet, .xlsx, .dta, .sav, .sas7bdat, .xpt or .sql"
AsWritten = Collection[str] | Literal["all"]
_CHUNK, _OVERLAP = 1 << 20, 256
_GAP_CODES = {
    *(-1, -7, -8, -9),
    *(sign * int(digit * length) for sign in (1, -1) for digit in "789" for length in (2, 3, 4, 5)),
}
_LONGEST_LINE = 64  # of one that says the separator
_NAMED = 3  # words among numbers that may be codes for gaps, and units of a column
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f]")  # bytes that no text has
_SUFFIXES = (*SEPARATORS, *PARQUET, *OFFICE, QUERY)
_ANY = ".*"  # suffix of a pattern of tables of all kinds
_HIDDEN = (".", "~$")  # beginnings of names that nobody means, as of a file that a spreadsheet holds open
_NEAR = 0.88  # likeness of names of which one is taken for a slip of the other: of site and sites, not of clinical
_BLANK = re.compile(rb"\n[ \t]*\r?\n")  # a line without a value, which is no row
_ZERO = re.compile(rb"(?:^|[,;\t|\"\n ])0\d")  # as of 007

_log = logging.getLogger(__name__)


def is_table(path: str | Path) -> bool:
    """Return whether a path is that of a table, judged by its suffix; that of a pattern may be `.*`."""
    return _suffix(path) in (*_SUFFIXES, _ANY)


def _suffix(path: str | Path) -> str:
    return Path(str(path).removesuffix(".gz")).suffix.lower()


def files_of(path: Path) -> list[Path]:
    """Return the files that a path names: one, or several in order where it, or a folder in it, has `*`, `?` or `[`.

    Of those that a pattern like `*.*` names, tables are taken, and none that is hidden or in a hidden folder.
    """
    if path.exists() or not is_table(path) or _fixed_folder(path) == path:
        return [path]
    return [file for file in _matches(path) if _suffix(file) in _SUFFIXES]


def _matches(pattern: Path) -> list[Path]:
    """Return the files that a pattern names in order, none of them hidden."""
    folder = _fixed_folder(pattern)
    found = sorted(file for file in folder.glob(str(pattern.relative_to(folder))) if file.is_file())
    hidden = {file for file in found if any(name.startswith(_HIDDEN) for name in file.relative_to(folder).parts)}
    return [file for file in found if file not in hidden]


def _fixed_folder(pattern: Path) -> Path:
    """Return the folder before the first part of a pattern with `*`, `?` or `[`; the path itself where none has one."""
    # a folder that is there under this very name, as "study [2]", is no pattern
    odd = [
        folder
        for folder in (pattern, *pattern.parents)
        if any(letter in folder.name for letter in "*?[") and not folder.exists()
    ]
    return odd[-1].parent if odd else pattern


def read_table(path: Path, names: str | None = None, as_written: AsWritten = ()) -> Any:
    """Read a CSV or Parquet file, or several with the same columns, or a query of a database, as a pandas DataFrame.

    A text file may have commas, semicolons (with decimal commas or points), tabs or bars, and a byte order mark.  It is
    in UTF-8, in UTF-16 with a byte order mark, or else in Windows-1252, which is said.

    Args:
        path: the file, or a pattern like rows-*.csv, */rows.csv or sites/*.*
        names: a column of names, such as that of the client.  Its text is taken as it is written: "007" is not "7",
            and "NA" is a name.  Where the files of a pattern have no such column, it has their own names without
            suffix, or the names of their folders where these differ, as of */rows.csv.
        as_written: columns whose text stays as it is written, for a cleaning that says how it is read; "all" of them.

    Returns:
        The rows; `attrs` has the path as "file" and the places of its rows (`row_number`), for messages.

    Raises:
        SettingError: the file is missing or cannot be read, has no rows, a column has two places or numbers that may be
            read in two ways, or pyarrow is missing.
    """
    if (files := files_of(path)) != [path]:
        return _joined(path, files, names, as_written)
    if not path.is_file():
        raise SettingError(f"there is no file {path}: give the path of a CSV or Parquet file")
    if (suffix := _suffix(path)) not in _SUFFIXES:
        raise SettingError(f"a table must be a {KINDS_OF_FILES} file, got {path}: save it as one of them")
    try:
        if suffix in PARQUET:
            frame = _placed(joined_chunks(read_parquet(path)), 1)
        elif suffix in OFFICE:
            frame = _placed(read_office(path, suffix), 1 + (suffix == EXCEL))
            frame = _all_plainly_written(frame, path, names, as_written)
        elif suffix == QUERY:
            frame = _all_plainly_written(_placed(joined_chunks(read_query(path)), 1), path, names, as_written)
        else:
            check_text_table(path, "".join(OTHERS))
            frame = _read_text(path, SEPARATORS[suffix], names, as_written)
            frame = _all_plainly_written(frame, path, names, as_written)
    except ImportError:
        raise SettingError(f"{path} is a Parquet file, which needs pyarrow: pip install pyarrow") from None
    except SettingError:
        raise
    except (OSError, EOFError, ValueError, OverflowError, MemoryError, zlib.error, csv.Error) as error:
        raise SettingError(_unreadable(path, " ".join(str(error).split()))) from None
    if not len(frame):
        raise SettingError(f"{path} names columns and has no rows: give a file with one row at least")
    frame.attrs["file"] = str(path)
    return frame


def _placed(frame: Any, first: int) -> Any:
    """Return the same rows, whose first one has this number in its file."""
    frame.attrs[ROWS] = (RowsOfFile(None, len(frame), first),)
    return frame


def _joined(pattern: Path, files: Sequence[Path], names: str | None, as_written: AsWritten) -> Any:
    """Return the rows of several tables one after the other.

    Raises:
        SettingError: there are none, or they have other columns.
    """
    if not files:
        raise SettingError(f"no file is called like {pattern}: give the path of a CSV or Parquet file, or a pattern")
    if others := [str(file.name) for file in _matches(pattern) if file not in files]:
        # a site whose spreadsheet is of an old kind must not be left out in silence
        named = ", ".join([*others[:5], *(["..."] if len(others) > 5 else [])])
        _log.warning("%s: files that are no tables are left out: %s", pattern, named)

    places, above = list[RowsOfFile](), _fixed_folder(pattern)
    in_folders = any(path.parent != above for path in files)

    def tables(columns: list[str]) -> Iterator[Any]:
        places.clear()
        unnamed = list[Path]()
        for number, path in enumerate(files):
            table = read_table(path, names, as_written)
            own = path.relative_to(above)
            if names is not None and names not in table.columns:
                near = difflib.get_close_matches(names, map(str, table.columns), n=1, cutoff=_NEAR)
                if near and not in_folders:  # a folder is called as its client is, whatever columns there are
                    raise SettingError(f"{own} has no column {names!r}: did you mean {near[0]!r}?")
                if in_folders and len(own.parts) == 1:
                    raise SettingError(f"{own} is in no folder, and others of {pattern} are: move it into its client's")
                table = table.assign(**{names: own.parts[0] if in_folders else _stem(own, files)})
                unnamed.append(own)
            if not in_folders and 0 < len(unnamed) < number + 1:
                raise SettingError(
                    f"other files of {pattern} have a column {names!r} and {unnamed[0]} has none: write it there"
                )
            if further := [column for column in table.columns if column not in columns]:
                raise _FurtherColumns(further)
            lacking.update(dict.fromkeys((str(own), column) for column in columns if column not in table.columns))
            places.extend(rows._replace(name=str(own)) for rows in table.attrs[ROWS])
            yield table.reindex(columns=columns)
        if unnamed and not in_folders:
            _log.warning("%s: no file has a column %r: each file is one of its own, by its name", pattern, names)

    lacking, columns, rows = dict[tuple[str, str], None](), list[str](), None
    while rows is None:
        try:
            rows = joined_chunks(tables(columns))
        except _FurtherColumns as error:  # files are read one by one, and a later one has a column more
            columns, lacking = [*columns, *error.names], {}
    for file, column in lacking:
        _log.warning("%s has no column %r, which others have: its rows count as gaps in it", above / file, column)
    rows.attrs = {"file": str(pattern), ROWS: tuple(places)}
    return rows


def _stem(own: Path, files: Sequence[Path]) -> str:
    """Return the name of a file without suffix.

    Raises:
        SettingError: another file of the same folder has the same.
    """
    stems = {path.name: Path(path.name.removesuffix(".gz")).stem for path in files}
    if twice := [name for name, stem in stems.items() if stem == stems[own.name] and name != own.name]:
        raise SettingError(f"{own} and {twice[0]} are both of {stems[own.name]!r}: take one out of the pattern's reach")
    return stems[own.name]


class _FurtherColumns(Exception):
    """A file has columns that those before it have not."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(names)
        self.names = names


def _unreadable(path: Path, message: str) -> str:
    """Return why a table cannot be read, from the message of pandas."""
    if many := re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", message):
        names, line, values = many.groups()
        return (
            f"{path} has {values} values in line {line}, and {names} in its first: put text that has a separator in "
            "quotes, or name all columns"
        )
    if quote := re.search(r"EOF inside string starting at row (\d+)", message):
        return f"{path} has a quote in line {int(quote[1]) + 1} that nothing closes: close it, or take it out"
    if path.exists() and not os.access(path, os.R_OK):
        return f"{path} cannot be read: permission denied: let this user read it"
    return f"{path} cannot be read as a table, it may be damaged: replace it ({message})"


def _encoding(path: Path) -> tuple[str, bool, bool]:
    """Return the encoding of a text file, and whether cells may begin with zeros of no number, and lines be blank.

    Raises:
        SettingError: it has bytes that are in no text.
    """
    encoding, decoder, lines = "utf-8-sig", codecs.getincrementaldecoder("utf-8")(), 1
    zeros = blank = False
    before = b""
    for number, chunk in enumerate(itertools.chain(_chunks(path), [b""])):
        if not number and chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return "utf-16", True, True
        both = before + chunk  # what is looked for may begin in one chunk and end in the next
        zeros = zeros or _ZERO.search(both) is not None
        blank = blank or _BLANK.search(both) is not None
        before = both[-_OVERLAP:]
        if control := _CONTROL.search(chunk):
            line = lines + chunk[: control.start()].count(b"\n")
            raise SettingError(
                f"{path} has a byte {control[0][0]:#04x} in line {line}, which is in no text: replace the file"
            )
        if encoding == "utf-8-sig":
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                line = lines + chunk[: error.start].count(b"\n")
                # Latin-1 has a letter for every byte, so that it is the last resort
                encoding = "cp1252" if _decodes(path, "cp1252") else "latin-1"
                name = {"cp1252": "Windows-1252", "latin-1": "Latin-1"}[encoding]
                _log.warning(
                    "%s is not in UTF-8 (line %d) and is read as %s: save it as UTF-8 if it is not", path, line, name
                )
        lines += chunk.count(b"\n")
    return encoding, zeros, blank


def _chunks(path: Path) -> Iterator[bytes]:
    with unpacked(path) as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _decodes(path: Path, encoding: str) -> bool:
    try:
        return all(chunk.decode(encoding) is not None for chunk in _chunks(path))
    except UnicodeDecodeError:
        return False


def _read_text(path: Path, separator: str, names: str | None, as_written: AsWritten) -> Any:
    """Read a CSV file with this separator, or with the one that its first line has instead."""
    import pandas

    encoding, zeros, blank = _encoding(path)
    separator, header, skipped = _header(path, separator, encoding)
    if not any(header):
        raise SettingError(f"{path} has no first line with the names of its columns: write it")
    if twice := next((column for column in header if column and header.count(column) > 1), None):
        raise SettingError(f"{path}: column {twice!r} occurs twice: rename one of them")

    def read(**options: Any) -> Iterator[Any]:
        options |= {"sep": separator, "index_col": False, "low_memory": False, "skiprows": skipped}
        options["chunksize"] = rows_at_once(len(header))
        with (
            unpacked(path) as file,
            pandas.read_csv(file, engine="c", encoding=encoding, skipinitialspace=True, **options) as chunks,
        ):
            yield from chunks

    def read_column(name: str, **options: Any) -> Iterator[Any]:
        return (chunk.iloc[:, 0] for chunk in read(usecols=[header.index(name)], dtype=str, **options))

    with warnings.catch_warnings():
        # pandas warns and drops values that are beyond the names of the first line
        warnings.simplefilter("error", pandas.errors.ParserWarning)
        try:
            frame = _of_one_kind(read)
            if separator == ";":  # decimal commas are likely, and the reading with more columns of numbers is right
                frame = max(frame, _of_one_kind(read, decimal=","), key=lambda table: len(_numeric(table, "iuf")))
        except pandas.errors.ParserWarning:
            raise SettingError(
                f"{path} has rows of more values than its first line has names ({shown(', '.join(header), 60)}): write "
                "the name of each column there"
            ) from None
        frame.columns = [column.strip() for column in frame.columns]
        _placed(frame, 2)  # after the names of the columns
        places = _places_among_blank_lines(path, separator, encoding, skipped) if blank else range(len(frame))
        if names is not None and names in frame:
            frame[names] = _counted(_series(read_column(names, keep_default_na=False, na_values=[""])))
        for column in filter(lambda name: _stays(name, as_written), frame.columns):
            frame[column] = _series(read_column(column))
        for column in _numeric(frame, "iu") if zeros else ():
            padded = (texts[texts.str.fullmatch(r"0\d+", na=False)] for texts in read_column(column))
            if column != names and (some := next((texts for texts in padded if len(texts)), None)) is not None:
                frame[column] = _series(read_column(column))
                _log.warning(
                    "%s: column %r has values like %s in row %d, whose zeros in front count: it is taken as text",
                    path, column, shown(some.iloc[0]), places[some.index[0]] + 2,
                )  # fmt: skip
    if blank and len(frame):
        frame.index = places
        frame.attrs[ROWS] = (RowsOfFile(None, places[-1] + 1, 2),)
    return frame


def _places_among_blank_lines(path: Path, separator: str, encoding: str, skipped: int) -> Any:
    """Return the places [n] of rows among those that a spreadsheet shows, which has blank lines as rows."""
    with unpacked(path) as file, io.TextIOWrapper(file, encoding=encoding, newline="") as text:
        # the line of names has the place -1, so that the row after it has 0
        lines = enumerate(islice(csv.reader(text, delimiter=separator, skipinitialspace=True), skipped, None), -1)
        held = [place for place, cells in lines if len(cells) > 1 or "".join(cells).strip()]
    return np.array(held[1:], dtype=np.int64)


def _numeric(frame: Any, kinds: str) -> list[str]:
    """Return the columns that NumPy has as such kinds of numbers."""
    return [name for name, dtype in frame.dtypes.items() if dtype.kind in kinds]


def _series(chunks: Iterator[Any]) -> Any:
    """Return a column that is read in chunks."""
    return joined_chunks(chunk.to_frame() for chunk in chunks).iloc[:, 0]


def _of_one_kind(read: Callable[..., Iterator[Any]], **options: Any) -> Any:
    """Return a table that is read in chunks, whose columns have the kinds that all of their values have.

    pandas knows the values of a chunk, and not that text comes later, which makes text of the numbers before it.

    Args:
        read: reads the chunks of the table.
        options: of the reading.
    """
    kinds, first, rows = dict[str, set[str]](), None, 0
    for chunk in read(**options):
        first, rows = chunk if first is None else first, rows + len(chunk)
        for name in chunk:
            kinds.setdefault(name, set()).add(_kind(chunk[name]))
    # of one chunk alone pandas has seen all values, so it need not be read twice
    if first is None or rows == len(first):
        return first
    mixed = {name: str for name, held in kinds.items() if len(held - {"nothing"}) > 1}
    return joined_chunks(read(dtype=mixed, **options), rows)


def _kind(series: Any) -> str:
    """Return what pandas takes the values of some rows of a text file for."""
    held = series.dropna()
    if not len(held):
        return "nothing"
    if series.dtype.kind in "iuf":
        return "numbers"
    return "truths" if series.dtype.kind == "b" or isinstance(held.iloc[0], bool) else "text"


def _all_plainly_written(frame: Any, path: Path, names: str | None, as_written: AsWritten) -> Any:
    """Return a table whose columns of text are such as `_plainly_written` returns, but for names and what stays."""
    units = dict[str, str]()
    for column in frame.columns[frame.dtypes.map(lambda kind: kind.kind in "OTU")]:
        if column != names and not _stays(column, as_written):
            frame[column], unit = _plainly_written(frame[column], path)
            units |= {column: unit} if unit and len(unit) <= LONGEST_UNIT else {}
    frame.attrs[ROWS] = tuple(rows._replace(units=tuple(units.items())) for rows in frame.attrs[ROWS])
    return frame


def _stays(column: str, as_written: AsWritten) -> bool:
    return as_written == "all" or column in as_written


def _header(path: Path, separator: str, encoding: str) -> tuple[str, list[str], int]:
    """The separator of a file, the names in its first line, and the lines before: that of Excel, like sep=;."""
    names_by_separator: dict[str, list[str]] = {}
    with unpacked(path) as file:
        said = separator_line(file.readline(_LONGEST_LINE))
    skipped = int(said is not None)
    for candidate in (separator, *OTHERS) if said is None else (said,):
        with unpacked(path) as file, io.TextIOWrapper(file, encoding=encoding, newline="") as text:
            first = next(islice(csv.reader(text, delimiter=candidate, skipinitialspace=True), skipped, None), [])
        names_by_separator[candidate] = [name.strip() for name in first]
        if len(first) > 1:
            return candidate, names_by_separator[candidate], skipped
    separator = said or separator
    return separator, names_by_separator[separator], skipped


def _counted(names: Any) -> Any:
    """Return names as numbers if all of them are whole numbers as Python writes them, so that 2 comes before 10."""
    # "007" and "+7" stay text, and 18 digits always fit into int64.
    whole = re.compile(r"0|-?[1-9]\d{0,17}")
    if names.isna().any() or not all(whole.fullmatch(name) for name in names.unique()):
        return names
    return names.astype("int64")


def _plainly_written(series: Any, path: Path) -> tuple[Any, str]:
    """Return a column of text as numbers, or as dates like 2024-05-31, where its values are such in another form.

    With it comes the unit of its numbers, or the form of dates that are not written so, "" where there is none.

    What it is taken for is said.

    Raises:
        SettingError: numbers may be read in two ways.
    """
    import pandas

    codes, different = pandas.factorize(series)
    texts = pandas.Series(different, dtype=object).astype(str).str.strip()
    held = texts[~texts.isin(GAPS)]
    # the last one is for gaps, whose code is -1
    plain = pandas.Series([*texts, np.nan], dtype=object)
    if not len(held):
        return series, ""

    def like(place: Any, what: str) -> str:
        row = row_number(series, int(np.argmax(codes == place)))
        return f"{path}: column {series.name!r} has {what} like {shown(texts[place])} in row {row}"

    if len(odd := held[pandas.to_numeric(held, errors="coerce").isna()]):
        readings = [*number_readings(held.tolist())]
        # the value with the most marks shows best how numbers are written
        telling = like(odd.str.count(r"[^\w]").idxmax(), "numbers")
        if len(readings) > 1:
            raise SettingError(
                f"{telling}, which may be read with {' or with '.join(reading.words for reading in readings)}: write "
                "all of them in one way, with a point before decimals and nothing between thousands, or set parse of "
                "the column to 'decimal comma' or 'decimal point' in [prepare]"
            )
        for reading in readings:
            _log.warning("%s, read with %s", telling, reading.words)
            numbers_by_place = pandas.Series(reading.numbers, held.index).reindex(plain.index).to_numpy()
            numbers = large_array(codes.shape, np.float64)
            for rows in blocks(len(codes)):
                numbers[rows] = numbers_by_place[codes[rows]]
            return pandas.Series(numbers, series.index, copy=False), reading.unit
        if 1 < len(units := units_among(held.tolist())) <= _NAMED:
            _log.warning("%s and the units %s, and stays text: write it in one unit",
                         like(held.index[0], "numbers"), shown(", ".join(units), 40))  # fmt: skip
    dates = date_readings(held)
    form = OR.join(dates)
    if len(dates) > 1:
        _log.warning("%s, which may be %s and so stay text, unless other clients' tell: write them like 2024-05-31",
                     like(held.index[0], "dates"), form)  # fmt: skip
    elif dates:
        ((form, moments),) = dates.items()
        _log.warning("%s, read as %s", like(held.index[0], "dates"), form)
        timed = (moments.dropna() != moments.dropna().dt.normalize()).any()
        written = moments.dropna().dt.strftime("%Y-%m-%d %H:%M:%S" if timed else "%Y-%m-%d")
        plain[written.index] = written
    else:
        if are_like_dates(held):
            _log.warning("%s, which have no common form and so stay text: write them like 2024-05-31",
                         like(held.index[0], "dates"))  # fmt: skip
        plain[texts.index] = texts
    if str(series.dtype) == "category":
        places, words = pandas.factorize(plain.to_numpy()[:-1])
        return pandas.Series(coded_words(np.append(places, -1)[codes], [*words]), series.index), form
    return pandas.Series(plain.to_numpy()[codes], series.index), form


def mixed_reason(series: Any, gaps: Sequence[str] = ()) -> str | None:
    """Return a sentence about a column of numbers with some words among them that are no gaps, None of others."""
    import pandas

    codes, different = factorized(series, gaps)
    is_word = pandas.to_numeric(pandas.Series(different, dtype=object), errors="coerce").isna().to_numpy(dtype=bool)
    words = np.flatnonzero(np.append(is_word, False)[codes])
    if not len(words) or 2 * len(words) > (codes >= 0).sum():
        return None
    others = f" and {len(words) - 1} more rows" if len(words) > 1 else ""
    names = [different[index] for index in np.flatnonzero(is_word)]
    code = (
        f", or set gaps = {[*gaps, *names]} in [prepare] where they stand for no value" if len(names) <= _NAMED else ""
    )
    return (
        f"column {series.name!r} has numbers, and {shown(series.iloc[words[0]], 40)} in row "
        f"{row_number(series, words[0])}{others}: leave these cells empty, or correct them{code}"
    )


def gap_code_reasons(series: Any, gaps: Sequence[str] = ()) -> Iterator[str]:
    """Yield a sentence about each number of a column that may be a code for a gap; arguments as of `gap_codes`."""
    for code, rows in gap_codes(series, gaps):
        yield (
            f"column {series.name!r} has {code:g} in {rows} rows, far from all other numbers: if it stands for a gap, "
            f"set gaps = ['{code:g}'] in [prepare]"
        )


def gap_codes(series: Any, gaps: Sequence[str] = ()) -> Iterator[tuple[float, int]]:
    """Yield the smallest and the largest number if it may be a code for a gap, like -9 or 999, and its rows.

    It is one of such codes, in two rows at least, and farther from the next number than half the range of all others.

    Args:
        series: numbers, or their texts.
        gaps: codes that are known to stand for one.
    """
    import pandas

    if is_numeric(series) and not _GAP_CODES & {series.min(), series.max()}:  # at once, where there are many rows
        return
    codes, different = factorized(series, gaps)
    numbers = pandas.to_numeric(pandas.Series(different, dtype=object), errors="coerce").to_numpy(dtype=np.float64)
    values, places = np.unique(numbers, return_inverse=True)  # missing ones last
    counts = np.bincount(places[codes[codes >= 0]], minlength=len(values))[: np.isfinite(values).sum()]
    values = values[np.isfinite(values)]
    for index, near, rest in ((0, 1, values[1:]), (-1, -2, values[:-1])):
        if len(values) < 5 or counts[index] < 2 or values[index] not in _GAP_CODES:
            continue
        if abs(values[index] - values[near]) > np.ptp(rest) / 2:
            yield float(values[index]), int(counts[index])
