"""Commands that train: run, compare, transfer, resume, adapt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from piebald.cli.app import (
    Deterministic,
    Interrupted,
    Json,
    Out,
    Quiet,
    RuntimeSettings,
    Sets,
    Verbose,
    app,
    check_run,
    end_on_term,
    is_transfer,
    progress,
    search_plugins,
    show_log,
)
from piebald.cli.printing import facts, line_printer, print_json, print_run, print_table, print_transfer
from piebald.errors import SettingError

if TYPE_CHECKING:
    from piebald.experiment_file import ExperimentSettings, Plan


@app.command()
def run(
    file: Annotated[
        Path | None, typer.Argument(help="An experiment file in TOML; the built-in experiment by default.")
    ] = None,
    sets: Sets = None,
    out: Out = None,
    runtime: RuntimeSettings = None,
    deterministic: Deterministic = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train with one recipe and keep the run in a folder."""
    show_log(verbose)
    end_on_term()
    settings = _settings(file, sets, out, runtime, deterministic)
    if settings.compares:
        raise SettingError(f"{file or 'the built-in experiment'} describes several runs: use piebald compare")
    plan = settings.plan()
    from piebald import experiment

    folder = _folder(settings)
    (label, recipe) = next(iter(plan.recipes.items()))
    with _guarded(folder, f"piebald resume {folder}", settings):
        history = experiment.run(
            recipe,
            plan.clients,
            plan.model,
            seed=settings.first_seed,
            label=settings.label or label,
            out=folder,
            progress=progress(as_json, quiet),
            **_common(settings, plan) | {"runtime": plan.runtime.with_folder(folder)},
        )
    print_run(history, as_json, quiet)


@app.command()
def compare(
    file: Annotated[Path, typer.Argument(help="An experiment file with [[recipes]], [grid] or seeds.")],
    sets: Sets = None,
    out: Out = None,
    runtime: RuntimeSettings = None,
    deterministic: Deterministic = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train with several recipes on the same clients and compare the results."""
    show_log(verbose)
    end_on_term()
    settings = _settings(file, sets, out, runtime, deterministic)
    plan = settings.plan()
    from piebald import comparisons

    folder = _folder(settings)
    with _guarded(folder, f"piebald compare {file} --out {folder}", settings):
        comparison = comparisons.compare(
            plan.recipes,
            plan.clients,
            plan.model,
            seeds=tuple(settings.seeds or (settings.first_seed,)),
            out=folder,
            progress=progress(as_json, quiet),
            **_common(settings, plan),
        )
    rows = comparison.summary()
    pairs = comparison.paired(comparison.made_by("fedavg") or comparison.labels[0])
    if as_json:
        runs = [facts(history) for history in comparison.runs]
        print_json({"runs": runs, "summary": rows, "paired": pairs, "out": str(folder)})
    elif not quiet:
        print_table(list(rows[0]), [list(row.values()) for row in rows])
        if pairs:
            print("\ndifferences of the means on the same seeds")
            print_table(list(pairs[0]), [list(row.values()) for row in pairs])
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
    from piebald import experiment

    search_plugins(folder)
    end_on_term()
    with _guarded(folder, f"piebald resume {folder}"):
        history = experiment.resume(folder, rounds=rounds, progress=progress(as_json, quiet))
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
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Adapt a finished run to a new client and choose the best method."""
    check_run(folder)
    search_plugins(folder)
    from piebald import experiment
    from piebald.adaptation import from_file

    opened = experiment.opened(folder)
    rows = from_file(str(data), target, opened.meta, validation=validation, test=test)
    made = experiment.adapt(opened, rows, epochs=epochs, lr=lr)
    if out is not None:
        opened.work.layout.save(made.vector, out)
    if as_json:
        print_json(made.table() | {"out": None if out is None else str(out)})
    elif not quiet:
        columns = ("method", "parameters fitted", "epochs", "validation loss", f"validation {made.metric}")
        tried = [[m.name, m.fitted, m.epochs, m.loss, m.validation, m.test, m.gain] for m in made.methods]
        print_table((*columns, f"test {made.metric}", "gain"), tried)
        print(f"\nbest on the validation rows: {made.best}")


def _settings(
    file: Path | None, sets: list[str] | None, out: str | None, runtime: str | None, deterministic: bool
) -> ExperimentSettings:
    from piebald.experiment_file import ExperimentSettings

    flags = list(sets or ())
    if deterministic:
        kind = [] if runtime is None else [f"runtime.kind={runtime}"]  # so that --runtime keeps what is set below it
        flags = [*kind, *flags, "runtime.deterministic=true"]
    return ExperimentSettings.load(file, flags, out=out, runtime=runtime)


def _common(settings: ExperimentSettings, plan: Plan) -> dict[str, Any]:
    """The options that a run and a comparison share."""
    return {
        "rounds": settings.rounds,
        "stop": plan.stop,
        "runtime": plan.runtime,
        "evaluate_every": settings.evaluate.every,
        "evaluate_clients": settings.evaluate.clients,
        "evaluate_split": settings.evaluate.split,
        "loss": settings.loss,
        "metrics": settings.evaluate.metrics,
        "keep": settings.keep,
        "unseen": settings.unseen,
        "checkpoint_every": settings.checkpoint_every,
        "measure": settings.measure,
        "max_examples": settings.max_examples,
        "max_weight": settings.max_weight,
        "trackers": settings.trackers,
        "settings": settings.table(),
        **({} if settings.longest_step is None else {"longest_step": settings.longest_step}),
    }


def _folder(settings: ExperimentSettings) -> Path:
    """The folder to write to: as given, or the first free name under runs/."""
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


@contextmanager
def _guarded(folder: Path, again: str, settings: ExperimentSettings | None = None) -> Iterator[None]:
    """Print how to continue after Ctrl-C, and add the place in the settings to an error about a setting."""
    try:
        yield
    except KeyboardInterrupt:
        if not folder.exists():
            raise Interrupted("interrupted before anything was written") from None
        raise Interrupted(f"interrupted; completed server steps are saved, continue with: {again}") from None
    except SettingError as error:
        raise (settings.located(error) if settings else error) from None
