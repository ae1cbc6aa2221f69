"""The commands about the columns of all clients, and about boosted trees over them: statistics, trees."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from piebald.cli.app import ROWS, SharedOptions, command, end_on_term, print_json, print_table, save_tables
from piebald.core.errors import SettingError, shown
from piebald.core.plain_text import WIDTH, printable
from piebald.core.result_table import ResultTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from piebald.core.progress import Bar
    from piebald.inference.pooled_statistics import FederatedStatistics
    from piebald.inference.trees.boosted_trees import BoostedTrees
    from piebald.inference.trees.rounds import Boosted
    from piebald.privacy.ledger import Ledger

_COMPONENTS = 4  # of the principal ones
_LISTED = 12  # categories, bins and clients in one table
Weights = Annotated[str | None, typer.Option(metavar="COLUMN", help="A column of weights of rows.")]
Source = Annotated[Path, typer.Argument(metavar="FILE", help="An experiment file, or a .csv, .tsv or .parquet table.")]


@command(*ROWS, "sets", "runtime", "as_json")
def statistics(
    options: SharedOptions,
    file: Source,
    quantile: Annotated[list[float] | None, typer.Option(help="A share in [0, 1]; repeatable.")] = None,
    bins: Annotated[int | None, typer.Option(help="Bins of a histogram of each column of numbers.")] = None,
    bounds: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN=LOW:HIGH", help="The range of a column; repeatable.")
    ] = None,
    table: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN,COLUMN", help="Columns to count together; repeatable.")
    ] = None,
    by_client: Annotated[bool, typer.Option("--by-client", help="Each client's own numbers, too.")] = False,
    epsilon: Annotated[float | None, typer.Option(help="Hide single rows by noise: the budget of this call.")] = None,
    delta: Annotated[float | None, typer.Option(help="Of the budget: below one over the number of rows.")] = None,
    noise_at: Annotated[
        Literal["server", "client"] | None, typer.Option(help="Who adds noise: the server by default.")
    ] = None,
    ledger: Annotated[Path | None, typer.Option(help="A file that counts the budget of all calls.")] = None,
    budget: Annotated[float | None, typer.Option(help="With --ledger: epsilon of all calls together.")] = None,
    standardise: Annotated[
        bool, typer.Option("--standardise", help="Print the constants of [data] standardise, and nothing else.")
    ] = False,
    by: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Means of the groups that a column names, and their tests.")
    ] = None,
    weights: Annotated[str | None, typer.Option(metavar="COLUMN", help="Weighted means, or correlations.")] = None,
    correlations: Annotated[
        bool, typer.Option("--correlations", help="Correlations, variance inflation and principal components.")
    ] = False,
) -> None:
    """Count, and compute means, deviations, quantiles and tables over the rows of all clients."""
    from piebald.inference.statistics_at_sites import statistics

    if by is not None or weights is not None or correlations:
        others = {
            "--quantile": quantile, "--bins": bins, "--bounds": bounds, "--table": table, "--by-client": by_client,
            "--epsilon": epsilon, "--ledger": ledger, "--standardise": standardise, "--by": correlations and by,
        }  # fmt: skip
        if other := next((name for name, value in others.items() if value), None):
            asked = "--correlations" if correlations else "--by" if by else "--weights"
            raise SettingError(
                f"{asked} is a question of its own, without {other}: ask for the two one after the other"
            )
        return _describe(options, file, by, weights, correlations)
    counted = _ledger(ledger, budget, delta)
    if noise_at is not None and epsilon is None:
        raise SettingError("--noise-at belongs to noise: give --epsilon and --delta, too, or leave it out")
    shares = () if standardise else (0.25, 0.5, 0.75) if quantile is None else quantile
    limits, values = dict(map(bounds_of, bounds or ())), categories_of(options)
    pairs = [[name.strip() for name in pair.split(",")] for pair in table or ()]
    question: dict[str, Any] = {
        "quantiles": shares, "bins": bins, "bounds": limits, "categories": values, "tables": pairs,
        "by_client": by_client, "split": options.split or "train", "secure": options.secure, "epsilon": epsilon,
        "delta": delta,
    }  # fmt: skip
    column = options.column
    if asks_sites(options):
        from piebald.inference.columns import statistics_request
        from piebald.inference.experiment import statistics_of_sites

        refuse_local_flags(options.client, ledger, noise_at)
        request = statistics_request(**question)
        answer = statistics_of_sites(file, site_flags(file, options), options.credentials, request)
        answer = answer if column is None else answer.only(column)
    else:
        rows = asked_rows(file, options, divided=standardise)
        names: dict[str, Any] = {"client": rows.client, "columns": column or rows.columns, "features": rows.inputs}
        answer = statistics(rows.source, **names, **question, noise_at=noise_at or "server", ledger=counted)
    save_tables(options.save or (), [(answer.table(), answer.publication())])
    if standardise:
        _print_constants(answer, column, options.as_json)
    elif options.as_json:
        print_json(answer.plain())
    else:
        _print(answer)


def _describe(
    options: SharedOptions, file: Path, by: str | None, weights: str | None, correlations: bool
) -> None:  # fmt: skip
    """Print means of groups, or correlations."""
    from piebald.inference.descriptions import (
        CorrelationOptions,
        GroupOptions,
        fit_correlations,
        fit_group_means,
    )

    column = options.column
    if correlations:
        found = fitted(options, file, fit_correlations, CorrelationOptions, {"weights": weights}, column)
        components = found.components()
        tables = [found.table(), components.table(_COMPONENTS)]
        about = f"{found.rows:,} rows ({found.dropped:,} with gaps left out) of {found.clients} clients."
        about += "\nPrincipal components are of standard scores."
    else:
        found = fitted(options, file, fit_group_means, GroupOptions, {"by": by, "weights": weights}, column)
        tables, about = [found.table(), *([found.tests()] if by else [])], "Rows with gaps are left out of each column."
    weights = found.weights
    save_tables(options.save or (), [(tables[0], found.publication()), *((table, table) for table in tables[1:])])
    if options.as_json:
        return print_json(found.plain())
    for table in tables:
        print_table(table, width=WIDTH)
        print()
    print(about if weights is None else f"{about}\nRows are weighted by {printable(weights)}.")


def asks_sites(options: SharedOptions) -> bool:
    """Return whether sites are asked, instead of reading rows on this machine.

    Raises:
        SettingError: another runtime is named, which these commands have no use for.
    """
    credentials, runtime = options.credentials, options.runtime
    if runtime not in (None, "simulator", "federation"):
        raise SettingError(
            f"--runtime must be 'federation', or be left out where rows are on this machine, got {shown(runtime)}: a "
            "cluster is for training"
        )
    if credentials is not None and runtime == "simulator":
        raise SettingError("--credentials asks sites, and --runtime simulator reads rows here: leave one of them out")
    return credentials is not None or runtime == "federation"


def site_flags(file: Path, options: SharedOptions) -> list[str]:
    """Return the settings of the user, with the sites that credentials list where the experiment takes any."""
    if options.credentials is None:
        return list(options.sets or ())
    from piebald.cli.predicting import with_sites
    from piebald.federation.credentials.provisioning import read
    from piebald.inference.experiment import QuestionExperiment

    return with_sites(file, options.sets, read(options.credentials).sites(), QuestionExperiment)


@dataclass(frozen=True, slots=True)
class AskedRows:
    """The rows that a command is about.

    Attributes:
        source: the path of a table, a table of the rows of one split, or clients.
        client: the column of a table that names the client.
        features: the columns to predict from, in the order of the inputs of clients; None where nobody named them.
        target: the column to predict, None where nobody named it.
        weights: the column of weights of rows, likewise.
    """

    source: Any
    client: str | None = None
    features: list[str] | None = None
    target: str | None = None
    weights: str | None = None

    @property
    def columns(self) -> list[str] | None:
        """The columns that an experiment chooses among those of its table, None for all."""
        if hasattr(self.source, "rows") or self.features is None:
            return None
        return [*self.features, *([] if self.target is None else [self.target])]

    @property
    def inputs(self) -> list[str] | None:
        """Names of the inputs of clients, None where they are in a table, which has its own."""
        return self.features if hasattr(self.source, "rows") else None


def asked_rows(file: Path, options: SharedOptions, divided: bool = False) -> AskedRows:
    """Return the rows of a table, or of an experiment.

    Args:
        file, options: what the user gave.
        divided: rows as the experiment's clients have them, in splits, also where they come from a table.

    Raises:
        SettingError: a flag has no meaning for them, or they cannot be read.
    """
    from piebald.data.clients.client_tables import is_table, read_table
    from piebald.data.preparation import PrepareSettings
    from piebald.experiments.file import ExperimentSettings
    from piebald.inference.columns import asked_owners

    client, split = options.client, options.split
    if is_table(file):
        if options.sets:
            raise SettingError("--set changes an experiment file, got a table: leave it out")
        _refuse_split(split, file)
        return AskedRows(str(file), client)

    class Settings(ExperimentSettings):
        needs_recipe = False

    settings = Settings.load(file, options.sets or ())
    section = settings.data
    table = section.source if section.source is not None and is_table(section.source) else None
    names = section.features
    if divided and table is not None and names is None:
        apart = (section.client, section.only_target, section.weights)
        names = [name for name in read_table(Path(table)).columns if name not in apart]
    if table is not None and section.client is not None and not divided:
        column = client or section.client
        prepare = settings.prepare if isinstance(settings.prepare, PrepareSettings) else PrepareSettings()
        owners = asked_owners(table, column, prepare, (column, section.only_target))
        rows: Any = owners[0].content
        if settings.split is None:
            _refuse_split(split, table)
        else:
            from piebald.data import train_validation_test_split

            parts: dict[Any, Any] = train_validation_test_split(
                rows, settings.split, client=column, target=section.only_target, regression=section.regression
            )
            rows = parts[split or "train"]
        return AskedRows(rows, column, section.features, section.only_target, section.weights)
    if client is not None:
        raise SettingError(
            "--client names a column of a table, and this command takes the experiment's clients: leave it out"
        )
    return AskedRows(settings.source_clients(), None, names)


def _refuse_split(split: str | None, table: Path | str) -> None:
    if split is not None:
        raise SettingError(
            f"--split {split} chooses among rows that are divided already, and the table {table} is taken whole: leave "
            "it out"
        )


def refuse_local_flags(client: str | None, ledger: Path | None, noise_at: str | None) -> None:
    """Refuse flags that have no meaning where sites are asked."""
    if client is not None:
        raise SettingError("--client is for rows on this machine: each site is a client")
    if ledger is not None:
        raise SettingError("--ledger is for rows on this machine: each site counts its questions in its own ledger")
    if noise_at == "server":
        raise SettingError("--noise-at server is for rows on this machine: each site adds noise to its own sums")


def _ledger(file: Path | None, budget: float | None, delta: float | None) -> Ledger | None:
    """Return the file that counts the budget of all calls, None where none is wanted."""
    from piebald.privacy.ledger import Ledger

    if file is None and budget is None:
        return None
    if file is None or budget is None:
        raise SettingError("--ledger FILE and --budget EPSILON belong together: give both, or neither")
    if delta is None:
        raise SettingError("--ledger counts noise: give --epsilon and --delta, too")
    return Ledger(budget, delta, file)


def bounds_of(text: str) -> tuple[str, tuple[float, float]]:
    """Return a column and its low and high, from COLUMN=LOW:HIGH."""
    # the last one, as a column's name may have others
    name, equals, ends = text.rpartition("=")
    low, colon, high = ends.partition(":")
    try:
        if not equals or not colon:
            raise ValueError
        return name, (float(low), float(high))
    except ValueError:
        raise SettingError(f"--bounds must be COLUMN=LOW:HIGH, like age=0:120, got {shown(text)}") from None


def categories_of(options: SharedOptions) -> dict[str, list[str]]:
    """Return the categories of columns, each written as COLUMN=A,B."""
    categories = {}
    for text in options.categories or ():
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise SettingError(f"--categories must be COLUMN=A,B, got {shown(text)}")
        categories[name] = [value.strip() for value in values.split(",")]
    return categories


def fitted(
    options: SharedOptions,
    file: Path,
    fit: Callable[[Any, Any], Any],
    kind: Callable[..., Any],
    wanted: Mapping[str, Any],
    column: Sequence[str] | None,
) -> Any:
    """Return what a command fits, of rows on this machine or at sites."""
    from piebald.inference.columns import TARGET
    from piebald.inference.models.clients import asked_tables

    codes, wanted, part = categories_of(options), dict(wanted), options.split or "train"
    accepts_columns = "columns" in {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if asks_sites(options):
        from piebald.inference.experiment import model_of_sites

        refuse_local_flags(options.client, None, None)
        # "ties" tells Cox's model from curves, which are stratified or not as well
        if wanted.get("stratified") is False and "ties" in wanted:
            raise SettingError("--pooled compares rows of different clients, which sites do not show: leave it out")
        # 0 for commands that have no such option
        if wanted.get("times", 0) is None:
            raise SettingError("sites count rows at times that they are asked about: give --times, such as 30:3600:30")
        if "target" in wanted:
            wanted["target"] = wanted["target"] or TARGET
        if accepts_columns:
            wanted["columns"] = column
        question: dict[str, Any] = {"split": part, "categories": codes, "secure": options.secure}
        return model_of_sites(file, site_flags(file, options), options.credentials, fit, kind(**wanted), **question)
    if options.secure:
        raise SettingError("--secure is for sites: rows on this machine are all in this process, leave it out")
    source = asked_rows(file, options)
    if "target" in wanted:
        wanted["target"] = wanted["target"] or source.target or TARGET
    if "weights" in wanted:
        wanted["weights"] = wanted["weights"] or source.weights
    columns = (source.features if source.columns else None) if column is None else column
    settings = kind(**wanted, **({"columns": columns} if accepts_columns else {}))
    with asked_tables(source.source, source.client, settings, part, source.inputs, codes) as clients:
        return fit(clients, settings)


def print_model(options: SharedOptions, model: Any, about: Callable[[Any], str]) -> None:
    """Print what was fitted, and sentences about it."""
    effects = getattr(model, "effects", None)
    tables = [(fit.table(), fit.publication()) for fit in (model, effects) if fit is not None]
    save_tables(options.save or (), tables)
    if options.as_json:
        return print_json(model.plain())
    print_table(tables[0][0], width=WIDTH)
    print("\n" + about(model))
    for table, _ in tables[1:]:
        print("\nAverage marginal effects\n")
        print_table(table, width=WIDTH)


def _print(answer: FederatedStatistics) -> None:
    if answer.numbers:
        print_table(answer.table(), width=WIDTH)
    for name, column in answer.numbers.items():
        if column.counts:
            print(f"\n{printable(name)}")
            bins = zip(column.edges, column.edges[1:], map(round, column.counts), strict=False)
            _print_long(bins, ("from", "to", "count"))
    for name, text in answer.texts.items():
        print(f"\n{printable(name)}")
        # a stable sort: values that are equally frequent stay in their order
        counts = sorted(text.counts.items(), key=lambda item: -item[1])
        counts += [*([("(other)", text.other)] if text.other else []), ("(missing)", text.missing)]
        _print_long([(value, round(count)) for value, count in counts], ("value", "count"))
    for (first, second), table in answer.tables.items():
        print()
        columns = list(next(iter(table.values()), {}))
        lines = [(value, *(round(line[name]) for name in columns)) for value, line in table.items()]
        _print_long(lines, (f"{first} by {second}", *columns))
        if test := answer.tests.get((first, second)):
            print(f"Independence: chi-square {test.statistic:.4g} on {test.degrees}, p {test.p_value:.3g}.")
    for client, columns_of_client in answer.by_client.items():
        print(f"\n{printable(client)}")
        lines_of_client = [
            (
                name,
                round(column.present),
                round(column.missing),
                answer.shown(name, column.mean),
                column.plain()["deviation"],
            )
            for name, column in columns_of_client.items()
        ]
        print_table(ResultTable(lines_of_client, ("column", "count", "missing", "mean", "sd")), width=WIDTH)
    print("\n" + _accuracy_notes(answer))


def _print_long(rows: Iterable[Sequence[Any]], heading: Sequence[str]) -> None:
    """Print the first rows of a table."""
    print_table(ResultTable(rows, heading), width=WIDTH, most=_LISTED)


def _accuracy_notes(answer: FederatedStatistics) -> str:
    """Return sentences about how exact the numbers are, and what was spent for them."""
    rows = "" if answer.rows is None else f"{sum(answer.rows):,} rows of "
    lines = [f"{rows}{len(answer.clients)} clients, {answer.mode}."]
    if answer.mode != "exact" and any(column.counts for column in answer.numbers.values()):
        lines.append("Quantiles are from the histogram, at most a bin's width off.")
    if answer.privacy is not None:
        spent = answer.privacy
        lines.append(
            f"Spent: epsilon {spent.epsilon_pld:.4g}, delta {spent.delta:g} ({spent.unit}-level).  "
            f"Noise on a count: sd {answer.noise:.3g}."
        )
    return "\n".join(lines)


def _print_constants(answer: FederatedStatistics, columns: list[str] | None, as_json: bool) -> None:
    from piebald.settings.toml_document import pair

    names = [name for name in columns or answer.numbers if name != "target"]
    constants = answer.standardisation(names).model_dump()
    if as_json:
        return print_json({"columns": names, **constants})
    print("[data.standardise]" + "  # of the inputs in the order " + ", ".join(map(printable, names)))
    for name, values in constants.items():
        print(pair(name, values))


_IMPORTANT = 8  # columns by their importance


@command("client", "column", "credentials", "sets", "runtime", "as_json", "quiet")
def trees(
    options: SharedOptions,
    file: Source,
    target: Annotated[str | None, typer.Option(help="The column to predict; the target by default.")] = None,
    objective: Annotated[
        Literal["binary", "multiclass", "regression"] | None, typer.Option(help="By default what the target is.")
    ] = None,
    weights: Weights = None,
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
        "row_weights": weights,
    }  # fmt: skip
    with Bar("trees", None, options.progress, unit="round") as bar:
        how: dict[str, Any] = {"split": split, "compare": not no_compare, "out": out, "done": _shown_on(bar)}
        if asks_sites(options):
            for name, value in {**columns, "column": options.column}.items():
                if value is not None:
                    name = "weights" if name == "row_weights" else name
                    raise SettingError(f"--{name} is for tables on this machine: sites have what [data] says")
            boosted = site_clients.trees_of_sites(file, site_flags(file, options), options.credentials, **how)
        else:
            grow = site_clients.trees_of_table if is_table(file) else site_clients.trees_of_experiment
            boosted = grow(file, options.sets or (), columns=options.column, **columns, **how)
    if options.as_json:
        return print_json(boosted.plain())
    if not options.quiet:
        _print_trees(boosted, out)


def _shown_on(bar: Bar) -> Any:
    def show(state: Boosted) -> None:
        bar.show(len(state.ends), f"loss {state.losses[-1]:.3f}" if state.losses else "")

    return show


def _print_trees(boosted: BoostedTrees, out: Path | None) -> None:
    print_table(boosted.table(), width=WIDTH)
    print()
    gains = list(boosted.importances.items())[:_IMPORTANT]
    print_table(ResultTable(gains, ("column", "share of gain")), width=WIDTH)
    dropped = f" ({boosted.dropped:,} without a target left out)" if boosted.dropped else ""
    print(
        f"\n{boosted.name}, {boosted.target.objective}: {len(boosted.boosted.forest):,} trees in {boosted.rounds} "
        f"rounds on {boosted.training_rows:,} rows{dropped}."
    )
    if out is not None:
        print(f"The model: {out}/trees.json")
