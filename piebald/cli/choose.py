"""Commands that choose: advise, tune."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from piebald.cli.app import SharedOptions, command, end_on_term
from piebald.cli.experiment_files import common_options, guarded, load_settings, out_folder
from piebald.cli.printing import print_json, print_table
from piebald.cli.statistics import print_narrow
from piebald.core.errors import RunFolderError, SettingError
from piebald.core.plain_text import printable
from piebald.core.reading.files import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from piebald.advice.tuning import Tuning
    from piebald.experiments.file import ExperimentSettings
    from piebald.experiments.plan import Plan
    from piebald.methods.recipe import Recipe


@command("as_json")
def look(
    options: SharedOptions,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .csv, .tsv or .parquet table.")],
    client: Annotated[str, typer.Option(help="The column that names the client of each row.")],
    target: Annotated[str, typer.Option(help="The column to predict.")],
    regression: Annotated[bool, typer.Option("--regression", help="The target has amounts and no classes.")] = False,
) -> None:
    """Look at a table before training: sites, columns, what may mislead, and an experiment file that runs."""
    from piebald.advice.table_look import look_at_table

    seen = look_at_table(file, client=client, target=target, regression=regression)
    if options.as_json:
        return print_json(seen.plain())
    classes = list(dict.fromkeys(name for site in seen.sites for name in site[target]))
    counts = [
        [site["site"], site["rows"], f"{site['gaps']:.0%}", *map(site[target].get, classes)] for site in seen.sites
    ]
    print_narrow(["site", "rows", "gaps", *(f"{target} {name}" for name in classes)], counts)
    print()
    for row in seen.columns:
        gaps = f", {row['gaps']} gaps ({row['most gaps']})" if row["gaps"] else ""
        print(f"{printable(row['column'])}: {row['kind']} of {row['values']:,} values{gaps}; {row['preparation']}")
    print("\n" + "\n".join(f"! {printable(sentence)}" for sentence in seen.warnings or ["nothing that may mislead"]))
    if seen.clients is not None:
        print(f"\n{seen.clients.text()}", end="")
    if seen.experiment:
        print(f"\n# an experiment file; run it with piebald run FILE\n{seen.experiment}", end="")


@command("sets", "scale", "out", "as_json", "quiet", "verbose", "wide")
def advise(
    options: SharedOptions,
    file: Annotated[
        Path, typer.Argument(help="An experiment file; it needs no recipe, those it has are raced as well.")
    ],
    budget: Annotated[
        str | None, typer.Option(help="Of the whole search: '300 rounds', '10 minutes' or '2e9 bytes'; see [advise].")
    ] = None,
) -> None:
    """Choose a method: whether to train together, how, and who loses by it."""
    end_on_term()
    from piebald.advice.adviser import AdviceSettings
    from piebald.advice.tuning import Budget

    flags = list(options.sets or ())
    if budget is not None:
        limit = Budget.parse(budget)
        flags.append(f"advise.budget={{ {limit.unit} = {limit.amount} }}")
    settings = load_settings(file, options, flags, AdviceSettings)
    _advise(settings, out_folder(settings, settings.label or "advice"), options)


@command("sets", "scale", "out", "as_json", "quiet", "verbose", "wide")
def tune(
    options: SharedOptions,
    file: Annotated[Path, typer.Argument(help="An experiment file with a recipe or [[recipes]], and maybe [tune].")],
) -> None:
    """Choose settings of recipes by validation rows, each recipe with the same budget."""
    end_on_term()
    settings = load_settings(file, options)
    folder = out_folder(settings)
    _print(_tuned(settings, settings.plan(), folder, f"piebald resume {folder}", options), folder, options)


def tuned_first(settings: ExperimentSettings, plan: Plan, folder: Path, again: str, options: SharedOptions) -> Tuning:
    """Tune recipes before a comparison, in a folder beside it: a report on the comparison is not about trials."""
    beside = folder.with_name(f"{folder.name}-tuning")
    tuning = _tuned(settings, plan, beside, again, options)
    if options.progress:
        _print(tuning, beside, options)
        print()
    return tuning


def resumed_search(folder: Path, options: SharedOptions) -> None:
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


def _tuned(settings: ExperimentSettings, plan: Plan, folder: Path, again: str, options: SharedOptions) -> Tuning:
    from piebald.advice import tuning
    from piebald.experiments.sections import TuneSection

    section = settings.tune or TuneSection()
    with guarded(folder, again, settings):
        return tuning.tune(
            plan.recipes,
            plan.clients,
            {label: plan.model_of(label) for label in plan.recipes},
            space=settings.search_space(),
            budget=section.budget,
            rounds=settings.rounds or 10,
            seeds=tuple(section.seeds or (settings.first_seed,)),
            sampler=section.sampler,
            rungs=section.rungs,
            factor=section.factor,
            seed=settings.first_seed,
            out=folder,
            progress=options.progress,
            **search_options(settings, plan),
        )


def _advise(settings: ExperimentSettings, folder: Path, options: SharedOptions) -> None:
    from piebald import advice
    from piebald.experiments.sections import AdviseSection

    section, first, plan = settings.advise or AdviseSection(), settings.first_seed, settings.plan()
    with guarded(folder, f"piebald resume {folder}", settings):
        chosen = advice.advise(
            plan.clients,
            plan.model,
            look=True,
            budget=section.budget,
            rounds=settings.rounds or 10,
            seeds=tuple(section.seeds or settings.seeds or range(first, first + 3)),
            methods=plan.recipes,
            training=shared_training(plan.recipes),
            families=section.families,
            more_data=section.more_data,
            out=folder,
            progress=options.progress,
            **search_options(settings, plan),
        )
    if options.as_json:
        print_json({**chosen.plain(), "out": str(folder)})
        return
    if not options.quiet:
        columns = ("method", "score", "behind", "error", "lr", "megabytes", "steps", "rounds", "seeds")
        print_table(columns, [[row.get(name) for name in columns] for row in chosen.table], options.wide)
        print()
    print(chosen.text())
    if not options.quiet:
        print(f"train it with: piebald run {folder / 'recommended.toml'}")


def shared_training(recipes: Mapping[str, Recipe]) -> dict[str, Any]:
    """Return the settings of the file's first recipe that all methods share: those of FedAvg, without the rate."""
    from piebald.methods.recipes import settings_of

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
    options = common_options(settings, plan)
    names = ("runtime", "evaluate_clients", "loss", "metrics", "max_examples", "max_weight", "longest_step", "settings")
    return {name: options[name] for name in names if name in options}


def _print(tuning: Tuning, folder: Path, options: SharedOptions) -> None:
    if options.as_json:
        print_json({**tuning.plain(), "out": str(folder)})
    elif not options.quiet:
        rows = tuning.table()
        print_table(list(rows[0]), [list(row.values()) for row in rows], options.wide)
        print(f"\nchosen by validation rows; all trials are in {folder}")
        for budget in tuning.privacy:
            print(printable(budget["meaning"]))
