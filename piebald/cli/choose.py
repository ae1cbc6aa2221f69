"""Commands that look and choose: look, advise, tune."""

from __future__ import annotations

import logging
import sys
import tomllib
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from piebald.cli import app
from piebald.core.errors import RunFolderError, SettingError
from piebald.core.files import read_json
from piebald.core.plain_text import WIDTH, errors_alone, printable
from piebald.core.result_table import ResultTable

if TYPE_CHECKING:
    from piebald.advice.tuning import Tuning
    from piebald.experiments.file import ExperimentSettings, Plan
    from piebald.methods.recipe import Recipe


log = logging.getLogger("piebald.cli")
_Settings = TypeVar("_Settings", bound="ExperimentSettings")
_CLIENT = typer.Option("--client", help="The column of a table that names the client of each row.")
_TARGET = typer.Option("--target", help="The column of a table to predict.")
_UNNAMED = "{} is a table: name its columns with --client COLUMN --target COLUMN"
_Regression = Annotated[bool, typer.Option("--regression", help="The target has amounts and no classes.")]


@app.command("as_json")
def look(
    options: app.SharedOptions,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A .csv, .tsv, .parquet or .sql table, '*/patients.csv' or '*.*'.")
    ],
    client: Annotated[str | None, _CLIENT] = None,
    target: Annotated[str | None, _TARGET] = None,
    regression: _Regression = False,
    write: Annotated[
        Path | None,
        typer.Option("--write", help="Propose rules that make sites alike, and write the experiment with them here."),
    ] = None,
) -> None:
    """Look at a table before training: sites, columns, what may mislead, and an experiment file that runs."""
    from piebald.advice.table_look import look_at_table
    from piebald.data.clients.table_files import is_table

    if not is_table(file):
        raise SettingError(f"piebald look reads a table, and {file} is none: name the file of its rows")
    if client is None or target is None:
        raise SettingError(_UNNAMED.format(file))
    seen = look_at_table(file, client=client, target=target, regression=regression, clean=write is not None)
    if write is not None and seen.experiment:
        write_new(write, seen.experiment)
    if options.as_json:
        return app.print_json(seen.plain())
    classes = list(dict.fromkeys(name for site in seen.sites for name in site[target]))
    counts = [
        [site["site"], site["rows"], f"{site['gaps']:.0%}", *map(site[target].get, classes)] for site in seen.sites
    ]
    heading = ["site", "rows", "gaps", *(f"{target} {name}" for name in classes)]
    app.print_table(ResultTable(counts, heading), width=WIDTH)
    print()
    for row in seen.columns:
        gaps = f", {row['gaps']} gaps ({row['most gaps']})" if row["gaps"] else ""
        print(f"{printable(row['column'])}: {row['kind']} of {row['values']:,} values{gaps}; {row['preparation']}")
    print("\n" + "\n".join(f"! {printable(sentence)}" for sentence in seen.warnings or ["nothing that may mislead"]))
    if seen.clients is not None:
        print(f"\n{seen.clients.text()}", end="")
    if write is not None and seen.experiment:
        print("\n" + "\n".join(f"{printable(change)}" for change in seen.cleaned or ["nothing to clean"]))
        print(f"\n{write}: look at its [prepare], whose rules are guesses, and run it with piebald run {write}")
    elif seen.experiment:
        print(f"\n# an experiment file; run it with piebald run FILE\n{seen.experiment}", end="")


def write_new(path: Path, text: str) -> None:
    """Write a file that is not there yet."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise SettingError(f"{path} is there already: name a new file, or remove it") from None
    except OSError as error:
        raise SettingError(f"{path} cannot be written: {error.strerror or error}") from None


@app.command("sets", "scale", "out", "as_json", "quiet", "verbose", "wide", lists_keys=True)
def advise(
    options: app.SharedOptions,
    file: Annotated[
        Path, typer.Argument(help="A table, or an experiment file, which needs no recipe; those it has are raced too.")
    ],
    client: Annotated[str | None, _CLIENT] = None,
    target: Annotated[str | None, _TARGET] = None,
    regression: _Regression = False,
    budget: Annotated[
        str | None, typer.Option(help="Of the whole search: '300 rounds', '10 minutes' or '2e9 bytes'; see [advise].")
    ] = None,
    distil: Annotated[
        bool, typer.Option("--distil", help="Train one model towards the ensemble, for three more runs.")
    ] = False,
    more: Annotated[bool, typer.Option("--more", help="Print the whole answer and all that was tried.")] = False,
) -> None:
    """Choose a method: whether to train together, how, and who loses by it."""
    app.end_on_term()
    from piebald.advice.adviser import AdviceSettings
    from piebald.advice.tuning import Budget
    from piebald.data.preparation.written_forms import VALUES_LOG

    flags = list(options.sets or ())
    if budget is not None:
        limit = Budget.parse(budget)
        flags.append(f"advise.budget={{ {limit.unit} = {limit.amount} }}")
    flags += ["advise.distil=true"] if distil else []
    text = _experiment_of_table(file, client, target, regression, options)
    settings = _first_fold(app.load_settings(file, options, flags, AdviceSettings, text))
    with nullcontext() if text is None else errors_alone(VALUES_LOG):  # they have been told of the table
        _advise(settings, app.out_folder(settings, settings.label or "advice"), options, more)


def _experiment_of_table(
    file: Path, client: str | None, target: str | None, regression: bool, options: app.SharedOptions
) -> str | None:
    """Return the experiment that a table means, by the data plan of `piebald look`; None for an experiment file.

    Raises:
        SettingError: an option is missing or has no meaning for this file, or no column can be trained on.
    """
    from piebald.advice.table_look import look_at_table
    from piebald.data.clients.table_files import is_table
    from piebald.settings.toml_document import dumps

    if not is_table(file):
        if client is not None or target is not None or regression:
            raise SettingError(
                f"--client, --target and --regression are for a table, which {file} is not: leave them out"
            )
        return None
    if client is None or target is None:
        raise SettingError(_UNNAMED.format(file))
    seen = look_at_table(file, client=client, target=target, regression=regression, clients=False)
    if not seen.experiment:
        raise SettingError(f"{file}: no column can be trained on as it is; piebald look says why of each")
    if options.progress:
        print("".join(f"! {printable(sentence)}\n" for sentence in seen.warnings), end="", file=sys.stderr)
    experiment = tomllib.loads(seen.experiment)
    # a recipe in the file would be raced as if the user had asked for it
    del experiment["recipe"]
    # validation rows choose among many methods, test rows check the one: both need more than a single run does
    experiment["split"] |= {"validation": 0.25, "test": 0.25}
    return dumps(experiment)


@app.command("sets", "scale", "out", "as_json", "quiet", "verbose", "wide", lists_keys=True)
def tune(
    options: app.SharedOptions,
    file: Annotated[Path, typer.Argument(help="An experiment file with a recipe or [[recipes]], and maybe [tune].")],
) -> None:
    """Choose settings of recipes by validation rows, each recipe with the same budget."""
    app.end_on_term()
    settings = _first_fold(app.load_settings(file, options))
    folder = app.out_folder(settings)
    _print(_tuned(settings, settings.plan(), folder, f"piebald resume {folder}", options), folder, options)


def _first_fold(settings: _Settings) -> _Settings:
    """Return the settings with the first of their folds, by which a search chooses, if they have several."""
    if settings.split is None or settings.split.folds is None or settings.split.fold is not None:
        return settings
    log.warning("settings and methods are chosen in the first of %d folds: compare them in all", settings.split.folds)
    return settings.model_copy(update={"split": settings.split.with_(fold=0)})


def tuned_first(
    settings: ExperimentSettings, plan: Plan, folder: Path, again: str, options: app.SharedOptions
) -> Tuning:
    """Tune recipes before a comparison, in a folder beside it: a report on the comparison is not about trials."""
    beside = folder.with_name(f"{folder.name}-tuning")
    tuning = _tuned(settings, plan, beside, again, options)
    if options.progress:
        _print(tuning, beside, options)
        print()
    return tuning


def resumed_search(folder: Path, options: app.SharedOptions) -> None:
    """Go on with the search in a folder, from the experiment file that it was started with, which may name plugins."""
    from piebald.advice.adviser import AdviceSettings
    from piebald.core.references import of_folder
    from piebald.experiments.file import ExperimentSettings

    try:
        record = read_json(folder / "search.json")
        table, kind = record["settings"], record["kind"]
    except (ValueError, KeyError, TypeError, OSError):
        raise RunFolderError(f"{folder / 'search.json'} cannot be read: start a new search") from None
    if table is None:
        raise SettingError(
            f"the search in {folder} was started from Python: go on with it there, with out={str(folder)!r}"
        )
    chooses: type[ExperimentSettings] = AdviceSettings if kind == "advise" else ExperimentSettings
    settings = chooses.of_table(table, f"the settings in {folder}", of_folder(folder, options.plugins or ()))
    if kind == "advise":
        return _advise(settings, folder, options)
    _print(_tuned(settings, settings.plan(), folder, f"piebald resume {folder}", options), folder, options)


def _tuned(settings: ExperimentSettings, plan: Plan, folder: Path, again: str, options: app.SharedOptions) -> Tuning:
    from piebald.advice import tuning
    from piebald.experiments.sections import TuneSection

    section = settings.tune or TuneSection()
    with app.guarded(folder, again, settings):
        return tuning.tune(
            plan.recipes,
            plan.clients,
            {label: plan.model_of(label) for label in plan.recipes},
            rounds=settings.rounds or 10,
            seed=settings.first_seed,
            out=folder,
            progress=options.progress,
            **section.model_dump()
            | {"space": settings.search_space(), "seeds": section.seeds or [settings.first_seed]}
            | search_options(settings, plan),
        )


def _advise(settings: ExperimentSettings, folder: Path, options: app.SharedOptions, more: bool = False) -> None:
    from piebald import advice
    from piebald.experiments.sections import AdviseSection

    section, first, plan = settings.advise or AdviseSection(), settings.first_seed, settings.plan()
    with app.guarded(folder, f"piebald resume {folder}", settings):
        chosen = advice.advise(
            plan.clients,
            plan.model,
            look=True,
            rounds=settings.rounds or 10,
            methods=plan.recipes,
            training=shared_training(plan.recipes),
            out=folder,
            progress=options.progress,
            **section.model_dump()
            | {"seeds": section.seeds or settings.seeds or [*range(first, first + 3)]}
            | search_options(settings, plan),
        )
    if options.as_json:
        app.print_json({**chosen.plain(), "out": str(folder)})
        return
    print(chosen.text(), end="")
    if more:
        columns = ("method", "score", "behind", "error", "lr", "megabytes", "steps", "rounds", "seeds")
        print()
        app.print_table(chosen.tried.only(*columns), options.wide)
        print(f"\n{chosen.details()}", end="")


def shared_training(recipes: Mapping[str, Recipe]) -> dict[str, Any]:
    """Return the settings of the file's first recipe that all methods share: those of FedAvg, without the rate."""
    from piebald.methods.catalog.registry import settings_of

    fields = next(iter(recipes.values())).fields if recipes else {}
    return {name: value for name, value in fields.items() if name in settings_of("fedavg") and name != "lr"}


def search_options(settings: ExperimentSettings, plan: Plan) -> dict[str, Any]:
    """Return the options that the runs of a search share with other runs.

    Raises:
        SettingError: the file has a setting that a search cannot follow.
    """
    for name, is_set in (("stop", settings.stop is not None), ("unseen", bool(settings.unseen))):
        if is_set:
            raise SettingError(
                f"{name} does not fit a search, whose runs have all clients and one length: leave it out"
            )
    from piebald.experiments.run_settings import SearchKeywords

    shared = settings.run_keywords(plan, SearchKeywords)
    del shared["trackers"]  # they would be told of every trial
    return shared


def _print(tuning: Tuning, folder: Path, options: app.SharedOptions) -> None:
    if options.as_json:
        app.print_json({**tuning.plain(), "out": str(folder)})
    elif not options.quiet:
        app.print_table(tuning.table(), options.wide)
        print(f"\nchosen by validation rows; all trials are in {folder}")
        for budget in tuning.privacy:
            print(printable(budget["meaning"]))
