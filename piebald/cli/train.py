"""Commands that train: run, compare, resume, adapt; and `new`, a folder to start from."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from piebald.cli import app
from piebald.cli.choose import resumed_search, tuned_first
from piebald.cli.predicting import resumed
from piebald.core.errors import SettingError
from piebald.core.result_table import ResultTable

if TYPE_CHECKING:
    from piebald.experiments.file import ExperimentSettings, Plan
    from piebald.report.callbacks import Callback


@app.command(
    "sets", "scale", "out", "runtime", "deterministic", "start_from", "dry_run", "as_json", "quiet", "verbose",
    lists_keys=True,
)  # fmt: skip
def run(
    options: app.SharedOptions,
    file: Annotated[
        list[Path] | None,
        typer.Argument(help="An experiment file in TOML, or several with --dry-run; the built-in one by default."),
    ] = None,
) -> None:
    """Train with one recipe and keep the run in a folder."""
    files: Sequence[Path | None] = file or [None]
    if options.dry_run:
        return _dry_run(files, options)
    if len(files) > 1:
        raise SettingError(f"one file is trained at a time, got {len(files)}: --dry-run alone takes several")
    carry_out(app.load_settings(files[0], options), files[0], options)


app.app.command("train", hidden=True)(run)  # the word of other programs


def carry_out(
    settings: ExperimentSettings,
    file: Path | None,
    options: app.SharedOptions,
    callbacks: Sequence[Callback] = (),
    folder: Path | None = None,
) -> None:
    """Train as the settings say, in a run folder, and print the results."""
    app.end_on_term()
    if options.start_from is not None:
        app.check_run(options.start_from)
    if settings.compares:
        raise SettingError(f"{file or 'the built-in experiment'} describes several runs: use piebald compare")
    if settings.asks_sites:
        from piebald.inference.experiment import agreed_at_sites

        settings = settings.with_agreed(agreed_at_sites(settings))
    if len(settings.divisions()) > 1 and folder is None and options.start_from is None:
        return _compare(settings, file, options, callbacks=callbacks)
    plan = settings.plan()
    # after the settings, so that a mistake in them is told before the slow import
    from piebald.data.clients.prepared import preparation_of
    from piebald.runs.run import run

    agreed = preparation_of(plan.clients)
    if agreed is not None and options.progress:
        print(agreed.said)
    folder = folder or app.out_folder(settings)
    label, recipe = next(iter(plan.recipes.items()))
    with app.guarded(folder, f"piebald resume {folder}", settings):
        history = run(
            recipe,
            plan.clients,
            plan.model,
            seed=settings.first_seed,
            label=settings.label or label,
            out=folder,
            progress=options.progress,
            callbacks=callbacks,
            start_from=options.start_from,
            **settings.run_keywords(plan),
        )
    app.print_run(history, options)


@app.command(
    "sets", "scale", "out", "runtime", "deterministic", "dry_run", "as_json", "quiet", "verbose", "wide",
    lists_keys=True,
)  # fmt: skip
def compare(
    options: app.SharedOptions,
    file: Annotated[Path, typer.Argument(help="An experiment file with [[recipes]], [grid] or seeds.")],
    tune: Annotated[
        bool, typer.Option("--tune", help="First choose each recipe's settings by validation rows, see [tune].")
    ] = False,
) -> None:
    """Train with several recipes on the same clients and compare the results."""
    app.end_on_term()
    if options.dry_run:
        return _dry_run([file], options)
    _compare(app.load_settings(file, options), file, options, tune)


def _dry_run(files: Sequence[Path | None], options: app.SharedOptions) -> None:
    """Check experiment files, and print a row for each method that they would train."""
    from piebald.runs.compare import dry_run

    rows: list[dict[str, Any]] = []
    for file in files:
        for settings in app.load_settings(file, options).divisions():
            plan = settings.plan()
            rows += [
                {"file": file and file.name, "division": settings.split and settings.split.title, **row}
                for row in dry_run(**_comparison_of(plan, settings), **settings.run_keywords(plan))
            ]
    known = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    if options.as_json:
        app.print_json(rows)
    else:
        app.print_table(ResultTable(rows).only(*known))


def _comparison_of(plan: Plan, settings: ExperimentSettings) -> dict[str, Any]:
    """The methods, clients, models and seeds of an experiment file, as keywords of `compare`."""
    return {
        "methods": plan.recipes,
        "clients": plan.clients,
        "model": {label: plan.model_of(label) for label in plan.recipes},
        "on_all_rows": plan.on_all_rows,
        "pooled": plan.pooled,
        "seeds": tuple(settings.seeds or (settings.first_seed,)),
    }


def _compare(
    settings: ExperimentSettings,
    file: Path | None,
    options: app.SharedOptions,
    tune: bool = False,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Train with all recipes, seeds and divisions of the rows, in a folder, and print the results."""
    folder, divisions = app.out_folder(settings), settings.divisions()
    if tune and len(divisions) > 1:
        raise SettingError(
            "--tune chooses settings for one division of the rows, and split asks for several: leave it out"
        )
    from piebald.report.comparison import Comparison
    from piebald.runs.compare import compare, folder_name

    scaled, tuning = f" --scale {options.scale}" if options.scale else "", " --tune" if tune else ""
    again, runs, tuned = f"piebald compare {file or ''}{scaled}{tuning} --out {folder}", [], None
    for divided in divisions:
        plan, title = divided.plan(), "" if divided.split is None else divided.split.title
        tuned = tuned_first(divided, plan, folder, again, options) if tune else None
        with app.guarded(folder, again, divided):
            methods = {} if tuned is None else {"methods": tuned.recipes}
            runs += compare(
                **{**_comparison_of(plan, divided), **methods},
                out=folder / folder_name(title) if len(divisions) > 1 else folder,
                progress=options.progress,
                callbacks=callbacks,
                **divided.run_keywords(plan),
            ).runs
    comparison = Comparison(runs)
    from piebald.cli.comparing import base_of, print_comparison
    from piebald.report.findings import work_by_label

    if options.as_json:
        values = {
            "runs": [history.facts() for history in comparison.runs],
            "summary": comparison.summary(),
            "divisions": comparison.by_division(),
            "against_pooled": comparison.against_pooled(),
            "paired": comparison.paired(base_of(comparison)),
            "verdict": None if comparison.verdict is None else comparison.verdict.plain(),
            "naive": {name: table.mean for name, table in comparison.naive.items()},
            "plain_alone": {name: table.mean for name, table in comparison.plain_alone.items()},
            "work": work_by_label(comparison),
            "privacy": comparison.privacy,
            "out": str(folder),
        }
        app.print_json(values | ({} if tuned is None else {"tuning": tuned.plain()}))
    elif not options.quiet:
        print_comparison(comparison, options.wide)
        print(f"\nsaved in {folder}; write a report with: piebald report {folder}")


@app.command("plugins", *app.LOG, *app.PAGE, "as_json", "quiet")
def resume(
    options: app.SharedOptions,
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that was interrupted.")],
    rounds: Annotated[
        int | None, typer.Option(help="Go on to this many server steps, also if the run was finished.")
    ] = None,
) -> None:
    """Continue a run that was interrupted."""
    app.check_run(folder)
    if not (folder / "run.db").exists() and any(folder.glob("*/seed-*/run.db")):
        raise SettingError(f"{folder} holds a comparison: go on with piebald compare FILE --out {folder}")
    kind = app.kind_of(folder)
    if kind == "transfer":
        if rounds is not None:
            raise SettingError(f"{folder} holds a transfer, whose length is in its file: leave out --rounds")
        from piebald.cli.transfer import resume_transfer  # after this file, so that --help has the commands in order

        return resume_transfer(folder, options)
    app.end_on_term()
    if kind == "search":
        if rounds is not None:
            raise SettingError(f"{folder} holds a search, whose runs have all one length: leave out --rounds")
        return resumed_search(folder, options)
    from piebald.runs.run import resume

    with resumed(folder, options) as callbacks, app.guarded(folder, f"piebald resume {folder}"):
        history = resume(
            folder, rounds=rounds, progress=options.progress, callbacks=callbacks, plugins=options.plugins or ()
        )
    app.print_run(history, options)


@app.command("plugins", "as_json", "quiet")
def adapt(
    options: app.SharedOptions,
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
) -> None:
    """Adapt a finished run to a new client and choose the best method."""
    app.check_run(folder)
    from piebald.runs.adaptation import from_file
    from piebald.runs.run import adapt, opened

    allowed = options.plugins or ()
    finished = opened(folder, plugins=allowed)
    rows = from_file(str(data), target, finished.meta, validation=validation, test=test, plugins=allowed)
    adapted = adapt(finished, rows, epochs=epochs, lr=lr)
    if out is not None:
        finished.work.layout.save(adapted.vector, out)
    if options.as_json:
        app.print_json(adapted.table() | {"out": None if out is None else str(out)})
    elif not options.quiet:
        columns = ("method", "parameters fitted", "epochs", "validation loss", f"validation {adapted.metric}")
        cells = [[m.name, m.fitted, m.epochs, m.loss, m.validation, m.test, m.gain] for m in adapted.methods]
        app.print_table(ResultTable(cells, (*columns, f"test {adapted.metric}", "gain")))
        print(f"\nbest on the validation rows: {adapted.best}, since {adapted.why}")


_BLOCK = re.compile(r"^```(\w+)\n(?:# ([\w.]+\.\w+)\n)?(.*?)^```\n", re.MULTILINE | re.DOTALL)


def template(name: str) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Return the files of a template by name, and the cells of its notebook as pairs of kind and source.

    A template is a page: a block that begins with the name of a file is that file, and the other Python is cells.
    """
    page = (files("piebald.cli") / "templates" / f"{name}.md").read_text("utf-8")
    contents, cells, text, end = {"README.md": page}, [], "", 0
    for block in _BLOCK.finditer(page):
        language, file, source = block.groups()
        text += page[end : block.start()]
        end = block.end()
        if file:
            contents[file] = source
        elif language == "python":
            cells += [("markdown", text.strip()), ("code", source.strip())]
            text = ""
        else:
            text += block[0]
    cells.append(("markdown", (text + page[end:]).strip()))
    return contents, [(kind, source) for kind, source in cells if source]


def notebook(cells: list[tuple[str, str]]) -> dict[str, Any]:
    """Return cells as a notebook of format 4.4."""
    code: dict[str, Any] = {"execution_count": None, "outputs": []}
    return {
        "nbformat": 4,
        # format 4.5 demands an id of each cell
        "nbformat_minor": 4,
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        "cells": [
            {"cell_type": kind, "metadata": {}, "source": source, **(code if kind == "code" else {})}
            for kind, source in cells
        ],
    }


def _schema_text() -> str:
    from piebald.experiments.reference import schema

    return json.dumps(schema(), indent=1) + "\n"


@app.app.command(name="schema")
def print_schema() -> None:
    """Print the JSON schema of experiment files, by which editors complete and check them."""
    print(_schema_text(), end="")


@app.app.command()
def new(
    folder: Annotated[Path, typer.Argument(help="The folder to make.")],
    kind: Annotated[
        Literal["table", "images", "text", "sites", "method"], typer.Option("--template", help="What to start from.")
    ] = "table",
) -> None:
    """Make a folder to start from: an experiment that runs at once, a test and a notebook."""
    from piebald.experiments.reference import SCHEMA, others

    contents, cells = template(kind)
    text = contents["experiment.toml"]
    keys, first_section, sections = text.partition("\n[")
    # editors that know TOML read the schema that the first line names; keys stand before all sections
    keys = f"#:schema ./{SCHEMA}\n{keys}\n{others(tomllib.loads(text))}"
    contents |= {"experiment.toml": f"{keys}{first_section}{sections}", SCHEMA: _schema_text()}
    try:
        # fails where it exists, so that nothing of the user's is overwritten
        folder.mkdir(parents=True)
        for name, text in {**contents, "notebook.ipynb": json.dumps(notebook(cells), indent=1) + "\n"}.items():
            (folder / name).write_text(text, "utf-8")
    except OSError as error:
        raise SettingError(f"{folder} cannot be made ({error.strerror}): give the name of a new folder") from None
    word = "up" if kind == "sites" else "run"
    print(f"{folder} has {', '.join(sorted(contents))} and notebook.ipynb; try:")
    print(f"  cd {folder} && piebald {word} experiment.toml")
