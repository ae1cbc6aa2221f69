"""The application, the options that commands share, first checks, experiment files, and how results are printed.

Results are tables for people, and one JSON object for programs.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer
import typer.core
from pydantic_core import to_jsonable_python

from piebald.core.errors import PiebaldError, SettingError, shown
from piebald.core.plain_text import WIDTH, printable
from piebald.core.result_table import ResultTable

if TYPE_CHECKING:
    from piebald.experiments.file import ExperimentSettings
    from piebald.report.tables import History

LOOPBACK = "127.0.0.1"
LOG = ("log_level", "log_json", "log_file")  # options of a process that writes a log
PAGE = ("status_port", "status_host")  # options of a server
ROWS = ("client", "column", "split", "categories", "credentials", "secure", "save")  # options of a question about rows

app = typer.Typer(
    name="piebald",
    help="Federated learning for clients that are not alike.",
    rich_markup_mode=None,
    # such tracebacks can show local variables, which may hold rows
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@dataclasses.dataclass(frozen=True, slots=True)
class SharedOptions:
    """SharedOptions that commands share: each command has those that it names where it is registered (`command`)."""

    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting; repeatable.")
    ] = None
    scale: Annotated[
        str | None, typer.Option("--scale", metavar="NAME", help="Change settings as the file's [scales.NAME] says.")
    ] = None
    out: Annotated[
        str | None, typer.Option("--out", help="The folder to write to; a new one under runs/ by default.")
    ] = None
    runtime: Annotated[str | None, typer.Option("--runtime", help="Where to run: simulator, ray or federation.")] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print what would be trained, and end.")
    ] = False
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="Choose how clients are computed by counting alone, so that bits repeat."),
    ] = False
    start_from: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="Begin with the models of this finished run.")
    ] = None
    plugins: Annotated[
        list[str] | None,
        typer.Option(
            "--plugin", metavar="MODULE", help="A module of yours that the run may name, or its file; repeatable."
        ),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option("--log-level", help="What the log holds at least: debug, info, warning or error."),
    ] = "info"
    log_json: Annotated[bool, typer.Option("--log-json", help="Write the log as JSON, one object a line.")] = False
    log_file: Annotated[
        Path | None,
        typer.Option("--log-file", help="Write the log to this file, rotated at 10 MB; five rotated files are kept."),
    ] = None
    status_port: Annotated[
        int | None, typer.Option("--status-port", min=1, max=65535, help="Serve a read-only status page on this port.")
    ] = None
    status_host: Annotated[
        str,
        typer.Option("--status-host", help="The page's address; other than loopback it is HTTPS and needs a token."),
    ] = LOOPBACK
    client: Annotated[str | None, typer.Option("--client", help="The column of a table that names the client.")] = None
    column: Annotated[list[str] | None, typer.Option("--column", help="A column that is wanted; repeatable.")] = None
    split: Annotated[
        Literal["train", "validation", "test"] | None,
        typer.Option("--split", help="Whose rows, where clients have splits: train by default."),
    ] = None
    categories: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN=A,B", help="The categories of a column; repeatable.")
    ] = None
    credentials: Annotated[
        Path | None, typer.Option("--credentials", help="Ask the sites of a federation: the server's credentials.")
    ] = None
    secure: Annotated[bool, typer.Option("--secure", help="Add clients' sums up under masks.")] = False
    save: Annotated[
        list[Path] | None,
        typer.Option("--save", metavar="FILE", help="Write the tables as .html, .csv, .md or .txt, too; repeatable."),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")] = False
    wide: Annotated[bool, typer.Option("--wide", help="Print all columns, however wide the table is.")] = False
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Also print how clients are computed: engine, batch of clients, workers."),
    ] = False

    @property
    def progress(self) -> bool:
        """True to show progress, a bar on a terminal and elsewhere a line a minute: without --json and --quiet."""
        return not self.as_json and not self.quiet

    def say(self, line: str) -> None:
        """Print a line for people: nothing with --json or --quiet."""
        if self.progress:
            print(line)

    def start_log(self) -> None:
        """Write the log of a federation's process as the options say."""
        from piebald.federation.operate.logs import start_log

        start_log(self.log_level, self.log_json, self.log_file)


class _ExperimentCommand(typer.core.TyperCommand):
    """A command that reads an experiment file, whose keys its help lists."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the keys behind the options; imported here alone, since it takes seconds."""
        from piebald.experiments.reference import meanings

        with formatter.section("Keys of the file, and of --set"):
            formatter.write_dl([*meanings().items()])


def command(
    *shared: str, name: str | None = None, group: typer.Typer = app, lists_keys: bool = False, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command, which has options of its own and shared ones.

    Args:
        shared: fields of `SharedOptions` that the command has; it gets them all together, as its first argument.
        name: the word that calls it, by default the name of the function.
        group: the commands among which it is.
        lists_keys: whether its help lists the keys of experiment files.
        defaults: defaults of shared options that differ from those of `SharedOptions`.
    """
    # typer reads the signature, which therefore gets the shared options behind those of the function
    annotations = get_type_hints(SharedOptions, include_extras=True)
    defaults = {field.name: field.default for field in dataclasses.fields(SharedOptions)} | defaults
    kind = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(n, kind, default=defaults[n], annotation=annotations[n]) for n in shared]

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def call(**values: Any) -> None:
            options = SharedOptions(**{option: values.pop(option) for option in shared})
            show_log(options.verbose)
            return function(options, **values)

        # evaluated, since annotations are text in files with `from __future__ import annotations`
        _, *parameters = inspect.signature(function, eval_str=True).parameters.values()
        # by keyword only, so that a parameter without a default may follow one that has one
        signature = inspect.Signature([*(parameter.replace(kind=kind) for parameter in parameters), *added])
        call.__signature__ = signature  # type: ignore[attr-defined]
        return group.command(name, cls=_ExperimentCommand if lists_keys else None)(call)

    return register


def _print_version(is_given: bool) -> None:
    if is_given:
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


class Interrupted(PiebaldError):
    """An interruption by Ctrl-C."""

    exit_code = 130


def show_log(verbose: bool) -> None:
    """Print the package's log to standard error where `verbose` is true."""
    if verbose:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("piebald").setLevel(logging.INFO)


def check_run(folder: Path) -> None:
    """Refuse a missing folder at once, before the slow import of what could open it."""
    if not folder.is_dir():
        raise SettingError(f"there is no run folder {str(folder)!r}: give the folder that piebald run wrote")


def kind_of(folder: Path) -> Literal["run", "transfer", "search", "site", "trees", "ensemble"]:
    """Return what a folder holds, by the file that this has in it: a run, or several in folders, where it has none."""
    kinds: dict[str, Literal["transfer", "search", "site", "trees", "ensemble"]] = {
        "transfer.toml": "transfer", "search.json": "search", "credentials.json": "site", "trees.json": "trees",
        "ensemble.json": "ensemble",
    }  # fmt: skip
    if (folder.resolve().parent / "transfer.toml").is_file() and (folder / "run.db").is_file():
        raise SettingError(f"{folder} is one party's part of a transfer: give the folder that it lies in")
    return next((kind for name, kind in kinds.items() if (folder / name).is_file()), "run")


def pair(text: str) -> tuple[str, Any]:
    """Parse KEY=VALUE from the command line; the value is TOML or else text.

    Examples:
        >>> pair("recipe.lr=0.1"), pair("recipe.name=fedavg")
        (('recipe.lr', 0.1), ('recipe.name', 'fedavg'))
    """
    from piebald.settings.toml_document import value_of

    key, equals, value = text.partition("=")
    if not equals or not key or not value:
        raise SettingError(f"--set must be KEY=VALUE, got {shown(text)}")
    return key, value_of(value, f"--set {key}")


def end_on_term() -> None:
    """Handle SIGTERM like Ctrl-C: what was recorded is safe, and the run is recorded as stopped."""
    if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print one JSON object."""
    # JSON has no NaN; a score that does not exist is null
    plain = to_jsonable_python(value, inf_nan_mode="null", fallback=str)
    print(json.dumps(plain, ensure_ascii=False))


def print_result(options: SharedOptions, value: Mapping[str, Any], line: str) -> None:
    """Print what a command did: one JSON object with --json, else a line for people."""
    if options.as_json:
        print_json(value)
    else:
        options.say(line)


def print_table(table: ResultTable, wide: bool = True, width: int | None = None, most: int | None = None) -> None:
    """Print a table; square brackets in a name are no markup, and no name moves the cursor.

    Args:
        table: what is printed.
        wide: whether all columns are printed; else those that have a value, as far as they fit beside each other.
        width: columns of the terminal; by default those that it has, or the variable COLUMNS where not all columns are
            wanted.  Output that is no terminal has lines as long as it takes, for grep.
        most: rows that are printed; all by default.
    """
    if width is None and (sys.stdout.isatty() or (not wide and os.environ.get("COLUMNS", "").isdecimal())):
        width = shutil.get_terminal_size().columns
    shown = table if wide or width is None else table.fitting(width)
    print(shown.first(most).text(width))
    if lost := [name for name in table.columns if name not in shown.columns]:
        print(f"\nnot shown: {', '.join(map(printable, lost))} (--wide shows them)")
    if most is not None and len(table) > most:
        print(f"and {len(table) - most} more (--json has all)")


def save_tables(files: Iterable[Path], tables: Sequence[tuple[ResultTable, ResultTable]]) -> None:
    """Write tables to files: the numbers as CSV, and what a paper prints as HTML, Markdown or text.

    Args:
        files: where to.
        tables: each as numbers, and as a paper prints it.

    Raises:
        SettingError: a file has another suffix.
    """
    kinds: dict[str, Callable[[tuple[ResultTable, ResultTable]], str]] = {
        ".csv": lambda pair: pair[0].csv(), ".html": lambda pair: pair[1].html(),
        ".md": lambda pair: pair[1].markdown(), ".txt": lambda pair: pair[1].text(WIDTH),
    }  # fmt: skip
    for file in files:
        if file.suffix not in kinds:
            raise SettingError(f"--save writes {', '.join(kinds)}, got {shown(str(file))}: give one of these suffixes")
        file.write_text("\n".join(kinds[file.suffix](pair).rstrip("\n") + "\n" for pair in tables), encoding="utf-8")


def print_facts(values: Mapping[str, Any]) -> None:
    """Print values beside their names."""
    print_table(ResultTable.of_facts(values))


def print_run(history: History, options: SharedOptions) -> None:
    """Print the results of a run."""
    if options.as_json:
        print_json(history.facts())
    elif not options.quiet:
        print_table(history.table())


def recipe_toml(entry: Mapping[str, Any]) -> str:
    """Return a recipe as a [recipe] section with its defaults, and a comment on each setting."""
    from piebald.settings.toml_document import pair

    lines = [f"# {entry['summary']}", f"# {entry['paper']}", "[recipe]", pair("name", entry["name"])]
    for name, field in entry["fields"].items():
        written = f"# {name} = ..." if field["default"] is None else pair(name, field["default"])
        doc = f": {field['doc']}" if field.get("doc") else ""
        lines.append(f"{written}  # {field['type']}{doc}")
    return "\n".join(lines) + "\n"


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
