"""A body that came, in a nameless file: a server that many sites send their results holds none of them in memory."""

from __future__ import annotations

from collections.abc import Mapping

from piebald.core.stored_vectors import NamelessFile, Place, StoredVectors


class StoredBody:
    """A body in a file, which ends with the last who has the body or a vector of it.

    Args:
        file: an empty file.
    """

    def __init__(self, file: NamelessFile) -> None:
        self._file, self._size = file, 0

    def __len__(self) -> int:
        return self._size

    def extend(self, data: bytes | memoryview) -> None:
        """Append bytes.

        Raises:
            OSError: the disk is full.
        """
        self._file.write(data)
        self._size += len(data)

    def read(self, start: int, stop: int) -> bytes:
        """Some of its bytes, as far as they are there."""
        made = bytearray(max(min(stop, self._size) - start, 0))
        self._file.read_into(memoryview(made), start)
        return bytes(made)

    def vectors(self, places: Mapping[str, Place]) -> StoredVectors:
        """The vectors that lie in it."""
        return StoredVectors(self._file, places)
