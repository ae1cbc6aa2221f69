"""The command about boosted trees over clients: trees."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from piebald.cli.app import Json, Quiet, RuntimeSettings, Sets, app, end_on_term
from piebald.cli.app import progress as wants_progress
from piebald.cli.printing import print_json
from piebald.cli.statistics import ClientColumn, ColumnNames, Source, asks_sites, print_narrow, site_flags
from piebald.core.errors import SettingError

if TYPE_CHECKING:
    from piebald.core.progress import Bar
    from piebald.statistics.boosting.rounds import Boosted
    from piebald.statistics.trees import BoostedTrees

_LISTED = 8  # columns by their importance


@app.command()
def trees(
    file: Source,
    target: Annotated[str | None, typer.Option(help="The column to predict; the target by default.")] = None,
    client: ClientColumn = None,
    column: ColumnNames = None,
    objective: Annotated[
        Literal["binary", "multiclass", "regression"] | None, typer.Option(help="By default what the target is.")
    ] = None,
    validation: Annotated[float | None, typer.Option(help="Share of a table's rows to be patient by.")] = None,
    test: Annotated[float | None, typer.Option(help="Share of a table's rows to score on, 0.2 by default.")] = None,
    split: Annotated[
        Literal["train", "validation", "test"], typer.Option(help="Whose rows are scored, where clients have splits.")
    ] = "test",
    no_compare: Annotated[
        bool, typer.Option("--no-compare", help="Do not also score trees grown alone and from pooled rows.")
    ] = False,
    credentials: Annotated[
        Path | None, typer.Option(help="Ask the sites of a federation: the server's credentials.")
    ] = None,
    runtime: RuntimeSettings = None,
    out: Annotated[Path | None, typer.Option("--out", help="A folder for the model, from which to go on.")] = None,
    sets: Sets = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Grow gradient-boosted trees on the rows of all clients, with xgboost at each of them."""
    end_on_term()
    from piebald.core.progress import Bar
    from piebald.data.clients.client_tables import is_table
    from piebald.statistics.trees import of_experiment as trees_of_experiment

    at_sites = asks_sites(credentials, runtime)
    own: dict[str, Any] = {
        "target": target,
        "client": client,
        "objective": objective,
        "validation": validation,
        "test": test,
    }
    with Bar("trees", None, wants_progress(as_json, quiet), unit="round") as bar:
        more: dict[str, Any] = {"split": split, "compare": not no_compare, "out": out, "done": _shown_on(bar)}
        if at_sites:
            for name, given in {**own, "column": column}.items():
                if given is not None:
                    raise SettingError(f"--{name} is for tables on this machine: sites have what [data] says")
            found = trees_of_experiment.trees_of_sites(file, site_flags(file, sets, credentials), credentials, **more)
        elif is_table(file):
            found = trees_of_experiment.trees_of_table(file, sets or (), columns=column, **own, **more)
        else:
            found = trees_of_experiment.trees_of_experiment(file, sets or (), columns=column, **own, **more)
    if as_json:
        return print_json(found.plain())
    if not quiet:
        _print(found, out)


def _shown_on(bar: Bar) -> Any:
    def show(state: Boosted) -> None:
        bar.show(len(state.ends), f"loss {state.losses[-1]:.3f}" if state.losses else "")

    return show


def _print(found: BoostedTrees, out: Path | None) -> None:
    heading, *rows = found.table()
    print_narrow(heading, rows)
    print()
    print_narrow(["column", "share of gain"], [[*one] for one in list(found.importances.items())[:_LISTED]])
    dropped = f" ({found.dropped:,} without a target left out)" if found.dropped else ""
    print(
        f"\n{found.name}, {found.target.objective}: {len(found.boosted.forest):,} trees in {found.rounds} rounds on "
        f"{found.training_rows:,} rows{dropped}."
    )
    if out is not None:
        print(f"The model: {out}/trees.json")
