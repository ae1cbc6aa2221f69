"""Tables and pictures, measured before they are parsed: CSV, Parquet, and each picture by its own decoder."""

from __future__ import annotations

import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from piebald.core.errors import SettingError
from piebald.core.reading.files import check_size, opened, regular
from piebald.core.reading.packed import unpacked
from piebald.core.stored_vectors import rows_at_once

if TYPE_CHECKING:
    from PIL.Image import Image

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
