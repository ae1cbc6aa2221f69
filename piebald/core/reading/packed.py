"""Packed files, metered while they are unpacked: gzip, zip, tar, npz without unpickling, and tensors."""

from __future__ import annotations

import gzip
import io
import math
import tarfile
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from piebald.core.errors import SettingError
from piebald.core.reading.files import UnfitFile, check_size, opened, regular

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
