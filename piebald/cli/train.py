"""Commands that train: run, compare, transfer, resume, adapt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from piebald.cli.app import (
    Deterministic,
    Json,
    Out,
    Plugins,
    Quiet,
    RuntimeSettings,
    Sets,
    StartFrom,
    Verbose,
    app,
    check_run,
    end_on_term,
    is_search,
    is_transfer,
    progress,
    search_plugins,
    show_log,
)
from piebald.cli.choose import resumed_search, tuned_first
from piebald.cli.experiment_files import common_options, guarded, load_settings, out_folder
from piebald.cli.operating import LogFile, LogJson, LogLevel, StatusHost, StatusPort
from piebald.cli.printing import facts, line_printer, print_json, print_run, print_table, print_transfer
from piebald.cli.serving import LOOPBACK, resumed
from piebald.core.errors import SettingError

if TYPE_CHECKING:
    from piebald.experiments.file import ExperimentSettings
    from piebald.report.callbacks import Callback


@app.command()
def run(
    file: Annotated[
        Path | None, typer.Argument(help="An experiment file in TOML; the built-in experiment by default.")
    ] = None,
    sets: Sets = None,
    out: Out = None,
    runtime: RuntimeSettings = None,
    deterministic: Deterministic = False,
    start_from: StartFrom = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train with one recipe and keep the run in a folder."""
    show_log(verbose)
    settings = load_settings(file, sets, out, runtime, deterministic)
    carry_out(settings, file, as_json=as_json, quiet=quiet, start_from=start_from)


def carry_out(
    settings: ExperimentSettings,
    file: Path | None,
    *,
    as_json: bool,
    quiet: bool,
    callbacks: Sequence[Callback] = (),
    folder: Path | None = None,
    start_from: Path | None = None,
) -> None:
    """Train as the settings say, in a run folder, and print the results."""
    end_on_term()
    if start_from is not None:
        check_run(start_from)
    if settings.compares:
        raise SettingError(f"{file or 'the built-in experiment'} describes several runs: use piebald compare")
    plan = settings.plan()
    from piebald.runs.run import run

    folder = folder or out_folder(settings)
    (label, recipe) = next(iter(plan.recipes.items()))
    with guarded(folder, f"piebald resume {folder}", settings):
        history = run(
            recipe,
            plan.clients,
            plan.model,
            seed=settings.first_seed,
            label=settings.label or label,
            out=folder,
            progress=progress(as_json, quiet),
            callbacks=callbacks,
            start_from=start_from,
            **common_options(settings, plan) | {"runtime": plan.runtime.with_folder(folder)},
        )
    print_run(history, as_json, quiet)


@app.command()
def compare(
    file: Annotated[Path, typer.Argument(help="An experiment file with [[recipes]], [grid] or seeds.")],
    sets: Sets = None,
    out: Out = None,
    runtime: RuntimeSettings = None,
    deterministic: Deterministic = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="First choose each recipe's settings by validation rows, see [tune].")
    ] = False,
    wide: Annotated[bool, typer.Option("--wide", help="Print all columns, however wide the table is.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train with several recipes on the same clients and compare the results."""
    show_log(verbose)
    end_on_term()
    settings = load_settings(file, sets, out, runtime, deterministic)
    plan = settings.plan()
    from piebald.runs.compare import compare

    folder = out_folder(settings)
    again = f"piebald compare {file}{' --tune' if tune else ''} --out {folder}"
    tuned = tuned_first(settings, plan, folder, again, as_json, quiet) if tune else None
    with guarded(folder, again, settings):
        comparison = compare(
            plan.recipes if tuned is None else tuned.recipes,
            plan.clients,
            {label: plan.model_of(label) for label in plan.recipes},
            seeds=tuple(settings.seeds or (settings.first_seed,)),
            out=folder,
            progress=progress(as_json, quiet),
            **common_options(settings, plan),
        )
    from piebald.cli.comparing import base_of, print_comparison
    from piebald.report.work import behind

    if as_json:
        told = {"cannot_be_told_apart": comparison.tied, "work": behind(comparison), "privacy": comparison.privacy}
        runs, pairs = [facts(history) for history in comparison.runs], comparison.paired(base_of(comparison))
        chosen = {} if tuned is None else {"tuning": tuned.plain()}
        print_json(
            {"runs": runs, "summary": comparison.summary(), "paired": pairs} | told | {"out": str(folder)} | chosen
        )
    elif not quiet:
        print_comparison(comparison, wide)
        print(f"\nsaved in {folder}; write a report with: piebald report {folder}")


@app.command()
def transfer(
    file: Annotated[Path, typer.Argument(help="A TOML file that describes vertical training between two parties.")],
    party: Annotated[str | None, typer.Option(help="Run only this party: source or target.")] = None,
    sets: Sets = None,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train two parties that have different features of partly the same people, under encryption."""
    from piebald.vertical import command

    end_on_term()
    made = command.start(file, sets or (), out, party, progress(as_json, quiet), line_printer(as_json, quiet))
    print_transfer(*made, as_json, quiet)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that was interrupted.")],
    rounds: Annotated[
        int | None, typer.Option(help="Go on to this many server steps, also if the run was finished.")
    ] = None,
    plugins: Plugins = None,
    log_level: LogLevel = "info",
    log_json: LogJson = False,
    log_file: LogFile = None,
    status_port: StatusPort = None,
    status_host: StatusHost = LOOPBACK,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Continue a run that was interrupted."""
    check_run(folder)
    if is_transfer(folder):
        from piebald.vertical import command

        if rounds is not None:
            raise SettingError(f"{folder} holds a transfer, whose length is in its file: leave out --rounds")
        made = command.resume(folder, progress(as_json, quiet), line_printer(as_json, quiet))
        return print_transfer(*made, as_json, quiet)
    search_plugins(folder)
    end_on_term()
    if is_search(folder):
        if rounds is not None:
            raise SettingError(f"{folder} holds a search, whose runs have all one length: leave out --rounds")
        return resumed_search(folder, as_json, quiet, plugins or ())
    from piebald.runs.run import resume

    serves = resumed(folder, log_level, log_json, log_file, status_host, status_port)
    with serves as callbacks, guarded(folder, f"piebald resume {folder}"):
        more: dict[str, Any] = {"callbacks": callbacks, "plugins": plugins or ()}
        history = resume(folder, rounds=rounds, progress=progress(as_json, quiet), **more)
    print_run(history, as_json, quiet)


@app.command()
def adapt(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    data: Annotated[
        str, typer.Option("--data", help="The new client's rows: .npz, .csv, .parquet, a folder, or my_data.py:load.")
    ],
    target: Annotated[str | None, typer.Option(help="The column of a table to predict.")] = None,
    epochs: Annotated[int, typer.Option(help="Maximum number of passes over the rows.")] = 20,
    lr: Annotated[float | None, typer.Option(help="Learning rate, the run's by default.")] = None,
    test: Annotated[float, typer.Option(help="Share of test rows, used only for reporting.")] = 0.2,
    validation: Annotated[float, typer.Option(help="Share of validation rows, used to choose the method.")] = 0.2,
    out: Annotated[Path | None, typer.Option("--out", help="A file for the adapted model, .safetensors.")] = None,
    plugins: Plugins = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Adapt a finished run to a new client and choose the best method."""
    check_run(folder)
    search_plugins(folder)
    from piebald.runs.adaptation import from_file
    from piebald.runs.run import adapt, opened

    allowed = plugins or ()
    finished = opened(folder, plugins=allowed)
    rows = from_file(str(data), target, finished.meta, validation=validation, test=test, plugins=allowed)
    made = adapt(finished, rows, epochs=epochs, lr=lr)
    if out is not None:
        finished.work.layout.save(made.vector, out)
    if as_json:
        print_json(made.table() | {"out": None if out is None else str(out)})
    elif not quiet:
        columns = ("method", "parameters fitted", "epochs", "validation loss", f"validation {made.metric}")
        tried = [[m.name, m.fitted, m.epochs, m.loss, m.validation, m.test, m.gain] for m in made.methods]
        print_table((*columns, f"test {made.metric}", "gain"), tried)
        print(f"\nbest on the validation rows: {made.best}, since {made.why}")
