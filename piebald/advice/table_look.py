"""A look at a table before any training: its sites, its columns, what may mislead, and the experiment that says it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from piebald.advice.cleaning_rules import proposed
from piebald.advice.first_look import Look, look
from piebald.advice.odd_sites import FAR, far_amounts
from piebald.core.arguments import checked
from piebald.core.errors import SettingError, shown, unknown
from piebald.core.plain_text import errors_alone, printable
from piebald.data.clients.client_tables import nameless_columns, owners_of, plain, target_gaps
from piebald.data.clients.prepared import preparation_of
from piebald.data.clients.sources import clients_from
from piebald.data.clients.table_files import gap_code_reasons, mixed_reason, read_table
from piebald.data.partition.leakage import RowKeys, with_suspects
from piebald.data.partition.split import Ints
from piebald.data.preparation.cleaning import Cleaning
from piebald.data.preparation.column_models import CategoryColumn
from piebald.data.preparation.columns import (
    classes_of,
    factorized,
    guess_columns,
    is_numeric,
    numbers_of,
    row_number,
)
from piebald.data.preparation.units import Spread, units_at_sites
from piebald.data.preparation.written_forms import VALUES_LOG
from piebald.experiments.file import ExperimentSettings
from piebald.settings.toml_document import Document, dumps

_CLASSES = 20  # classes that are named
_ONE_HOT = 20  # categories that become a column each
_LISTED = 4  # names in a sentence
_TOKENS = 512  # that usual pretrained networks read at most
_FEW = 5  # rows whose values are the same by chance
_SINGLE = 10  # clients that may have a row each without a doubt of what a client is
_LARGEST_IN_TREES = 1e38  # scikit-learn's, of float32
_MOST_ROWS = 100_000  # in such a tree: a share of them is known to a tenth of a per cent
_TELLS = 0.99  # share of rows whose target or site a column tells


@dataclass(frozen=True, slots=True, eq=False)
class TableLook:
    """What a table holds, by site and by column.

    Attributes:
        sites: a row for each site: its name, rows, rows of each class or the mean of the target, and share of gaps.
        columns: a row for each column besides client and target: its kind, different values, gaps in all, the sites
            with most of them, and the preparation that its kind asks for.
        warnings: sentences about what may mislead.
        experiment: an experiment file that says the same, in TOML.
        cleaned: sentences about what proposed rules change in how many rows, none where they were not asked for.
        clients: the look at the clients of this experiment; None where no column can be
            trained on, or where they were not asked for.
    """

    sites: list[dict[str, Any]]
    columns: list[dict[str, Any]]
    warnings: list[str]
    experiment: str
    clients: Look | None
    cleaned: Sequence[str] = ()

    def plain(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        clients = {} if self.clients is None else self.clients.rows()
        tables = {"sites": self.sites, "columns": self.columns, "warnings": self.warnings}
        return {**tables, "experiment": self.experiment, "cleaned": [*self.cleaned], "clients": clients}


@checked
def look_at_table(
    table: Any, *, client: str, target: str, regression: bool = False, clients: bool = True, clean: bool = False
) -> TableLook:
    """Look at a table before any training.

    Args:
        table: the path of a CSV or Parquet file, or a pattern such as "*/patients.csv".
        client: the column that names the site of each row.
        target: the column to predict.
        regression: the target has amounts, also where all of them are whole.
        clients: whether the clients of the experiment are looked at as well.
        clean: whether rules are proposed that make sites alike, and rows are looked at as these leave them.

    Raises:
        SettingError: the table cannot be read, or has no such column.
    """
    path = Path(table)
    if client == target:
        raise SettingError(f"client and target must be different columns, got {client!r} for both")
    rules, cleaned = Cleaning(), list[str]()
    if clean:
        written = read_table(path, client, "all")
        if {client, target} <= {*written.columns}:
            written, whose, own = owners_of(written, client)
            rules = proposed(written.drop(columns=client), np.array(own, dtype=object)[whose].tolist(), target)
    frame = read_table(path, client, rules.as_written)
    if not rules.is_empty:
        frame, cleaned = rules.applied(frame, [str(site) for site in frame[client].tolist()])
    for column in (client, target):
        if column not in frame.columns:
            raise SettingError(f"{path}: {unknown('column', column, frame.columns)}")
    frame, sites, names = owners_of(frame, client)
    _refuse_single_rows(sites, client)
    # words for a gap in the target must be no class
    frame = frame.assign(**{target: frame[target].mask(target_gaps(frame[target]))})
    inputs = frame.drop(columns=[client, target, *nameless_columns(frame.columns)])
    amounts = regression or classes_of(frame[target]) is None
    keys = with_suspects(RowKeys(), frame, target, (client,))
    suspects = keys.columns
    kinds: dict[str, str] = {
        name: "identifier" if name in suspects else kind for name, kind in guess_columns(inputs).items()
    }
    columns = [_column(inputs[name], kinds[name], sites, names) for name in inputs]
    warnings = [
        *_of_target(frame[target], amounts, sites, names, target),
        *(sentence for name in inputs for sentence in _of_column(inputs[name], kinds[name], sites, names)),
        *_of_units({name: inputs[name] for name in inputs if kinds[name] == "number"}, sites, names),
        *_of_leaks(inputs, kinds, frame[target], amounts, keys, target),
    ]
    rows = _sites(frame, inputs, target, amounts, sites, names)
    # a gap in every row of a site would name it
    empty = [name for name in inputs if any(inputs[name][sites == site].isna().all() for site in range(len(names)))]
    experiment = _experiment(path, client, target, amounts, kinds, inputs.drop(columns=empty), [*suspects])
    if empty:
        experiment["data"].setdefault("features", [name for name in inputs if name not in empty])
    if not rules.is_empty:
        experiment["prepare"] = rules.model_dump(exclude_defaults=True)
    # an empty list, and not None, which means all columns
    if experiment["data"].get("features") == []:
        warnings.append("no column can be trained on as it is")
        return TableLook(rows, columns, warnings, "", None, cleaned)
    settings, looked = ExperimentSettings.of(Document.of(experiment, "the experiment")), None
    try:
        if clients:
            # warnings about values are told as sentences of the look itself
            with errors_alone(VALUES_LOG):
                read = clients_from(
                    frame, client=client, target=target, features=experiment["data"].get("features"),
                    split=settings.split, regression=amounts, prepare="federated",
                )  # fmt: skip
            _tell_agreed(columns, read)
            looked = look(read)
    except SettingError as error:
        warnings.append(f"no run begins before this is mended: {error}")
    return TableLook(rows, columns, warnings, dumps(experiment), looked, cleaned)


_PREPARATIONS = {
    "number": "standard score",
    "boolean": "0 and 1",
    "date": "elapsed days and parts",
    "text": "none: left out, or token ids",
    "identifier": "none: left out",
}


def _refuse_single_rows(sites: Ints, client: str) -> None:
    """Refuse a column that names what each row is about in place of who keeps the rows, before anything else."""
    rows = np.bincount(sites)
    single = int((rows == 1).sum())
    if single > max(_SINGLE, len(rows) / 2):
        raise SettingError(
            f"{single:,} of {len(rows):,} values of {client!r} have a single row: name as client the column of who "
            "keeps the rows, such as a hospital, and not that of what each row is about"
        )


def _column(series: Any, kind: str, sites: Ints, names: Sequence[str]) -> dict[str, Any]:
    # sites may write the same value as a number and as text
    values = int(series.nunique()) if is_numeric(series) else len(factorized(series)[1])
    gaps = series.isna().to_numpy()
    preparation = _PREPARATIONS.get(kind, f"{values} columns of 0 and 1" if values <= _ONE_HOT else "embedding")
    if gaps.any() and kind in ("number", "boolean", "date"):
        preparation += f"; gaps: {'the commoner one' if kind == 'boolean' else 'median'}, and a column that marks them"
    # each site has a row at least, since sites are those that occur
    by_site = np.bincount(sites, gaps, len(names)) / np.bincount(sites, minlength=len(names))
    most = [f"{names[site]} {by_site[site]:.0%}" for site in np.argsort(-by_site)[:2] if by_site[site]]
    return {
        "column": str(series.name), "kind": kind, "values": values, "gaps": int(gaps.sum()),
        "most gaps": ", ".join(most) or None, "preparation": preparation,
    }  # fmt: skip


def _tell_agreed(columns: list[dict[str, Any]], clients: Any) -> None:
    """Say of columns what clients have agreed on where it is another than their values in the whole table ask for."""
    agreed = preparation_of(clients)
    if agreed is None:
        return
    categories = {column.name: column for column in agreed.columns if isinstance(column, CategoryColumn)}
    for row in columns:
        if (reason := agreed.left_out.get(row["column"])) is not None:
            row["preparation"] = f"none: left out ({reason})"
        elif (column := categories.get(row["column"])) is not None:
            count = len(column.categories) + column.rare + column.gaps
            row["preparation"] = f"{count} columns of 0 and 1" if column.coding == "one-hot" else "embedding"
            if column.rare:
                row["preparation"] += f"; those in fewer than {agreed.least_rows} rows of each site together"


def _sites(
    frame: Any, inputs: Any, target: str, amounts: bool, sites: Ints, names: Sequence[str]
) -> list[dict[str, Any]]:
    rows = []
    for site, name in enumerate(names):
        own = sites == site
        goal = frame[target][own]
        counts = {"mean": float(goal.mean()), "sd": float(goal.std(ddof=0))} if amounts else _counts(goal)
        gaps = float(inputs[own].isna().to_numpy().mean()) if inputs.shape[1] else 0.0
        rows.append({"site": name, "rows": int(own.sum()), target: counts, "gaps": gaps})
    return rows


def _counts(goal: Any) -> dict[str, int]:
    counts = goal.dropna().astype(str).value_counts()
    return {str(name): int(count) for name, count in sorted(counts.items())}


def _of_target(goal: Any, amounts: bool, sites: Ints, names: Sequence[str], target: str) -> list[str]:
    """Return sentences about gaps and classes of the target."""
    sentences, gaps = [], goal.isna().to_numpy()
    if gaps.any():
        sentences.append(
            f"target {target!r} has no value in {gaps.sum()} of {len(gaps)} rows (row "
            f"{row_number(goal, int(gaps.argmax()))}, ...): these rows are left out"
        )
    if goal.nunique() < 2:
        sentences.append(f"target {target!r} has one value alone: there is nothing to learn from it")
    if amounts and goal.nunique() > 1:
        sentences += _of_far_targets(goal, sites, names, target)
    if amounts or goal.nunique() < 2:
        return sentences
    held = {name: {*goal[sites == site].dropna().astype(str)} for site, name in enumerate(names)}
    for value in sorted(set().union(*held.values()))[:_CLASSES]:
        if lacking := [name for name in names if value not in held[name]]:
            sentences.append(f"class {value!r} of {target!r} has no row at {_some(lacking)}")
    return sentences


def _of_far_targets(goal: Any, sites: Ints, names: Sequence[str], target: str) -> list[str]:
    """Return a sentence about amounts so far from all others that a model would learn little else."""
    amounts = goal.to_numpy(dtype=np.float64)
    far = far_amounts(amounts)
    if not far.any():
        return []
    # the farthest amount is the example, since it is the likeliest error
    first = int(np.nanargmax(np.abs(amounts - np.nanmedian(amounts))))
    more = f" ({far.sum()} rows are that far)" if far.sum() > 1 else ""
    place = f"row {row_number(goal, first)} at {names[int(sites[first])]}"
    return [
        f"target {target!r} has {amounts[first]:,.10g} in {place}, over {FAR} times as far from the median as 95% of "
        f"the rows{more}: if it is an error, correct it before training"
    ]


def _of_column(series: Any, kind: str, sites: Ints, names: Sequence[str]) -> list[str]:
    """Return sentences about gaps, categories and values that depend on the site."""
    name, gaps, sentences = series.name, series.isna().to_numpy(), []
    by_site = np.bincount(sites, gaps, len(names)) / np.bincount(sites, minlength=len(names))
    # a column without values at all sites is empty and names none of them
    if (empty := [name for name, share in zip(names, by_site, strict=True) if share == 1]) and len(empty) < len(names):
        sentences.append(f"column {name!r} has no value at {_some(empty)}, so that a gap names the site: left out")
    elif np.ptp(by_site) > 0.5:
        most = names[int(by_site.argmax())]
        sentences.append(
            f"column {name!r} has gaps in {by_site.max():.0%} of the rows at {most}, so that a gap hints at it"
        )
    if kind == "category":
        held = {site: {*series[sites == index].dropna().astype(str)} for index, site in enumerate(names)}
        counts: dict[str, list[str]] = {}
        for value in sorted(set().union(*held.values())):
            # a site without any value has no column, which is said above
            if lacking := [site for site in names if value not in held[site] and held[site]]:
                # one sentence for all values that the same sites lack
                counts.setdefault(_some(lacking), []).append(value)
        sentences += [f"column {name!r} lacks {_some(values)} at {lacking}" for lacking, values in counts.items()]
        forms: dict[str, str] = {}
        for value in sorted(set().union(*held.values())):
            if (other := forms.setdefault(" ".join(value.split()).lower(), value)) != value:
                sentences.append(
                    f"column {name!r} has {other!r} and {value!r}, which differ in blanks or capitals alone"
                )
                break
        if len(names) > 1 and all(len(values) == 1 for values in held.values()) and series.nunique() == len(names):
            sentences.append(f"column {name!r} has another value at each site, so that it names the site")
    if kind == "text":
        longest = int(series.dropna().astype(str).str.split().str.len().max())
        length = min(1 << longest.bit_length(), _TOKENS)  # a word is a token at least
        sentences.append(
            f"column {name!r} has free text and is left out: features = [{name!r}] in [data], prepare = {{ tokenizer = "
            f"'distilbert-base-uncased', length = {length} }} and a pretrained model read it, and no other column"
        )
    if kind in ("category", "identifier", "number") and (reason := mixed_reason(series)):
        sentences.append(reason)
    if kind == "number" and series.nunique() > 2:
        rows = np.bincount(sites[~gaps], minlength=len(names))
        same = [series[sites == index].nunique() == 1 for index in range(len(names))]
        # two or three equal numbers are chance
        constant = [site for index, site in enumerate(names) if same[index] and rows[index] >= _FEW]
        if all(same) and len(constant) > 1:
            sentences.append(f"column {name!r} has one value at each site, so that it names the site")
        elif constant:
            sentences.append(f"column {name!r} has one value in all rows at {_some(constant)}: is it a code for a gap?")
        sentences += gap_code_reasons(series)
    if series.nunique() == 1 and not gaps.any():
        sentences.append(f"column {name!r} has one value alone: {shown(plain(series)[0].item(), 40)}")
    return sentences


def _of_units(numbers: Mapping[str, Any], sites: Ints, names: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each column of numbers that a site seems to have in another unit."""
    for column, series in numbers.items():
        try:
            values = numbers_of(series)
        except SettingError:  # an odd word among numbers, which is told by itself
            continue
        yield from units_at_sites({
            column: {name: Spread.of(values[sites == site]) for site, name in enumerate(names)}
        })  # fmt: skip


def _of_leaks(inputs: Any, kinds: Mapping[str, str], goal: Any, amounts: bool, keys: RowKeys, target: str) -> list[str]:
    """Return sentences about identifiers, copies of rows, and columns that tell the target."""
    sentences = [
        f"column {name!r} looks like an identifier of what several rows belong to ({codes.max() + 1} values): group = "
        f"{name!r} in [split] keeps them together"
        for name, codes in keys.columns.items()
    ]
    if keys.content is not None and (copies := len(goal) - len(np.unique(keys.content))):
        sentences.append(f"rows that are copies of earlier ones in all columns: {copies}")
    for name in inputs:
        if kinds[name] not in ("identifier", "text") and (share := _told(inputs[name], goal, amounts)) >= _TELLS:
            sentences.append(f"column {name!r} tells {target!r} in {share:.1%} of the rows: is it known beforehand?")
    return sentences


def _told(series: Any, goal: Any, amounts: bool) -> float:
    """Return the share of the target's variance, or of its rows, that a column tells by a small tree of its own.

    0 where nearly all targets are the same, and so always told.
    """
    import pandas
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    known = (series.notna() & goal.notna()).to_numpy()
    if getattr(series.dtype, "kind", "O") == "f":
        # trees convert numbers to float32, and refuse those that it cannot hold
        known = known & (np.abs(series.to_numpy()) < _LARGEST_IN_TREES)
    if known.sum() > _MOST_ROWS:  # more take long, and tell no other share
        rows = np.random.default_rng(0).choice(np.flatnonzero(known), _MOST_ROWS, replace=False)
        known = np.isin(np.arange(len(known)), rows)
    # on very few rows a small tree tells any target
    if known.sum() < _CLASSES or series[known].nunique() < 2 or goal[known].nunique() < 2:
        return 0.0
    # a tree tells one far amount by one leaf, and with it nearly all of the variance
    y = np.clip(goal[known], *goal[known].quantile([0.01, 0.99])) if amounts else pandas.factorize(goal[known])[0]
    if not amounts and 2 * (y.max() + 1) > len(y):  # names of rows
        return 0.0
    if not amounts and np.bincount(y).max() / len(y) > 0.95:
        return 0.0
    numeric = getattr(series.dtype, "kind", "O") in "biuf"
    x = series[known] if numeric else pandas.factorize(series[known].astype(str))[0]
    # a depth of 4 is enough for a column that gives the target away, and too shallow to learn rows by heart
    tree = (DecisionTreeRegressor if amounts else DecisionTreeClassifier)(max_depth=4, random_state=0)
    x = np.asarray(x, dtype=np.float64)[:, None]
    return float(tree.fit(x, y).score(x, y))


def _experiment(
    path: Path, client: str, target: str, amounts: bool, kinds: Mapping[str, str], inputs: Any, groups: list[str]
) -> dict[str, Any]:
    """Return an experiment that trains on all columns that can be trained on."""
    features = [name for name in inputs if kinds[name] not in ("text", "identifier")]
    data: dict[str, Any] = {"source": str(path.resolve()), "client": client, "target": target}
    if len(features) < inputs.shape[1] or groups:
        data["features"] = features
    if amounts:
        data["regression"] = True
    # rows of one person in training and test would make any score look better than it is
    split: dict[str, Any] = {"test": 0.2, "validation": 0.1} | ({"group": groups[0]} if groups else {})
    common = {"rounds": 20, "data": data, "split": split}
    return {**common, "model": {"name": "mlp"}, "recipe": {"name": "fedavg", "lr": 0.1}}


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(printable(str(name)) for name in names[:_LISTED])
    return shown + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
