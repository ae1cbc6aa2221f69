"""Files of data sets: prepared ones in PIEBALD_DATA, and official ones, which are downloaded where they are missing."""

from __future__ import annotations

import http.client
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from piebald.core.errors import SettingError
from piebald.core.machine import cache_folder
from piebald.core.progress import Bar
from piebald.core.reading import read_arrays

VARIABLE = "PIEBALD_DATA"


def prepared(folder: str, file: str) -> Path:
    """The path of a prepared file.

    Raises:
        SettingError: the variable is not set, or the file is missing; the message says where to put it.
    """
    root = os.environ.get(VARIABLE)
    if not root:
        raise SettingError(
            f"the data set in {folder}/{file} needs {VARIABLE}, which is not set: "
            f"put the file in a folder {folder}/ and set {VARIABLE} to the folder above it"
        )
    path = Path(root) / folder / file
    if not path.is_file():
        raise SettingError(
            f"there is no file {path}: put {file} there, or set {VARIABLE} to the folder that has {folder}/{file}"
        )
    return path


def is_prepared(folder: str, file: str) -> bool:
    """Return whether a prepared file exists."""
    root = os.environ.get(VARIABLE)
    return bool(root) and (Path(str(root)) / folder / file).is_file()


def read_npz(folder: str, file: str, arrays: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Read named arrays of a prepared npz file.

    Raises:
        SettingError: the file is missing, is damaged, or lacks an array.
    """
    return read_arrays(prepared(folder, file), arrays)


TIMEOUT = 30.0  # seconds without a byte; the whole download may take longer
ATTEMPTS = 3
CHUNK = 1 << 16

_forbidden: ContextVar[bool] = ContextVar("downloads are forbidden", default=False)


@contextmanager
def forbidden() -> Iterator[None]:
    """Forbid downloads inside this context, to find out which files are already available."""
    token = _forbidden.set(True)
    try:
        yield
    finally:
        _forbidden.reset(token)


def cache() -> Path:
    """The folder for downloads, see `machine.cache_folder`; without a home, below the working folder."""
    return cache_folder() or Path(".cache", "piebald")


def official(folder: str, url: str, checksum: str) -> Path:
    """The path of a published file, which is downloaded, checked and cached if necessary.

    An interrupted download is resumed, at once or at the next call.

    Args:
        folder: folder of the data set, below PIEBALD_DATA and below the cache.
        url: address of the file; its last part is the file's name.
        checksum: published checksum, "sha256:..." or "md5:..."; it is also checked for files found on disk.

    Raises:
        SettingError: the file cannot be found or downloaded, or is not the published one.
    """
    import pooch

    file = url.rsplit("/", 1)[-1]
    places = [cache() / folder / file]
    if root := os.environ.get(VARIABLE):
        places.insert(0, Path(root) / folder / file)
    for path in places:
        if path.is_file():
            # checked on each call, since the user may have put another file there
            if not _is_published(path, checksum):
                raise SettingError(f"{path} is not the published file (another checksum): delete or replace it")
            return path
    if _forbidden.get():
        raise SettingError(f"{file} is not here: loading it downloads it from {url}")
    put = f"{VARIABLE} to a folder and put it in {folder}/{file} there"
    # it logs a line for each file, beside the bar that is shown here
    pooch.get_logger().setLevel("WARNING")
    try:
        return Path(pooch.retrieve(url, checksum, fname=file, path=places[-1].parent, downloader=_Resuming()))
    # a SettingError is a ValueError, which below stands for a wrong checksum
    except SettingError:
        raise
    except ValueError:
        raise SettingError(
            f"what {url} sent is not the published file (another checksum): try again later, or set {put}"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise SettingError(
            f"{file} is not here and cannot be downloaded from {url} ({reason}): "
            f"try again, or get it elsewhere, set {put}"
        ) from None


def _is_published(path: Path, checksum: str) -> bool:
    import pooch

    algorithm, _, digest = checksum.rpartition(":")
    return str(pooch.file_hash(str(path), alg=algorithm or "sha256")) == digest


class _Resuming:
    """Downloader for pooch that keeps incomplete files, so that the next attempt requests only the rest."""

    def __call__(self, url: str, output: Any, mover: Any, check_only: bool = False) -> None:
        # Next to pooch's temporary file, but with a name that the next attempt will find.
        part = Path(str(output)).parent / (url.rsplit("/", 1)[-1] + ".part")
        for attempt in range(ATTEMPTS):
            try:
                if _continue(url, part):
                    break
            except urllib.error.HTTPError as error:
                error.close()  # the error holds an open response
                if error.code == 416:  # nothing is left to send
                    break
                raise
            except (OSError, http.client.HTTPException):
                if attempt == ATTEMPTS - 1:
                    raise
            time.sleep(0.1 * attempt)
        else:
            raise OSError(f"it broke off after {part.stat().st_size:,} bytes, which are kept")
        shutil.move(part, str(output))


def _continue(url: str, part: Path) -> bool:
    """Request the missing bytes; True when the file is complete."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        # a server may ignore the range and send the whole file, which must not be appended to the part
        resumed = response.status == 206
        have = have if resumed else 0
        length = response.headers.get("Content-Length")
        whole = None if length is None else have + int(length)
        with part.open("ab" if resumed else "wb") as file, Bar(part.stem, whole, True, "bytes", lines=False) as bar:
            bar.show(have)
            while chunk := response.read(CHUNK):
                file.write(chunk)
                have += len(chunk)
                bar.show(have)
    return whole is None or part.stat().st_size >= whole
