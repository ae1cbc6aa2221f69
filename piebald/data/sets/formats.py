"""Readers of the formats in which data sets are published.  Damaged files are refused, and nothing is unpickled."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from piebald.core.errors import SettingError, install
from piebald.core.files import json_value, opened, read_bytes
from piebald.core.reading import DAMAGE, check_members, read_unpacked, tar_members

if TYPE_CHECKING:
    from pandas import DataFrame


IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def read_idx(path: Path) -> NDArray[np.generic]:
    """Read an array in MNIST's IDX format, packed by gzip where the name ends in .gz.

    Raises:
        SettingError: the format differs, or the length does not match.
    """
    try:
        raw = read_unpacked(path)
    except DAMAGE as error:
        raise SettingError(f"{path} cannot be read, it may be damaged: replace it ({error})") from None
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in IDX_TYPES or len(raw) < 4 + 4 * raw[3]:
        raise SettingError(f"{path} is not of the IDX format, or it may be damaged: replace it")
    shape = tuple(int(side) for side in np.frombuffer(raw, ">u4", raw[3], 4))
    kind, start = np.dtype(IDX_TYPES[raw[2]]), 4 + 4 * raw[3]
    expected = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    if len(raw) - start != expected:
        raise SettingError(
            f"{path} must hold {expected} bytes of numbers {list(shape)}, got {len(raw) - start}: replace it"
        )
    # the file is big-endian, and torch takes numbers in the machine's order alone
    return np.frombuffer(raw, kind, offset=start).reshape(shape).astype(kind.newbyteorder("="))


def read_members(path: Path, names: Sequence[str]) -> list[bytes]:
    """Read files from a tar archive, by the last part of their names.

    Raises:
        SettingError: the archive is damaged or lacks one of them.
    """
    try:
        bodies = tar_members(path, names)
    except DAMAGE as error:
        raise SettingError(f"{path} cannot be read as a tar archive, it may be damaged: replace it ({error})") from None
    for name in names:
        if name not in bodies:
            raise SettingError(
                f"{path} must hold {name}, got {', '.join(sorted(bodies)) or 'nothing of it'}: replace it"
            )
    return [bodies[name] for name in names]


def read_zip(source: Path | bytes, names: Sequence[str], place: str) -> list[bytes]:
    """Read files from a zip archive, by the last part of their names.

    Args:
        source: path of the archive, or its bytes if it comes from another archive.
        names: names of the files.
        place: name of the archive, for the error message.

    Raises:
        SettingError: the archive is damaged or lacks one of them.
    """
    try:
        with (
            io.BytesIO(source) if isinstance(source, bytes) else opened(source) as file,
            zipfile.ZipFile(file) as archive,
        ):
            entries = {entry.filename.rsplit("/", 1)[-1]: entry for entry in archive.infolist()}
            for name in names:
                if name not in entries:
                    raise SettingError(f"{place} must hold {name}: replace it")
            chosen = [entries[name] for name in names]
            check_members(place, chosen, file.seek(0, io.SEEK_END))
            return [archive.read(entry) for entry in chosen]
    except (*DAMAGE, ValueError, NotImplementedError) as error:
        raise SettingError(
            f"{place} cannot be read as a zip archive, it may be damaged: replace it ({error})"
        ) from None


def read_numbers(raw: bytes, columns: int, place: str) -> NDArray[np.float64]:
    """Read numbers [lines, columns] from text separated by blanks, the format of UCI's txt files.

    Raises:
        SettingError: a value is not a number, or a line has another length.
    """
    import pandas

    try:
        frame = pandas.read_csv(io.BytesIO(raw), sep=r"\s+", header=None, dtype=np.float64)
    except ValueError as error:
        raise SettingError(f"{place} is not a table of numbers, it may be damaged: replace it ({error})") from None
    if frame.shape[1] != columns or frame.isna().to_numpy().any():
        raise SettingError(
            f"{place} must have {columns} numbers in each line, got {frame.shape[1]} or gaps: replace it"
        )
    return frame.to_numpy()


def read_xls(raw: bytes, header: int, place: str) -> DataFrame:
    """Read the first sheet of an Excel file in the old format (.xls), whose numbers are all floats.

    Args:
        raw: content of the file.
        header: number of the line with the names of columns, from 0.
        place: name of the file, for the error message.

    Raises:
        SettingError: xlrd is missing, or the file is damaged.
    """
    import pandas

    try:
        import xlrd
        from xlrd.compdoc import CompDocError
    except ImportError:
        raise SettingError(f"{place} is an old Excel file, which needs xlrd: {install('xls')}") from None
    try:
        sheet = xlrd.open_workbook(file_contents=raw, logfile=io.StringIO()).sheet_by_index(0)
        lines = [sheet.row_values(line) for line in range(header, sheet.nrows)]
        names = [str(name) for name in lines[0]]
    except (OSError, ValueError, IndexError, AssertionError, struct.error, xlrd.XLRDError, CompDocError) as error:
        raise SettingError(f"{place} cannot be read as Excel, it may be damaged: replace it ({error})") from None
    return pandas.DataFrame(lines[1:], columns=names)


def read_cifar(raw: bytes, label_bytes: int, place: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read images [n, 3, 32, 32] and labels [n, label_bytes] of CIFAR's binary version.

    Raises:
        SettingError: the length is not a whole number of records.
    """
    record = label_bytes + 3 * 32 * 32
    if not raw or len(raw) % record:
        raise SettingError(f"{place} must be records of {record} bytes, got {len(raw)} bytes: replace it")
    rows = np.frombuffer(raw, np.uint8).reshape(-1, record)
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, :label_bytes]


def read_leaf(folder: Path) -> tuple[list[NDArray[np.float32]], list[NDArray[np.int64]], list[str]]:
    """Read inputs and labels of each user from LEAF's JSON files in a folder, in order of file and user.

    Raises:
        SettingError: there is no file, or one is not in LEAF's format.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise SettingError(f"there is no JSON file in {folder}: put those there that LEAF's preprocess.sh wrote")
    x, y, users = [], [], []
    for file in files:
        try:
            stored = json_value(read_bytes(file, most=None), file)
            for user in stored["users"]:
                x.append(np.asarray(stored["user_data"][user]["x"], dtype=np.float32))
                y.append(np.asarray(stored["user_data"][user]["y"], dtype=np.int64))
                users.append(str(user))
                if len(x[-1]) != len(y[-1]):
                    raise ValueError(f"user {user} has {len(x[-1])} inputs and {len(y[-1])} labels")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise SettingError(f"{file} is not of LEAF's format, it may be damaged: replace it ({error})") from None
    return x, y, users
