"""The folder of a run before and without its store: whether a new run may use it, and whether it holds one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from piebald.core.errors import RunFolderError
from piebald.storage.lock import refuse_links
from piebald.storage.schema import DATABASE

START = "start.safetensors"  # what a run took over, see `lineage`
UNFINISHED = DATABASE + ".part"
_LEFTOVERS = {"run.lock", START, START + ".part", UNFINISHED, UNFINISHED + "-wal", UNFINISHED + "-shm"}


def missing(folder: Path) -> list[Path]:
    """The folders that making this one would make, the innermost first."""
    return [one for one in (folder, *folder.parents) if not one.exists()]


def remove_again(folder: Path, made: Sequence[Path]) -> None:
    """Remove what a run that could not be started has left, so that the same command can be tried again."""
    with suppress(OSError):  # what cannot be removed is taken for leftovers the next time
        for name in sorted(_LEFTOVERS | {DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm"}):
            (folder / name).unlink(missing_ok=True)
        for one in made:
            one.rmdir()


def refuse_occupied(folder: Path) -> None:
    """Refuse a folder for a new run that holds anything but what a killed start has left."""
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder} is a file: choose a folder for the run")
    if (folder / DATABASE).exists():
        raise RunFolderError(
            f"{folder} already holds a run: continue it with `piebald resume {folder}` or choose another folder"
        )
    if folder.is_dir() and {path.name for path in folder.iterdir()} - _LEFTOVERS:
        raise RunFolderError(f"{folder} is not empty and holds no run: choose another folder")


def existing(folder: Path) -> Path:
    """The folder, if it holds a run."""
    if not folder.exists():
        raise RunFolderError(f"there is no run folder at {folder}: check the path")
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is a file, not a run folder: name the folder that holds it")
    if not (folder / DATABASE).exists() and not (folder / DATABASE).is_symlink():
        raise RunFolderError(f"{folder} is not a run folder: it has no {DATABASE}")
    refuse_links(folder, written=False)
    return folder
