"""The bounded reader of what is packed or has columns: it takes no more memory than was checked.

    packed     gzip, zip, tar and npz without unpickling, metered while they are unpacked
    tables     CSV, and Parquet, metered by its metadata and batch by batch
    images     pictures, each by the decoder that its name calls for
    databases  SQLite without views, triggers or virtual tables, with limits

A decoder is chosen by the name of a file and never by its content.  What is refused is an `UnfitFile`, an OSError,
which callers turn into the sentence that they have for a file that cannot be read.  Plain text and JSON are read in
`files`.
"""

from __future__ import annotations

import gzip
import io
import math
import re
import sqlite3
import struct
import tarfile
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from piebald.core.errors import SettingError
from piebald.core.files import UnfitFile, check_size, opened, regular
from piebald.core.tensor_store import rows_at_once

if TYPE_CHECKING:
    from PIL.Image import Image


LONGEST = 256 << 20  # bytes of a value or of a row
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: LONGEST,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 100_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 200,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 20,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000,
}
_TICK = 1_000_000  # instructions of SQLite's machine
_COLUMN = r"\w+ (?:INTEGER|NUMERIC|REAL|TEXT)(?: PRIMARY KEY| NOT NULL)*"
_TABLE = re.compile(
    rf'CREATE TABLE "?\w+"? ?\(\s*{_COLUMN}(?:\s*,\s*{_COLUMN})*(?:\s*,\s*PRIMARY KEY \(\w+(?:, \w+)*\))?\s*\)'
)


class BoundedConnection(sqlite3.Connection):
    """A connection whose statements end: after a number of instructions that grows with the size of the file.

    What has no views and no expressions of a stranger's own takes few for each byte; a damaged file may have none.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ticks = self._most = 0

    def bound(self, size: int) -> None:
        """Set the limits, for a file of `size` bytes, before anything else is done."""
        for limit, value in _LIMITS.items():
            self.setlimit(limit, value)
        # honest queries take a few instructions for each byte; a damaged tree of pages may lead in a circle
        self._most = 1000 + size // 10_000
        self.set_progress_handler(self._ticked, _TICK)
        # the schema of a stranger's file may call functions in views, triggers and defaults
        self.execute("PRAGMA trusted_schema = OFF")
        self.execute("PRAGMA cell_size_check = ON")

    def execute(self, *args: Any) -> sqlite3.Cursor:
        """Run a statement, whose instructions are counted from here on."""
        self._ticks = 0
        return super().execute(*args)

    def _ticked(self) -> int:
        self._ticks += 1
        return self._ticks > self._most


def connected(path: Path, uri: str | None = None) -> BoundedConnection:
    """Open a database with limits, in autocommit mode.  Threads may share it, one at a time.

    Args:
        path: the file.
        uri: how to open it, by default for reading and writing.

    Raises:
        OSError: it, or what SQLite reads beside it, is no regular file.
        sqlite3.Error: it cannot be opened.
    """
    size = regular(path, links=False) if path.exists() or path.is_symlink() else 0
    # SQLite opens these by itself, and would follow a link or wait for a pipe
    for suffix in ("-wal", "-shm", "-journal"):
        beside = path.with_name(path.name + suffix)
        if beside.exists() or beside.is_symlink():
            size += regular(beside, links=False)
    options: dict[str, Any] = {"isolation_level": None, "check_same_thread": False, "factory": BoundedConnection}
    db: BoundedConnection = sqlite3.connect(uri or path, uri=uri is not None, **options)
    try:
        db.bound(size)
    except BaseException:
        db.close()
        raise
    return db


def foreign_part(db: sqlite3.Connection, indexes: Collection[str]) -> str | None:
    """Return what a database has besides plain tables, in words, or None.

    Such a part would run when the tables are read or written.

    Args:
        db: the database.
        indexes: the statements that made its own indexes.
    """
    try:
        parts = db.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    except sqlite3.DatabaseError as error:
        if "malformed database schema" in str(error):
            return "a part that SQLite cannot read"
        raise
    for kind, name, sql in parts:
        expected = sql is None or sql in indexes if kind == "index" else kind == "table" and _is_plain(sql)
        if not expected:
            return f"the {kind if kind != 'table' else 'unusual table'} {str(name)[:80]!r}"
    return None


def _is_plain(sql: Any) -> bool:
    # bounded first, since a pattern with repetitions may backtrack for long
    return isinstance(sql, str) and len(sql) < 10_000 and _TABLE.fullmatch(sql) is not None


_ODD_HEADER = (ValueError, TypeError, SyntaxError, tokenize.TokenError)  # NumPy reads it as a literal of Python
DAMAGE = (OSError, EOFError, zlib.error, zipfile.BadZipFile, tarfile.TarError)  # what unpacking a damaged file raises


class _Metered(io.RawIOBase):
    """Bytes of a stream, whose number is checked against the size of the file that they come from."""

    def __init__(self, stream: Any, path: Path, stored: int) -> None:
        self._stream, self._path, self._stored, self._count = stream, path, stored, 0

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        content = self._stream.read(len(room))
        room[: len(content)] = content
        # what comes out is counted, since the size that a header claims may be untrue
        self._count += len(content)
        check_size(self._path, self._count, self._stored)
        return len(content)

    def close(self) -> None:
        self._stream.close()
        super().close()


@contextmanager
def unpacked(path: Path) -> Iterator[io.BufferedReader[Any]]:
    """The content of a file, unpacked where its name ends in .gz, and metered.

    Raises:
        OSError, EOFError, zlib.error: it cannot be read, is damaged, or expands too far; also while it is read.
    """
    with opened(path) as file:
        if path.suffix != ".gz":
            yield file
            return
        stream = _Metered(gzip.GzipFile(fileobj=file, mode="rb"), path, regular(path))
        with io.BufferedReader(stream, 1 << 20) as buffered:
            yield buffered


def read_unpacked(path: Path) -> bytes:
    """All of `unpacked`."""
    with unpacked(path) as file:
        return file.read()


def tar_members(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    """The files of a tar archive, packed where its name says so, with these last parts of their names.

    Raises:
        OSError, EOFError, zlib.error, tarfile.TarError: it cannot be read, is damaged, or expands too far.
    """
    contents: dict[str, bytes] = {}
    with unpacked(path) as file, tarfile.open(fileobj=file, mode="r|") as archive:
        for member in archive:
            name = member.name.rsplit("/", 1)[-1]
            # a sparse member claims holes of any size in a few bytes; a link would lead elsewhere
            if name in names and member.isfile() and not member.issparse():
                check_size(path, member.size, regular(path))
                stream = archive.extractfile(member)
                contents[name] = b"" if stream is None else stream.read()
    return contents


def check_members(path: Path | str, entries: Sequence[zipfile.ZipInfo], stored: int) -> None:
    """Refuse members of a zip archive that expand too far, or are packed by other means than zlib.

    Raises:
        UnfitFile: one is, or all together do.
    """
    for entry in entries:
        # bzip2 and LZMA expand far further than zlib, and some Pythons lack them
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UnfitFile(f"{path} is packed in a way that is not read: pack it again with an ordinary zip")
    check_size(path, sum(entry.file_size for entry in entries), stored)


def read_arrays(path: Path, names: Sequence[str] | None = None) -> dict[str, NDArray[Any]]:
    """Read arrays of an npz file; nothing is unpickled.

    Args:
        path: the file.
        names: the arrays to read, by default all.

    Raises:
        SettingError: the file cannot be read, lacks an array, or claims more than it holds.
    """
    try:
        with opened(path) as file, zipfile.ZipFile(file) as archive:
            members = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
            for name in members if names is None else names:
                if name not in members:
                    raise SettingError(
                        f"{path} must hold an array {name!r}, got {', '.join(members) or 'none'}: replace the file"
                    )
            chosen = {name: entry for name, entry in members.items() if names is None or name in names}
            check_members(path, list(chosen.values()), regular(path))
            return {name: _array(archive, entry, path) for name, entry in chosen.items()}
    except SettingError:
        raise
    except UnfitFile as error:
        raise SettingError(f"{path} cannot be read as npz: {error}") from None
    except (*DAMAGE, *_ODD_HEADER, OverflowError, MemoryError, RuntimeError) as error:
        raise SettingError(f"{path} cannot be read as npz, it may be damaged: replace it ({error})") from None


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path) -> NDArray[Any]:
    """One array, whose header is compared with its size first."""
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        if dtype.hasobject:
            raise SettingError(
                f"{path} cannot be read as npz: {entry.filename} holds Python objects, which are never unpickled: save "
                "numbers, or text with array.astype(str)"
            )
        # NumPy makes room for what the header claims before it reads, so a few bytes could fill the memory
        if math.prod(shape) * dtype.itemsize > entry.file_size:
            raise SettingError(f"{path}: {entry.filename} claims to be {list(shape)} but has {entry.file_size} bytes")
    with archive.open(entry) as file:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
        return array


@contextmanager
def opened_tensors(path: Path | str, links: bool = True) -> Iterator[Any]:
    """A safetensors file, as `safetensors.safe_open` opens it for torch: its tensors lie inside it and not in another.

    Raises:
        OSError: it is no regular file, or memory cannot hold it.
        SafetensorError: it is no safetensors.
    """
    size = regular(path, links)
    check_size(path, size, size)
    with safe_open(str(path), framework="pt") as file:
        yield file


def state_dict(path: Path) -> Any:
    """Return what torch saved in a zip archive; nothing but tensors in plain containers is unpickled.

    Raises:
        OSError: it is no regular file, or expands too far.
        Exception: of zipfile, torch or pickle, where it is something else.
    """
    with opened(path) as file:
        with zipfile.ZipFile(file) as archive:
            check_members(path, archive.infolist(), regular(path))
        # the archive was read through the same handle: what was checked is what is loaded
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)


MOST_COLUMNS = 100_000
_LINE = 64 * MOST_COLUMNS  # bytes of the first line
_SEPARATOR_LINE = re.compile(rb'(?:\xef\xbb\xbf)?"?sep=([,;|\t])"?[\r\n]*', re.IGNORECASE)
_CHUNK = 1 << 20
_BATCH = 1 << 14  # rows that are decoded before they are counted
_FLAT = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}  # bytes of a value


def separator_line(line: bytes) -> str | None:
    """Return the separator that Excel wants to be told in a line of its own before the names of columns, or None.

    Examples:
        >>> separator_line(b"sep=;"), separator_line(b"sep,x")
        (';', None)
    """
    match = _SEPARATOR_LINE.fullmatch(line)
    return None if match is None else match[1].decode()


def check_text_table(path: Path, separators: str) -> None:
    """Refuse a text table with too many columns, or one whose cells would fill the memory.

    Args:
        path: the file.
        separators: what may stand between cells.

    Raises:
        SettingError: it has too many columns.
        OSError, EOFError, zlib.error: it cannot be read, is damaged, or expands too far.
    """
    stored = regular(path)
    with unpacked(path) as file:
        # bounded, since a file without line ends is a single line
        line = file.readline(_LINE)
        if separator_line(line) is not None:
            line = file.readline(_LINE)
        if max(line.count(letter.encode()) for letter in separators) >= MOST_COLUMNS:
            raise SettingError(f"{path} has more than {MOST_COLUMNS:,} columns: leave out those that are not needed")
        if len(line) == _LINE:
            raise SettingError(f"{path} has a first line of more than {_LINE:,} bytes, which are no names of columns")
        memory = 0
        while line:
            # 8 bytes for each cell: as a float64 it takes so many, however short its text is
            memory += len(line) + 8 * sum(line.count(letter.encode()) for letter in f"{separators}\n")
            check_size(path, memory, stored)
            line = file.read(_CHUNK)


def read_parquet(path: Path) -> Iterator[Any]:
    """Yield the rows of a Parquet file as pandas DataFrames, of `rows_at_once` rows each.

    A run of equal values takes a few bytes in the file, and a long text is stored once however often it occurs.  So the
    rows that the metadata promise are counted first, and then what they take, batch by batch; texts stay codes of a
    dictionary until it is known how long they are together.

    Raises:
        ImportError: pyarrow is missing.
        SettingError: a column holds lists or tables.
        OSError, ValueError, MemoryError: it cannot be read, is damaged, or expands too far.
    """
    import pyarrow
    from pyarrow import parquet

    stored = regular(path)
    with opened(path) as source:
        limits = {"thrift_string_size_limit": 64 << 20, "thrift_container_size_limit": 1_000_000}
        with parquet.ParquetFile(source, **limits) as file:
            texts, schema = _checked_columns(path, file, stored), file.schema_arrow
        source.seek(0)
        with parquet.ParquetFile(source, read_dictionary=texts, **limits) as file:
            batches = _metered(path, file, stored)
            several, any_rows = max(rows_at_once(len(schema)) // _BATCH, 1), False
            while (held := list(islice(batches, several))) or not any_rows:  # a table without rows has columns
                yield _with_texts(pyarrow.Table.from_batches(held, file.schema_arrow), schema).to_pandas()
                any_rows = True


def _checked_columns(path: Path, file: Any, stored: int) -> list[str]:
    """The columns of texts, after a check of all columns by the metadata."""
    rows, texts, memory = file.metadata.num_rows, [], 0
    if file.metadata.num_columns > MOST_COLUMNS:
        raise SettingError(f"{path} has more than {MOST_COLUMNS:,} columns: leave out those that are not needed")
    for number in range(file.metadata.num_columns):
        column = file.schema.column(number)
        if column.max_repetition_level or column.path != column.name:
            raise SettingError(
                f"{path}: column {column.path.partition('.')[0]!r} holds lists or tables, and a table has one value in "
                "each cell: save it without that column"
            )
        # a run of a billion equal values has a few bytes in the file
        memory += rows * _FLAT.get(column.physical_type, 4)
        if column.physical_type == "BYTE_ARRAY":
            texts.append(column.path)
    check_size(path, memory, stored)
    for group in range(file.metadata.num_row_groups):
        memory += file.metadata.row_group(group).total_byte_size
        check_size(path, memory, stored)
    return texts


def _metered(path: Path, file: Any, stored: int) -> Iterator[Any]:
    memory = 0
    for batch in file.iter_batches(_BATCH, use_threads=False):
        memory += sum(_bytes(column) for column in batch.columns)
        check_size(path, memory, stored)
        yield batch


def _bytes(column: Any) -> int:
    """The bytes of a column once its texts are no codes any more."""
    import pyarrow
    from pyarrow import compute

    if not pyarrow.types.is_dictionary(column.type):
        return int(column.nbytes)
    lengths = compute.binary_length(column.dictionary)
    return int(compute.sum(compute.take(lengths, column.indices)).as_py() or 0) + 8 * len(column)


def _with_texts(table: Any, schema: Any) -> Any:
    """The table with texts in place of codes, in the form of the file's own schema."""
    for number, field in enumerate(schema):
        if table.schema.field(number).type != field.type:
            table = table.set_column(number, field.name, table.column(number).cast(field.type))
    return table.replace_schema_metadata(schema.metadata)


FORMATS = {  # others would be chosen by content, and some of them start programs, as Ghostscript for PostScript
    ".bmp": "BMP",
    ".gif": "GIF",
    ".jpeg": "JPEG",
    ".jpg": "JPEG",
    ".png": "PNG",
    ".ppm": "PPM",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".webp": "WEBP",
}


MOST_PIXELS = 1 << 26  # of one image


_DAMAGE = (OSError, ValueError, SyntaxError, MemoryError, OverflowError, struct.error)  # what decoders raise


@contextmanager
def picture(source: Path | IO[bytes], kind: str, where: str) -> Iterator[Image]:
    """An image whose size has been checked; the first one where there are several.

    Args:
        source: the file, or its content.
        kind: the format that it must have, one of the values of `FORMATS`.
        where: name of the file, for the error message.

    Raises:
        SettingError: it is none of this format, is damaged or too large; also while the block decodes it.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise SettingError(f"{where}: images need Pillow: pip install pillow") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large images, which are refused here
            file = opened(source) if isinstance(source, Path) else source
            with file, Image.open(file, formats=(kind,)) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise ValueError(f"its {image.width} x {image.height} pixels are more than {MOST_PIXELS:,}")
                yield image
    except UnidentifiedImageError:
        raise SettingError(
            f"{where} cannot be read as an image: its name says {kind}, and its content is something else: rename it, "
            "or leave it out"
        ) from None
    except (*_DAMAGE, Image.DecompressionBombError) as error:
        raise SettingError(f"{where} cannot be read as an image: replace it or leave it out ({error})") from None
