"""The runs in folders and in the folders below them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from piebald.core.errors import RunFolderError
from piebald.report.tables import History
from piebald.storage.schema import DATABASE


def load(paths: Sequence[Path | str]) -> list[History]:
    """The runs in these folders and their subfolders, each once, sorted by path.

    Args:
        paths: run folders, or folders that contain run folders.

    Raises:
        RunFolderError: a path does not exist, or there is no run below it.
    """
    folders: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise RunFolderError(f"{path} is not a folder: name run folders, or folders that contain run folders")
        found = sorted(database.parent for database in path.rglob(DATABASE))
        if not found:
            raise RunFolderError(f"there is no run in {path}: no folder below it has a {DATABASE}")
        folders |= dict.fromkeys(folder.resolve() for folder in found)
    if not folders:
        raise RunFolderError("no run was named: name run folders, or folders that contain run folders")
    return [History(folder) for folder in folders]
