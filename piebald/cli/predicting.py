"""The command that uses a trained model: predict."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from piebald.cli.app import SharedOptions, check_run, command, is_search, is_transfer
from piebald.cli.printing import print_json
from piebald.core.errors import SettingError, unknown
from piebald.core.plain_text import csv_text, printable
from piebald.core.private_files import write_private

if TYPE_CHECKING:
    import pandas as pd


@command("plugins", "as_json", "quiet")
def predict(
    options: SharedOptions,
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="A folder of a run, or of several whose answers are averaged; trees, a transfer, or credentials.",
        ),
    ],
    rows: Annotated[Path, typer.Argument(metavar="ROWS", help="The rows: .csv, .tsv, .parquet, or .npz with x.")],
    client: Annotated[
        str | None, typer.Option(help="The name of the client whose model it is; the global model by default.")
    ] = None,
    cluster: Annotated[int | None, typer.Option(help="The number of the cluster whose model it is.")] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Fit a temperature of the probabilities to validation rows.")
    ] = False,
    threshold: Annotated[
        str | None, typer.Option(help="Name the class of two, by the best threshold for f1, sensitivity=0.9, ...")
    ] = None,
    pooled: Annotated[bool, typer.Option("--pooled", help="Choose one threshold on the rows of all clients.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="A CSV file; printed without it.")] = None,
) -> None:
    """Predict for the rows of a table: probabilities of the classes, or values in the target's unit."""
    check_run(folder)
    if out is not None and not out.name.endswith((".csv", ".csv.gz")):
        raise SettingError(f"--out must be a .csv file, got {out}")
    if pooled and threshold is None:
        raise SettingError("--pooled says on which rows a threshold is chosen: give --threshold as well")
    if out is not None and out.resolve() == rows.resolve():
        raise SettingError(f"--out would overwrite the rows {rows}: name another file")
    if (folder / "credentials.json").is_file():
        if client is not None or cluster is not None or calibrate or threshold:
            raise SettingError(f"{folder} has one model, that of its site: give no options but --out")
        from piebald.federation.site.site_model import site_predictor

        predictor, model = site_predictor(folder), "the site's model"
        predictions, naming = predictor.predict(rows), predictor.naming
    elif (folder / "trees.json").is_file():
        if cluster is not None or calibrate or threshold:
            raise SettingError("--cluster, --calibrate and --threshold are for runs of a recipe, and these are trees")
        (predictions, model), naming = _of_trees(folder, rows, client), ""
    elif is_transfer(folder):
        if client is not None or cluster is not None or calibrate or threshold:
            raise SettingError(f"{folder} holds a transfer, with one model: give no options but --out")
        from piebald.vertical import predict as predict_transfer

        predictions, model, naming = predict_transfer(folder, rows), "the target's model", ""
    else:
        places = _runs_in(folder)
        if threshold is not None and len(places) > 1:
            raise SettingError(f"--threshold is chosen for one run, and {folder} has {len(places)}: name one of them")
        chosen: dict[str, Any] = {"cluster": cluster, "calibrate": calibrate, "threshold": threshold, "pooled": pooled}
        tables = [
            _of_run(place, options.plugins or (), rows, client, own=len(places) == 1, **chosen) for place in places
        ]
        predictions, naming = mean_of([table for table, _ in tables]), tables[0][1]
        model = "the global model" if client is None else f"the model of {client}"
        model = model if cluster is None else f"the model of cluster {cluster}"
        model = model if len(places) == 1 else f"{model} in {len(places)} runs, their mean"
    if out is not None:
        _write(predictions, out)
    if options.as_json:
        about = {"rows": len(predictions), "model": model, "out": None if out is None else str(out)}
        about |= {"naming": naming} if naming else {}
        return print_json(about | {"predictions": predictions.to_dict("list")} if out is None else about)
    if out is None:
        sys.stdout.write(csv_text(predictions))
    else:
        options.say(f"{len(predictions):,} rows predicted with {model}: {out}")
    if naming and options.progress:  # the table may be printed, so this is not among it
        print(printable(naming), file=sys.stderr)
    return None


def _of_run(
    place: Path, plugins: Sequence[str], rows: Path, client: str | None, own: bool, reads: bool = False, **chosen: Any
) -> tuple[pd.DataFrame, str]:
    """Return the predictions of a run, and how they name the class.

    Args:
        own: whether the class is named by the run's own threshold where no other one is chosen.
        reads: whether rows of the run are read for it, where its folder has not kept it.
    """
    from piebald.runs.run import opened

    rows_are_read = reads or bool(chosen["calibrate"] or chosen["threshold"])
    with opened(place, plugins=plugins, rows=rows_are_read) as run:
        criterion = chosen["threshold"]
        if criterion is None and own:
            criterion = run.usual_criterion(client, chosen["cluster"])
        predictor = run.predictor(client, **{**chosen, "threshold": criterion})
        whose = "all clients" if client is None else client
        lacking = f"no class is named: the run has no threshold by validation rows of both classes of {whose} here"
        is_lacking = own and run.meta.get("threshold") is not None and predictor.threshold is None
        if rows_are_read or not is_lacking:
            return predictor.predict(rows), lacking if is_lacking else predictor.naming
    # reading the run's rows is slow, so it is done only where what the folder has kept does not suffice
    return _of_run(place, plugins, rows, client, own, reads=True, **chosen)


def _runs_in(folder: Path) -> list[Path]:
    """Return the folder of a run, or the runs of a comparison in it."""
    from piebald.storage.schema import DATABASE

    if is_search(folder):
        raise SettingError(
            f"{folder} holds a search with runs of many kinds: run its recommended.toml, and name that run"
        )
    below = [] if (folder / DATABASE).exists() else sorted(path.parent for path in folder.rglob(DATABASE))
    return below or [folder]


def mean_of(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the mean of the predictions of several runs for the same rows.

    Raises:
        SettingError: runs predict different things, or words.
    """
    first = tables[0]
    if len(tables) == 1:
        return first
    if any(list(table.columns) != list(first.columns) for table in tables):
        raise SettingError("the runs in this folder predict different things, so there is no mean: name one run")
    if first.select_dtypes("number").shape[1] < first.shape[1]:
        raise SettingError("words cannot be averaged: name one run")
    return sum(tables[1:], first) / len(tables)


def _of_trees(folder: Path, rows: Path, client: str | None) -> tuple[pd.DataFrame, str]:
    """Return predictions of boosted trees, which have one model for all clients, and its name."""
    import pandas as pd

    from piebald.data.clients.client_tables import read_table
    from piebald.inference.trees.boosted_trees import trees_in

    trees = trees_in(folder)
    if client is not None and client not in trees.clients:
        raise unknown("client", client, trees.clients)
    return pd.DataFrame(trees.predict(read_table(rows)), columns=[*(trees.classes or (trees.name,))]), "the trees"


def _write(predictions: pd.DataFrame, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = csv_text(predictions).encode()
        write_private(path, gzip.compress(text) if path.suffix == ".gz" else text, lasting=False)
    except OSError as error:
        raise SettingError(f"{path} cannot be written: {error.strerror or error}") from None
