"""Commands on what is there already: report, export, recipes, data, version; backup, restore, approve, audit.

The first ones show or write something, the last four keep runs and federations for months.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from piebald.cli import app
from piebald.core.errors import SettingError
from piebald.core.result_table import ResultTable

if TYPE_CHECKING:
    from piebald.data.clients.data_source import DataSource


ExportFormat = Literal["safetensors", "state_dict", "torch_export", "onnx", "huggingface"]  # without importing torch


@app.command("as_json", "quiet")
def report(
    options: app.SharedOptions,
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders that contain them.")],
    out: Annotated[Path, typer.Option("--out", help="The folder for the report.")] = Path("report"),
    target: Annotated[float | None, typer.Option(help="A value of the metric whose cost is shown.")] = None,
) -> None:
    """Write an HTML page and figures about one or more runs."""
    for folder in runs:
        app.check_run(folder)
    if len(runs) == 1 and app.kind_of(runs[0]) == "transfer":
        from piebald.vertical.transfer_results import write_page

        files = [str(file) for file in write_page(runs[0], out)]
    else:
        from piebald.report import write_report

        files = [str(file) for file in write_report(runs, out, target)]
    app.print_result(options, {"page": files[0], "files": files}, files[0])


@app.command("as_json")
def errors(
    options: app.SharedOptions,
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    client: Annotated[str | None, typer.Option(help="The name of one client; all clients together by default.")] = None,
) -> None:
    """Print the right and wrong answers of a run's models by class, and the number of rows."""
    app.check_run(folder)
    from piebald.report.tables import History

    with History(folder) as history:
        rows = history.class_errors(client)
        if not rows:
            raise SettingError(
                f"the run in {folder} has no answers by class: they are counted when a run ends that has classes and "
                "evaluations, in a federation only with evaluate.per_class = true and where sites allow it"
            )
        if options.as_json:
            return app.print_json(rows)
        right, count = sum(row["right"] for row in rows), sum(row["rows"] for row in rows)
        print(f"{right:,} of {count:,} {history.split} rows right")
        mistakes = [f"{row['taken_for']} ({row['mistaken']:,})" if row["taken_for"] else "-" for row in rows]
        lines = [
            [row["class"], row["rows"], row["right"], f"{row['share']:.0%}", mistaken, row["wrong"]]
            for row, mistaken in zip(rows, mistakes, strict=True)
        ]
        heading = ("class", "rows", "right", "share", "most often taken for", "others taken for it")
        app.print_table(ResultTable(lines, heading))
    return None


@app.command("plugins", "as_json", "quiet")
def export(
    options: app.SharedOptions,
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run, or of an ensemble.")],
    out: Annotated[Path, typer.Option("--out", help="A new file, or a new folder, which scores raw rows.")],
    client: Annotated[
        str | None, typer.Option(help="The name of the client whose model it is; the global model by default.")
    ] = None,
    file_format: Annotated[
        ExportFormat | None, typer.Option("--format", help="The format, where the suffix should not choose it.")
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Divide scores by a temperature, in a folder or an .onnx file of raw rows."),
    ] = False,
) -> None:
    """Write a run's model to a file that other programs read; the suffix of the file chooses the format."""
    app.check_run(folder)
    if app.kind_of(folder) == "ensemble":
        from piebald.runs.averaged import save_ensemble

        if calibrate:
            raise SettingError("--calibrate is for one run, and this is a mean of several: leave it out")
        path = save_ensemble(folder, out, client, file_format=file_format, plugins=options.plugins or ())
        return app.print_result(options, {"file": str(path)}, str(path))
    from piebald.runs.run import opened

    run = opened(folder, plugins=options.plugins or (), rows=calibrate)
    path = run.save(out, client, file_format=file_format, calibrate=calibrate)
    return app.print_result(options, {"file": str(path)}, str(path))


@app.command("as_json")
def recipes(
    options: app.SharedOptions,
    name: Annotated[str | None, typer.Argument(help="Print this recipe's settings as TOML.")] = None,
) -> None:
    """List the recipes, with their papers and settings."""
    from piebald.methods.catalog import recipes as registry
    from piebald.methods.catalog.registry import unknown_recipe

    listing = registry.listing()
    if name is not None:
        listing = [entry for entry in listing if entry["name"] == name]
        if not listing:
            raise unknown_recipe(name)
    if options.as_json:
        app.print_json(listing)
    elif name is None:
        rows = [[entry["name"], entry["summary"], entry["paper"]] for entry in listing]
        app.print_table(ResultTable(rows, ("recipe", "what it does", "paper")))
    else:
        print(app.recipe_toml(listing[0]), end="")


@app.command("sets", "as_json")
def data(
    options: app.SharedOptions,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="list, show NAME, or NAME; your own rows are a file, a folder or my_data.py:load.", metavar="[NAME]"
        ),
    ] = None,
    partition: Annotated[
        str | None, typer.Option(help="Partition the data set and measure the clients: iid, dirichlet, ...")
    ] = None,
    client: Annotated[str | None, typer.Option(help="The column of a table that names the client.")] = None,
    target: Annotated[str | None, typer.Option(help="The column of a table to predict.")] = None,
    fleet: Annotated[str | None, typer.Option(help="Devices of the clients: fast_slow, log_normal, trace, ...")] = None,
    model: Annotated[
        str | None, typer.Option(help="A model to train for one epoch on each client, to measure weight divergence.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="A folder for pictures of the partition.")] = None,
) -> None:
    """List the data sets, or show one and how a partition divides it (--set clients=10, --set fleet.fast=2)."""
    from piebald import data as data_sets

    words = list(words or ())
    names = words[1:] if words[:1] in (["show"], ["list"]) else words
    if len(names) > 1 or (words[:1] == ["list"] and names) or (words == ["show"]):
        raise SettingError(f"piebald data takes list, show NAME or NAME, got {' '.join(words)!r}")
    name = names[0] if names else None
    if name is None and (partition or client or target):
        flag = f"--partition {partition}" if partition else "--client" if client else "--target"
        raise SettingError(f"{flag} needs a data set: piebald data show NAME {flag}")
    if name is not None and (partition is not None or name not in data_sets.names()):
        source = _source(name, client, target)
        return _show(source, partition, options, fleet=fleet, model=model, out=out)
    if options.sets or out or fleet or model or client or target:
        raise SettingError("--set, --fleet, --model and --out need a partition: add --partition KIND")
    listing = [_properties(data_set, name is None) for data_set in data_sets.names() if name in (None, data_set)]
    if options.as_json:
        app.print_json(listing)
    elif name is None:
        rows = [[entry["name"], entry.get("rows", "-"), entry.get("licence", ""), _origin(entry)] for entry in listing]
        app.print_table(ResultTable(rows, ("data set", "rows", "licence", "source")))
    else:
        app.print_facts(listing[0])


def _show(source: DataSource, partition: str | None, options: app.SharedOptions, **measures: Any) -> None:
    """Print measures of a partitioned data set, and draw pictures."""
    from piebald.experiments.preview import columns, show

    preview = show(source, partition, dict(app.pair(text) for text in options.sets or ()), **measures)
    if options.as_json:
        return app.print_json(asdict(preview))
    rows = [(measure, number, preview.units[measure]) for measure, number in preview.federation.items()]
    app.print_table(ResultTable(rows, ("federation", "", "unit")))
    print()
    app.print_table(ResultTable(preview.clients, columns(preview.clients)), most=20)
    for path in preview.files:
        print(path)


@app.command("as_json")
def version(options: app.SharedOptions) -> None:
    """Print the version."""
    from piebald.version import __version__

    app.print_result(options, {"version": __version__}, __version__)


def _properties(name: str, only_local: bool) -> dict[str, Any]:
    """Return the properties of a data set, or the reason why it cannot be loaded."""
    from piebald import data as data_sets
    from piebald.data.sets.download import forbidden

    try:
        # a list of all data sets must not download each of them
        with forbidden() if only_local else nullcontext():
            loaded = data_sets.load(name)
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


def _source(name: str, client: str | None, target: str | None) -> DataSource:
    """Return the data set of a name, or the source at a path or reference."""
    from piebald import data as data_sets
    from piebald.core.references import USERS, is_reference
    from piebald.data.clients.data_source import DataSource

    if name in data_sets.names():
        return DataSource(name=name, client=client, target=target)
    if not is_reference(name) and not Path(name).exists():
        data_sets.load(name)  # says which names there are
    return DataSource(source=USERS.mark(name), client=client, target=target)


def _origin(entry: Mapping[str, Any]) -> str:
    return str(entry.get("source") or f"not here: {entry['missing']}")


@app.command("as_json")
def backup(
    options: app.SharedOptions,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder; the run may go on meanwhile.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file, which only you can read.")],
) -> None:
    """Write a run folder into one file, without stopping the run."""
    app.check_run(run)
    from piebald.storage.backup import backup

    summary = backup(run, file)
    app.print_result(options, summary, f"{summary['file']} holds {run} as of server step {summary['step']}")


@app.command("as_json")
def restore(
    options: app.SharedOptions,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that piebald backup wrote.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that does not exist.")],
) -> None:
    """Make a run folder from a backup; piebald resume goes on from there."""
    from piebald.storage.backup import restore

    summary = restore(file, folder)
    step = summary["step"]
    line = f"{folder} holds the run as of server step {step}; go on with: piebald resume {folder}"
    app.print_result(options, summary, line)


@app.command("as_json")
def approve(
    options: app.SharedOptions,
    credentials: Annotated[Path, typer.Argument(metavar="CREDENTIALS", help="The credentials of a site.")],
    digest: Annotated[str | None, typer.Argument(help="The digest of the terms to approve; shown without it.")] = None,
) -> None:
    """Show the experiment that waits for approval at a site, or approve it."""
    from piebald.federation.credentials.provisioning import read
    from piebald.federation.site import consent

    # says what is wrong with the folder, where `consent` would only find nothing in it
    read(credentials)
    if digest is not None:
        consent.approve(credentials, digest)
        return app.print_result(options, {"approved": digest}, f"approved {digest}")
    waiting = consent.pending(credentials)
    if options.as_json:
        return app.print_json({"pending": waiting})
    if waiting is None:
        return print(f"nothing waits for approval in {credentials}")
    waiting["questions"] = waiting["questions"] or "none: nothing is answered, sites only train"
    app.print_facts({name: value for name, value in waiting.items() if value})
    print(f"\napprove it with: piebald approve {credentials} {waiting['terms']}")


@app.command("as_json")
def audit(
    options: app.SharedOptions,
    folder: Annotated[
        Path, typer.Argument(metavar="RUN|CREDENTIALS", help="A run folder, or a folder of credentials.")
    ],
    head: Annotated[str | None, typer.Option(help="A head that was noted before: it must still be in the log.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="The credentials of the other side: nothing that it tells of may be missing.")
    ] = None,
    archive: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where rotated files of the log were moved to.")
    ] = None,
) -> None:
    """Check the chain of a party's audit log: no line was changed, removed, added or moved."""
    from piebald.federation.operate.audit_check import check_log

    path, log, agrees = check_log(folder, head, against, archive)
    facts = {"log": str(path), "lines": log.lines, "first": log.first, "last": log.last, "head": log.head}
    if options.as_json:
        return app.print_json({**facts, "agrees": agrees})
    app.print_facts(facts)
    if not log.lines:
        return print(f"\nNothing has been written yet: {path.parent} has not taken part in anything.")
    print(f"\nThe chain holds{', and agrees with ' if agrees else ''}{'; '.join(agrees)}.")
    if head is None and against is None:
        print(
            "Whoever can write all of this folder could make such a log: compare the head with one kept elsewhere "
            "(--head), or the log with that of the other side (--against)."
        )
