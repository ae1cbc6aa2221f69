"""Commands that choose: tune."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from piebald.cli.app import Json, Out, Quiet, Sets, Verbose, app, end_on_term, show_log
from piebald.cli.experiment_files import common_options, guarded, load_settings, out_folder
from piebald.cli.printing import print_json, print_table
from piebald.errors import RunFolderError, SettingError

if TYPE_CHECKING:
    from piebald.experiment_file import ExperimentSettings, Plan
    from piebald.tuning import Tuning


@app.command()
def tune(
    file: Annotated[Path, typer.Argument(help="An experiment file with a recipe or [[recipes]], and maybe [tune].")],
    sets: Sets = None,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Choose settings of recipes by validation rows, each recipe with the same budget."""
    show_log(verbose)
    end_on_term()
    settings = load_settings(file, sets, out, None, False)
    folder = out_folder(settings)
    _print(
        _tuned(settings, settings.plan(), folder, f"piebald resume {folder}", as_json, quiet), as_json, quiet, folder
    )


def tuned_first(
    settings: ExperimentSettings, plan: Plan, folder: Path, again: str, as_json: bool, quiet: bool
) -> Tuning:
    """What was chosen before a comparison, in a folder beside it: a report on the comparison is not about trials."""
    beside = folder.with_name(f"{folder.name}-tuning")
    found = _tuned(settings, plan, beside, again, as_json, quiet)
    if not quiet and not as_json:
        _print(found, as_json, quiet, beside)
        print()
    return found


def resumed_search(folder: Path, as_json: bool, quiet: bool) -> None:
    """Go on with the search in a folder, from the experiment file that it was started with."""
    from piebald.experiment_file import ExperimentSettings

    try:
        record = json.loads((folder / "search.json").read_text(encoding="utf-8"))
        table, _ = record["settings"], record["kind"]
    except (ValueError, KeyError, TypeError, OSError):
        raise RunFolderError(f"{folder / 'search.json'} cannot be read: start a new search") from None
    if table is None:
        raise SettingError(
            f"the search in {folder} was started from Python: go on with it there, with out={str(folder)!r}"
        )
    settings = ExperimentSettings.of_table(table, f"the settings in {folder}")
    found = _tuned(settings, settings.plan(), folder, f"piebald resume {folder}", as_json, quiet)
    _print(found, as_json, quiet, folder)


def _tuned(settings: ExperimentSettings, plan: Plan, folder: Path, again: str, as_json: bool, quiet: bool) -> Tuning:
    from piebald import tuning
    from piebald.experiment_sections import TuneSection

    section = settings.tune or TuneSection()
    with guarded(folder, again, settings):
        return tuning.tune(
            plan.recipes,
            plan.clients,
            plan.model,
            space=settings.search_space(),
            budget=section.budget,
            rounds=settings.rounds or 10,
            seeds=tuple(section.seeds or (settings.first_seed,)),
            sampler=section.sampler,
            rungs=section.rungs,
            factor=section.factor,
            seed=settings.first_seed,
            out=folder,
            progress=not as_json and not quiet,
            **search_options(settings, plan),
        )


def search_options(settings: ExperimentSettings, plan: Plan) -> dict[str, Any]:
    """The options that the runs of a search share with other runs.

    Raises:
        SettingError: the file has a setting that a search cannot follow.
    """
    for name, given in (("stop", settings.stop is not None), ("unseen", bool(settings.unseen))):
        if given:
            raise SettingError(
                f"{name} does not fit a search, whose runs have all clients and one length: leave it out"
            )
    options = common_options(settings, plan)
    kept = ("runtime", "evaluate_clients", "loss", "metrics", "max_examples", "max_weight", "longest_step", "settings")
    return {name: options[name] for name in kept if name in options}


def _print(found: Tuning, as_json: bool, quiet: bool, folder: Path) -> None:
    if as_json:
        print_json({**found.plain(), "out": str(folder)})
    elif not quiet:
        rows = found.table()
        print_table(list(rows[0]), [list(row.values()) for row in rows])
        print(f"\nchosen by validation rows; all trials are in {folder}")
