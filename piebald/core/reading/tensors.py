"""Tensors in safetensors files and in the zip archives of torch."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from piebald.core.reading.files import check_size, opened, regular
from piebald.core.reading.packed import check_members


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
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
