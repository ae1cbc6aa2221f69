"""The transfer commands of the command line: start and resume."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from piebald.core.errors import PiebaldError, SettingError
from piebald.core.progress import Bar
from piebald.core.result_table import ResultTable
from piebald.vertical import transfer_runs as runs
from piebald.vertical.party_store import read_settings
from piebald.vertical.protocol import ROLES
from piebald.vertical.transfer_results import TransferResult, is_simulated, secrecy, write_page
from piebald.vertical.transfer_runs import Watcher
from piebald.vertical.transfer_settings import TransferSettings

Say = Callable[[str], None]


class Stopped(PiebaldError):
    """The user pressed Ctrl-C."""

    exit_code = 130


def start(settings: TransferSettings, role: str | None, bar: bool, say: Say) -> tuple[TransferResult, ResultTable]:
    """Train as the settings say, both parties or one; return the result and its table.

    `say` is called with the statements of the run about its secrecy before it starts.
    """
    folder = Path(settings.out) if settings.out is not None else _free()
    if role is not None and role not in ROLES:
        raise SettingError(f"--party must be source or target, got {role!r}")
    _announce(settings, role is None, say)
    with progress(settings, folder, bar) as watch:
        if role is None:
            finished = runs.run(settings, out=folder, watch=watch, tell=_caution)
        else:
            finished = runs.run_party("source" if role == "source" else "target", settings, folder, watch, _caution)
    return finished, reported(finished)


def resume(folder: Path, bar: bool, say: Say) -> tuple[TransferResult, ResultTable]:
    """Continue an interrupted run."""
    settings = read_settings(folder)
    _announce(settings, is_simulated(folder), say)
    with progress(settings, folder, bar) as watch:
        finished = runs.resume(folder, watch, _caution)
    return finished, reported(finished)


def _announce(settings: TransferSettings, simulated: bool, say: Say) -> None:
    for name, sentence in secrecy(settings, simulated).items():
        say(f"{name}: {sentence}")


def _caution(sentence: str) -> None:
    print(f"warning: {sentence}", file=sys.stderr)


def reported(finished: TransferResult) -> ResultTable:
    """Write the report page if both parties' folders are here; return the table of the result."""
    table, folder = finished.table(), finished.folder
    if folder is not None and all((folder / role / "after.safetensors").exists() for role in ROLES):
        table.append({"name": "page", "value": str(write_page(folder)[0])})
    return table


@contextmanager
def progress(settings: TransferSettings, folder: Path, wanted: bool) -> Iterator[Watcher | None]:
    """Show progress with seconds per step and traffic; explain how to go on after Ctrl-C."""
    try:
        with Bar("", settings.steps, wanted, unit="step") as bar:
            bar.show(note="generating keys")

            def watch(line: dict[str, Any]) -> None:
                ways = f"{line['sent'] / 1000:,.0f} kB out, {line['received'] / 1000:,.0f} kB in"
                losses = "".join(f", {name} {value:.3g}" for name, value in (line["losses"] or {}).items())
                bar.show(line["step"] + 1, f"{line['seconds']:.2f} s per step, {ways}{losses}")

            yield watch if wanted else None
    except KeyboardInterrupt:
        raise Stopped(f"interrupted; the checkpoints are safe, continue with: piebald resume {folder}") from None


def _free() -> Path:
    """Return the first free name under runs/."""
    number = 1
    while (folder := Path("runs") / ("transfer" if number == 1 else f"transfer-{number}")).exists():
        number += 1
    return folder
