"""The commands `predict` and `serve`, which use a trained model, and the running of a federation's server.

Several commands run such a server: its settings, log, lock, and status page are here.
"""

from __future__ import annotations

import gzip
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from piebald.cli import app
from piebald.core.errors import SettingError, shown, unknown
from piebald.core.plain_text import csv_text, printable
from piebald.core.private_files import clear_parts, write_private

if TYPE_CHECKING:
    import pandas as pd

    from piebald.data.preparation.preparation import Tell
    from piebald.experiments.file import ExperimentSettings
    from piebald.federation.operate.page_server import PageAddress
    from piebald.federation.operate.prediction_server import Answerer
    from piebald.models.prediction import Predictor
    from piebald.report.callbacks import Callback
    from piebald.runs.finished_run import Run


log = logging.getLogger("piebald.data")
_Client = Annotated[
    str | None, typer.Option(help="The name of the client whose model it is; the global model by default.")
]
_Cluster = Annotated[int | None, typer.Option(help="The number of the cluster whose model it is.")]
_Calibrate = Annotated[
    bool, typer.Option("--calibrate", help="Fit a temperature of the probabilities to validation rows.")
]
_Threshold = Annotated[
    str | None, typer.Option(help="Name the class of two, by the best threshold for f1, sensitivity=0.9, ...")
]
_Pooled = Annotated[bool, typer.Option("--pooled", help="Choose one threshold on the rows of all clients.")]


@app.command("plugins", "as_json", "quiet")
def predict(
    options: app.SharedOptions,
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="A folder of a run, or of several, which are averaged; an ensemble, trees, transfer, or credentials.",
        ),
    ],
    rows: Annotated[Path, typer.Argument(metavar="ROWS", help="The rows: .csv, .tsv, .parquet, or .npz with x.")],
    client: _Client = None,
    cluster: _Cluster = None,
    calibrate: _Calibrate = False,
    threshold: _Threshold = None,
    pooled: _Pooled = False,
    source_rows: Annotated[
        Path | None, typer.Option(help="The source's table, for a simulated split model that is a transfer's.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="A CSV file; printed without it.")] = None,
) -> None:
    """Predict for the rows of a table: probabilities of the classes, or values in the target's unit."""
    app.check_run(folder)
    if out is not None and not out.name.endswith((".csv", ".csv.gz")):
        raise SettingError(f"--out must be a .csv file, got {out}")
    if out is not None and out.resolve() == rows.resolve():
        raise SettingError(f"--out would overwrite the rows {rows}: name another file")
    model = _answerer(folder, options.plugins or (), client, cluster, calibrate, threshold, pooled, source_rows or True)
    predictions, about = model.about(rows)
    for sentence in about.get("warnings", ()):
        log.warning("%s", sentence)
    if out is not None:
        _write(predictions, out)
    if options.as_json:
        about |= {"out": None if out is None else str(out)}
        return app.print_json(about | {"predictions": predictions.to_dict("list")} if out is None else about)
    if out is None:
        sys.stdout.write(csv_text(predictions))
    else:
        options.say(f"{len(predictions):,} rows predicted with {model.model}: {out}")
    if model.naming and options.progress:  # the table may be printed, so this is not among it
        print(printable(model.naming), file=sys.stderr)
    return None


@app.command("plugins", "as_json", "quiet")
def ensemble(
    options: app.SharedOptions,
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The folders of finished runs.")],
    out: Annotated[Path, typer.Option("--out", help="A new folder, which piebald predict, serve and export take.")],
    shares: Annotated[
        str | None, typer.Option(help="How much each run counts, like 2,1,1; all the same by default.")
    ] = None,
    like: Annotated[
        Path | None, typer.Option(help="An ensemble of piebald advise, whose shares runs of the same recipes take.")
    ] = None,
) -> None:
    """Join finished runs of the same clients, as those of a federation, into an ensemble."""
    from piebald.runs.averaged import join_runs

    for folder in runs:
        app.check_run(folder)
    try:
        counts = None if shares is None else [float(share) for share in shares.split(",")]
    except ValueError:
        raise SettingError(f"--shares must be numbers with commas, like 2,1,1, got {shown(shares)}") from None
    path = join_runs(runs, out, shares=counts, like=like, plugins=options.plugins or ())
    return app.print_result(options, {"folder": str(path)}, f"an ensemble of {len(runs)} runs: {path}")


@app.command("plugins", "as_json", "quiet")
def serve(
    options: app.SharedOptions,
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A folder that piebald predict takes.")],
    client: _Client = None,
    cluster: _Cluster = None,
    calibrate: _Calibrate = False,
    threshold: _Threshold = None,
    pooled: _Pooled = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 for any that is free.")] = 8477,
    host: Annotated[
        str, typer.Option(help="The address to listen on; other than loopback it is HTTPS and needs a token.")
    ] = app.LOOPBACK,
    credentials: Annotated[
        Path | None, typer.Option(help="The folder with certificate.pem, key.pem and the token; RUN by default.")
    ] = None,
) -> None:
    """Answer with predictions over HTTP: POST rows as JSON to /predict, which GET /schema.json describes."""
    app.check_run(folder)
    from piebald.federation.operate.page_server import PageAddress
    from piebald.federation.operate.prediction_server import serve as serve_model

    def tell(about: Mapping[str, Any]) -> None:
        needs = f", with the token in {about['token']}" if "token" in about else ""
        app.print_result(options, about, f"predictions of {about['model']} are at {about['url']}predict{needs}")
        sys.stdout.flush()

    model = _answerer(folder, options.plugins or (), client, cluster, calibrate, threshold, pooled)
    app.end_on_term()
    serve_model(model, PageAddress(host, port), folder if credentials is None else credentials, tell)


def _answerer(
    folder: Path, plugins: Sequence[str], client: str | None, cluster: int | None, calibrate: bool,
    threshold: str | None, pooled: bool, partner: Path | bool = False,
) -> Answerer:  # fmt: skip
    """Return the model of a folder that the options choose.

    Args:
        partner: the rows of the other party of a transfer, or whether it may be met, for each answer.
    """
    from piebald.federation.operate.prediction_server import Answerer

    kind = app.kind_of(folder)
    if isinstance(partner, Path) and kind != "transfer":
        raise SettingError(f"--source-rows are for the run of a transfer, and {folder} is none: leave them out")
    if pooled and threshold is None:
        raise SettingError("--pooled says on which rows a threshold is chosen: give --threshold as well")
    if kind == "site":
        if client is not None or cluster is not None or calibrate or threshold:
            raise SettingError(f"{folder} has one model, that of its site: give none of the options that choose one")
        from piebald.federation.site.site_model import site_predictor

        predictor = site_predictor(folder)
        raw = predictor.inputs
        return Answerer(predictor.predict, "the site's model", predictor.naming, raw.preparation, raw.features)
    if kind == "trees":
        if cluster is not None or calibrate or threshold:
            raise SettingError("--cluster, --calibrate and --threshold are for runs of a recipe, and these are trees")
        return _of_trees(folder, client)
    if kind == "ensemble":
        if cluster is not None or calibrate or threshold:
            raise SettingError("--cluster, --calibrate and --threshold are for one run, and this is a mean of several")
        from piebald.runs.averaged import ensemble_predictor

        mean = ensemble_predictor(folder, client, plugins=plugins)
        raw = mean.inputs
        whose = "the ensemble" if client is None else f"the ensemble of {client}"
        return Answerer(mean.predict, whose, "", raw.preparation, raw.features)
    if kind == "transfer":
        if client is not None or cluster is not None or calibrate or threshold:
            raise SettingError(f"{folder} holds a transfer, with one model: give none of the options that choose one")
        from piebald.vertical.party_store import read_settings
        from piebald.vertical.prediction import TransferPredictor
        from piebald.vertical.prediction import predict as scores

        if read_settings(folder).method.joint:
            if not partner:
                raise SettingError(f"{folder} holds a split model, which needs both parties: use piebald predict")
            given = partner if isinstance(partner, Path) else None
            return Answerer(lambda rows, tell: scores(folder, rows, given, tell), "both parties' model")
        transfer = TransferPredictor.of_run(folder)
        prepared = transfer.preparation
        return Answerer(transfer.predict, "the target's model", "", prepared.columns, prepared.features)
    places = _runs_in(folder)
    if threshold is not None and len(places) > 1:
        raise SettingError(f"--threshold is chosen for one run, and {folder} has {len(places)}: name one of them")
    chosen: dict[str, Any] = {"cluster": cluster, "calibrate": calibrate, "threshold": threshold, "pooled": pooled}
    models = [_of_run(place, plugins, client, own=len(places) == 1, **chosen) for place in places]
    raw, naming = models[0][0].inputs, models[0][1]

    def answer(rows: Any, tell: Tell) -> pd.DataFrame:
        return mean_of([predictor.predict(rows, tell) for predictor, _ in models])

    model = "the global model" if client is None else f"the model of {client}"
    model = model if cluster is None else f"the model of cluster {cluster}"
    model = model if len(places) == 1 else f"{model} in {len(places)} runs, their mean"
    return Answerer(answer, model, naming, raw.preparation, raw.features)


def _of_run(
    folder: Path, plugins: Sequence[str], client: str | None, own: bool, **chosen: Any
) -> tuple[Predictor, str]:
    """Return the model of a run, and how its predictions name the class.

    Args:
        own: whether the class is named by the run's own threshold where no other one is chosen.
    """
    from piebald.runs.run import read_opened

    def read(run: Run) -> tuple[Predictor, bool]:
        criterion = chosen["threshold"]
        if criterion is None and own:
            criterion = run.usual_criterion(client, chosen["cluster"])
        predictor = run.predictor(client, **{**chosen, "threshold": criterion})
        return predictor, own and run.meta.get("threshold") is not None and predictor.threshold is None

    needs_rows = bool(chosen["calibrate"] or chosen["threshold"])
    predictor, lacks_threshold = read_opened(folder, read, plugins, needs_rows)
    if lacks_threshold and not needs_rows:
        # reading the run's rows is slow, so it is done only where what the folder has kept does not suffice
        predictor, lacks_threshold = read_opened(folder, read, plugins, rows=True)
    whose = "all clients" if client is None else client
    lacking = f"no class is named: the run has no threshold by validation rows of both classes of {whose} here"
    return predictor, lacking if lacks_threshold else predictor.naming


def _runs_in(folder: Path) -> list[Path]:
    """Return the folder of a run, or the runs of a comparison in it."""
    from piebald.storage.schema import DATABASE

    if app.kind_of(folder) == "search":
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


def _of_trees(folder: Path, client: str | None) -> Answerer:
    """Return boosted trees, which have one model for all clients."""
    import pandas as pd

    from piebald.data.clients.client_tables import read_table
    from piebald.federation.operate.prediction_server import Answerer
    from piebald.inference.trees.boosted_trees import trees_in

    trees = trees_in(folder)
    if client is not None and client not in trees.clients:
        raise unknown("client", client, trees.clients)
    prepared = trees.encoding.preparation

    def answer(rows: Any, tell: Tell) -> pd.DataFrame:
        if isinstance(rows, Path):
            rows = read_table(rows, None, () if prepared is None else prepared.as_written)
        return pd.DataFrame(trees.predict(rows, client, tell), columns=[*(trees.classes or (trees.name,))])

    return Answerer(answer, "the trees", "", prepared, trees.encoding.columns)


def _write(predictions: pd.DataFrame, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = csv_text(predictions).encode()
        write_private(path, gzip.compress(text) if path.suffix == ".gz" else text, lasting=False)
    except OSError as error:
        raise SettingError(f"{path} cannot be written: {error.strerror or error}") from None


_RELAY = 0.2  # seconds between two looks at what sites on this machine have printed


def with_sites(
    file: Path, sets: Sequence[str] | None, sites: list[str], kind: type[ExperimentSettings] | None = None
) -> list[str]:
    """Return the settings of the user, with the sites that credentials list where the experiment takes any."""
    from piebald.experiments.file import ExperimentSettings

    flags = list(sets or ())
    return [*flags, *sites_flags((kind or ExperimentSettings).load(file, flags), sites)]


def sites_flags(settings: ExperimentSettings, sites: Sequence[str]) -> list[str]:
    """Return the setting that names an experiment's sites where it takes any, else none."""
    partition = settings.partition if settings.rows_at_sites else None
    takes_any = partition is not None and partition.model_dump().get("clients") == "any"
    return [f"partition.clients={json.dumps([*sites])}"] if takes_any else []


def federation_flags(file: Path | None, sets: Sequence[str] | None, **settings: str) -> list[str]:
    """Return settings that choose the federation where the file does not, then those of the user, who may change it."""
    from piebald.experiments.file import ExperimentSettings

    experiment = ExperimentSettings.load(file)
    if "credentials" in experiment.component_class("runtime", experiment.runtime).model_fields:
        chosen = [f"runtime.{name}={json.dumps(value)}" for name, value in settings.items()]
    else:
        fields = "".join(f", {name} = {json.dumps(value)}" for name, value in settings.items())
        chosen = [f'runtime={{ kind = "federation"{fields} }}']
    return [*chosen, *(sets or ())]


@contextmanager
def locked(credentials: Path) -> Iterator[None]:
    """Lock credentials for this process, and end it on SIGTERM as on Ctrl-C."""
    from piebald.storage.lock import RunLock
    from piebald.storage.schema import explained

    with explained(f"{credentials} cannot be used"):
        lock = RunLock(credentials)
    try:
        # under the lock: without it they could be those of a process that is writing
        clear_parts(credentials)
        app.end_on_term()
        yield
    finally:
        lock.release()


def page_address(options: app.SharedOptions) -> PageAddress | None:
    """Return the address of the status page, None where no page is wanted.

    Raises:
        SettingError: an extra is missing, or there is a host and no port.
    """
    from piebald.federation.operate.page_server import PageAddress, check_installed

    if options.status_port is None:
        if options.status_host != app.LOOPBACK:
            raise SettingError(f"--status-host is {options.status_host!r} and there is no page: add --status-port PORT")
        return None
    check_installed()
    return PageAddress(options.status_host, options.status_port)


@contextmanager
def relayed(run: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Relay what the sites of a federation on this machine print, each line after its site's name.

    Args:
        run: the run folder, or one with several, in which the sites' logs are.
        tell: takes a line.
    """
    from piebald.federation.link.supervision import repeated

    read = dict[Path, int]()

    def relay() -> None:
        for path in sorted(run.glob("**/federation/*/log.txt")):
            with path.open("rb") as file:
                file.seek(read.setdefault(path, 0))
                # whole lines only, as a site may be in the middle of one
                whole, end, _ = file.read().rpartition(b"\n")
            read[path] += len(whole) + len(end)
            for line in whole.decode(errors="replace").split("\n") if end else ():
                words = (part if part.isspace() else printable(part) for part in re.split("( +)", line))  # a table's
                tell(f"{path.parent.name} | {''.join(words)}".rstrip())

    try:
        with repeated(relay, _RELAY):
            yield
    finally:
        # once more, for what came after the thread's last look
        relay()


@contextmanager
def serving(credentials: Path, run: Path, page: PageAddress | None = None) -> Iterator[list[Callback]]:
    """Run a federation's server: one at a time for its credentials, which name the run folder from then on.

    Args:
        credentials: the server's.
        run: the run folder.
        page: the address of its status page.

    Yields:
        The listeners of the run that write its steps into the log.
    """
    from piebald.federation.link.supervision import at_work, repeated
    from piebald.federation.operate.logs import StepLog
    from piebald.federation.operate.page_server import serving_page
    from piebald.federation.operate.takeover import BEAT, leased

    with leased(credentials) as held, locked(credentials), repeated(held.beat, BEAT):
        name_run(credentials, run)
        page_server = nullcontext() if page is None else serving_page(page, credentials)
        with page_server, at_work("preparing the run"):
            yield [StepLog()]


def name_run(credentials: Path, run: Path) -> None:
    """Write the name of the run folder that a server writes into its credentials."""
    from piebald.federation.operate.status import RUN
    from piebald.storage import lease

    lease.write(credentials / RUN, json.dumps({"folder": str(run.resolve())}) + "\n")


@contextmanager
def resumed(run: Path, options: app.SharedOptions) -> Iterator[list[Callback]]:
    """Run the server of a run that goes on, if it is a federation's.

    Raises:
        SettingError: it is not, and the options speak of a log or a page.
    """
    from piebald.federation.operate.status import server_credentials

    credentials = server_credentials(run)
    if credentials is None:
        if any(getattr(options, name) != getattr(app.SharedOptions(), name) for name in (*app.LOG, *app.PAGE)):
            raise SettingError(
                f"{run} is not a run of a federation, which --log-... and --status-... are for: leave them out"
            )
        yield []
        return
    page = page_address(options)
    options.start_log()
    with serving(credentials, run, page) as callbacks:
        yield callbacks
