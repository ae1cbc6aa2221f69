"""The command line.  Everything heavy is imported inside the command that needs it, so `piebald --help` is quick."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from piebald.errors import PiebaldError, SettingError, unknown

if TYPE_CHECKING:
    from piebald.report.tables import History
    from piebald.settings import Plan, Settings
    from piebald.transfer import Result

app = typer.Typer(
    name="piebald",
    help="Federated learning for clients that are not alike.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only what goes wrong.")]
Out = Annotated[str | None, typer.Option("--out", help="The folder to write; a new one under runs/ by default.")]
Where = Annotated[str | None, typer.Option("--runtime", help="Where to run, e.g. simulator.")]


class Interrupted(PiebaldError):
    """Somebody pressed Ctrl-C."""

    exit_code = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and say how it ended: 0, 1 (something broke), 2 (bad input) or 130 (Ctrl-C).

    Args:
        argv: words after `piebald`, by default those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = app(words or ["--help"], prog_name="piebald", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`); without this, Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except PiebaldError as error:
        return _fail(str(error), error.exit_code)
    except typer.TyperException as error:
        return _fail(error.format_message(), 2)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130)
    except Exception as error:
        hint = "PIEBALD_DEBUG=1 shows where"
        return _fail(f"something broke: {type(error).__name__}: {error} ({hint})", 1)
    if code == 130:
        return _fail("interrupted", 130)
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    if os.environ.get("PIEBALD_DEBUG") and code != 130:
        traceback.print_exc()
    print(" ".join(message.split()), file=sys.stderr)
    return code


@app.command()
def run(
    file: Annotated[Path | None, typer.Argument(help="A TOML file; the built-in experiment without one.")] = None,
    sets: Sets = None,
    out: Out = None,
    runtime: Where = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train one recipe and keep the run in a folder."""
    settings = _settings(file, sets, out, runtime)
    if settings.compares:
        raise SettingError(f"{file or 'the built-in experiment'} describes several runs: use piebald compare")
    plan = settings.plan()
    from piebald import experiment

    folder = _folder(settings)
    (label, recipe) = next(iter(plan.recipes.items()))
    with _kept(folder, f"piebald resume {folder}", settings):
        history = experiment.run(
            recipe,
            plan.clients,
            plan.model,
            seed=settings.seed,
            label=settings.label or label,
            out=folder,
            progress=_progress(as_json, quiet),
            **_common(settings, plan),
        )
    _print_run(history, as_json, quiet)


@app.command()
def compare(
    file: Annotated[Path, typer.Argument(help="A TOML file with [[recipes]], [grid] or seeds.")],
    sets: Sets = None,
    out: Out = None,
    runtime: Where = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train several recipes on the same clients and show them side by side."""
    settings = _settings(file, sets, out, runtime)
    plan = settings.plan()
    from piebald import experiment

    folder = _folder(settings)
    with _kept(folder, f"piebald compare {file} --out {folder}", settings):
        comparison = experiment.compare(
            plan.recipes,
            plan.clients,
            plan.model,
            seeds=tuple(settings.seeds or (settings.seed,)),
            out=folder,
            progress=_progress(as_json, quiet),
            **_common(settings, plan),
        )
    if as_json:
        runs = [_facts(history) for history in comparison.runs]
        _print_json({"runs": runs, "summary": comparison.summary(), "out": str(folder)})
    elif not quiet:
        rows = comparison.summary()
        _print_table(list(rows[0]), [list(row.values()) for row in rows])
        print(f"\nkept in {folder}; make a page of it with: piebald report {folder}")


@app.command()
def transfer(
    file: Annotated[Path, typer.Argument(help="A TOML file that describes a transfer between two parties.")],
    party: Annotated[str | None, typer.Option(help="Run only this party: source or target.")] = None,
    sets: Sets = None,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train two parties with different features of partly the same people, under encryption."""
    from piebald.transfer import command

    _print_transfer(*command.start(file, sets or (), out, party, _progress(as_json, quiet)), as_json, quiet)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that was interrupted.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Take up a run where it stopped."""
    _check_run(folder)
    if _is_transfer(folder):
        from piebald.transfer import command

        return _print_transfer(*command.resume(folder, _progress(as_json, quiet)), as_json, quiet)
    from piebald import experiment

    with _kept(folder, f"piebald resume {folder}"):
        history = experiment.resume(folder, progress=_progress(as_json, quiet))
    _print_run(history, as_json, quiet)


@app.command()
def adapt(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    data: Annotated[
        Path, typer.Option("--data", help="The newcomer's rows: .npz with x and y, .csv, .parquet, a folder.")
    ],
    target: Annotated[str | None, typer.Option(help="The column of a table to predict.")] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the rows, at most.")] = 20,
    lr: Annotated[float | None, typer.Option(help="Learning rate, the run's by default.")] = None,
    test: Annotated[float, typer.Option(help="Share of the rows that is only for the report.")] = 0.2,
    validation: Annotated[float, typer.Option(help="Share of the rows that chooses.")] = 0.2,
    out: Annotated[Path | None, typer.Option("--out", help="A file for the adapted model, .safetensors.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fit a finished run to a newcomer, and say which way of doing so is best."""
    _check_run(folder)
    from piebald import experiment
    from piebald.newcomers import from_file

    opened = experiment.opened(folder)
    rows = from_file(data, target, opened.meta, validation=validation, test=test)
    made = experiment.adapt(opened, rows, epochs=epochs, lr=lr)
    if out is not None:
        opened.work.layout.save(made.vector, out)
    if as_json:
        _print_json(made.table() | {"out": None if out is None else str(out)})
    elif not quiet:
        columns = ("way", "numbers fitted", "epochs", "validation loss", f"validation {made.metric}")
        tried = [[w.name, w.fitted, w.epochs, w.loss, w.validation, w.test, w.gain] for w in made.ways]
        _print_table((*columns, f"test {made.metric}", "gain"), tried)
        print(f"\nbest on the validation rows: {made.best}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or folders that hold them.")],
    out: Annotated[Path, typer.Option("--out", help="The folder to write the report into.")] = Path("report"),
    target: Annotated[float | None, typer.Option(help="A value of the metric: what did it cost to get there?")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a page and figures about one or more runs."""
    for folder in runs:
        _check_run(folder)
    if len(runs) == 1 and _is_transfer(runs[0]):
        from piebald.transfer.page import write_page

        files = [str(file) for file in write_page(runs[0], out)]
    else:
        from piebald.report import write_report

        files = [str(file) for file in write_report(runs, out, target)]
    if as_json:
        _print_json({"page": files[0], "files": files})
    elif not quiet:
        print(files[0])


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe's settings as TOML.")] = None,
    as_json: Json = False,
) -> None:
    """List the recipes, with their papers and settings."""
    from piebald import recipes as registry

    listing = registry.listing()
    if name is not None:
        listing = [entry for entry in listing if entry["name"] == name]
        if not listing:
            raise unknown("recipe", name, registry.names())
    if as_json:
        _print_json(listing)
    elif name is None:
        _print_table(("recipe", "what it does", "paper"), [[e["name"], e["summary"], e["paper"]] for e in listing])
    else:
        print(_recipe_toml(listing[0]), end="")


@app.command()
def data(
    words: Annotated[list[str] | None, typer.Argument(help="list, show NAME, or a NAME.", metavar="[NAME]")] = None,
    partition: Annotated[str | None, typer.Option(help="Deal it and measure the clients: iid, dirichlet, ...")] = None,
    fleet: Annotated[str | None, typer.Option(help="The clients' devices: fast_slow, log_normal, trace, ...")] = None,
    model: Annotated[str | None, typer.Option(help="Train it one epoch on each: how far do weights diverge?")] = None,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option("--out", help="A folder for pictures of the partition.")] = None,
    as_json: Json = False,
) -> None:
    """List the data sets, or show one and what a partition makes of it (--set clients=10, --set fleet.fast=2)."""
    from piebald import data as shelf

    words = list(words or ())
    shown = words[1:] if words[:1] in (["show"], ["list"]) else words
    if len(shown) > 1 or (words[:1] == ["list"] and shown) or (words == ["show"]):
        raise SettingError(f"piebald data takes list, show NAME or a NAME, got {' '.join(words)!r}")
    name = shown[0] if shown else None
    if name is not None and name not in shelf.names():
        raise unknown("data set", name, shelf.names())
    if partition is not None:
        if name is None:
            raise SettingError(
                f"--partition {partition} needs a data set: piebald data show NAME --partition {partition}"
            )
        return _show(name, partition, sets or [], as_json, fleet=fleet, model=model, out=out)
    if sets or out or fleet or model:
        raise SettingError("--set, --fleet, --model and --out are about a partition: add --partition KIND")
    listing = [_about(known, name is None) for known in shelf.names() if name in (None, known)]
    if as_json:
        _print_json(listing)
    elif name is None:
        rows = [[about["name"], about.get("rows", "-"), about.get("licence", ""), _source(about)] for about in listing]
        _print_table(("data set", "rows", "licence", "source"), rows)
    else:
        _print_table(("", ""), list(listing[0].items()))


def _show(name: str, partition: str, sets: Sequence[str], as_json: bool, **more: Any) -> None:
    """What a partition makes of a data set: numbers for the federation and its clients, and pictures."""
    from piebald.show import columns, show

    shown = show(name, partition, dict(_pair(text) for text in sets), **more)
    if as_json:
        return _print_json(asdict(shown))
    _print_table(
        ("federation", "", "unit"),
        [(measured, number, shown.units[measured]) for measured, number in shown.federation.items()],
    )
    print()
    known = columns(shown.clients)
    _print_table(known, [[row[column] for column in known] for row in shown.clients[:20]])
    if len(shown.clients) > 20:
        print(f"and {len(shown.clients) - 20} more clients (--json has all)")
    for path in shown.files:
        print(path)


def _pair(text: str) -> tuple[str, Any]:
    """A setting from the command line: KEY=VALUE, the value as TOML or else as text."""
    import tomllib

    key, equals, value = text.partition("=")
    if not equals or not key:
        raise SettingError(f"--set must be KEY=VALUE, got {text!r}")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


@app.command()
def version(as_json: Json = False) -> None:
    """Print the version."""
    from piebald import __version__

    if as_json:
        _print_json({"version": __version__})
    else:
        print(__version__)


# ------------------------------------------------------------------------------------------------------------- reading


def _settings(file: Path | None, sets: list[str] | None, out: str | None, runtime: str | None) -> Settings:
    from piebald.settings import Settings

    return Settings.load(file, sets or (), out=out, runtime=runtime)


def _common(settings: Settings, plan: Plan) -> dict[str, Any]:
    """What a run and a comparison hand on alike."""
    return {
        "rounds": settings.rounds,
        "stop": plan.stop,
        "runtime": plan.runtime,
        "evaluate_every": settings.evaluate.every,
        "evaluate_clients": settings.evaluate.clients,
        "evaluate_split": settings.evaluate.split,
        "metrics": settings.evaluate.metrics,
        "keep": settings.keep,
        "unseen": settings.unseen,
        "checkpoint_every": settings.checkpoint_every,
        "measure": settings.measure,
        "settings": settings.table(),
    }


def _folder(settings: Settings) -> Path:
    """Where to write: as told, or the first free name under runs/."""
    if settings.out is not None:
        return Path(settings.out)
    name = settings.label or (settings.recipe.name if settings.recipe else "comparison")
    stem = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
    folder = Path("runs") / stem
    number = 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{stem}-{number}"
    return folder


def _check_run(folder: Path) -> None:
    """Say at once that a folder is not there, before the second it takes to import what could open it."""
    if not folder.is_dir():
        raise SettingError(f"there is no run folder {str(folder)!r}: give the folder that piebald run wrote")


def _is_transfer(folder: Path) -> bool:
    return (folder / "transfer.toml").is_file()


@contextmanager
def _kept(folder: Path, again: str, settings: Settings | None = None) -> Iterator[None]:
    """Say how to go on after Ctrl-C, and where in the settings something stands that does not fit."""
    try:
        yield
    except KeyboardInterrupt:
        if not folder.exists():
            raise Interrupted("interrupted before anything was written") from None
        raise Interrupted(f"interrupted; what was committed is safe, go on with: {again}") from None
    except SettingError as error:
        raise (settings.located(error) if settings else error) from None


# ------------------------------------------------------------------------------------------------------------ printing


def _progress(as_json: bool, quiet: bool) -> bool:
    return sys.stdout.isatty() and not as_json and not quiet


def _print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    # JSON knows no NaN; a score that does not exist is null.
    print(json.dumps(_finite(value), ensure_ascii=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_finite(entry) for entry in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _print_table(heading: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*heading, box=None, pad_edge=False, header_style="bold", show_header=any(heading))
    for row in rows:
        table.add_row(
            *("-" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row)
        )
    # Where nobody looks, lines stay whole: they are for grep.
    Console(width=None if sys.stdout.isatty() else 10_000, highlight=False).print(table)


def _facts(history: History) -> dict[str, Any]:
    """One run in numbers; its metric goes by its own name, e.g. "accuracy"."""
    final = history.final
    facts = {name: final[name] for name in ("recipe", "label", "rounds", "seed", "status")}
    facts[history.metric] = final["mean"]
    kept = ("sd", "worst_decile", "common", "best", "unseen", "bytes_up", "bytes_down", "seconds", "wall")
    return facts | {name: final[name] for name in kept} | {"run": str(history.path)}


def _print_run(history: History, as_json: bool, quiet: bool) -> None:
    if as_json:
        _print_json(_facts(history))
    elif not quiet:
        _print_table(("", ""), [item for item in _facts(history).items() if item[1] is not None])


def _print_transfer(made: Result, rows: Sequence[tuple[str, str]], as_json: bool, quiet: bool) -> None:
    if as_json:
        _print_json(made.table())
    elif not quiet:
        _print_table(("", ""), rows)


def _about(name: str, only_here: bool) -> dict[str, Any]:
    """What is known of a data set; why it cannot be loaded, if it cannot."""
    from piebald import data as shelf
    from piebald.data.download import forbidden

    try:
        with forbidden() if only_here else nullcontext():
            loaded = shelf.load(name)
    except SettingError as error:
        return {"name": name, "missing": str(error)}
    return {
        "name": name,
        "rows": len(loaded),
        "input": list(loaded.input_shape),
        "classes": None if loaded.classes is None else len(loaded.classes),
        "owners": {owner: len(owners.names) for owner, owners in loaded.owners.items()},
        "licence": loaded.licence,
        "source": loaded.source,
        "citation": loaded.citation,
    }


def _source(about: Mapping[str, Any]) -> str:
    return str(about.get("source") or f"not here: {about['missing']}")


def _recipe_toml(entry: Mapping[str, Any]) -> str:
    """A recipe's section with its defaults, and a comment on each setting."""
    from piebald.toml import pair

    lines = [f"# {entry['summary']}", f"# {entry['paper']}", "[recipe]", pair("name", entry["name"])]
    for field, about in entry["fields"].items():
        written = f"# {field} = ..." if about["default"] is None else pair(field, about["default"])
        doc = f": {about['doc']}" if about.get("doc") else ""
        lines.append(f"{written}  # {about['type']}{doc}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
