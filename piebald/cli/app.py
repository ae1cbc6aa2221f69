"""Shared parts of the commands: the application, common options, and first checks."""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from piebald.core.errors import PiebaldError, SettingError, shown

app = typer.Typer(
    name="piebald",
    help="Federated learning for clients that are not alike.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from piebald.version import __version__

        print(f"piebald {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting; repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")]
Out = Annotated[str | None, typer.Option("--out", help="The folder to write to; a new one under runs/ by default.")]
Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", metavar="MODULE", help="A module of yours that the run may name; repeatable."),
]
StartFrom = Annotated[
    Path | None, typer.Option("--from", metavar="RUN", help="Begin with the models of this finished run.")
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Also print how clients are computed: engine, batch of clients, workers."),
]
Deterministic = Annotated[
    bool,
    typer.Option("--deterministic", help="Choose how clients are computed by counting alone, so that bits repeat."),
]
RuntimeSettings = Annotated[str | None, typer.Option("--runtime", help="Where to run: simulator, ray or federation.")]


class Interrupted(PiebaldError):
    """An interruption by Ctrl-C."""

    exit_code = 130


def show_log(verbose: bool) -> None:
    """Print the package's log to standard error, if wanted."""
    if verbose:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("piebald").setLevel(logging.INFO)


def check_run(folder: Path) -> None:
    """Refuse a missing folder at once, before the slow import of what could open it."""
    if not folder.is_dir():
        raise SettingError(f"there is no run folder {str(folder)!r}: give the folder that piebald run wrote")


def is_transfer(folder: Path) -> bool:
    """Whether a folder holds a run of vertical training between two parties."""
    return (folder / "transfer.toml").is_file()


def search_plugins(run: Path) -> None:
    """Find plugins in the current folder, which is never the run's own: its files are data."""
    from piebald.core.references import search

    here = Path.cwd().resolve()
    if run.resolve() not in (here, *here.parents):
        search(here)


def is_search(folder: Path) -> bool:
    """Whether a folder holds a search for settings or recipes."""
    return (folder / "search.json").is_file()


def pair(text: str) -> tuple[str, Any]:
    """Parse KEY=VALUE from the command line; the value is TOML or else text."""
    from piebald.settings.toml_document import value_of

    key, equals, value = text.partition("=")
    if not equals or not key or not value:
        raise SettingError(f"--set must be KEY=VALUE, got {shown(text)}")
    return key, value_of(value, f"--set {key}")


def end_on_term() -> None:
    """Handle SIGTERM like Ctrl-C: what was recorded is safe, and the run is recorded as stopped."""
    if threading.current_thread() is threading.main_thread():  # the only one that may
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def progress(as_json: bool, quiet: bool) -> bool:
    """Whether to show progress, a bar on a terminal and elsewhere a line a minute: without --json and --quiet."""
    return not as_json and not quiet
