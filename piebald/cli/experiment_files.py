"""Experiment files as commands use them: loading, the folder to write to, and the way to go on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from piebald.cli.app import Interrupted, SharedOptions
from piebald.core.errors import SettingError

if TYPE_CHECKING:
    from piebald.experiments.file import ExperimentSettings


def load_settings(
    file: Path | None,
    options: SharedOptions,
    flags: Sequence[str] | None = None,
    kind: type[ExperimentSettings] | None = None,
    text: str | None = None,
) -> ExperimentSettings:
    """Return the settings of a file, or of the built-in experiment, changed by the flags of the command line.

    Args:
        file: the file.
        options: shared options of the command.
        flags: in place of `options.sets`.
        kind: the class of settings.
        text: the settings in TOML in place of those of the file, which is then a table.
    """
    from piebald.experiments.file import ExperimentSettings

    changes = list(options.sets or ()) if flags is None else list(flags)
    if options.deterministic:
        # the kind comes first, so that it keeps what is set below it
        kinds = [] if options.runtime is None else [f"runtime.kind={options.runtime}"]
        changes = [*kinds, *changes, "runtime.deterministic=true"]
    return (kind or ExperimentSettings).load(
        file, changes, out=options.out, runtime=options.runtime, scale=options.scale, text=text
    )


def label_of(settings: ExperimentSettings, otherwise: str) -> str:
    """Return the name of an experiment: its label, its recipe's name, or else the given one."""
    return settings.label or (settings.recipe.name if settings.recipe else otherwise)


def out_folder(settings: ExperimentSettings, name: str | None = None) -> Path:
    """Return the folder to write to: the one that the settings name, or the first free name under runs/."""
    if settings.out is not None:
        return Path(settings.out)
    return free_folder(Path("runs"), name or label_of(settings, "comparison"))


def free_folder(parent: Path, name: str, occupied: Collection[str] = ()) -> Path:
    """Return the first folder NAME, NAME-2, ... that does not exist and is not occupied."""
    # a label may have slashes, which would be folders, and blanks, which a shell would split at
    stem = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
    folder, number = parent / stem, 1
    while folder.exists() or str(folder) in occupied:
        number += 1
        folder = parent / f"{stem}-{number}"
    return folder


@contextmanager
def guarded(folder: Path, again: str, settings: ExperimentSettings | None = None) -> Iterator[None]:
    """Print the way to continue after Ctrl-C, and add the place in the settings to an error about a setting."""
    try:
        yield
    except KeyboardInterrupt:
        if not folder.exists():
            raise Interrupted("interrupted before anything was written") from None
        raise Interrupted(f"interrupted; completed server steps are saved, continue with: {again}") from None
    except SettingError as error:
        raise (settings.located(error) if settings else error) from None
