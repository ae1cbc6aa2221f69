"""Files that only their owner can read."""

from __future__ import annotations

import os
from pathlib import Path


def write_private(path: Path, text: str | bytes, lasting: bool = True) -> None:
    """Write a file with mode 0600, either completely or not at all.

    Args:
        path: the file, which is replaced if it exists.
        text: the new content.
        lasting: whether to flush it to the disk, so that it survives a power failure.
    """
    data = text.encode() if isinstance(text, str) else text
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")  # another process may write the same file
    temporary.unlink(missing_ok=True)  # a link with this name would be written through
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
