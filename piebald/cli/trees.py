"""The command about boosted trees over clients: trees."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from piebald.cli.app import SharedOptions, command, end_on_term, print_json, print_table
from piebald.cli.statistics import Source, asks_sites, site_flags
from piebald.core.errors import SettingError
from piebald.core.plain_text import WIDTH
from piebald.core.result_table import ResultTable

if TYPE_CHECKING:
    from piebald.core.progress import Bar
    from piebald.inference.trees.boosted_trees import BoostedTrees
    from piebald.inference.trees.rounds import Boosted

_LISTED = 8  # columns by their importance


@command("client", "column", "credentials", "sets", "runtime", "as_json", "quiet")
def trees(
    options: SharedOptions,
    file: Source,
    target: Annotated[str | None, typer.Option(help="The column to predict; the target by default.")] = None,
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
    out: Annotated[Path | None, typer.Option("--out", help="A folder for the model, from which to go on.")] = None,
) -> None:
    """Grow gradient-boosted trees on the rows of all clients, with xgboost at each of them."""
    end_on_term()
    from piebald.core.progress import Bar
    from piebald.data.clients.client_tables import is_table
    from piebald.inference.trees import site_clients

    columns: dict[str, Any] = {
        "target": target, "client": options.client, "objective": objective, "validation": validation, "test": test,
    }  # fmt: skip
    with Bar("trees", None, options.progress, unit="round") as bar:
        how: dict[str, Any] = {"split": split, "compare": not no_compare, "out": out, "done": _shown_on(bar)}
        if asks_sites(options):
            for name, value in {**columns, "column": options.column}.items():
                if value is not None:
                    raise SettingError(f"--{name} is for tables on this machine: sites have what [data] says")
            boosted = site_clients.trees_of_sites(file, site_flags(file, options), options.credentials, **how)
        else:
            grow = site_clients.trees_of_table if is_table(file) else site_clients.trees_of_experiment
            boosted = grow(file, options.sets or (), columns=options.column, **columns, **how)
    if options.as_json:
        return print_json(boosted.plain())
    if not options.quiet:
        _print(boosted, out)


def _shown_on(bar: Bar) -> Any:
    def show(state: Boosted) -> None:
        bar.show(len(state.ends), f"loss {state.losses[-1]:.3f}" if state.losses else "")

    return show


def _print(boosted: BoostedTrees, out: Path | None) -> None:
    print_table(boosted.table(), width=WIDTH)
    print()
    gains = list(boosted.importances.items())[:_LISTED]
    print_table(ResultTable(gains, ("column", "share of gain")), width=WIDTH)
    dropped = f" ({boosted.dropped:,} without a target left out)" if boosted.dropped else ""
    print(
        f"\n{boosted.name}, {boosted.target.objective}: {len(boosted.boosted.forest):,} trees in {boosted.rounds} "
        f"rounds on {boosted.training_rows:,} rows{dropped}."
    )
    if out is not None:
        print(f"The model: {out}/trees.json")
