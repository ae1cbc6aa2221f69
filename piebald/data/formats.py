"""Readers of the formats in which data sets are published.  What is damaged is refused, and nothing is unpickled."""

from __future__ import annotations

import gzip
import json
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from piebald.errors import SettingError

IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def read_idx(path: Path) -> NDArray[np.generic]:
    """An array of MNIST's IDX format, plain or gzip.

    Raises:
        SettingError: another format, or fewer bytes than it announces.
    """
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise SettingError(f"{path} cannot be read, it may be damaged: replace it ({error})") from None
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in IDX_TYPES or len(raw) < 4 + 4 * raw[3]:
        raise SettingError(f"{path} is not of the IDX format: replace it")
    shape = tuple(int(side) for side in np.frombuffer(raw, ">u4", raw[3], 4))
    kind, start = np.dtype(IDX_TYPES[raw[2]]), 4 + 4 * raw[3]
    wanted = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    if len(raw) - start != wanted:
        raise SettingError(
            f"{path} must hold {wanted} bytes of numbers {list(shape)}, got {len(raw) - start}: replace it"
        )
    return np.frombuffer(raw, kind, offset=start).reshape(shape).astype(kind.newbyteorder("="))


def read_members(path: Path, names: Sequence[str]) -> list[bytes]:
    """Files out of a tar archive, by the last part of their names.

    Raises:
        SettingError: the archive is damaged or lacks one of them.
    """
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = member.name.rsplit("/", 1)[-1]
                if name in names and member.isfile() and (opened := archive.extractfile(member)) is not None:
                    found[name] = opened.read()
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise SettingError(f"{path} cannot be read as a tar archive, it may be damaged: replace it ({error})") from None
    for name in names:
        if name not in found:
            raise SettingError(
                f"{path} must hold {name}, got {', '.join(sorted(found)) or 'nothing of it'}: replace it"
            )
    return [found[name] for name in names]


def read_cifar(raw: bytes, label_bytes: int, where: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images [n, 3, 32, 32] and labels [n, label_bytes] of CIFAR's binary version.

    Raises:
        SettingError: bytes that are no whole number of records.
    """
    record = label_bytes + 3 * 32 * 32
    if not raw or len(raw) % record:
        raise SettingError(f"{where} must be records of {record} bytes, got {len(raw)} bytes: replace it")
    rows = np.frombuffer(raw, np.uint8).reshape(-1, record)
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, :label_bytes]


def read_leaf(folder: Path) -> tuple[list[NDArray[np.float32]], list[NDArray[np.int64]], list[str]]:
    """Inputs and labels of each user from the JSON files of LEAF in a folder, in order of file and user.

    Raises:
        SettingError: no file, or one that is not of LEAF's format.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise SettingError(f"there is no JSON file in {folder}: put those there that LEAF's preprocess.sh wrote")
    x, y, users = [], [], []
    for file in files:
        try:
            stored = json.loads(file.read_bytes())
            for user in stored["users"]:
                x.append(np.asarray(stored["user_data"][user]["x"], dtype=np.float32))
                y.append(np.asarray(stored["user_data"][user]["y"], dtype=np.int64))
                users.append(str(user))
                if len(x[-1]) != len(y[-1]):
                    raise ValueError(f"user {user} has {len(x[-1])} inputs and {len(y[-1])} labels")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise SettingError(f"{file} is not of LEAF's format, it may be damaged: replace it ({error})") from None
    return x, y, users
